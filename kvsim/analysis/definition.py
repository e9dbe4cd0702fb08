"""A metric: an entry of the registry, and the Cells that its function returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvsim.analysis.arrays import Floats, Ints


@dataclass(frozen=True)
class Cells:
    """Values of one metric for one layer: [m], or [m, E] where `events` [E] names the rows.

    layer: None for values of the whole trace, such as its response; several where m runs over the
    heads of one layer after the other. heads: the axis that m runs over. chance: the values
    expected by chance, shaped like values. turn: from 1, if several. unit: by default the metric's.
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

    kind: the input. "sets": kept sets and decisions of events; "rows": attention of rows; "trace":
    only the trace; "live": a running model. cells: computes the values from an `Analysis` of the
    trace (kind "trace"), or from a `Subject`, the trace and a record. unit: a "share" is from 0 to
    1, a "signed share" a difference of shares. better: the direction in which a policy is better,
    None without one. over_events: the value that a Table without `events` has of all events; with
    "each" all events are listed, and no summary has the metric. main: the variant for tables with
    one number per metric. default: False for a metric that a Table of records has only on request.
    beside: "optimum" for a comparison with the optimum on the same terms, which is computed on
    request. notes: the notes of allocators that it reads (`Plan.notes`, `kvsim.replay(...,
    internals=...)`). layers: whether a summary has the mean of the layers or their sum. arrays:
    arrays that a trace must have recorded; by default, metrics of traces without them are left out.
    after: the metric that it follows in a Table; by default metrics of packages come last.
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
