"""How many entries stay where, once more and naively: AdaKV, ChunkKV, AMS, PyramidKV, CAKE.

Loops over entries, Python floats, sets and dicts; integer splits in exact fractions. Written from
the definitions alone, so that agreement with the policies means something. A head's entries are
known by position; its slots are the ranks of its live positions.
"""

import math
import sys
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Any

from kvsim.errors import BudgetError
from kvsim.testing.loops.event import Scored, Sets
from reference.event import Event

#: (margin, size) of a decision: the difference between what was taken last and what was left first,
#: relative to the larger of the two, and that larger one. Margin 0 is a tie that a rule decides.
Decision = tuple[float, float]
#: The kept set of each KV head, and every decision taken.
Allocated = tuple[list[set[int]], list[Decision]]

#: Margin of a tie that no rule decides, because rounding may break it: below every tolerance.
_UNSURE = sys.float_info.min
#: What is closer to 1 is 1.
_ROUNDING = 1e-9
#: Added to every usage, so that no mass is 0.
_EPSILON = 1e-12


def apportion(
    total: int, weights: Sequence[float | Fraction], floor: Sequence[int], cap: Sequence[int]
) -> tuple[list[int], float]:
    """`total` in whole numbers between floor and cap, and how far the split is from turning.

    Above the floors, shares min(cap - floor, mu * weight) that sum to what is left, rounded down;
    one more to the largest fractional parts, the lower index first among equals.
    """
    if not sum(floor) <= total <= sum(cap):
        raise ValueError(f"total is {total}; expected {sum(floor)} to {sum(cap)}")
    left = total - sum(floor)
    shares = _shares(left, weights, [c - f for c, f in zip(cap, floor, strict=True)])
    whole = [math.floor(x) for x in shares]
    part = [x - w for x, w in zip(shares, whole, strict=True)]
    more = left - sum(whole)
    order = sorted(range(len(shares)), key=lambda i: (-part[i], i))
    margin = math.inf
    if 0 < more < len(order):
        last, first = order[more - 1], order[more]
        margin = float((part[last] - part[first]) / max(shares[last], shares[first]))
    for i in order[:more]:
        whole[i] += 1
    return [f + w for f, w in zip(floor, whole, strict=True)], margin


def _shares(total: int, weights: Sequence[float | Fraction], room: Sequence[int]) -> list[Fraction]:
    """Proportional shares with caps; weights of 0 share equally what the others cannot take."""
    share = [Fraction(0) for _ in room]
    exact = [Fraction(w) for w in weights]
    left = Fraction(total)
    for weight, chosen in (
        (exact, [i for i, w in enumerate(exact) if w > 0]),
        ([Fraction(1)] * len(exact), [i for i, w in enumerate(exact) if w == 0]),
    ):
        below = chosen
        while below and left > 0:
            level = left / sum(weight[i] for i in below)
            full = [i for i in below if level * weight[i] >= room[i]]
            for i in full or below:
                share[i] = Fraction(room[i]) if full else level * weight[i]
                left -= share[i]
            below = [i for i in below if i not in full]
    return share


def in_rounds(total: int, cap: Sequence[int], priority: Sequence[float]) -> list[int]:
    """One unit a round to each entry with room, by priority, ties to the lower index."""
    return _in_rounds(total, cap, priority)[0]


def _in_rounds(
    total: int, cap: Sequence[int], priority: Sequence[float]
) -> tuple[list[int], float]:
    if total > sum(cap):
        raise ValueError(f"total is {total}; expected at most {sum(cap)}")
    dealt = [0] * len(cap)
    order = sorted(range(len(cap)), key=lambda i: (-priority[i], i))
    margin = math.inf
    while total > 0:
        room = [i for i in order if dealt[i] < cap[i]]
        if total < len(room):
            margin = gap(priority[room[total - 1]], priority[room[total]])[0]
        for i in room[:total]:
            dealt[i] += 1
        total -= min(total, len(room))
    return dealt, margin


