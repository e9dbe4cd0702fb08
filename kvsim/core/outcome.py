"""Effects of a record on its model, and the error of the attention output."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# Distance is error / missing mass; below this, float32 rounding exceeds 1 % of it.
_LEAST_MISSING = 1e-4


@dataclass(frozen=True)
class OutputDeviation:
    """Per layer, query head and row; float32 [layer, qhead, row], 0 error before the first event.

    The rows are those after the prompt, or all (`output_error`).
    NaN for rows of the prompt that do not reach the layer: they have no attention there.

    error: |o_full - o_seen| / |o_full| against the output that the model computed.
    mass: share of the full attention on visible entries, and on the model's sinks if it has them,
        which no policy evicts.
    missing: 1 - mass, without the cancellation.
    distance: |o_evicted - o_seen| / |o_full|; NaN where missing is below 1e-4 (rounding noise).
    factored: whether error is missing * distance. If keys were rotated to slots or rounded it is
        not, and distance is NaN.
    added: |W_o (o_seen - o_full)| of all heads of a layer together [layer, row]: the norm of
        eviction's change to the residual stream; None unless it was computed.
    before: if the rows follow the prompt, the same for the rows of the prompt after its first
        event; None without such rows.
    """

    error: NDArray[np.float32]
    missing: NDArray[np.float32]
    factored: bool = True
    added: NDArray[np.float32] | None = None
    before: OutputDeviation | None = None

    def parted(self, rows: int) -> OutputDeviation:
        """Return the deviation with the first `rows` moved to `before`."""
        if not rows:
            return self

        names = ("error", "missing", "added")
        arrays = {name: x for name in names if (x := getattr(self, name)) is not None}
        before = replace(self, **{name: x[..., :rows] for name, x in arrays.items()})
        return replace(self, **{name: x[..., rows:] for name, x in arrays.items()}, before=before)

    @property
    def mass(self) -> NDArray[np.float32]:
        """1 - missing [layer, qhead, row]."""
        return 1.0 - self.missing

    @property
    def distance(self) -> NDArray[np.float32]:
        """|o_evicted - o_seen| / |o_full| [layer, qhead, row]."""
        defined = (self.missing >= _LEAST_MISSING) & self.factored
        out = np.full_like(self.error, np.nan)
        np.divide(self.error, self.missing, out=out, where=defined)
        return out


@dataclass(frozen=True)
class Forced:
    """The recorded response fed to the model under the policy, and with the full cache.

    Of R tokens of the response, each predicted by the row before it: nll, full_nll [R], their
    negative log-likelihood in nats; kl [R], the divergence of the prediction from that of the full
    cache, KL(full || live), in nats; agreement [R], 1 where the most likely token is the same.
    stream_error [layer, row]: |h' - h| / |h| of the input of each layer of the model, rows after
    the prompt. output: the error of the attention output of the record's layers, of the same rows;
    None where a replay was judged. before: the same for the rows of the prompt after its first
    event, and the tokens of the prompt that they predict; None without such rows.
    """

    nll: Floats
    full_nll: Floats
    kl: Floats
    agreement: Floats
    stream_error: Floats
    output: OutputDeviation | None = None
    before: Forced | None = None

    def parted(self, rows: int) -> Forced:
        """Return the outcome with the first `rows`, of the prompt, moved to `before`.

        The last of them predicts the first token of the response.
        """
        if not rows:
            return self

        names = ("nll", "full_nll", "kl", "agreement")
        tokens = {name: getattr(self, name) for name in names}
        output = None if self.output is None else self.output.parted(rows)
        before = {name: x[: rows - 1] for name, x in tokens.items()}
        rest = {name: x[rows - 1 :] for name, x in tokens.items()}
        part = Forced(**before, stream_error=self.stream_error[:, :rows])
        moved = self.stream_error[:, rows:]
        return replace(self, **rest, stream_error=moved, output=output, before=part)


@dataclass(frozen=True)
class Generated:
    """A response that the model wrote under the policy.

    tokens: of the response. right: whether it has the right answer; None if the right answer is
    unknown. answered: tokens until the answer is complete, None without one. full_right: as right,
    with the full cache. seconds: of decoding, without the prefill. score: 0 to 1, by the scorer
    that the prompt names, if any.
    """

    tokens: tuple[int, ...]
    right: bool | None
    answered: int | None
    full_right: bool | None
    seconds: float
    score: float | None = None


@dataclass(frozen=True)
class Outcome:
    """Both runs of one prompt under one policy, or a judged replay.

    None for a missing run. peak_bytes: most bytes of live keys and values in decoding, from the
    event that ends the prefill on; full_bytes: of the full cache at the end. later: as generated,
    for turns after the first.
    """

    forced: Forced | None
    generated: Generated | None = None
    peak_bytes: int | None = None
    full_bytes: int | None = None
    later: tuple[Generated, ...] = ()
