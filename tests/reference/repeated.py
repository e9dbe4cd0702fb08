"""KVzip naively: weights of rows that repeat the context, and one ranking of all heads."""

from __future__ import annotations

import math

import numpy as np

from kvsim.errors import BudgetError
from kvsim.testing import loops
from kvsim.testing.loops.event import Decision, Scored, Sets, first, softmax, union
from reference.event import Event


def kvzip(event: Event) -> Scored:
    """The largest weight of an entry in the softmax of any row that repeats its chunk.

    It is taken once, when nothing has left. Entries behind the context come before all others, the
    newest first.
    """
    sink, values = int(event.params["sink"]), []
    assert event.probe is not None
    queries, keys, chunks = event.probe
    for h, live in enumerate(event.live):
        once, end = event.memory[h], chunks[-1][1]
        if any(p < end and p not in once for p in live):
            row = 0
            for start, stop, rows in chunks:
                seen = [*range(min(sink, start)), *range(start, stop)]
                for i in event.qheads(h):
                    for r in range(row, row + rows):
                        of_cache = [queries[i, r] @ event.keys[h, p] for p in seen]
                        of_rows = [queries[i, r] @ keys[h, s] for s in range(row, r + 1)]
                        weight = softmax(event.scale * np.array([*of_cache, *of_rows]))
                        for p, a in zip(seen, weight.tolist(), strict=False):
                            if p >= start:
                                once[p] = max(once.get(p, 0.0), a)
                row += rows
        values.append({p: once[p] if p < end else 2.0 + p for p in live})
    return Scored(values, first(event, sink))


def pooled(
    events: list[loops.Event], scored: list[Scored], budget: int
) -> tuple[list[Sets], Decision]:
    """Return the entries that each head of each layer keeps if all are ranked together."""
    heads = range(len(events[0].live))
    protected = [union(s.protected, e.protected) for e, s in zip(events, scored, strict=True)]
    kept: list[Sets] = [[set(of_head) for of_head in of_layer] for of_layer in protected]
    total = len(events) * len(heads) * budget
    room = total - sum(len(of_head) for of_layer in kept for of_head in of_layer)
    if room < 0:
        raise BudgetError(f"{total - room} entries are protected, and {total} may stay")
    ranking = sorted(
        (-scored[at].values[h][p], p, at, h)
        for at, event in enumerate(events)
        for h in heads
        for p in event.live[h]
        if p not in protected[at][h]
    )
    for _, p, at, h in ranking[:room]:
        kept[at][h].add(p)
    if not 0 < room < len(ranking):
        return kept, (math.inf, math.inf)
    worst, best = -ranking[room - 1][0], -ranking[room][0]
    return kept, ((worst - best) / worst if worst else 0.0, worst)
