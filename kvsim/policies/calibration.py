"""Calibration queries of a scorer: from the beginning of the trace, or from another trace.

Some methods measure a model once, on a text of their own, and score keys by these statistics.
`calibration` names the queries used in place of that text:

* "prefix:N": the first N rows of the replayed trace, which a live run could measure itself;
* a Trace or its path: another text through the same model, as in the papers;
* "oracle": every row of the replayed trace, future rows included; a bound.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar, cast

from kvsim.core.attention import Rope
from kvsim.core.lazy import Tensor, torch
from kvsim.core.pieces import Inputs, Piece, Run, Scorer
from kvsim.core.trace import Trace
from kvsim.core.view import LOGIT_BYTES, View
from kvsim.errors import PolicyError, TraceError
from kvsim.policies.model import described, differ, model_of
from kvsim.store.reader import open_trace

_WAYS = (
    'give calibration="prefix:64" (the first 64 rows of each trace), another trace of the same '
    'model, or "oracle" (every row, later ones included)'
)


class Calibration(str):  # noqa: SLOT000  has more than its text
    """A source of calibration queries, which is shown, compared and recorded as its text.

    rows: of a prefix, else None. trace: another trace, else None; learned: statistics from it.
    """

    rows: int | None = None
    trace: Trace | None = None
    learned: dict[Calibrated, tuple[Tensor, ...]]


def _source(policy: str, given: str | Path | Trace | None) -> Calibration:
    if isinstance(given, Calibration):
        return given
    prefix = re.fullmatch(r"prefix:0*([1-9]\d*)", str(given), re.ASCII)
    if given == "oracle" or prefix:
        source = Calibration(f"prefix:{prefix[1]}" if prefix else given)
        source.rows = int(prefix[1]) if prefix else None
        return source
    try:
        trace = given if isinstance(given, Trace) else open_trace(given or "")
    except TraceError as error:
        found = f"{str(given)!r} ({error})" if given else "missing"
        raise PolicyError(f"{policy}: calibration is {found}; {_WAYS}") from error
    source = Calibration(f"{trace.name}@{trace.digest.removeprefix('sha256:')[:12]}")
    source.trace, source.learned = trace, {}
    return source


class Sourced(Piece):
    """A piece with calibration rows."""

    calibration: str | Path | Trace | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "calibration", _source(self.label, self.calibration))

    @property
    def source(self) -> Calibration:
        """The source of the calibration rows."""
        return cast("Calibration", self.calibration)

    def check(self, run: Run) -> None:
        """Raise PolicyError if the other trace comes from another model."""
        both = self.source.trace or run.trace, run.trace
        sizes = [(x.layer_ids, x.n_qheads, [rope.rotary_dim for rope in x.ropes]) for x in both]
        if sizes[0] != sizes[1] or differ(*map(model_of, both)):
            mine, other = (f"{described(model_of(x))} of {x.n_qheads} query heads" for x in both)
            raise PolicyError(
                f"{self.label}: calibration {self.source} is of {mine} and {run.trace.name} of "
                f"{other}; expected a trace of the same model"
            )


class Calibrated(Sourced, Scorer):
    """A scorer with statistics of calibration queries.

    Subclasses define `learn` and score with `learned(view)`.
    """

    #: whether the queries are taken after RoPE
    rotated: ClassVar[bool]

    @property
    def reads(self) -> Inputs:
        """Rows of the prefix, which must exist at the event; or future rows."""
        prefix = self.source.rows or 0
        return Inputs(first=prefix, least=max(1, prefix), future=self.source == "oracle")

    @abstractmethod
    def learn(self, blocks: Iterator[Tensor], rope: Rope) -> tuple[Tensor, ...]:
        """Statistics [L, H, G, ...] of queries in blocks [L, H, G, w, d]."""

    def learned(self, view: View) -> tuple[Tensor, ...]:
        """Statistics of the calibration queries for the view's layers and heads, [L, H, G, ...].

        Those of another trace are computed once.
        """
        trace = self.source.trace
        if trace is None:
            stop = self.source.rows or view.source.n_rows

            def read(first: int, last: int) -> Tensor:
                return view.queries(range(first, last), rotated=self.rotated)

            key = self.learn, stop
            return view.memo(key, lambda: self.learn(row_blocks(read, 0, stop), view.rope))
        if self not in self.source.learned:
            layers = (
                self.learn(_of_layer(trace, layer, self.rotated), trace.ropes[layer])
                for layer in range(trace.n_layers)
            )
            self.source.learned[self] = tuple(map(torch.cat, zip(*layers, strict=True)))
        of_view = (x[view.layers.to(x.device)] for x in self.source.learned[self])
        heads = view.pos.shape[1]
        return tuple(
            x.flatten(1, 2).unflatten(1, (heads, -1)).to(view.keys.device) for x in of_view
        )


def row_blocks(read: Callable[[int, int], Tensor], start: int, stop: int) -> Iterator[Tensor]:
    """Yield read(start, stop) by blocks of rows, so that memory does not grow with the rows."""
    row = read(start, start + 1)
    step = max(1, LOGIT_BYTES // (row.numel() * row.element_size()))
    for first in range(start, stop, step):
        yield read(first, min(first + step, stop))


def _of_layer(trace: Trace, layer: int, rotated: bool) -> Iterator[Tensor]:
    """Queries of a layer in blocks of rows, each head a group of its own; [1, qhead, 1, w, d]."""

    def read(start: int, stop: int) -> Tensor:
        q = trace.read("q", slice(layer, layer + 1), slice(start, stop)).unsqueeze(2)
        return q if rotated else trace.ropes[layer].unrotate(q, torch.arange(start, stop))

    return row_blocks(read, 0, trace.n_pos)