def gap(last: float, first: float) -> Decision:
    """Margin and size between the last one taken and the first one left."""
    size = max(abs(last), abs(first))
    return (last - first) / size if size > 0 else 0.0, size


def _best(
    candidates: Sequence[int], count: int, score: Mapping[int, float]
) -> tuple[list[int], list[Decision]]:
    """The `count` best, the lower position first among equals, and the cut if there is one."""
    ranking = sorted(candidates, key=lambda p: (-score[p], p))
    count = min(count, len(ranking))
    if not 0 < count < len(ranking):
        return ranking[:count], []
    return ranking[:count], [gap(score[ranking[count - 1]], score[ranking[count]])]


def _check(protected: Sequence[set[int]], budget: int) -> None:
    most = max(len(p) for p in protected)
    if most > budget:
        raise BudgetError(f"{most} protected entries, budget is {budget}; give at least {most}")


def adakv(event: Event, scored: Scored, protected: Sets, *, inside: bool = False) -> Allocated:
    """Each head's safe entries first; then the heads of the layer compete for what is left.

    Safe: the protected and int(floor * budget) others, a budget at most; `inside`: the protected
    are part of max(1, int(floor * budget)).
    """
    budget, floor, scores = event.budgets[0], float(event.params["floor"]), scored.values
    _check(protected, budget)
    kept: list[set[int]] = []
    rest: list[tuple[float, int, int]] = []
    for head, live in enumerate(event.live):
        safe = min(int(floor * budget), budget - len(protected[head]))
        if inside:
            safe = (max(1, int(floor * budget)) if floor > 0 else 0) - len(protected[head])
        others = [p for p in live if p not in protected[head]]
        best, _ = _best(others, max(0, safe), scores[head])
        kept.append(protected[head] | set(best))
        rest += [(-scores[head][p], p, head) for p in others if p not in kept[head]]
    rest.sort()
    room = max(0, len(kept) * budget - sum(len(k) for k in kept))
    for _, p, head in rest[:room]:
        kept[head].add(p)
    decisions = [gap(-rest[room - 1][0], -rest[room][0])] if 0 < room < len(rest) else []
    for head, live in enumerate(event.live):
        others = [p for p in live if p not in protected[head]]
        count = len(kept[head]) - len(protected[head])
        decisions += _best(others, count, scores[head])[1]
    return kept, decisions


def chunkkv(event: Event, scored: Scored, protected: Sets, *, exact: bool = True) -> Allocated:
    """Chunks of `chunk` slots by their mean score summed over heads; all heads keep the same slots.

    exact: protected slots first, then chunks until the budget is full, of the last one its best
    slots. Else whole chunks, the share budget / slots of them, protected entries scored one
    above the largest score of the layer; with less than one chunk, each head its own best.
    """
    budget, chunk, scores = event.budgets[0], int(event.params["chunk"]), scored.values
    n = len(event.live[0])
    if any(len(live) != n for live in event.live):
        raise ValueError("heads hold different numbers of entries")
    required = {s for h, live in enumerate(event.live) for s in range(n) if live[s] in protected[h]}
    if exact:
        _check([required], budget)
    else:
        top = 1 + max((x for of in scores for x in of.values()), default=0.0)
        scores = [
            {p: top if p in protected[h] else scores[h][p] for p in live}
            for h, live in enumerate(event.live)
        ]
        if n < chunk:
            own = [_best(live, budget, scores[h]) for h, live in enumerate(event.live)]
            return [set(kept) for kept, _ in own], [d for _, cut in own for d in cut]
    # an entry that a scorer does not score is protected, and counts 0
    summed = {
        s: sum(scores[h].get(live[s], 0.0) for h, live in enumerate(event.live)) for s in range(n)
    }
    chunks = {a: range(a, min(a + chunk, n)) for a in range(0, n, chunk)}
    if exact:  # what is kept in any case says nothing for its chunk
        free = {a: [s for s in slots if s not in required] for a, slots in chunks.items()}
    else:
        free = {a: list(slots) for a, slots in chunks.items()}
    mean = {
        a: sum(summed[s] for s in slots) / len(slots) if slots else -math.inf
        for a, slots in free.items()
    }
    slots: set[int] = set()
    if exact:
        slots, decisions = _fill_chunks(chunks, mean, summed, required, budget)
    else:
        ratio = 1 - budget / n  # the released code knows only this, and rounds what comes of it
        count = max(1, int(len(chunks) * (1 - ratio)))
        best, decisions = _best(list(chunks), count, mean)
        slots = {s for a in best for s in chunks[a]}
    return [{live[s] for s in slots} for live in event.live], decisions


