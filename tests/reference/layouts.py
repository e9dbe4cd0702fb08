"""Layouts of caches once more and naively: one set for heads or layers, and whole pages."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from kvsim.errors import BudgetError, PolicyError
from kvsim.testing import loops
from kvsim.testing.loops.event import Decision, Scored, Sets, first, unprotected
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
        if params["passes"] == "merged":
            order = _merged(event, h, leave, kept, drops, start)
            order += [p for p in live if p not in order]
            values.append({p: float(order.index(p)) for p in live})
            continue
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


def _merged(event: Event, h: int, leave: int, kept: int, drops: int, start: int) -> list[int]:
    """What leaves first, in order, if all passes that start over are one of larger chunks.

    What is left over of the last chunk leaves at the next event, before anything else.
    """
    cursor, pending = event.column("cursor")[h], event.column("pending")[h]
    order = [p for p in event.live[h] if p in pending]
    leave = max(0, leave - len(order))
    text = [p for p in event.live[h] if p >= int(event.params["sink"]) and p not in pending]
    if drops and leave:
        length = kept + drops
        ahead = [p for p in text if p > cursor.get(-1, -1.0)]
        fit = max(0, len(ahead) - event.n_layers - leave) // kept
        over = leave > fit * drops
        room = max(0, len(text) - event.n_layers - leave) // kept * drops
        number = fit if over else math.ceil(leave / drops)
        gone = []
        for j in range(number):
            chunk = ahead[j * length : (j + 1) * length]
            gone += chunk[:start] + chunk[start + kept :]
            cursor[-1] = float(chunk[-1])
        order += gone
        leave -= len(gone)
        if over and room:
            times = math.ceil(leave / room)
            size = times * (length - 1) + 1
            text = [p for p in text if p not in gone]
            first_kept = start * times  # with a ladder's offset
            if event.params["offset"] == "modulo":
                first_kept = min(times * drops, event.layer % (size - kept + 1))
            stay = [first_kept + times * k for k in range(kept)]
            for j in range(math.ceil(leave / (size - kept))):
                chunk = text[j * size : (j + 1) * size]
                order += [p for i, p in enumerate(chunk) if i not in stay]
                cursor[-1] = float((chunk or text)[-1])
    pending.update(dict.fromkeys(order, 1.0))
    return order


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
    if any(list(column) != list(columns[0]) for column in columns):
        raise PolicyError("heads hold different entries; expected one set for all of them")
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


def paged(event: Event, scored: Scored, protected: Sets) -> tuple[Sets, list[Decision]]:
    """Whole pages; after the prompt single entries, which are then written into pages.

    Of each head it remembers {position: place in pages} of what was live at an event before.
    """
    budget, params, cells = event.budgets[0], event.params, event.memory
    heads = list(range(len(event.live)))
    kept: Sets = [set() for _ in heads]
    decisions: list[Decision] = []
    for members in [heads] if params["heads"] == "all" else [[h] for h in heads]:
        one_by_one = event.prefill and params["prompt"] != "pages"
        groups = [[h] for h in members] if params["prompt"] == "heads" else [members]
        for group in groups if one_by_one else [members]:
            live, required = event.live[group[0]], protected[group[0]]
            if len(required) > budget:
                raise BudgetError(f"{len(required)} protected entries, budget is {budget}")
            # the i-th entries of the heads of a group share a place
            rows = list(zip(*(event.live[h] for h in group), strict=True))
            total = {
                p: sum(scored.values[h].get(x, 0.0) for h, x in zip(group, row, strict=True))
                for p, row in zip(live, rows, strict=True)
            }
            if one_by_one:
                assert all(event.live[h] == live for h in group)
                stay, cut = _entries(live, total, required, budget, params)
                cell = {p: float(i) for i, p in enumerate(sorted(stay))}
            else:
                cell = dict(cells[group[0]])
                for p in live:
                    cell.setdefault(p, max(cell.values(), default=-1.0) + 1)
                norms = _norms(event, group) if params["reduction"] == "norms" else None
                stay, cut = _whole(live, cell, total, required, budget, params, norms)
            decisions += cut
            places = [i for i, p in enumerate(live) if p in stay]
            for column, h in enumerate(group):
                kept[h] = {rows[i][column] for i in places}
                cells[h].clear()
                cells[h].update({rows[i][column]: cell[live[i]] for i in places})
    return kept, decisions


def _norms(event: loops.Event, group: Sequence[int]) -> dict[int, tuple[float, float]]:
    """Lengths of the values and of the keys in a place, over the heads; by the first's position."""
    return {
        row[0]: (
            sum(float(np.linalg.norm(event.values[h, p])) for h, p in zip(group, row, strict=True)),
            sum(float(np.linalg.norm(event.keys[h, p])) for h, p in zip(group, row, strict=True)),
        )
        for row in zip(*(event.live[h] for h in group), strict=True)
    }


def _entries(
    live: list[int],
    total: dict[int, float],
    required: set[int],
    budget: int,
    params: Mapping[str, Any],
) -> tuple[set[int], list[Decision]]:
    """Single entries: the best; or first the newest full page and what follows it, and the first.

    Of a part that does not fit as a whole, the best.
    """
    parts = [live]
    if params["ends"]:
        page = int(params["page"])
        newest = live[max(0, len(live) // page - 1) * page :]
        first = [p for p in live[:page] if p not in newest]
        parts = [newest, first, [p for p in live if p not in newest and p not in first]]
    stay, decisions = set(required), []
    for part in parts:
        free = [p for p in part if p not in required]
        chosen, cut = _best(free, min(len(free), budget - len(stay)), total)
        stay |= chosen
        decisions += cut
    return stay, decisions


def _whole(
    live: list[int],
    cell: dict[int, float],
    total: dict[int, float],
    required: set[int],
    budget: int,
    params: Mapping[str, Any],
    norms: Mapping[int, tuple[float, float]] | None = None,
) -> tuple[set[int], list[Decision]]:
    """Protected entries, and the pages that fit, in their order; of the first one at least a part.

    Page by page: the newest while it has room, those with protected entries (with `ends`, the first
    and the newest full one, too), the others by score.
    """
    length = int(params["page"])
    pages: dict[int, list[int]] = {}
    for p in live:
        pages.setdefault(int(cell[p]) // length, []).append(p)
    after = int(cell[live[-1]]) + 1
    open_page = None if after % length == 0 else after // length
    ends = {0, after // length - 1} if params["ends"] else set()
    score, tier = {}, {}
    for number, entries in pages.items():
        rated = [p for p in entries if p not in required]
        if not rated:
            score[number] = -math.inf
        elif norms is not None:
            value, key = (sum(norms[p][i] for p in rated) for i in range(2))
            score[number] = value / max(key, 1e-6)
        elif params["reduction"] == "mean":
            score[number] = sum(total[p] for p in rated) / len(rated)
        else:
            score[number] = max(total[p] for p in rated)
        tier[number] = int(len(rated) < len(entries) or number in ends)
        if number == open_page:
            tier[number] = 2
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


def dms(event: Event, scored: Scored, protected: Sets) -> tuple[Sets, list[Decision]]:
    """What is protected, what was admitted, and what scores at least the threshold."""
    threshold, admitted = float(event.params["threshold"]), event.memory
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
