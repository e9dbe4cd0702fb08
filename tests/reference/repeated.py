"""KVzip naively: weights of rows that repeat the context, and one ranking of all heads."""

import math
from collections.abc import Callable

import numpy as np

from kvsim.errors import BudgetError
from kvsim.testing import loops
from kvsim.testing.loops.event import Decision, Scored, Sets, first, softmax, union
from reference.event import Event


def kvzip(event: Event) -> Scored:
    """The largest weight of an entry in the softmax of any row that repeats its chunk."""
    return _once(event, max)


def kvcompose(event: Event) -> Scored:
    """The mean over the group of each head's largest weight, plus the mean over the layer."""
    return _once(event, lambda own: sum(own) / len(own), with_layer=True)


def _once(
    event: Event, reduce: Callable[[list[float]], float], *, with_layer: bool = False
) -> Scored:
    """What a group's query heads give once while nothing left; entries behind the context first."""
    sink = int(event.params["sink"])
    assert event.repeated is not None
    end = event.repeated[2][-1][1]
    if any(p < end and p not in event.memory[h] for h, live in enumerate(event.live) for p in live):
        found = []
        for h in range(len(event.live)):
            of_heads = [_largest(event, h, i, sink) for i in event.qheads(h)]
            found.append({p: reduce([own[p] for own in of_heads]) for p in of_heads[0]})
        for h, own in enumerate(found):
            layer = {p: sum(each[p] for each in found) / len(found) for p in own}
            event.memory[h].update({p: s + with_layer * layer[p] for p, s in own.items()})
    values = [
        {p: event.memory[h][p] if p < end else 2.0 + p for p in live}
        for h, live in enumerate(event.live)
    ]
    return Scored(values, first(event, sink))


def _largest(event: Event, head: int, qhead: int, sink: int) -> dict[int, float]:
    """The largest weight that one query head gives each entry of the context."""
    assert event.repeated is not None
    queries, keys, chunks = event.repeated
    out: dict[int, float] = {}
    row = 0
    for start, stop, rows in chunks:
        seen = [*range(min(sink, start)), *range(start, stop)]
        for r in range(row, row + rows):
            of_cache = [queries[qhead, r] @ event.keys[head, p] for p in seen]
            of_rows = [queries[qhead, r] @ keys[head, s] for s in range(row, r + 1)]
            weight = softmax(event.scale * np.array([*of_cache, *of_rows]))
            for p, a in zip(seen, weight.tolist(), strict=False):
                if p >= start:
                    out[p] = max(out.get(p, 0.0), a)
        row += rows
    return out


def composed(
    events: list[loops.Event], scored: list[Scored], budget: int
) -> tuple[list[Sets], Decision]:
    """Layers compete by the mean of what their heads rank alike; heads keep their own best."""
    protected = [union(s.protected, e.protected) for e, s in zip(events, scored, strict=True)]
    orders, means, sizes = [], [], []
    for at, event in enumerate(events):
        ranked = [
            sorted(
                live,
                key=lambda p, at=at, h=h: (
                    p not in protected[at][h],
                    -scored[at].values[h][p],
                    p,
                ),
            )
            for h, live in enumerate(event.live)
        ]
        orders.append(ranked)
        sizes.append(max(1, len(protected[at][0])))
        columns = zip(
            *([scored[at].values[h][p] for p in own] for h, own in enumerate(ranked)), strict=True
        )
        means.append([sum(column) / len(ranked) for column in columns])
    room = min(len(events) * budget, sum(map(len, means))) - sum(sizes)
    if room < 0:
        raise BudgetError(f"{sum(sizes)} entries stay, and {len(events) * budget} may")
    if events[0].layer == 0:
        means[0] = [max(own[r] for own in means if r < len(own)) for r in range(len(means[0]))]
    ranking = sorted(
        (-mean, r, at)
        for at, own in enumerate(means)
        for r, mean in enumerate(own)
        if r >= sizes[at]
    )
    for _, _, at in ranking[:room]:
        sizes[at] += 1
    kept = [[set(own[: sizes[at]]) for own in ranked] for at, ranked in enumerate(orders)]
    margins = [(math.inf, math.inf)]
    if 0 < room < len(ranking):
        worst, best = -ranking[room - 1][0], -ranking[room][0]
        margins.append(((worst - best) / worst if worst else 0.0, worst))
    for at, ranked in enumerate(orders):
        for h, own in enumerate(ranked):
            last, out = (
                (scored[at].values[h][p] for p in own[sizes[at] - 1 : sizes[at] + 1])
                if (len(protected[at][h]) < sizes[at] < len(own))
                else (math.inf, 0.0)
            )
            if last < math.inf:
                margins.append(((last - out) / last if last else 0.0, last))
    return kept, min(margins)


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