def _fill_chunks(
    chunks: Mapping[int, Sequence[int]],
    mean: Mapping[int, float],
    summed: Mapping[int, float],
    required: set[int],
    budget: int,
) -> tuple[set[int], list[Decision]]:
    """Protected slots, then chunks by score until the budget is full, the last one in part."""
    kept, decisions = set(required), list[Decision]()
    others = {a: [s for s in slots if s not in required] for a, slots in chunks.items()}
    ranking, _ = _best([a for a in chunks if others[a]], len(chunks), mean)
    for rank, a in enumerate(ranking):
        room = budget - len(kept)
        if room == 0:
            break
        best, decisions = _best(others[a], room, summed)
        kept |= set(best)
        if rank > 0 and decisions:  # only the order of the last two matters
            decisions = [*decisions, gap(mean[ranking[rank - 1]], mean[a])]
        decisions = [*decisions, *(gap(mean[a], mean[b]) for b in ranking[rank + 1 : rank + 2])]
    return kept, decisions


def ams(event: Event, scored: Scored, protected: Sets) -> Allocated:
    """Segments of about equal attention mass, a quota each, the best of each by score.

    Of each head it remembers {position: credit} of the survivors.
    """
    budget, params, credit = event.budgets[0], event.params, event.memory
    scores, unscored = scored.values, scored.protected
    _check(protected, budget)
    strict = params["mode"] == "strict"
    used = []
    for head, live in enumerate(event.live):
        rows = window_rows(event, len(live), budget, params)
        used.append(usage(event, head, rows, int(params["pool_kernel"])))
    all_kept: list[set[int]] = []
    decisions: list[Decision] = []
    for head, u in enumerate(fill(used, params["suffix_fill"])):
        live, required = event.live[head], protected[head]
        weight = mass([u[p] for p in live])
        now: dict[int, float] = {}
        if params["credit"]:
            past = [credit[head].get(p, 0.0) for p in live]
            decay, mix = params["credit_decay"], params["credit_mix"]
            if params["credit_of"] == "usage":
                weight, fresh = credited_usage([u[p] for p in live], past, decay, mix)
            else:
                weight, fresh = credited(weight, past, decay, mix)
            now = dict(zip(live, fresh, strict=True))
        if params["segmentation"] == "fixed":
            starts = list(range(0, len(live), int(params["segment_length"])))
        else:
            starts, decided = cuts(weight, params["segment_mass"], strict=strict)
            decisions += decided
            shortest, longest = int(params["min_segment"]), int(params["max_segment"])
            starts = repair(starts, len(live), shortest, longest, strict=strict)
        segments = _segments(starts, len(live))
        quotas, decided = (strict_quotas if strict else reference_quotas)(
            [b - a for a, b in segments],
            _weights(segments, weight, params["weights"]),
            _weights(segments, weight, "mass"),
            [sum(p in required for p in live[a:b]) for a, b in segments],
            min(budget, len(live)),
            int(params["min_quota"]),
        )
        if params["weights"] == "equal":
            decisions += decided
        else:  # rounding may break their ties
            decisions += [(margin or _UNSURE, size) for margin, size in decided]
        parts = [live[a:b] for a, b in segments]
        if strict:
            kept, decided = pick_strict(parts, quotas, scores[head], required)
        else:
            ahead = unscored[head] if unscored else set[int]()
            kept, decided = pick_reference(parts, quotas, scores[head], required, ahead)
        decisions += decided
        all_kept.append(kept)
        credit[head].clear()
        credit[head].update({p: c for p, c in now.items() if p in kept})
    return all_kept, decisions


