"""The optimum on the terms of a record: the kept sets that retain the most attention."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np

from kvsim.core.checks import resolve_device
from kvsim.core.lazy import torch
from kvsim.core.parts import by_query_head
from kvsim.core.pieces import ACROSS_LAYERS, Even
from kvsim.core.policy import Policy
from kvsim.core.record import Plans, Record
from kvsim.core.trace import Trace
from kvsim.engine.layers import runs
from kvsim.engine.source import TraceSource
from kvsim.policies.future import best
from kvsim.policies.optimum import Ints, Optimum
from kvsim.policies.oracle import Oracle
from kvsim.schema import NEVER

#: A policy without decisions here, with the needs of the optimum.
_OPTIMUM = Policy("optimum", Oracle("optimum"))


def optimum(
    trace: Trace,
    policy: Policy,
    record: Record,
    *,
    protected: bool = True,
    device: str = "cpu",
    memory: int | None = None,
    known: dict[Hashable, Record] | None = None,
) -> Record:
    """Return the kept sets that retain the most mass on the terms of a record of the policy.

    Terms are the events, the protected entries (none unless `protected`), and the capacity of each
    layer: the budget of each head or of all heads of a layer together, or, where layers have
    budgets of their own or rows of the prompt are dropped, the entries that the record keeps after
    each event. Mass is full attention of the rows after the prompt, summed over the query heads of
    a group. `device` is cpu, cuda or auto, `memory` the bytes that a block of layers may take, 2
    GiB by default. `known` has optima by their terms; one that it lacks is added.

    The record's `internals` hold one `Plans` with the certificate in its notes; a pool is a head,
    or all heads of a layer. price [layer, pool, event] of a place; places [layer, pool, event];
    retained, bound and chance [layer, pool]: the mass of entries without protection, here, at most,
    and on average in random sets, as shares of a row's attention. Raises MemoryLimitError where one
    layer takes more than `memory`, as with thousands of events.
    """
    policy = policy.at(record.budget)
    events = record.schedule.rows(*trace.extent)
    end = record.schedule.ends(trace.prompt_len, trace.header.context_len)[-1]
    places, least = _places(policy, record, events)
    protection = policy.protection(least)
    ends = (protection.first(end), protection.recent) if protected else (0, 0)
    terms = (*events, *ends, places.shape, places.tobytes(), record.per_query_head, record.layers)
    known = {} if known is None else known
    if terms not in known:
        known[terms] = _solved(trace, record, events, places, ends, device=device, memory=memory)
    return known[terms]


def _solved(
    trace: Trace,
    record: Record,
    events: Sequence[int],
    places: Ints,
    protect: tuple[int, int],
    *,
    device: str,
    memory: int | None,
) -> Record:
    """The optimum with `places` [layer, pool, event]; protect: counts of first and last entries."""
    whole = by_query_head(trace) if record.per_query_head else trace
    parts: list[Optimum] = []
    with torch.inference_mode():
        for run in runs(whole, record.layers, _OPTIMUM, memory=memory):
            source = TraceSource(whole, run.layers, torch.device(resolve_device(device)))
            of_run = places[[record.layers.index(layer) for layer in run.layers]]
            start = trace.prompt_len
            parts.append(best(source, events, of_run, start=start, protect=protect, memory=memory))
    together = Optimum.concatenated(parts)
    evicted_at = np.array([*events, NEVER], np.int32)[together.stop]
    heads = trace.n_qheads // places.shape[1]  # query heads of a pool
    attention = heads * max(1, trace.n_pos - trace.prompt_len)
    names = ("price", "retained", "bound", "chance")
    notes = {name: getattr(together, name) / attention for name in names}
    none = np.empty((*evicted_at.shape[:2], 0))
    certificate = Plans(
        row=events[-1] if events else -1,
        layers=record.layers,
        pos=none.astype(np.int64),
        scores=none,
        budgets=np.full(len(evicted_at), record.budget),
        quotas=none.astype(np.int64),
        notes={**notes, "places": places},
    )
    return replace(
        record,
        evicted_at=evicted_at,
        policy="optimum",
        params={},
        positions="absolute",
        remark="",
        facts=replace(record.facts, looks_ahead=True, access=(), changed=None),
        selection=None,
        reads=None,
        storage=None,
        internals=(certificate,),
    )


def _places(policy: Policy, record: Record, events: Sequence[int]) -> tuple[Ints, int]:
    """Capacity after each event, [layer, head or 1, M], and the smallest acting head's budget."""
    layers, heads, _ = record.evicted_at.shape
    pools = 1 if policy.allocator.shared in ("heads", "all") else heads
    shape = layers, pools, len(events)
    even = isinstance(policy.layer_budgets, Even) and policy.allocator.shared not in ACROSS_LAYERS
    if not events or (even and policy.so_far is None and record.selection is None):
        return np.full(shape, record.budget * (heads // pools)), record.budget
    of_heads = np.sort(record.evicted_at, axis=-1).reshape(layers * heads, -1)
    before, after = (
        np.array([np.searchsorted(of_head, events, side) for of_head in of_heads])
        for side in ("left", "right")
    )
    kept = np.asarray(events, np.int64) + 1 - after
    least = int(kept[after > before].min(initial=record.budget))
    return kept.reshape(layers, pools, heads // pools, len(events)).sum(2), least
