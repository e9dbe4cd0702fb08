"""`measure`: a tidy Table of records, or of only a trace."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from itertools import chain
from typing import Any

import polars as pl

from kvsim.analysis.attention.windows import default_window
from kvsim.analysis.definition import Metric
from kvsim.analysis.live.metrics import JUDGED, KL_TOKENS
from kvsim.analysis.output.error import check_record, output_error
from kvsim.analysis.registry import METRICS, metric
from kvsim.analysis.subject import Analysis, Subject, Walk
from kvsim.analysis.table import RowArrays, blocks_of, table_of
from kvsim.core.arguments import listed
from kvsim.core.checks import resolve_device
from kvsim.core.record import Record
from kvsim.core.trace import Trace
from kvsim.errors import PolicyError, TraceError
from kvsim.store.opening import TraceLike, as_trace

#: Metrics of rows that a live run has, in addition to metrics of sets and of kind "live".
LIVE_ROWS = ("output_error", "layer_error")

#: Called with (metrics done, metrics, current metric).
Progress = Callable[[int, int, str], None]


def measure(
    trace: TraceLike | Analysis,
    record: Record | Sequence[Record] | None = None,
    metrics: str | Sequence[str] | None = None,
    *,
    events: bool = False,
    device: str = "cpu",
    optima: Sequence[Record | None] | None = None,
    progress: Progress | None = None,
) -> pl.DataFrame:
    """Measure one record or many of the same trace, or only a trace.

    Metrics of decisions at events (`Metric.notes`: segments and quotas of `ams`) need a record with
    internals, `kvsim.replay(..., internals=True)`; without them only their proxies have values. A
    metric that a trace is too short for has no rows.

    Args:
        trace: a trace, its path or URL, or an `Analysis` of it with its own settings.
        record: one or many; None for metrics of only the trace.
        metrics: one or several, by name. By default, of records the quick ones (`Metric.default`),
            without a record all of kind "trace".
        events: add a row for every event, with the row after which it fired.
        device: cpu, cuda or auto; of an `Analysis` its own.
        optima: for `regret`, the `kvsim.analysis.output.optimum` of each record, or None;
            `kvsim.sweep(metrics="regret")` computes them.
        progress: called with (metrics done, metrics, current metric).

    Returns:
        A Table with one row per value: trace, its model, labels of the prompt (task, domain, level;
        length and depth), policy, budget, the turn of a trace with several, whose labels these then
        are, layer, head (KV head) or qhead (query head), value, chance (its expected value by
        chance, if known) and fidelity. Policy, budget and schedule are null in rows about the
        trace. Without `events`, a row has the last event or the mean over events
        (`Metric.over_events`). Facts about the policy are in the columns
        `kvsim.analysis.table.FACTS`.

    Raises:
        PolicyError: an unknown metric, a metric of records without a record, or regret without
            optima.
        NeedsError: the trace lacks an array of a metric that `metrics` names (`Metric.arrays`).
        TraceError: anything but traces and records, or a record of another trace.

    Example:
        >>> record = kvsim.replay("sample", "tova", 64)
        >>> table = kvsim.measure("sample", record, "output_error")
        >>> table["layer"].unique().to_list(), table["unit"].unique().to_list()
        ([0, 1, 2], ['relative'])
    """
    device = resolve_device(device)
    records = [record] if isinstance(record, Record) else record
    trace = trace if isinstance(trace, Analysis) else as_trace(trace)
    _check_inputs(records, optima)
    chosen = choose(metrics, optima=optima is not None, records=records is not None)
    if isinstance(trace, Analysis):
        analysis = trace
    else:
        analysis = Analysis(trace, device=device, only=records[0].layers if records else None)
    trace = analysis.trace
    if metrics is None:
        chosen = {name: chosen[name] for name in available(chosen, [trace])}
    check_arrays(trace, chosen)
    subjects: Sequence[Analysis | Subject] = [analysis]
    if records is not None:
        projected = any("o_proj" in entry.arrays for entry in chosen.values())
        subjects = subjects_of(trace, records, optima, device, projected=projected)
    steps = [
        (analysis if entry.kind == "trace" else subject, name, entry)
        for place, subject in enumerate(subjects)
        for name, entry in chosen.items()
        if not place or entry.kind != "trace"  # the same for every record
    ]
    blocks: list[RowArrays] = []
    for done, (subject, name, entry) in enumerate(steps):
        if progress is not None:
            progress(done, len(steps), f"{trace.name}: {name}")
        blocks += blocks_of(subject, name, entry, events=events)
    return table_of(blocks)


def _check_inputs(records: Any, optima: Any) -> None:
    if records is not None and not all(isinstance(each, Record) for each in listed(records)):
        raise TraceError(f"record is {reprlib.repr(records)}; expected Records of kvsim.replay")
    given = listed(optima or ())
    certified = all(x is None or getattr(x, "internals", ()) for x in given)
    if optima is not None and not (certified and len(given) == len(records or ())):
        raise PolicyError(
            f"optima are {reprlib.repr(optima)}; expected for each record None or a Record of "
            "kvsim.analysis.output.optimum"
        )


def choose(
    metrics: Sequence[str] | None,
    *,
    optima: bool = False,
    records: bool = True,
    judged: bool = False,
    live: bool = False,
) -> dict[str, Metric]:
    """Return the metrics by name, or the default ones of records, of a trace, or of a live run.

    judged: include metrics of a judge (`JUDGED`). optima: metrics of the optimum have values, and
    are among the default ones. Raises PolicyError for an unknown name, and for a metric without
    values there.
    """

    def reason(name: str, entry: Metric) -> str:
        of_judge = name in (*JUDGED, KL_TOKENS)
        if live:
            there = entry.kind in ("live", "sets") or name in LIVE_ROWS
            return "" if there else "is computed from recorded attention; take kvsim replay"
        if entry.kind == "live" and not (judged and of_judge):
            way = "give --judge, or take kvsim live" if of_judge else "take kvsim live"
            return f"is about a running model, and a replay runs none; {way}"
        if not records and entry.kind != "trace":
            return "is about a record, and only a trace was given; give one, or another metric"
        if entry.beside and not optima:
            return "compares with the optimum, which was not replayed; give it to `kvsim replay`"
        return ""

    names: list[str]
    if metrics is None:
        usual = {name for name, x in METRICS.items() if x.default or not records}
        usual |= {name for name, x in METRICS.items() if live and x.kind == "live"} - {KL_TOKENS}
        names = [x for x, entry in METRICS.items() if x in usual and not reason(x, entry)]
    else:
        names = listed(metrics)
        if live and KL_TOKENS in names:  # without the mean a summary would be empty
            names = ["response_kl", *names]
    chosen = {name: metric(name) for name in [*names, *(JUDGED if judged else ())]}
    for name, entry in chosen.items():
        if why := reason(name, entry):
            raise PolicyError(f"{name} {why}")
    return chosen


def available(metrics: Iterable[str], traces: Sequence[Trace]) -> list[str]:
    """The metrics whose arrays every trace has recorded (`Metric.arrays`)."""
    return [
        name
        for name in metrics
        if all(_has(trace, array) for array in metric(name).arrays for trace in traces)
    ]


def check_arrays(trace: Trace, metrics: Iterable[str]) -> None:
    """Raise NeedsError where the trace lacks an array that one of the metrics reads."""
    for name in dict.fromkeys(array for each in metrics for array in metric(each).arrays):
        if not _has(trace, name):
            trace.read("q" if name in ROWS else name, slice(0, 0))


#: Names in `Metric.arrays` that stand for rows: the first row that a metric reads.
ROWS: Mapping[str, Callable[[int], int]] = {
    "all_rows": lambda _: 0,
    "last_windows": lambda n_pos: n_pos - 4 * default_window(n_pos),
}


def _has(trace: Trace, array: str) -> bool:
    """Whether a trace has an array, or the rows that one of `ROWS` names."""
    if array == "layer_sensitivity":
        return bool(trace.header.layer_sensitivity)
    if array in ROWS:
        rows = range(ROWS[array](trace.n_pos), trace.n_pos)
        return trace.header.held("q", rows) in ([], [slice(rows.start, rows.stop)])
    return trace.has(array)


def subjects_of(
    trace: Trace,
    records: Sequence[Record],
    optima: Sequence[Record | None] | None = None,
    device: str = "cpu",
    *,
    projected: bool = False,
) -> list[Subject]:
    """Return a Subject of each record; walks over the trace and output errors are shared."""
    trace, optima = trace.part(), optima or [None] * len(records)
    replayed = list({id(r): r for r in chain(records, optima) if r is not None}.values())
    different = replayed[: len({id(record) for record in records})]
    for record in replayed:
        check_record(trace, record)
    error = partial(output_error, projected=projected, prompt=False)

    @cache
    def results(walk: Walk[Any]) -> dict[int, Any]:
        of = replayed if walk is error else different
        return dict(zip(map(id, of), walk(trace, of, device), strict=True))

    def result(record: Record, walk: Walk[Any]) -> Any:
        return results(walk)[id(record)]

    return [
        Subject(
            *(trace, record, partial(result, record, error), partial(result, record)),
            optimum=None if best is None else (best, partial(result, best, error)),
        )
        for record, best in zip(records, optima, strict=True)
    ]
