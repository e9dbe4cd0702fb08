"""LU-KV once more and naively: the plan of a prompt with a heap, and what a head keeps by it.

Loops over heads, rows and entries; sums and slopes in exact fractions, attention in float64.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np

from kvsim.errors import BudgetError
from kvsim.testing.loops import Event, Scored
from kvsim.testing.loops.event import Floats, Sets, softmax
from reference.allocation import Allocated, Decision, apportion

Allocate = Callable[[Event, Scored, Sets], Allocated]


def utility(case, layer: int) -> list[list[float]]:
    """[head][pos]: the most that a row of the response gives an entry of the prompt."""
    heads, group = case.k.shape[1], case.q.shape[1] // case.k.shape[1]
    n, size = case.prompt_len, {}
    for h in range(heads):
        for i in range(h * group, (h + 1) * group):
            for p in range(n):
                size[i, p] = math.hypot(*(case.v[layer, h, p] @ case.o_proj[layer, i]))
    total = sum(size.values())
    best = [[0.0] * n for _ in range(heads)]
    for i in range(heads * group):
        h = i // group
        for row in range(n, case.n):
            weights = softmax(case.scale * case.k[layer, h, : row + 1] @ case.q[layer, i, row])
            for p in range(n):
                share = size[i, p] / total if total else 0.0
                best[h][p] = max(best[h][p], float(weights[p]) * share)
    return best


def hull(losses: Sequence[float]) -> list[Fraction]:
    """Steps of the lower convex hull of what is lost so far."""
    lost = [Fraction(0)]
    for loss in losses:
        lost.append(lost[-1] + Fraction(loss))
    steps: list[Fraction] = []
    while len(steps) < len(losses):
        at = len(steps)
        slopes = [(lost[to] - lost[at]) / (to - at) for to in range(at + 1, len(lost))]
        steps += [min(slopes)] * (slopes.index(min(slopes)) + 1)
    return steps


def leaving(losses: Sequence[Sequence[Sequence[float]]], n: int, least: int) -> list[Floats]:
    """How many entries of each [layer, head] have left at 1, 2, ... 99 per cent of all.

    losses [layer][head]: utility in the order in which entries leave. A head keeps `least`.
    """
    heap, steps = [], {}
    for place in np.ndindex(len(losses), len(losses[0])):
        steps[place] = hull(losses[place[0]][place[1]])
        heapq.heappush(heap, (steps[place][0], *place, 0))
    gone = np.zeros((len(losses), len(losses[0])))
    out = []
    for percent in range(1, 100):
        target = round(percent / 100 * (gone.size * n))
        while gone.sum() < target and heap:
            _, layer, head, at = heapq.heappop(heap)
            if n - gone[layer, head] <= least:
                continue
            gone[layer, head] += 1
            if at + 1 < len(steps[layer, head]):
                heapq.heappush(heap, (steps[layer, head][at + 1], layer, head, at + 1))
        out.append(gone.copy())
    return out


def plan(case, scores: Sequence[Sequence[Sequence[float]]], first: int, recent: int) -> Floats:
    """Shares [99, layer, head] that leave, by the scores [layer][head][pos] after the prompt."""
    n, losses = case.prompt_len, []
    for layer, heads in enumerate(scores):
        useful = utility(case, layer)
        losses.append([])
        for head, of_head in enumerate(heads):
            order = sorted(range(first, n - recent), key=lambda p: (of_head[p], -p))
            losses[-1].append([useful[head][p] for p in order])
    least = max(first + recent, round((1.0 - 0.99) * n))
    return np.array(leaving(losses, n, least)) / n


def percent_of(n: int, budget: int) -> int:
    """The whole per cent that leaves, at least 1 and at most 99."""
    return min(99, max(1, round(Fraction(100 * (n - budget), n))))


def allocate(ratios: Floats, *, exact: bool) -> Allocate:
    """What each head keeps after a prompt whose heads all hold it."""

    def by_plan(event: Event, scored: Scored, protected: Sets) -> Allocated:
        n, budget = event.row + 1, event.budgets[0]
        stays = 1 - ratios[percent_of(n, budget) - 1]
        ideal = [[Fraction(x) * n for x in row] for row in stays.tolist()]
        margin = math.inf
        if exact:
            numbers, margin = _exact(ideal, n, budget, len(protected[0]))
            numbers = numbers[event.layer * len(protected) :][: len(protected)]
        else:
            numbers = _released(ideal[event.layer], n)
        kept, decisions = [], [(margin, 1.0)]
        for number, live, safe, of_head in zip(
            numbers, event.live, protected, scored.values, strict=True
        ):
            order = sorted(live, key=lambda p: (p not in safe, p in safe or -of_head[p], p))
            kept.append(set(order[:number]))
            if len(safe) < number < len(order):
                decisions.append(_decision(of_head[order[number - 1]], of_head[order[number]]))
        return kept, decisions

    return by_plan


def _exact(
    ideal: Sequence[Sequence[Fraction]], n: int, budget: int, always: int
) -> tuple[list[int], float]:
    """Numbers of all heads of all layers whose sum is the budget, none below what is protected."""
    if budget < always:
        raise BudgetError("more is protected")
    flat = [x for row in ideal for x in row]
    floor = [max(1, always)] * len(flat)
    above = [max(Fraction(0), x - f) for x, f in zip(flat, floor, strict=True)]
    return apportion(budget * len(flat), above, floor, [n] * len(flat))


def _released(ideal: Sequence[Fraction], n: int) -> list[int]:
    """Numbers of the heads of a layer: rounded sum, largest remainders, at least one each."""
    total = min(max(round(sum(ideal)), len(ideal)), len(ideal) * n)
    numbers = [math.floor(x) for x in ideal]
    order = sorted(range(len(ideal)), key=lambda h: (numbers[h] - ideal[h], h))
    for head in order[: max(0, total - sum(numbers))]:
        numbers[head] += 1
    return [min(max(number, 1), n) for number in numbers]


def _decision(last: float, first: float) -> Decision:
    size = max(abs(last), abs(first))
    return ((last - first) / size if size else 0.0, size)
