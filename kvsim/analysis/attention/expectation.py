"""Expected against observed attention, and the four steps in which the two part.

Devoto, Jeblick and Jegou, arXiv 2510.00636, Fig. 10. The sequence is cut: rows before the cut are
the past, those from it on the future. Observed is the mean attention of the future's rows on each
key of the past behind the sinks; expected is what Expected Attention says of these keys, a softmax
over them. All of it per query head, before the policy averages over the group, and without the size
of the value and epsilon. From observed to expected, one assumption more in each step:

    ratio_of_means  mean over the future's queries of exp(s q.k), normalised once: attention is the
                    mean of ratios, this is the ratio of means
    normal          the same mean if these queries, after RoPE, were normal with their moments
    mean_rotation   moments of the future's queries before RoPE, turned by the mean rotation
    past            moments of the past's queries instead: Expected Attention

The first step is the mean of the observed rows, weighted by each row's sum of exponentials.

`loss` is the "attention loss curve": the share of observed mass that goes when keys are pruned in
the order of a score, beside key norm (small norms stay, as `knorm`), chance and the observed mass
itself (`oracle`), which no order undercuts.

Attention is that of the recorded run up to its end, and the policy would choose right behind the
last row of the past: every number is `exact`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvsim.analysis.attention.agreement import lost, pearson, recall, spearman
from kvsim.analysis.attention.projections import logit_blocks, unrotated
from kvsim.analysis.prompt.tables import task_of
from kvsim.core.trace import Trace
from kvsim.engine.source import TraceSource
from kvsim.errors import PolicyError
from kvsim.policies.calibration import row_blocks
from kvsim.policies.expected_attention import expected_logits, moments
from kvsim.schema import FIDELITY

Floats = NDArray[np.float64]

#: From observed to expected attention; the last is Expected Attention.
STEPS = ("ratio_of_means", "normal", "mean_rotation", "past")

#: Orders in which the loss curve prunes.
ORDERS = (*STEPS, "key_norm", "random", "oracle")

#: Shares of the keys whose best are compared.
TOP = (0.1, 0.25, 0.5)

#: Shares of the keys that the loss curve removes.
REMOVED = tuple(i / 20 for i in range(21))

# The paper takes the moments of the first 1,000 of 5,000 tokens.
_PAST = 5

_OF_TRACE: dict[str, Any] = {
    "trace": pl.String,
    "task": pl.String,
    "cut": pl.Int64,
    "rows": pl.Int64,
    "keys": pl.Int64,
}
_OF_HEAD: dict[str, Any] = {"layer": pl.Int64, "head": pl.Int64, "qhead": pl.Int64}
_LABEL = pl.Enum(FIDELITY)
#: Columns of `expectation_table`.
EXPECTATION_COLUMNS: dict[str, Any] = {
    **_OF_TRACE,
    **_OF_HEAD,
    "step": pl.Enum(STEPS),
    "spearman": pl.Float64,
    "log_pearson": pl.Float64,
    **{f"recall_{100 * share:.0f}": pl.Float64 for share in TOP},
    "fidelity": _LABEL,
}
#: Columns of `loss_table`.
LOSS_COLUMNS: dict[str, Any] = {
    **_OF_TRACE,
    **_OF_HEAD,
    "order": pl.Enum(ORDERS),
    "removed": pl.Float64,
    "loss": pl.Float64,
    "fidelity": _LABEL,
}
#: Columns of `key_table`.
KEY_COLUMNS: dict[str, Any] = {
    **_OF_TRACE,
    **_OF_HEAD,
    "pos": pl.Int64,
    "observed": pl.Float64,
    **dict.fromkeys(STEPS, pl.Float64),
    "fidelity": _LABEL,
}


@dataclass(frozen=True)
class Expectation:
    """Attention on the keys of positions sink..cut-1, in logarithms.

    observed [layer, qhead, key]: mean over the `rows` rows from `cut` on; its sum is what these
    rows give to the past behind the sinks. expected [step, layer, qhead, key]: sums to 1 over the
    keys. key_norm [layer, qhead, key]: the key's length, itself. group: query heads of a KV head.
    """

    trace: str
    task: str
    cut: int
    sink: int
    rows: int
    group: int
    observed: Floats = field(repr=False)
    expected: Floats = field(repr=False)
    key_norm: Floats = field(repr=False)

    @property
    def keys(self) -> int:
        """Keys that are compared."""
        return int(self.observed.shape[-1])

    @cached_property
    def spearman(self) -> Floats:
        """Rank correlation of each step with observed attention; [step, layer, qhead]."""
        return spearman(self.expected, np.broadcast_to(self.observed, self.expected.shape))

    @cached_property
    def log_pearson(self) -> Floats:
        """Correlation of the logarithms; [step, layer, qhead]."""
        return pearson(self.expected, self.observed)

    def recall(self, share: float) -> Floats:
        """Share of the top keys of observed attention among those of each step.

        [step, layer, qhead]; the top is `share` of the keys, rounded up, and chance is its size
        divided by the number of keys.
        """
        return recall(self.expected, self.observed, math.ceil(share * self.keys - 1e-9))

    def loss(self, removed: Sequence[float] = REMOVED) -> Floats:
        """Share of the observed mass that is lost with the keys removed; as `ORDERS` in order.

        [order, layer, qhead, removed], `removed` shares of the keys, rounded down. `random` is the
        mean over all orders.
        """
        count = np.floor(np.asarray(removed) * self.keys + 1e-9).astype(np.int64)
        mass = np.exp(self.observed)
        scores = np.concatenate([self.expected, [-self.key_norm, mass]])
        found = lost(scores, mass, count)
        chance = np.broadcast_to(count / self.keys, found[:1].shape)
        return np.concatenate([found[:-1], chance, found[-1:]])


def expected_and_observed(
    trace: Trace,
    cut: int | None = None,
    *,
    sink: int = 4,
    device: str = "cpu",
    progress: Callable[[int, int], None] | None = None,
) -> Expectation:
    """Expected and observed attention of every query head, one layer in memory at a time.

    cut: rows of the past, a fifth of the trace by default, as in the paper. progress: called with
    (layers done, layers). Raises PolicyError where there are no two samples behind the sinks, or no
    row after the cut.
    """
    cut = trace.n_pos // _PAST if cut is None else cut
    if not 0 <= sink <= cut - 2 or cut >= trace.n_pos:
        raise PolicyError(
            f"{trace.name}: cut is {cut} of {trace.n_pos} rows; expected two rows behind the "
            f"{sink} sinks before it, and a row after it"
        )
    found = []
    with torch.inference_mode():
        for layer in range(trace.n_layers):
            source = TraceSource(trace, [layer], torch.device(device))
            found.append([one.cpu().numpy() for one in _of_layer(source, cut, sink)])
            if progress is not None:
                progress(layer + 1, trace.n_layers)
    observed, expected, key_norm = (np.stack(part, -3) for part in zip(*found, strict=True))
    return Expectation(
        trace=trace.name,
        task=task_of(trace),
        cut=cut,
        sink=sink,
        rows=trace.n_pos - cut,
        group=trace.group,
        observed=observed,
        expected=expected,
        key_norm=key_norm,
    )


def _of_layer(source: TraceSource, cut: int, sink: int) -> tuple[Tensor, Tensor, Tensor]:
    """Observed [qhead, key], expected [step, qhead, key] and length of the keys of one layer."""
    end, before, scale = source.n_rows, unrotated(source), source.formula.scale
    keys = source.keys[:, :, sink:cut]
    # the transpose of the mean rotation over the future, cut..end-1
    back = source.rope.rotate_mean(keys, 1 - end, end - cut)
    observed, means = _recorded(source, keys, cut)
    logits = [means]
    for at, read, start, stop in (
        (keys, source.queries, cut, end),
        (back, before, cut, end),
        (back, before, sink, cut),
    ):
        _, mu, sigma = moments(row_blocks(read, start, stop))
        logits.append(expected_logits(at, mu, sigma, scale).double())
    expected = torch.stack(logits)[:, 0].log_softmax(-1)
    length = torch.linalg.vector_norm(keys[0], dim=-1).double()
    group = observed.shape[2]
    return (
        observed[0].flatten(0, 1),
        expected.flatten(1, 2),
        length.repeat_interleave(group, 0),
    )


def _recorded(source: TraceSource, keys: Tensor, cut: int) -> tuple[Tensor, Tensor]:
    """Logs of mean attention and of the mean exponential, rows from `cut` on; [1, H, G, n]."""
    attention, exponential = (
        torch.tensor(-torch.inf, dtype=torch.float64, device=keys.device) for _ in range(2)
    )
    for rows, z in logit_blocks(source.queries, cut, source.n_rows, keys, source.formula):
        exponential = torch.logaddexp(exponential, z.logsumexp(3))
        _, lse = source.full(rows.start, rows.stop)
        attention = torch.logaddexp(attention, z.sub_(lse.unsqueeze(-1)).logsumexp(3))
    count = math.log(source.n_rows - cut)
    return attention - count, exponential - count


def expectation_table(found: Sequence[Expectation]) -> pl.DataFrame:
    """One row per trace, step and query head; `EXPECTATION_COLUMNS`.

    recall_10: as `Expectation.recall` of 10 % of the keys, which chance alone would give.
    """
    frames = [pl.DataFrame(schema=EXPECTATION_COLUMNS)]
    for one in found:
        recalls = {f"recall_{100 * share:.0f}": one.recall(share) for share in TOP}
        values = {"spearman": one.spearman, "log_pearson": one.log_pearson, **recalls}
        frames.append(_frame(one, values, "step", STEPS, EXPECTATION_COLUMNS))
    return pl.concat(frames)


def loss_table(found: Sequence[Expectation], removed: Sequence[float] = REMOVED) -> pl.DataFrame:
    """One row per trace, order, query head and share of keys removed; `LOSS_COLUMNS`."""
    frames = [pl.DataFrame(schema=LOSS_COLUMNS)]
    for one in found:
        loss = one.loss(removed)
        shares = np.broadcast_to(np.asarray(removed), loss.shape)
        frames.append(_frame(one, {"loss": loss, "removed": shares}, "order", ORDERS, LOSS_COLUMNS))
    return pl.concat(frames)


def key_table(found: Sequence[Expectation]) -> pl.DataFrame:
    """One row per trace, query head and key, attention itself: what scatters are drawn from.

    `KEY_COLUMNS`: observed mean attention, and expected attention of each step.
    """
    frames = [pl.DataFrame(schema=KEY_COLUMNS)]
    for one in found:
        values = {"observed": one.observed} | dict(zip(STEPS, one.expected, strict=True))
        values = {name: np.exp(value) for name, value in values.items()}
        values["pos"] = np.broadcast_to(np.arange(one.sink, one.cut), one.observed.shape)
        by_head = {name: value[None] for name, value in values.items()}
        frames.append(_frame(one, by_head, "", ("",), KEY_COLUMNS))
    return pl.concat(frames)


def _frame(
    one: Expectation,
    values: dict[str, Floats],
    first: str,
    names: Sequence[str],
    columns: dict[str, Any],
) -> pl.DataFrame:
    """Arrays [name, layer, qhead, ...] as rows; `first` is the column of the names."""
    at = np.indices(next(iter(values.values())).shape)
    constant = {name: getattr(one, name) for name in _OF_TRACE} | {"fidelity": "exact"}
    made: dict[str, Any] = {name: value.ravel() for name, value in values.items()}
    made |= {"layer": at[1].ravel(), "qhead": at[2].ravel(), "head": at[2].ravel() // one.group}
    made[first] = np.asarray(names)[at[0].ravel()]
    return (
        pl.DataFrame(made)
        .with_columns(**{name: pl.lit(value) for name, value in constant.items()})
        .with_columns(pl.selectors.float().fill_nan(None))
        .select(pl.col(name).cast(kind) for name, kind in columns.items())
    )
