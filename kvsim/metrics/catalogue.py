"""The metrics by name: what each says, in which unit, and which direction is better."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvsim.errors import PolicyError, suggest
from kvsim.metrics.output import OutputError
from kvsim.metrics.overlap import default_window, window_overlap
from kvsim.metrics.retention import entries_seen, retained_iou, wipeout
from kvsim.record import Record
from kvsim.trace import Trace

Floats = NDArray[np.float64]

#: Regions of the wipe-out rate: lengths in tokens and survival thresholds.
LENGTHS = (16, 32, 64, 128)
THRESHOLDS = (0.0, 0.1)


@dataclass(frozen=True)
class Cells:
    """Values of one metric for one layer: [m], or [m, E] where `events` [E] names the rows.

    heads: the axis that m runs over; chance: what chance alone would give, like values.
    """

    layer: int
    values: Floats
    heads: Literal["head", "qhead"] | None = None
    variant: str = ""
    chance: Floats | None = None
    events: NDArray[np.int64] | None = None


@dataclass
class Subject:
    """What a metric measures: a trace, and a record of it with its output error.

    oracle: the output error of the record that the mass oracle gives under the same conditions.
    """

    trace: Trace
    record: Record
    output: Callable[[], OutputError]
    oracle: Callable[[], OutputError] | None = None

    @cached_property
    def rows(self) -> slice:
        """Rows after the prompt, over which row metrics average."""
        return slice(self.trace.prompt_len, None)

    def layers(self) -> Iterator[tuple[int, NDArray[np.int32]]]:
        """(layer, the rows [H, T] after which entries are gone) of the record."""
        return zip(self.record.layers, self.record.gone_after, strict=True)


@dataclass(frozen=True)
class Metric:
    """A named function from a trace and a record to Cells.

    kind: "sets" reads kept sets alone, "rows" what rows of attention become, "trace" no record.
    better: the direction in which a policy is better, None where there is none. over_events: what
    stands for all events in a Table that does not list them. beside_oracle: compares the record
    with one of the mass oracle, which is replayed on request alone. main: the variant that stands
    for the others where there is room for one number.
    """

    summary: str
    kind: Literal["sets", "rows", "trace"]
    unit: str
    better: Literal["higher", "lower"] | None
    source: str
    cells: Callable[[Subject], Iterable[Cells]]
    over_events: Literal["last", "mean"] = "mean"
    beside_oracle: bool = False
    main: str = ""


def _wipeout(kind: Literal["cumulative", "hazard"]) -> Callable[[Subject], Iterator[Cells]]:
    def cells(subject: Subject) -> Iterator[Cells]:
        for layer, evicted_at in subject.layers():
            for length in LENGTHS:
                for threshold in THRESHOLDS:
                    found = wipeout(evicted_at, length, threshold)
                    variant = f"length={length},threshold={threshold:g}"
                    rates = getattr(found, kind)
                    yield Cells(layer, rates, "head", variant, events=found.rows)

    return cells


def _iou(subject: Subject) -> Iterator[Cells]:
    for layer, evicted_at in subject.layers():
        found = retained_iou(evicted_at)
        yield Cells(layer, found.iou, "head", chance=found.chance, events=found.rows)


def _entries(subject: Subject) -> Iterator[Cells]:
    for layer, evicted_at in subject.layers():
        yield Cells(layer, entries_seen(evicted_at, subject.trace.prompt_len), "head")


def _overlap(subject: Subject) -> Iterator[Cells]:
    trace = subject.trace
    window = default_window(trace.n_pos)
    if window < 1:
        return
    for layer in subject.record.layers:
        found = window_overlap(trace, layer, window=window)
        names = [f"window={window},share={share:g}" for share in found.shares]
        for i, name in enumerate(names):
            share, union = found.chance[i : i + 1], found.chance_union[i : i + 1]
            for block in range(3):
                before = found.before[block, i : i + 1]
                yield Cells(layer, before, variant=f"{name},block={block + 1}", chance=share)
            yield Cells(layer, found.union[i : i + 1], variant=f"{name},union", chance=union)
            equal = found.equal_budget[i : i + 1]
            yield Cells(layer, equal, variant=f"{name},equal_budget", chance=share)


def _rows(name: str) -> Callable[[Subject], Iterator[Cells]]:
    def cells(subject: Subject) -> Iterator[Cells]:
        values = getattr(subject.output(), name)[:, :, subject.rows].astype(np.float64)
        if not values.shape[-1]:
            return
        for layer, of_layer in zip(subject.record.layers, values, strict=True):
            yield Cells(layer, mean_known(of_layer), "qhead")

    return cells


def _regret(subject: Subject) -> Iterator[Cells]:
    if subject.oracle is None:  # no budget binds the policy, so no oracle is comparable
        return
    missing, least = (
        made().missing[:, :, subject.rows] for made in (subject.output, subject.oracle)
    )
    if not missing.shape[-1]:
        return
    for layer, more in zip(subject.record.layers, missing.astype(np.float64) - least, strict=True):
        yield Cells(layer, mean_known(more), "qhead")


METRICS: Mapping[str, Metric] = {
    "wipeout": Metric(
        "share of text regions of which (almost) nothing is left, per event",
        "sets", "share", "lower", "named by AMS, defined here", _wipeout("cumulative"),
        over_events="last", main="length=32,threshold=0",
    ),
    "wipeout_hazard": Metric(
        "share of the regions still alive that an event wipes out",
        "sets", "share", "lower", "as wipeout", _wipeout("hazard"),
        main="length=32,threshold=0",
    ),
    "retained_iou": Metric(
        "intersection over union of the sets kept after consecutive events, beside chance",
        "sets", "share", None, "AMS, Table 14", _iou,
    ),
    "entries_seen": Metric(
        "entries that a row sees, mean over rows after the prompt: the cache a policy really used",
        "sets", "entries", None, "kvsim", _entries,
    ),
    "window_overlap": Metric(
        "share of the last rows' top keys that were top keys of earlier rows, beside chance",
        "trace", "share", None, "G-KV, Fig. 1", _overlap,
    ),
    "output_error": Metric(
        "|o_full - o_seen| / |o_full| of the attention output, mean over rows after the prompt",
        "rows", "relative", "lower", "kvsim", _rows("error"),
    ),
    "retained_mass": Metric(
        "share of full attention on what a row sees, mean over rows after the prompt",
        "rows", "share", "higher", "kvsim", _rows("mass"),
    ),
    "missing_mass": Metric(
        "first factor of the output error: attention on evicted entries",
        "rows", "share", "lower", "error = missing x distance", _rows("missing"),
    ),
    "error_distance": Metric(
        "second factor: |o_evicted - o_seen| / |o_full|, where at least 1e-5 is missing",
        "rows", "relative", None, "as missing_mass", _rows("distance"),
    ),
    "regret": Metric(
        "mass that a mass oracle retains on the same terms, minus retained mass; needs --regret",
        "rows", "share", "lower", "kvsim", _regret, beside_oracle=True,
    ),
}  # fmt: skip


def mean_known(values: Floats) -> Floats:
    """Mean over the last axis of what is not NaN; NaN where nothing is."""
    known = ~np.isnan(values)
    count = known.sum(-1)
    out = np.full(values.shape[:-1], np.nan)
    np.divide(np.where(known, values, 0.0).sum(-1), count, out=out, where=count > 0)
    return out


def metric(name: str) -> Metric:
    """The metric called `name`; PolicyError with a suggestion otherwise."""
    if name not in METRICS:
        known = ", ".join(METRICS)
        raise PolicyError(f"unknown metric {name!r}{suggest(name, METRICS)}; known: {known}")
    return METRICS[name]
