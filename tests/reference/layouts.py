"""Layouts of caches once more and naively: one set for heads or layers, and whole pages."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from kvsim.errors import BudgetError
from kvsim.testing import loops
from kvsim.testing.loops.event import Decision, Numbers, Scored, Sets, first, unprotected
from reference.allocation import gap
from reference.event import Event


def norm_ratio(event: Event) -> Scored:
    """The length of the value over that of the key, which counts as at least 1e-6."""
    values = [
        {
            p: float(np.linalg.norm(event.values[h, p]))
            / max(float(np.linalg.norm(event.keys[h, p])), 1e-6)
            for p in live
        }
        for h, live in enumerate(event.live)
    ]
    return Scored(values, unprotected(event))


def lacache(event: Event) -> Scored:
    """The turn at which an entry is dropped, if compaction goes on until the rest fits.

    The cursor, the position behind which this pass has compacted, is remembered of each head.
    """
    params, n_layers = event.params, event.n_layers
    span = params["span"] or max(1, n_layers // 2)
    step = span - min(int(params["overlap"]), span - 1)
    length = 1 + max(0, math.ceil((n_layers - span) / step))
    kept = min(length, math.ceil(span / step))
    drops = length - kept
    layer = event.layer
    start = layer % (drops + 1) if params["offset"] == "modulo" else min(drops, layer // step)
    cursor = event.column("cursor")
    values = []
    for h, live in enumerate(event.live):
        leave = len(live) - event.budgets[h]  # so many entries leave now
        rest = [p for p in live[: max(0, len(live) - n_layers)] if p >= int(params["sink"])]
        order: list[int] = []
        at = cursor[h].get(-1, -1.0)
        while drops and len(rest) >= length and len(order) < leave:
            group = [p for p in rest if p > at][:length]
            if len(group) < length:
                at = -1.0  # start over
                continue
            at = float(group[-1])
            gone = group[:start] + group[start + kept :]
            order += gone
            rest = [p for p in rest if p not in gone]
        cursor[h][-1] = at
        order += [p for p in live if p not in order]
        values.append({p: float(order.index(p)) for p in live})
    return Scored(values, first(event, int(params["sink"])), exact=True)


def union(params: Mapping[str, Any], scored: Sequence[Scored]) -> list[Scored]:
    """Scores of layers, reduced over the heads of each, or over all heads of all of them."""
    together = [list(scored)] if params["across"] == "layers" else [[one] for one in scored]
    return [each for layers in together for each in _shared(layers, params["reduction"])]


def _shared(layers: list[Scored], reduction: str) -> list[Scored]:
    heads = [(each, h) for each in layers for h in range(len(each.values))]
    decisions = [d for each, h in heads for d in each.taken(h)]
    columns, sizes = [], []
    for each, h in heads:
        free = {p: s for p, s in each.values[h].items() if p not in each.protected[h]}
        if reduction == "rank":
            order = sorted(free, key=lambda p: free[p])
            for a, b in pairwise(order):
                size = max(each.size(h, a), each.size(h, b))
                margin = (free[b] - free[a]) / size if size > 0 else 0.0
                decisions.append((margin, max(abs(free[a]), abs(free[b]))))
            columns.append({p: float(sum(x < free[p] for x in free.values())) for p in free})
        else:
            columns.append(free)
        sizes.append({p: each.size(h, p) for p in free})
    assert all(list(column) == list(columns[0]) for column in columns)
    value, noise = {}, {}
    for p in columns[0]:
        scores = [column[p] for column in columns]
        value[p] = max(scores) if reduction == "max" else sum(scores) / len(scores)
        noise[p] = max(size[p] for size in sizes)
    ranks = reduction == "rank"
    return [
        Scored(
            [dict(value) for _ in each.values],
            each.protected,
            None if ranks else [dict(noise) for _ in each.values],
            [list(decisions) for _ in each.values],
            exact=ranks,
            rounded=not ranks and (each.rounded or reduction == "mean"),
        )
        for each in layers
    ]


def paged(
    event: loops.Event,
    scored: Scored,
    protected: Sets,
    *,
    budget: int,
    params: Mapping[str, Any],
    cells: Numbers,
) -> tuple[Sets, list[Decision]]:
    """Whole pages; after the prompt single entries, which are then written into pages.

    cells: per head {position: place in pages}, of all entries that were live at an event before.
    """
    heads = list(range(len(event.live)))
    kept: Sets = [set() for _ in heads]
    decisions: list[Decision] = []
    for members in [heads] if params["heads"] == "all" else [[h] for h in heads]:
        live, required = event.live[members[0]], protected[members[0]]
        assert all(event.live[h] == live for h in members)
        if len(required) > budget:
            raise BudgetError(f"{len(required)} protected entries, budget is {budget}")
        total = {p: sum(scored.values[h].get(p, 0.0) for h in members) for p in live}
        free = [p for p in live if p not in required]
        if event.prefill and params["prompt"] == "entries":
            chosen, cut = _best(free, budget - len(required), total)
            stay = required | chosen
            cell = {p: float(i) for i, p in enumerate(sorted(stay))}
        else:
            cell = dict(cells[members[0]])
            for p in live:
                cell.setdefault(p, max(cell.values(), default=-1.0) + 1)
            stay, cut = _whole(live, cell, total, required, budget, params)
        decisions += cut
        for h in members:
            kept[h] = set(stay)
            cells[h].clear()
            cells[h].update({p: cell[p] for p in stay})
    return kept, decisions


def _whole(
    live: list[int],
    cell: dict[int, float],
    total: dict[int, float],
    required: set[int],
    budget: int,
    params: Mapping[str, Any],
) -> tuple[set[int], list[Decision]]:
    """Protected entries, and the pages that fit, in their order; of the first one at least a part.

    Page by page: the newest while it has room, those with protected entries, the others by score.
    """
    length = int(params["page"])
    pages: dict[int, list[int]] = {}
    for p in live:
        pages.setdefault(int(cell[p]) // length, []).append(p)
    open_page = None if (cell[live[-1]] + 1) % length == 0 else int(cell[live[-1]]) // length
    score, tier = {}, {}
    for number, entries in pages.items():
        rated = [total[p] for p in entries if p not in required]
        reduced = max(rated, default=0.0)
        if params["reduction"] == "mean":
            reduced = sum(rated) / max(1, len(rated))
        score[number] = reduced if rated else -math.inf
        tier[number] = 2 if number == open_page else int(len(rated) < len(entries))
    order = sorted(pages, key=lambda number: (-tier[number], -score[number], number))
    decisions = [
        gap(score[a], score[b])
        for a, b in pairwise(order)
        if tier[a] == tier[b] and math.isfinite(score[b])
    ]
    stay, fits = set(required), True
    for place, number in enumerate(order):
        rest = [p for p in pages[number] if p not in required]
        fits = fits and len(stay) + len(rest) <= budget
        if fits:
            stay |= set(rest)
        elif place == 0:
            part, cut = _best(rest, budget - len(stay), total)
            stay |= part
            decisions += cut
    return stay, decisions


def _best(
    entries: list[int], count: int, score: dict[int, float]
) -> tuple[set[int], list[Decision]]:
    """The entries with the highest scores, the lower position first among equals."""
    order = sorted(entries, key=lambda p: (-score[p], p))
    cut = [gap(score[order[count - 1]], score[order[count]])] if 0 < count < len(order) else []
    return set(order[:count]), cut


def dms(
    event: Event, scored: Scored, protected: Sets, threshold: float, admitted: Numbers
) -> tuple[Sets, list[Decision]]:
    """What is protected, what was admitted, and what scores at least the threshold."""
    kept: Sets = []
    decisions: list[Decision] = []
    for h, live in enumerate(event.live):
        for p in live:
            if p in protected[h] or p in admitted[h]:
                continue
            score = scored.values[h][p]
            size = max(scored.size(h, p), abs(threshold))
            decisions.append((abs(score - threshold) / size, max(abs(score), abs(threshold))))
            if score >= threshold:
                admitted[h][p] = 1.0
        kept.append({p for p in live if p in protected[h] or p in admitted[h]})
    return kept, decisions