def window_rows(event: Event, held: int, budget: int, params: Mapping[str, Any]) -> range:
    """The last rows, whose attention counts; entries at their positions are the suffix."""
    most = min(int(params["window"]), event.row + 1, held - 1, budget)
    if params["mode"] == "reference" and not event.prefill:
        most = min(most, min(event.interval or 257, 257) - 1)
    return range(event.row + 1 - max(1, most), event.row + 1)


def usage(
    event: Event, head: int, rows: range, kernel: int
) -> tuple[dict[int, float], dict[int, float]]:
    """(u, observed): mean attention, smoothed, before the suffix; and in it, unsmoothed.

    In the suffix the mean is over the rows that can see the entry; both are means over the group.
    """
    live, group = event.live[head], event.group
    before = [p for p in live if p < rows[0]]
    u = dict.fromkeys(before, 0.0)
    observed = {p: 0.0 for p in live if p >= rows[0]}
    for i in range(head * group, (head + 1) * group):
        total = dict.fromkeys(live, 0.0)
        for row in rows:
            for p, a in event.attention(i, row).items():
                total[p] += a
        for slot, p in enumerate(before):
            near = before[max(0, slot - kernel // 2) : slot + kernel // 2 + 1]
            u[p] += sum(total[other] for other in near) / len(rows) / kernel / group
        for p in observed:
            observed[p] += total[p] / (rows[-1] + 1 - p) / group
    return u, observed


def fill(used: list[tuple[dict[int, float], dict[int, float]]], how: str) -> list[dict[int, float]]:
    """Usage of every entry of each head: u before the suffix, and what stands for it inside."""
    everywhere = [x for u, _ in used for x in u.values()]
    found = []
    for u, observed in used:
        own = list(u.values()) or [1.0]
        value = {
            "head_max": max(own),
            "global_max": max(everywhere, default=1.0),
            "head_mean": sum(own) / len(own),
            "zero": 0.0,
        }
        found.append({**u, **{p: value.get(how, seen) for p, seen in observed.items()}})
    return found


def mass(u: Sequence[float]) -> list[float]:
    """Usage as shares of 1, none of them 0."""
    total = sum(max(x, 0.0) + _EPSILON for x in u)
    return [(max(x, 0.0) + _EPSILON) / total for x in u]


def credited(
    m: Sequence[float], past: Sequence[float], decay: float, mix: float
) -> tuple[list[float], list[float]]:
    """(m', c): mass mixed with credit, and the credit c = decay * past + (1 - decay) * m."""
    c = [decay * old + (1 - decay) * x for old, x in zip(past, m, strict=True)]
    mixed = [mix * x + (1 - mix) * y for x, y in zip(m, mass(c), strict=True)]
    return [x / sum(mixed) for x in mixed], c


def credited_usage(
    u: Sequence[float], past: Sequence[float], decay: float, mix: float
) -> tuple[list[float], list[float]]:
    """The release without mass: c averages usage u as it is, and mix u + (1 - mix) c is weighed."""
    c = [decay * old + (1 - decay) * x for old, x in zip(past, u, strict=True)]
    return mass([mix * x + (1 - mix) * y for x, y in zip(u, c, strict=True)]), c


def cuts(m: Sequence[float], delta: float, *, strict: bool) -> tuple[list[int], list[Decision]]:
    """Starts of segments: where the cumulative mass first reaches a multiple of `delta` below 1.

    The slot that reaches it begins the next segment, slot 1 at the earliest. A multiple that
    rounding leaves unreached is left out, or (not strict) cuts off the last slot; one that is 1 but
    for rounding, such as 49 * (1 / 49), is none.
    """
    last = len(m) - 1
    running = list(accumulate(m))
    starts, decisions = {0}, list[Decision]()
    k = 1
    while k * delta < 1 - _ROUNDING:
        threshold = k * delta
        reached = [t for t, c in enumerate(running) if c >= threshold]
        if reached or not strict:
            starts.add(min(max(reached[0] if reached else last, 1), last))
        nearest = min(abs(c - threshold) for c in running) / threshold
        decisions.append((nearest or _UNSURE, threshold))
        k += 1
    return sorted(starts), decisions


def _segments(starts: Sequence[int], n: int) -> list[tuple[int, int]]:
    return list(zip(starts, [*starts[1:], n], strict=True))


def repair(starts: list[int], n: int, shortest: int, longest: int, *, strict: bool) -> list[int]:
    """Starts of segments of bearable length.

    strict: merge short ones into what follows, a short tail into what precedes; then split long
    ones evenly. Else: cut long ones every `longest`; then merge, leaving a short tail.
    """
    if not strict:
        cut = [s for a, b in _segments(starts, n) for s in range(a, b, longest)]
        return _merge(cut, shortest)
    merged = _merge(starts, shortest)
    if len(merged) > 1 and n - merged[-1] < shortest:
        merged.pop()
    split = []
    for a, b in _segments(merged, n):
        pieces = -(-(b - a) // longest)
        piece = [offset * pieces // (b - a) for offset in range(b - a)]
        split += [a + piece.index(i) for i in range(pieces)]
    return split


def _merge(starts: Sequence[int], shortest: int) -> list[int]:
    """Each segment absorbs the ones after it until it is long enough."""
    merged = [0]
    for start in starts:
        if start - merged[-1] >= shortest and start > 0:
            merged.append(start)
    return merged


def _weights(segments: list[tuple[int, int]], m: Sequence[float], kind: str) -> list[float]:
    of = {
        "mass": [sum(m[a:b]) for a, b in segments],
        "length": [float(b - a) for a, b in segments],
        "equal": [1.0 for _ in segments],
    }
    return of[kind]


def strict_quotas(
    lengths: Sequence[int],
    weights: Sequence[float],
    masses: Sequence[float],
    required: Sequence[int],
    total: int,
    min_quota: int,
) -> tuple[list[int], list[Decision]]:
    """Shares by weight above the floors max(required, min(min_quota, length)), to the unit.

    Where the floors do not fit: the required ones, then a unit a round towards the floors, the
    segment of most mass first.
    """
    low = [max(r, min(min_quota, n)) for r, n in zip(required, lengths, strict=True)]
    if sum(low) <= total:
        quotas, margin = apportion(total, weights, low, lengths)
        return quotas, [(margin, 1.0)]
    room = [q - r for q, r in zip(low, required, strict=True)]
    more, margin = _in_rounds(total - sum(required), room, masses)
    return [r + q for r, q in zip(required, more, strict=True)], [(margin or _UNSURE, 1.0)]


def reference_quotas(
    lengths: Sequence[int],
    weights: Sequence[float],
    masses: Sequence[float],
    required: Sequence[int],
    total: int,
    min_quota: int,
) -> tuple[list[int], list[Decision]]:
    """The released rule: floors, rounded shares of the rest, then passes from left to right.

    It does not know `required`, and with more segments than units it has no end: then strict.
    """
    flat = [0.0] * len(lengths)
    first = [min(min_quota, n) for n in lengths]
    rest = total - sum(first)
    if rest <= 0:
        if len(lengths) > total:
            return strict_quotas(lengths, weights, masses, required, total, min_quota)
        fewer = in_rounds(-rest, [max(0, q - 1) for q in first], flat)
        return [q - d for q, d in zip(first, fewer, strict=True)], []
    whole = sum(Fraction(w) for w in weights)
    shares = [rest * Fraction(w) / whole for w in weights]
    quotas = [min(n, q + round(x)) for n, q, x in zip(lengths, first, shares, strict=True)]
    over = sum(quotas) - total
    if over > 0:
        fewer = in_rounds(over, [q - f for q, f in zip(quotas, first, strict=True)], flat)
        quotas = [q - d for q, d in zip(quotas, fewer, strict=True)]
    else:
        more = in_rounds(-over, [n - q for n, q in zip(lengths, quotas, strict=True)], flat)
        quotas = [q + d for q, d in zip(quotas, more, strict=True)]
    halves = [float(abs(x % 1 - Fraction(1, 2)) / max(x, Fraction(1, 2))) for x in shares]
    return quotas, [(half or _UNSURE, 1.0) for half in halves]


def pick_strict(
    segments: Sequence[Sequence[int]],
    quotas: Sequence[int],
    score: Mapping[int, float],
    required: set[int],
) -> tuple[set[int], list[Decision]]:
    """Of each segment the required entries, and the best others up to its quota."""
    kept, decisions = set(required), list[Decision]()
    for positions, quota in zip(segments, quotas, strict=True):
        others = [p for p in positions if p not in required]
        best, cut = _best(others, quota - (len(positions) - len(others)), score)
        kept |= set(best)
        decisions += cut
    return kept, decisions


def pick_reference(
    segments: Sequence[Sequence[int]],
    quotas: Sequence[int],
    score: Mapping[int, float],
    required: set[int],
    unscored: Collection[int] = (),
) -> tuple[set[int], list[Decision]]:
    """The required entries, and the best of what the segments' quotas let through.

    What the scorer protects instead of scoring it counts as the best of its segment and takes its
    share of the quota; other required entries compete by their score.
    """
    through, decisions = list[int](), list[Decision]()
    for positions, quota in zip(segments, quotas, strict=True):
        ahead = [p for p in positions if p in unscored][:quota]
        others = [p for p in positions if p not in unscored]
        best, cut = _best(others, quota - len(ahead), score)
        through += ahead + best
        decisions += cut
    candidates = [p for p in through if p not in required]
    best, cut = _best(candidates, sum(quotas) - len(required), score)
    return required | set(best), decisions + cut


def pyramid(budget: int, n_layers: int, *, window: int, beta: float, longest: int) -> list[int]:
    """PyramidKV's budget of every layer: the mean is `budget`, none below `window`.

    Budgets never rise with depth. longest: entries of the longest cache that an event has found.
    """
    if budget < window:
        raise BudgetError(f"budget is {budget}, window is {window}; give at least {window}")
    low, high = _slope(budget, window, beta, longest)
    if high < budget:
        low = high = Fraction(budget)
    at = [_on_slope(low, high, layer, n_layers, budget) for layer in range(n_layers)]
    return apportion(
        n_layers * budget,
        [min(max(x, Fraction(window)), Fraction(longest)) - window for x in at],
        [window] * n_layers,
        [max(longest, budget)] * n_layers,
    )[0]


def pyramid_at_event(
    budget: int, layer: int, n_layers: int, held: int, *, window: int, beta: float
) -> int:
    """PyramidKV's budget of one layer that holds `held` entries; `budget` where no slope fits."""
    low, high = _slope(budget, window, beta, held)
    if not held >= high >= low >= window:
        return budget
    return round(_on_slope(low, high, layer, n_layers, budget))


def _slope(budget: int, window: int, beta: float, held: int) -> tuple[Fraction, Fraction]:
    """Budgets of the last and the first layer."""
    low = Fraction(budget) / Fraction(beta)
    high = 2 * budget - low
    if high >= held - window:
        high = Fraction(held - window)
        low = 2 * budget - high
    return low, high


def _on_slope(low: Fraction, high: Fraction, layer: int, n_layers: int, budget: int) -> Fraction:
    return high - layer * (high - low) / (n_layers - 1) if n_layers > 1 else Fraction(budget)


def cake_budgets(
    preferences: list[float], total: int, floor: list[int], cap: list[int]
) -> list[int]:
    """CAKE's budget of every layer (entries of a head): `total` split by preference."""
    return apportion(total, preferences, floor, cap)[0]
