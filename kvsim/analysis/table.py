"""Tables: one row per value of a metric, with its fidelity."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import polars as pl

from kvsim.analysis.arrays import Floats, Ints, mean_known
from kvsim.analysis.definition import Metric
from kvsim.analysis.subject import Analysis, Subject
from kvsim.core.header import printable
from kvsim.core.record import Record, record_document
from kvsim.core.trace import Trace
from kvsim.schema import FIDELITY, LABELS, PREFILL, object_at

#: Facts about the policy of a value (`kvsim.core.record.Facts`), several separated by commas.
#: per_query_head: each query head has a set of `budget` entries.
FACTS: dict[str, Any] = {
    "looks_ahead": pl.Boolean,
    "bounds": pl.String,
    "access": pl.String,
    "per_query_head": pl.Boolean,
    "changed": pl.String,
}

# Numeric labels; a Table has their columns, and the turn, only where a trace has them.
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


def in_order(tables: Iterable[pl.DataFrame]) -> pl.DataFrame:
    """The rows of several Tables as one, with the columns of `COLUMNS`, their types and order."""
    typed = [
        table.select(pl.col(name).cast(kind) for name, kind in TYPES.items() if name in table)
        for table in tables
    ]
    table = pl.concat([pl.DataFrame(schema=COLUMNS), *typed], how="diagonal")
    return table.select(
        name for name in TYPES if name in COLUMNS or (name in table and table[name].count())
    )


#: The columns about a record, null in rows about a trace.
OF_RECORD = ("policy", "params", "budget", "share", "interval", "prefill", *FACTS)
#: The columns in which the rows of a block differ.
_OF_ROW = ("value", "chance", "head", "qhead", "event")

#: The columns that rows share, and those `_OF_ROW`, arrays [n]; -1 where a row has no such index.
RowArrays = tuple[dict[str, Any], tuple[Floats | Ints, ...]]


def columns_of(record: Record) -> dict[str, Any]:
    """The columns of a Table that identify the record of a row."""
    given, changed = record_document(record), record.facts.changed
    # another result, as with another parameter
    other = {name: given[name] for name in PREFILL if given[name] not in ("prompt", None)}
    return {name: given[name] for name in OF_RECORD} | {
        "params": json.dumps({**record.params, **other}),
        "bounds": ",".join(record.facts.bounds),
        "access": ",".join(record.facts.access),
        "changed": None if changed is None else ",".join((*changed, *other)),
    }


def model_name(trace: Trace) -> str | None:
    """Return the name of a trace's model, of a path or hub id the last part; None if unknown."""
    name = str(object_at(trace.meta, "model").get("name", ""))
    return printable(name).rstrip("/").rpartition("/")[2] or None


def blocks_of(
    subject: Analysis | Subject, name: str, entry: Metric, *, events: bool
) -> list[RowArrays]:
    """The rows of one metric of a trace, or of a record."""
    trace, record = subject.trace, None if isinstance(subject, Analysis) else subject.record
    shared: dict[str, Any] = {"trace": trace.name, "model": model_name(trace), "metric": name}
    if record is not None:
        shared |= columns_of(record)
    blocks: list[RowArrays] = []
    for cells in entry.cells(subject):
        shared["unit"] = cells.unit or entry.unit
        labels = trace.header.labels if cells.turn is None else trace.header.labels_of(cells.turn)
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
            axis = "qhead"  # the head axis counts query heads
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
    # the fidelity of each layer, even where layers were computed together
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
    """Return "exact" where a live run that is fed the recorded tokens would have the same value.

    Exact: a property of only the trace; the model's first layer, whose input no eviction changes; a
    layer replayed without others, which stands for a teacher-forced run with eviction in that layer
    only; and kept sets decided once, at the end of the prefill or of its context. Everything else
    is open loop: recorded q, k, v lack the errors of earlier layers from evicted, unread and
    quantized entries. A value of all layers (`layer` is None) has the weakest label of the record's
    layers.

    A running model's values are closed loop; values with the kept sets of the replay are judged.

    Where only some rows of the prompt reach deeper layers, those layers compute other values than
    in the recorded run. The layer after the first selection still has exact inputs, so its own sets
    and the rows that go deeper are exact; deeper sets are exact if those layers select nothing.
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
    whole = record.reads is None and record.storage is None
    if trace.layer_ids[layer] == 0 or (not record.events and (whole or kind == "sets")):
        return "exact"
    if kind != "sets" or len(record.events) > 1 or record.events[0] >= record.prompt_len:
        return "open"
    return "exact" if _settled(record, layer) else "open"


def selection_fidelity(record: Record) -> str:
    """Fidelity of the rows that reach deeper layers: exact up to the second drop."""
    selection = record.selection
    if selection is None or selection.layer is None or selection.dropped[-1] <= selection.layer + 1:
        return "exact"
    return "open"


def _settled(record: Record, layer: int) -> bool:
    """Return whether the set of a layer is decided by attention that no dropped row has changed."""
    selection = record.selection
    if selection is None or selection.layer is None or layer <= selection.layer + 1:
        return True  # the layer after the selection layer is the last one with recorded inputs
    above = [drop for drop in selection.dropped if drop < layer]  # decide the rows of the layer
    cut = (record.evicted_at[record.layers.index(layer)] == record.prompt_len - 1).any()
    return above[-1] <= selection.layer + 1 and not cut
