"""`measure`: records to a tidy Table, every row with its fidelity."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from kvsim.analysis.output.error import OutputError, check_record, output_error
from kvsim.analysis.registry import METRICS, Metric, mean_known, metric
from kvsim.analysis.subject import Cells, Subject, Walk, Walks
from kvsim.core.record import Record
from kvsim.core.trace import Trace
from kvsim.errors import PolicyError
from kvsim.schema import FIDELITY, LABELS

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

#: Columns of a Table and their types; one row is one value.
COLUMNS: dict[str, Any] = {
    "trace": pl.String,
    **dict.fromkeys(LABELS, pl.String),
    "policy": pl.String,
    "params": pl.String,
    "budget": pl.Int64,
    "share": pl.String,
    "interval": pl.Int64,
    "prefill": pl.Boolean,
    "metric": pl.String,
    "variant": pl.String,
    "layer": pl.Int64,
    "head": pl.Int64,
    "qhead": pl.Int64,
    "event": pl.Int64,
    "value": pl.Float64,
    "chance": pl.Float64,
    "unit": pl.String,
    "fidelity": pl.Enum(FIDELITY),
}


def measure(
    trace: Trace,
    record: Record | Sequence[Record],
    metrics: Sequence[str] | None = None,
    *,
    events: bool = False,
    device: str = "cpu",
    oracles: Sequence[Record | None] | None = None,
) -> pl.DataFrame:
    """A Table of `metrics` (all by default) of one record or of many of the same trace.

    One row per value: labels of the prompt (task, domain, level), policy, budget, layer, head (KV
    head) or qhead (query head), value, chance (what chance alone would give, where that is known)
    and fidelity (see `fidelity`). With `events` one row for every event too (the row after which it
    fired); without, the last event stands for them all or their mean (`Metric.over_events`).
    oracles: for `regret`, beside each record that of the mass oracle on the same terms, or None;
    `kvsim.sweeps.sweep(..., regret=True)` makes them.

    Metrics of what a policy decided at its events (`Metric.notes`: segments and quotas of `ams`)
    need a record with internals, `kvsim.replay(..., internals=True)`. Without them they have no
    value, or that of their proxy alone; a sweep asks for them itself.

    Raises PolicyError for an unknown metric and for regret without oracles, TraceError where a
    record belongs to another trace.
    """
    records = [record] if isinstance(record, Record) else list(record)
    beside = [None] * len(records) if oracles is None else list(oracles)
    known = list({id(one): one for one in (*records, *beside) if one is not None}.values())
    for one in known:
        check_record(trace, one)
    chosen = choose(metrics, oracles=oracles is not None)

    @cache
    def outputs() -> dict[int, OutputError]:
        return dict(zip(map(id, known), output_error(trace, known, device), strict=True))

    def output(one: Record) -> Callable[[], OutputError]:
        return lambda: outputs()[id(one)]

    different = list({id(one): one for one in records}.values())

    @cache
    def answers(walk: Walk[Any]) -> dict[int, Any]:
        return dict(zip(map(id, different), walk(trace, different, device), strict=True))

    def walks(one: Record) -> Walks:
        return lambda walk: answers(walk)[id(one)]

    blocks = []
    for i, (one, best) in enumerate(zip(records, beside, strict=True)):
        oracle = None if best is None else output(best)
        subject = Subject(trace, one, output(one), walks(one), oracle)
        origin = _origin(trace, one)
        for name, what in chosen.items():
            if what.kind == "trace" and i:
                continue  # the same for every record
            shared = (origin if what.kind != "trace" else origin | _NO_RECORD) | {
                "metric": name,
                "unit": what.unit,
            }
            for cells in what.cells(subject):
                level = fidelity(trace, one, what.kind, cells.layer)
                own = {"variant": cells.variant, "layer": cells.layer, "fidelity": level}
                blocks.append(_block(one, what, cells, shared | own, events=events))
    return _table(blocks)


def choose(metrics: Sequence[str] | None, *, oracles: bool) -> dict[str, Metric]:
    """The metrics asked for by name; by default all, those that need an oracle if there is one."""
    if metrics is None:
        return {name: one for name, one in METRICS.items() if oracles or not one.beside_oracle}
    chosen = {name: metric(name) for name in metrics}
    for name, one in chosen.items():
        if one.beside_oracle and not oracles:
            raise PolicyError(
                f"{name} compares with the mass oracle, which was not replayed; give --regret "
                "(kvsim.sweeps.sweep(..., regret=True))"
            )
    return chosen


@dataclass(frozen=True)
class _Block:
    """Rows [n] that share most of their columns; -1 where a row has no such index."""

    shared: dict[str, Any]
    value: Floats
    chance: Floats
    head: Ints
    qhead: Ints
    event: Ints


def _block(
    record: Record, what: Metric, cells: Cells, shared: dict[str, Any], *, events: bool
) -> _Block:
    values = cells.values
    chance = np.full(values.shape, np.nan) if cells.chance is None else cells.chance
    rows = cells.events
    if rows is not None and not events:
        if what.over_events == "last":
            values, chance, rows = values[:, -1:], chance[:, -1:], rows[-1:]
        else:
            values, chance, rows = mean_known(values), mean_known(chance), None
    m, n_events = len(values), 1 if rows is None else len(rows)
    index = np.repeat(np.arange(m), n_events)
    none = np.full(len(index), -1)
    # a record per query head counts query heads on its head axis
    axis = "qhead" if cells.heads == "head" and record.per_query_head else cells.heads
    return _Block(
        shared,
        values.ravel(),
        chance.ravel(),
        index if axis == "head" else none,
        index if axis == "qhead" else none,
        none if rows is None else np.tile(rows, m),
    )


def _table(blocks: Sequence[_Block]) -> pl.DataFrame:
    """One frame of all blocks: one for each would take longer than what it holds."""
    if not blocks:
        return pl.DataFrame(schema=COLUMNS)
    same = {name: kind for name, kind in COLUMNS.items() if name not in _OWN}
    block = np.repeat(np.arange(len(blocks)), [len(one.value) for one in blocks])
    own = {name: np.concatenate([getattr(one, name) for one in blocks]) for name in _OWN}
    known = [pl.when(pl.col(name) >= 0).then(pl.col(name)) for name in ("head", "qhead", "event")]
    numbers = [pl.col(name).fill_nan(None) for name in ("value", "chance")]
    shared = pl.DataFrame([one.shared for one in blocks], schema=same)
    return (
        pl.concat([shared[block], pl.DataFrame(own)], how="horizontal")
        .with_columns(*known, *numbers)
        .select(pl.col(name).cast(kind) for name, kind in COLUMNS.items())
    )


#: The columns in which the rows of a block differ.
_OWN = ("value", "chance", "head", "qhead", "event")
#: What belongs to the trace has none of these.
_NO_RECORD: dict[str, Any] = dict.fromkeys(
    ("policy", "params", "budget", "share", "interval", "prefill")
)


def _origin(trace: Trace, record: Record) -> dict[str, Any]:
    """The columns that say which trace and record a value is of."""
    labels = {name: trace.labels.get(name) for name in LABELS}
    return {
        "trace": trace.name,
        **{name: None if label is None else str(label) for name, label in labels.items()},
        "policy": record.policy,
        "params": json.dumps(dict(record.params)),
        "budget": record.budget,
        "share": record.share,
        "interval": record.interval,
        "prefill": record.prefill,
    }


def fidelity(trace: Trace, record: Record, kind: str, layer: int | None) -> str:
    """Whether a live run that is fed the recorded tokens would show the value: "exact" if so.

    Exact: a property of the trace alone; the model's first layer, whose input no eviction touches;
    a layer replayed alone, which stands for a teacher-forced run in which only that layer evicts;
    and kept sets decided once, at the end of the prefill, which attention had finished by then.
    Everything else is open loop: recorded q, k, v carry no error from the layers below.

    Where some rows of the prompt go on alone, layers behind the first selection compute what the
    recorded run did not. The layer right behind it still has exact inputs, so its own sets and the
    rows that it hands on are exact; deeper sets are so where nothing is chosen there, and "semi"
    where these layers were computed again (`kvsim.recompute`).
    """
    across = record.selection is not None and record.selection.layer is not None
    alone = len(record.layers) == 1 and not across  # rows are dropped for many layers at once
    if kind == "trace" or layer is None or alone or trace.layer_ids[layer] == 0:
        return "exact"
    once = record.events == [record.prompt_len - 1]
    if not record.events:
        return "exact"
    if kind != "sets" or not once:
        return "open"
    if _settled(record, layer):
        return "exact"
    return "semi" if record.recomputed else "open"


def selection_fidelity(record: Record) -> str:
    """The level of what a record's propagation decided: exact up to the second drop."""
    selection = record.selection
    if selection is None or selection.layer is None or selection.dropped[-1] <= selection.layer + 1:
        return "exact"
    return "semi" if record.recomputed else "open"


def _settled(record: Record, layer: int) -> bool:
    """Whether the set of a layer follows from attention that no dropped row has changed."""
    selection = record.selection
    if selection is None or selection.layer is None:
        return True
    exact = selection.layer + 1  # the last layer whose inputs are the recorded ones
    if layer <= exact:
        return True
    above = [at for at in selection.dropped if at < layer]  # decide which rows the layer has
    last = record.evicted_at[record.layers.index(layer)]
    cut = (last == record.prompt_len - 1).any()
    return above[-1] <= exact and not cut
