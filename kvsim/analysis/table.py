"""`measure`: records, or a trace alone, to a tidy Table; every row with its fidelity."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache, partial
from itertools import chain
from typing import Any

import numpy as np
import polars as pl

from kvsim.analysis.arrays import Floats, Ints, mean_known
from kvsim.analysis.attention.windows import default_window
from kvsim.analysis.definition import Metric
from kvsim.analysis.live.metrics import KL_TOKENS
from kvsim.analysis.output.error import check_record, output_error
from kvsim.analysis.output.metrics import METRICS as OUTPUT
from kvsim.analysis.registry import METRICS, metric
from kvsim.analysis.results import FACTS, model_name
from kvsim.analysis.subject import Analysis, LiveSubject, Subject, Walk
from kvsim.core.arguments import listed
from kvsim.core.checks import check_progress, resolve_device
from kvsim.core.outcome import OutputDeviation
from kvsim.core.record import Record, record_document
from kvsim.core.trace import Trace
from kvsim.errors import PolicyError, TraceError
from kvsim.schema import FIDELITY, LABELS, PREFILL
from kvsim.store.opening import TraceLike, as_trace

# Labels that are numbers; a Table has their columns, and the turn, only where a trace has them.
_NUMBERS: dict[str, Any] = {"length": pl.Int64, "depth": pl.Float64}
_OPTIONAL = (*_NUMBERS, "turn")

#: All columns that a Table may have, and their types; one row is one value.
TYPES: dict[str, Any] = {
    **dict.fromkeys(("trace", "model", *LABELS), pl.String),
    **_NUMBERS,
    **dict.fromkeys(("policy", "params"), pl.String),
    "budget": pl.Int64,
    "share": pl.String,
    "interval": pl.Int64,
    "prefill": pl.Boolean,
    **FACTS,
    **dict.fromkeys(("metric", "variant"), pl.String),
    **dict.fromkeys(("turn", "layer", "head", "qhead", "event"), pl.Int64),
    **dict.fromkeys(("value", "chance"), pl.Float64),
    "unit": pl.String,
    "fidelity": pl.Enum(FIDELITY),
}

#: Columns of every Table and their types.
COLUMNS = {name: kind for name, kind in TYPES.items() if name not in _OPTIONAL}


#: Records that metrics compare with (`Metric.beside`), those about the optimum, and what a pass of
#: the model says of a replay (`kvsim.runner.judging`).
BESIDE = {
    "optimum": "optimum",
    "unprotected": "optimum without protected entries",
}
JUDGED = ("response_kl", "nll_increase", "top_agreement", "stream_error")
REGRET = tuple(name for name, entry in OUTPUT.items() if entry.beside)

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
    unprotected: Sequence[Record | None] | None = None,
    progress: Progress | None = None,
) -> pl.DataFrame:
    """Measure one record or many of the same trace, or a trace alone.

    Metrics of decisions at events (`Metric.notes`: segments and quotas of `ams`) need a record with
    internals, `kvsim.replay(..., internals=True)`; without them only their proxies have values. A
    metric that a trace is too short for has no rows (`Analysis.left_out`).

    Args:
        trace: a trace, its path or URL, or an `Analysis` of it with another k, rule or cut.
        record: one or many; None for metrics of the trace alone.
        metrics: one or several, by name. By default, of records those that are quick
            (`Metric.default`), and of a trace alone all of kind "trace".
        events: add a row for every event, with the row after which it fired.
        device: cpu, cuda or auto; of an `Analysis` its own.
        optima: for `regret`, for each record that of `kvsim.analysis.output.optimum`, or None;
            `kvsim.sweep(metrics="regret")` computes them.
        unprotected: for `possible_share`, the same with nothing protected.
        progress: called with (metrics done, metrics, current metric).

    Returns:
        A Table with one row per value: trace, its model, labels of the prompt (task, domain, level;
        length and depth), policy, budget, the turn of a trace with several, whose labels these then
        are, layer, head (KV head) or qhead (query head), value, chance (its value by chance alone,
        if known) and fidelity. Policy, budget and schedule are null in rows about the trace.
        Without `events`, a row has the last event or the mean over events (`Metric.over_events`).
        Facts about the policy are in the columns `kvsim.analysis.results.FACTS`.

    Raises:
        PolicyError: an unknown metric, a metric of records without a record, or regret without
            optima.
        NeedsError: the trace lacks an array of a metric that `metrics` names (`Metric.arrays`).
        TraceError: anything but traces and records, or a record of another trace.
    """
    device = resolve_device(device)
    check_progress(progress)
    records = [record] if isinstance(record, Record) else record
    trace = trace if isinstance(trace, Analysis) else as_trace(trace)
    references = {"optimum": optima, "unprotected": unprotected}
    _check_inputs(records, references)
    beside = [name for name, given in references.items() if given is not None]
    chosen = choose(metrics, beside=beside, records=records is not None)
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
        subjects = subjects_of(trace, records, references, device, projected=projected)
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


def _check_inputs(records: Any, references: Mapping[str, Any]) -> None:
    if records is not None and not all(isinstance(each, Record) for each in listed(records)):
        raise TraceError(f"record is {reprlib.repr(records)}; expected Records of kvsim.replay")
    for given in references.values():
        optima = listed(given or ())
        certified = all(x is None or getattr(x, "internals", ()) for x in optima)
        if given is not None and not (certified and len(optima) == len(records or ())):
            raise PolicyError(
                f"optima are {reprlib.repr(given)}; expected for each record None or a Record of "
                "kvsim.analysis.output.optimum"
            )


def in_order(tables: Iterable[pl.DataFrame]) -> pl.DataFrame:
    """The rows of several Tables as one, with the columns of `COLUMNS`, their types and order.

    `length` and `depth`, labels that are numbers, and `turn` are among them where they have values.
    """
    typed = [
        table.select(pl.col(name).cast(kind) for name, kind in TYPES.items() if name in table)
        for table in tables
    ]
    table = pl.concat([pl.DataFrame(schema=COLUMNS), *typed], how="diagonal")
    return table.select(
        name for name in TYPES if name in COLUMNS or (name in table and table[name].count())
    )


def choose(
    metrics: Sequence[str] | None,
    *,
    beside: Collection[str] = (),
    records: bool = True,
    judged: bool = False,
) -> dict[str, Metric]:
    """The metrics by name, or the default ones of records or of a trace alone.

    judged: with those of a judge (`JUDGED`). beside: records to compare with (`Metric.beside`),
    whose metrics are among the default ones then. Raises PolicyError for an unknown name, and for a
    metric whose record is missing.
    """
    if metrics is None and not records:
        return {name: entry for name, entry in METRICS.items() if entry.kind == "trace"}
    if metrics is None:
        comparable = {"", *beside}
        metrics = [name for name, x in METRICS.items() if x.default and x.beside in comparable]
    names: list[str] = listed(metrics)
    chosen = {name: metric(name) for name in [*names, *(JUDGED if judged else ())]}
    for name, entry in chosen.items():
        of_judge = name in (*JUDGED, KL_TOKENS)
        reason = ""
        if entry.kind == "live" and not (judged and of_judge):
            way = "give --judge, or take kvsim live" if of_judge else "take kvsim live"
            reason = f"is about a running model, and a replay runs none; {way}"
        elif not records and entry.kind != "trace":
            of_trace = ", ".join(choose(None, records=False))
            reason = f"is about a record, and only a trace was given; give one, or {of_trace}"
        elif entry.beside and entry.beside not in beside:
            reason = f"compares with the {BESIDE[entry.beside]}, which was not replayed; give "
            reason += "it as a metric of `kvsim replay` or kvsim.sweep"
        if reason:
            raise PolicyError(f"{name} {reason}")
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


#: What `Metric.arrays` names beside arrays: the first of the rows that a metric reads.
ROWS: Mapping[str, Callable[[int], int]] = {
    "all_rows": lambda _: 0,
    "last_windows": lambda n_pos: n_pos - 4 * default_window(n_pos),
}


def _has(trace: Trace, array: str) -> bool:
    """Whether a trace has an array, or the rows that one of `ROWS` names."""
    if array == "layer_sensitivity":
        return bool(trace.header.layer_sensitivity)
    if array in ROWS:
        return trace.left_out is None or trace.left_out[1] <= ROWS[array](trace.n_pos)
    return trace.has(array)


def subjects_of(
    trace: Trace,
    records: Sequence[Record],
    references: Mapping[str, Sequence[Record | None] | None],
    device: str,
    *,
    projected: bool,
) -> list[Subject]:
    """Return a Subject of each record; they share walks over the trace and output errors.

    references: by name (`Metric.beside`), what each record is compared with.
    """
    trace = trace.evicting
    beside = [references.get(name) or [None] * len(records) for name in BESIDE]
    replayed = list({id(r): r for r in chain(records, *beside) if r is not None}.values())
    for record in replayed:
        check_record(trace, record)
    different = list({id(record): record for record in records}.values())

    @cache
    def outputs() -> dict[int, OutputDeviation]:
        errors = output_error(trace, replayed, device, projected=projected, prompt=False)
        return dict(zip(map(id, replayed), errors, strict=True))

    @cache
    def results(walk: Walk[Any]) -> dict[int, Any]:
        return dict(zip(map(id, different), walk(trace, different, device), strict=True))

    def error_of(record: Record) -> OutputDeviation:
        return outputs()[id(record)]

    def subject(record: Record, *beside: Record | None) -> Subject:
        return Subject(
            *(trace, record, partial(error_of, record), lambda walk: results(walk)[id(record)]),
            beside={
                name: (other, partial(error_of, other))
                for name, other in zip(BESIDE, beside, strict=True)
                if other is not None
            },
        )

    return [subject(*each) for each in zip(records, *beside, strict=True)]


#: The columns about a record, null in rows about a trace.
OF_RECORD = ("policy", "params", "budget", "share", "interval", "prefill", *FACTS)
#: The columns in which the rows of a block differ.
_OF_ROW = ("value", "chance", "head", "qhead", "event")

#: The columns that rows share, and those `_OF_ROW`, arrays [n]; -1 where a row has no such index.
RowArrays = tuple[dict[str, Any], tuple[Floats | Ints, ...]]


def columns_of(record: Record) -> dict[str, Any]:
    """The columns of a Table that say which record of a trace a row is about."""
    given, changed = record_document(record), record.facts.changed
    # another result, as with another parameter
    other = {name: given[name] for name in PREFILL if given[name] not in ("prompt", None)}
    return {name: given[name] for name in OF_RECORD} | {
        "params": json.dumps({**record.params, **other}),
        "bounds": ",".join(record.facts.bounds),
        "access": ",".join(record.facts.access),
        "changed": None if changed is None else ",".join((*changed, *other)),
    }


def blocks_of(
    subject: Analysis | Subject | LiveSubject, name: str, entry: Metric, *, events: bool
) -> list[RowArrays]:
    """The rows of one metric of a trace, of a record, or of a live run."""
    trace, record = subject.trace, None if isinstance(subject, Analysis) else subject.record
    shared: dict[str, Any] = {"trace": trace.name, "model": model_name(trace), "metric": name}
    if record is not None:
        shared |= columns_of(record)
    blocks: list[RowArrays] = []
    for cells in entry.cells(subject):
        shared["unit"] = cells.unit or entry.unit
        labels = trace.labels if cells.turn is None else trace.header.labels_of(cells.turn)
        shared |= {name: labels.get(name) for name in LABELS} | {"turn": cells.turn}
        shared |= {x: str(label) for x, label in labels.items() if x not in _NUMBERS}
        values, rows = cells.values, cells.events
        given = np.nan if cells.chance is None else cells.chance  # of the values' own events
        chance = np.where(np.isnan(values), np.nan, given)
        if rows is not None and not events and entry.over_events != "each":
            if entry.over_events == "last":
                values, chance, rows = values[:, -1:], chance[:, -1:], rows[-1:]
            else:
                values, chance, rows = mean_known(values), mean_known(chance), None
        layers = cells.layer if isinstance(cells.layer, Sequence) else [cells.layer]
        size = len(values) // len(layers)
        index = np.repeat(np.arange(size), 1 if rows is None else len(rows))
        none, axis = np.full(len(index), -1), cells.heads
        if record is not None and record.per_query_head and axis == "head":
            axis = "qhead"  # its head axis counts query heads
        heads = index if axis == "head" else none, index if axis == "qhead" else none
        event = none if rows is None else np.tile(rows, size)
        for place, layer in enumerate(layers):
            level = "exact" if record is None else fidelity(trace, record, entry.kind, layer)
            part = slice(place * size, (place + 1) * size)
            blocks.append(
                (
                    shared | {"variant": cells.variant, "layer": layer, "fidelity": level},
                    (values[part].ravel(), chance[part].ravel(), *heads, event),
                )
            )
    # those of a record by layer, whatever was computed together
    order = {} if record is None else {layer: place for place, layer in enumerate(record.layers)}
    return sorted(blocks, key=lambda block: order.get(block[0]["layer"], -1))


def table_of(blocks: Sequence[RowArrays]) -> pl.DataFrame:
    """One frame of all blocks, because one for each is slow."""
    if not blocks:
        return pl.DataFrame(schema=COLUMNS)
    labels, arrays = zip(*blocks, strict=True)
    schema = {name: kind for name, kind in TYPES.items() if name not in _OF_ROW}
    shared = pl.DataFrame(labels, schema=schema)
    rows = map(np.concatenate, zip(*arrays, strict=True))
    block = np.repeat(np.arange(len(blocks)), [len(of_row[0]) for of_row in arrays])
    index, number = pl.col("head", "qhead", "event"), pl.col("value", "chance")
    table = (
        shared[block]
        .with_columns(**dict(zip(_OF_ROW, map(pl.Series, rows), strict=True)))
        .with_columns(pl.when(index >= 0).then(index), number.fill_nan(None))
    )
    return in_order([table])


def fidelity(trace: Trace, record: Record, kind: str, layer: int | None) -> str:
    """Return "exact" where a live run that is fed the recorded tokens would show the value.

    Exact: a property of the trace alone; the model's first layer, whose input no eviction touches;
    a layer replayed alone, which stands for a teacher-forced run in which only that layer evicts;
    and kept sets decided once, at the end of the prefill or of its context, which attention had
    finished by then. Everything else is open loop: recorded q, k, v carry no error from the layers
    below, of what left, of what was not read and of what was rounded. A value of all layers
    (`layer` is None) has the weakest label of the record's layers.

    What a running model did is closed loop, or judged: it ran with the kept sets of the replay.

    Where only some rows of the prompt propagate, layers behind the first selection compute what the
    recorded run did not. The layer right behind it still has exact inputs, so its own sets and the
    rows that it propagates are exact; deeper sets are so where nothing is chosen there.
    """
    if record.closed or kind == "live":
        return "closed" if record.closed else "judged"
    across = record.selection is not None and record.selection.layer is not None
    alone = len(record.layers) == 1 and not across  # rows are dropped for many layers at once
    if kind == "trace" or alone:
        return "exact"
    if layer is None:
        each = (fidelity(trace, record, kind, index) for index in record.layers)
        return max(each, key=("exact", "open").index)
    whole = record.reads is None and record.codec is None
    if trace.layer_ids[layer] == 0 or (not record.events and (whole or kind == "sets")):
        return "exact"
    if kind != "sets" or len(record.events) > 1 or record.events[0] >= record.prompt_len:
        return "open"
    return "exact" if _settled(record, layer) else "open"


def selection_fidelity(record: Record) -> str:
    """The fidelity of a record's propagation: exact up to the second drop."""
    selection = record.selection
    if selection is None or selection.layer is None or selection.dropped[-1] <= selection.layer + 1:
        return "exact"
    return "open"


def _settled(record: Record, layer: int) -> bool:
    """Return whether attention that no dropped row has changed decides the set of a layer."""
    selection = record.selection
    if selection is None or selection.layer is None or layer <= selection.layer + 1:
        return True  # the layer behind the selection layer is the last one with recorded inputs
    above = [drop for drop in selection.dropped if drop < layer]  # decide which rows the layer has
    cut = (record.evicted_at[record.layers.index(layer)] == record.prompt_len - 1).any()
    return above[-1] <= selection.layer + 1 and not cut
