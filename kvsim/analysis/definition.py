"""A metric: an entry of the registry, and the Cells that its function returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvsim.analysis.arrays import Floats, Ints


@dataclass(frozen=True)
class Cells:
    """Values of one metric for one layer: [m], or [m, E] where `events` [E] names the rows.

    layer: None for what a trace has as a whole, such as its response; several where m runs over the
    heads of one after those of the other. heads: the axis that m runs over. chance: what chance
    alone would give, like values. turn: from 1, if several. unit: by default the metric's.
    """

    layer: int | Sequence[int] | None
    values: Floats
    heads: Literal["head", "qhead"] | None = None
    variant: str = ""
    chance: Floats | None = None
    events: Ints | None = None
    turn: int | None = None
    unit: str = ""


@dataclass(frozen=True)
class Metric:
    """A named number about a trace, or about a record of it.

    kind: "sets" reads what events kept and decided, "rows" what rows of attention become, "trace"
    the trace alone, "live" what a running model did. cells: computes the values from an `Analysis`
    of the trace (kind "trace"), or from a `Subject`, the trace and a record.
    unit: a "share" is from 0 to 1, a "signed share" a difference of shares, or below random sets.
    better: the direction in which a policy is better, None where there is none. over_events: what
    stands for all events in a Table that does not list them; of "each" all are listed, and no
    summary has it. main: the variant that stands for the
    others where there is room for one number. default: False where a Table of records has it only
    if it is named. beside: "optimum" where it compares with the optimum on the same terms,
    which is computed on request. notes: what it reads of the notes of
    allocators at events (`Plan.notes`, `kvsim.replay(..., internals=...)`). layers: what
    stands for all layers in a summary, the mean of their values or the sum. arrays: what a trace
    must have recorded; by default, metrics of traces without them are left out. after: the metric
    that it follows in a Table; by default those of packages come last.
    """

    summary: str
    kind: Literal["sets", "rows", "trace", "live"]
    unit: str
    better: Literal["higher", "lower"] | None
    source: str
    cells: Callable[[Any], Iterable[Cells]]
    over_events: Literal["last", "mean", "each"] = "mean"
    main: str = ""
    default: bool = True
    beside: Literal["", "optimum"] = ""
    notes: frozenset[str] = frozenset()
    layers: Literal["mean", "sum"] = "mean"
    arrays: tuple[str, ...] = ()
    after: str = ""
