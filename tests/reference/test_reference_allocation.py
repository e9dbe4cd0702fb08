"""The naive allocators against worked examples, closed forms and brute force."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvsim.errors import BudgetError
from reference import allocation
from reference.allocation import adakv, ams, apportion, chunkkv, deal

QUIET = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))

AMS = {
    "segment_mass": 0.1,
    "min_segment": 4,
    "max_segment": 9,
    "min_quota": 1,
    "credit": True,
    "credit_decay": 0.9,
    "credit_mix": 0.9,
    "credit_of": "mass",
    "window": 6,
    "pool_kernel": 5,
    "suffix_fill": "head_max",
    "mode": "strict",
    "weights": "mass",
    "segmentation": "mass",
    "segment_length": 6,
}


@dataclass
class Event:
    """An event over made-up logits [qhead, row, pos]."""

    logits: np.ndarray
    live: list[list[int]]
    row: int
    interval: int | None = None
    prefill: bool = False
    weights: dict[int, float] = field(default_factory=dict)  # in place of the last row's softmax

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return len(self.logits) // len(self.live)

    def attention(self, qhead: int, row: int) -> dict[int, float]:
        """Softmax over the live entries up to the row."""
        if self.weights:
            return self.weights
        seen = [p for p in self.live[qhead // self.group] if p <= row]
        weight = np.exp(self.logits[qhead, row, seen])
        return dict(zip(seen, (weight / weight.sum()).tolist(), strict=True))


def made_up(seed: int, *, heads: int, group: int, n: int, row: int | None = None) -> Event:
    """Steep random logits; every position up to the row is live."""
    rng = np.random.default_rng(seed)
    row = n - 1 if row is None else row
    logits = 2.0 * rng.standard_normal((heads * group, n, n))
    return Event(logits, [list(range(row + 1)) for _ in range(heads)], row, interval=8)


def random_scores(event: Event, seed: int, *, distinct: int | None = None) -> list[dict]:
    """Per head a score of each live entry; few distinct values make ties."""
    rng = np.random.default_rng(seed)
    return [
        {p: float(rng.integers(0, distinct) if distinct else rng.standard_normal()) for p in live}
        for live in event.live
    ]


def ends(event: Event, sink: int, recent: int) -> list[set[int]]:
    """The first and the last entries of each head."""
    return [set(live[:sink]) | set(live[max(0, len(live) - recent) :]) for live in event.live]


# -------------------------------------------------------------------------------- whole numbers


def shares_by_subsets(total: int, weights: Sequence[Fraction], room: Sequence[int]) -> list:
    """The capped proportional shares: the one set of full entries that is consistent."""
    n = len(room)
    for full in product((False, True), repeat=n):
        left = total - sum(r for r, f in zip(room, full, strict=True) if f)
        heavy = sum(w for w, f in zip(weights, full, strict=True) if not f)
        if left < 0 or (heavy == 0 and left > 0):
            continue
        mu = Fraction(left, 1) / heavy if heavy else None
        share = [Fraction(room[i]) if full[i] else (mu or 0) * weights[i] for i in range(n)]
        consistent = all(
            mu is None or (mu * weights[i] >= room[i] if full[i] else share[i] <= room[i])
            for i in range(n)
        )
        if consistent:
            return share
    raise AssertionError("no consistent set of full entries")


@st.composite
def splits(draw, most: int = 4, size: int = 6) -> tuple[int, list[float], list[int], list[int]]:
    """(total, weights, floor, cap), feasible; weights of few values, so that parts tie."""
    n = draw(st.integers(1, size))
    weights = draw(st.lists(st.sampled_from((0.25, 0.5, 1.0, 3.0, 0.7)), min_size=n, max_size=n))
    floor = draw(st.lists(st.integers(0, 2), min_size=n, max_size=n))
    cap = [f + draw(st.integers(0, most)) for f in floor]
    return draw(st.integers(sum(floor), sum(cap))), weights, floor, cap


@QUIET
@given(splits(size=4))
def test_apportion_is_the_nearest_whole_split(case):
    """Of all whole splits within the bounds, the nearest to the shares; ties favour low indices."""
    total, weights, floor, cap = case
    room = [c - f for c, f in zip(cap, floor, strict=True)]
    share = shares_by_subsets(total - sum(floor), [Fraction(w) for w in weights], room)
    best = min(
        (q for q in product(*(range(r + 1) for r in room)) if sum(q) == total - sum(floor)),
        key=lambda q: (
            sum((a - b) ** 2 for a, b in zip(q, share, strict=True)),
            [-a for a in q],
        ),
    )
    found, _ = apportion(total, weights, floor, cap)
    assert found == [f + q for f, q in zip(floor, best, strict=True)]


@QUIET
@given(splits(most=40, size=12), st.lists(st.floats(0, 1e6), min_size=12, max_size=12))
def test_apportion_is_exact_whatever_the_weights(case, weights):
    """The sum is exact and the bounds hold, for zero weights and wild ones."""
    total, _, floor, cap = case
    found, margin = apportion(total, weights[: len(cap)], floor, cap)
    assert sum(found) == total
    assert all(f <= q <= c for f, q, c in zip(floor, found, cap, strict=True))
    assert margin >= 0


@QUIET
@given(splits(most=40, size=12), st.integers(0, 10_000))
def test_apportion_turns_only_within_its_margin(case, seed):
    """Weights off by less than the margin by far give the same split."""
    total, weights, floor, cap = case
    found, margin = apportion(total, weights, floor, cap)
    noise = 1 + 1e-12 * np.random.default_rng(seed).standard_normal(len(weights))
    again, _ = apportion(total, [w * e for w, e in zip(weights, noise, strict=True)], floor, cap)
    assert again == found or margin < 1e-9


def test_apportion_of_weights_that_are_zero():
    """All zero: equally; some zero: they get what the others have no room for."""
    assert apportion(7, [0, 0, 0], [0, 0, 0], [9, 9, 9])[0] == [3, 2, 2]
    assert apportion(7, [0, 5, 0], [0, 0, 0], [9, 4, 9])[0] == [2, 4, 1]
    assert apportion(4, [0, 5, 0], [0, 0, 0], [9, 4, 9])[0] == [0, 4, 0]


def test_apportion_reports_ties():
    """Equal fractional parts are a margin of 0, no fraction at all is no decision."""
    assert apportion(3, [1, 1], [0, 0], [9, 9]) == ([2, 1], 0.0)
    assert apportion(4, [1, 1], [0, 0], [9, 9]) == ([2, 2], math.inf)
    assert apportion(3, [2, 1], [0, 0], [9, 9])[1] == math.inf
    found, margin = apportion(2, [0.7, 0.3], [0, 0], [9, 9])
    assert found == [1, 1]
    assert margin == pytest.approx((0.6 - 0.4) / 1.4)


@pytest.mark.parametrize("total", [1, 7])
def test_apportion_refuses_what_cannot_be(total):
    """Less than the floors or more than the caps is an error."""
    with pytest.raises(ValueError, match="expected 2 to 6"):
        apportion(total, [1, 1], [1, 1], [3, 3])


def passes(total: int, cap: Sequence[int]) -> list[int]:
    """Closed form of left-to-right passes: p full ones, then one more to the first with room."""
    p = max((p for p in range(max(cap) + 1) if sum(min(c, p) for c in cap) <= total), default=0)
    dealt = [min(c, p) for c in cap]
    for i in [i for i, c in enumerate(cap) if c > p][: total - sum(dealt)]:
        dealt[i] += 1
    return dealt


@QUIET
@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.data())
def test_deal_is_the_closed_form_of_passes(cap, data):
    """By falling priority it is the closed form on entries in that order; equal: left to right."""
    total = data.draw(st.integers(0, sum(cap)))
    priority = data.draw(
        st.lists(st.sampled_from((0.0, 1.0, 2.5)), min_size=len(cap), max_size=len(cap))
    )
    assert deal(total, cap, [0.0] * len(cap)) == passes(total, cap)
    order = sorted(range(len(cap)), key=lambda i: (-priority[i], i))
    found = deal(total, cap, priority)
    assert [found[i] for i in order] == passes(total, [cap[i] for i in order])


def test_deal_refuses_more_than_there_is_room_for():
    """It ends, with an error."""
    with pytest.raises(ValueError, match="at most 3"):
        deal(4, [1, 2], [0, 0])


# ------------------------------------------------------------------------------ AMS, by its steps


MASS = (0.31, 0.02, 0.02, 0.02, 0.02, 0.02, 0.10, 0.10, 0.10, 0.10, 0.10, 0.09)
WORKED = {
    **AMS,
    "segment_mass": 0.25,
    "min_segment": 2,
    "max_segment": 5,
    "credit": False,
    "window": 1,
    "pool_kernel": 1,
    "suffix_fill": "observed",
}


def segment_sums(starts: list[int], values: Sequence[float]) -> list[float]:
    """Sum of the values of each segment."""
    return [sum(values[a:b]) for a, b in zip(starts, [*starts[1:], len(values)], strict=True)]


@pytest.mark.parametrize("strict", [True, False])
def test_worked_example_cuts(strict):
    """Thresholds .25, .5, .75 are reached at slots 0 (moved to 1), 6 and 9."""
    starts, decisions = allocation.cuts(MASS, 0.25, strict=strict)
    assert starts == [0, 1, 6, 9]
    assert [m for m, _ in decisions] == pytest.approx([0.06 / 0.25, 0.01 / 0.5, 0.04 / 0.75])


def test_worked_example_strict():
    """Merge, split evenly; lower bounds 1 and two units by largest remainder."""
    starts = allocation.repair([0, 1, 6, 9], 12, 2, 5, strict=True)
    assert starts == [0, 3, 6, 9]
    masses = segment_sums(starts, MASS)
    assert masses == pytest.approx([0.35, 0.06, 0.30, 0.29])
    quotas, [(margin, _)] = allocation.strict_quotas(
        [3, 3, 3, 3], masses, masses, [1, 0, 0, 1], 6, 1
    )
    assert quotas == [2, 1, 2, 1]
    assert margin == pytest.approx((0.60 - 0.58) / 0.60)


def test_worked_example_reference():
    """Nothing to cut; a merged segment may be longer than the longest; rounded shares."""
    starts = allocation.repair([0, 1, 6, 9], 12, 2, 5, strict=False)
    assert starts == [0, 6, 9]
    masses = segment_sums(starts, MASS)
    assert masses == pytest.approx([0.41, 0.30, 0.29])
    quotas, decisions = allocation.reference_quotas([6, 3, 3], masses, masses, [1, 0, 1], 6, 1)
    assert quotas == [2, 2, 2]
    assert min(m for m, _ in decisions) == pytest.approx(0.27 / 1.23)


@pytest.mark.parametrize(
    ("mode", "kept"),
    [("strict", {0, 2, 5, 7, 8, 11}), ("reference", {0, 5, 7, 8, 10, 11})],
)
def test_worked_example_whole(mode, kept):
    """The released code trims across segments: slot 10 stays there in place of slot 2."""
    event = Event(np.zeros((1, 12, 12)), [list(range(12))], 11, weights=dict(enumerate(MASS)))
    scores = [{p: float(p) for p in range(12)}]
    params = {**WORKED, "mode": mode}
    for unscored in ([set()], [{0, 11}]):
        found, _ = ams(
            event, scores, [{0, 11}], budget=6, params=params, credit=[{}], unscored=unscored
        )
        assert found == [kept]


def test_what_the_scorer_protects_takes_a_place_of_its_segment():
    """Slots 4 and 5 score highest; with slot 0 protected by the scorer only one is a candidate."""
    scores = {0: 0.0, 1: 0.1, 2: 0.2, 3: 0.3, 4: 0.9, 5: 0.8, 6: 0.4, 7: 0.6, 8: 0.5, 9: 0.3, 10: 1}
    segments, required = [range(6), range(6, 9), range(9, 12)], {0, 11}
    free, _ = allocation.pick_reference(segments, [2, 2, 2], {**scores, 11: 0.05}, required)
    first, _ = allocation.pick_reference(segments, [2, 2, 2], scores, required, {0, 11})
    assert free == {0, 4, 5, 7, 10, 11}
    assert first == {0, 4, 7, 8, 10, 11}


def test_multiples_that_are_never_reached():
    """Strict leaves them out; the released code cuts off the last slot."""
    m = [0.1] * 7 + [0.1999999]
    strict, _ = allocation.cuts(m, 0.9, strict=True)
    released, decisions = allocation.cuts(m, 0.9, strict=False)
    assert strict == [0]
    assert released == [0, 7]
    assert decisions[0][0] < 1e-6


def test_a_multiple_hit_exactly_is_unsure():
    """It is reached; but rounding may break such a tie, so its margin is not 0, but next to it."""
    starts, decisions = allocation.cuts([0.25] * 4, 0.25, strict=True)
    assert starts == [0, 1, 2]
    assert all(0 < margin < 1e-300 for margin, _ in decisions)


def test_a_multiple_that_is_one_is_no_threshold():
    """49 * (1 / 49) is a little below 1 in floats; it is meant to be 1."""
    assert 49 * (1 / 49) < 1
    assert len(allocation.cuts([0.01] * 100, 1 / 49, strict=True)[1]) == 48
    assert allocation.cuts([0.5, 0.5], 1.0, strict=True) == ([0], [])


def test_one_slot_is_one_segment():
    """No cut can be moved out of a cache of one entry."""
    assert allocation.cuts([1.0], 0.1, strict=True)[0] == [0]
    assert allocation.cuts([1.0], 0.1, strict=False)[0] == [0]
    assert allocation.repair([0], 1, 16, 256, strict=True) == [0]


@st.composite
def segmentations(draw) -> tuple[list[int], int, int, int]:
    """(starts, n, shortest, longest), longest at least twice the shortest less 1."""
    n = draw(st.integers(1, 90))
    starts = [0, *sorted(draw(st.sets(st.integers(1, n - 1), max_size=30)) if n > 1 else [])]
    shortest = draw(st.integers(1, 12))
    return starts, n, shortest, draw(st.integers(max(1, 2 * shortest - 1), 3 * shortest))


@QUIET
@given(segmentations())
def test_strict_segments_are_bounded(case):
    """Between shortest and longest, all of them, where the cache is long enough."""
    starts, n, shortest, longest = case
    found = allocation.repair(starts, n, shortest, longest, strict=True)
    lengths = np.diff([*found, n])
    assert found[0] == 0
    assert lengths.max() <= longest
    if n >= shortest:
        assert lengths.min() >= shortest
        assert math.ceil(n / longest) <= len(found) <= max(1, n // shortest)
    else:
        assert found == [0]


@QUIET
@given(segmentations())
def test_released_segments_are_bounded_otherwise(case):
    """Only the last may be short, and none reaches the sum of both bounds."""
    starts, n, shortest, longest = case
    lengths = np.diff([*allocation.repair(starts, n, shortest, longest, strict=False), n])
    assert (lengths[:-1] >= shortest).all()
    assert lengths.max() <= longest + shortest - 1


def test_splits_are_even_or_greedy():
    """Pieces of a long segment: 4 + 4 + 3 or so, against 5 + 5 + 1 that then merge."""
    assert allocation.repair([0], 11, 1, 5, strict=True) == [0, 4, 8]
    assert allocation.repair([0], 11, 1, 5, strict=False) == [0, 5, 10]
    assert allocation.repair([0, 11], 13, 2, 5, strict=False) == [0, 5, 10]
    assert allocation.repair([0, 9], 10, 2, 10, strict=True) == [0]  # a short tail goes back
    assert allocation.repair([0, 9], 10, 2, 10, strict=False) == [0, 9]


@st.composite
def quotas_of(draw, *, tight: bool = False) -> tuple[list[int], list[float], list[int], int, int]:
    """(lengths, weights, required, total, min_quota); tight: the floors do not fit."""
    n = draw(st.integers(1, 10))
    lengths = draw(st.lists(st.integers(1, 9), min_size=n, max_size=n))
    weights = draw(st.lists(st.floats(1e-6, 1), min_size=n, max_size=n))
    required = [draw(st.integers(0, min(2, x))) for x in lengths]
    min_quota = draw(st.integers(0, 10))
    low = sum(max(r, min(min_quota, x)) for r, x in zip(required, lengths, strict=True))
    if tight:
        total = draw(st.integers(sum(required), max(sum(required), low - 1)))
    else:
        total = draw(st.integers(max(1, sum(required)), sum(lengths)))
    return lengths, weights, required, total, min_quota


@QUIET
@given(quotas_of())
def test_strict_quotas_are_exact(case):
    """The sum is the total, the required fit, and every segment gets its minimum if all can."""
    lengths, weights, required, total, min_quota = case
    quotas, _ = allocation.strict_quotas(lengths, weights, weights, required, total, min_quota)
    low = [max(r, min(min_quota, x)) for r, x in zip(required, lengths, strict=True)]
    assert sum(quotas) == total
    assert all(r <= q <= x for r, q, x in zip(required, quotas, lengths, strict=True))
    if sum(low) <= total:
        assert all(q >= x for q, x in zip(quotas, low, strict=True))


@QUIET
@given(quotas_of(tight=True))
def test_infeasible_quotas_end(case):
    """No segment gets more than its floor before all have; the heavier one first."""
    lengths, weights, required, total, min_quota = case
    quotas, _ = allocation.strict_quotas(lengths, weights, weights, required, total, min_quota)
    low = [max(r, min(min_quota, x)) for r, x in zip(required, lengths, strict=True)]
    more = [q - r for q, r in zip(quotas, required, strict=True)]
    assert sum(quotas) == total
    for i in range(len(quotas)):
        for j in range(len(quotas)):
            if quotas[j] < low[j] and sum(low) > total:
                assert more[i] <= more[j] + (weights[i] >= weights[j])


def released_loops(lengths, weights, total: int, min_quota: int) -> list[int]:
    """The released rule with its passes as loops, for segments no more than units."""
    quotas = [min(min_quota, x) for x in lengths]
    first = list(quotas)
    over = sum(quotas) - total
    if over >= 0:
        while over > 0:
            for i in range(len(quotas)):
                if over > 0 and quotas[i] > 1:
                    quotas[i] -= 1
                    over -= 1
        return quotas
    whole = sum(map(Fraction, weights))
    for i, w in enumerate(weights):
        quotas[i] = min(lengths[i], quotas[i] + round(-over * Fraction(w) / whole))
    while sum(quotas) != total:
        step = 1 if sum(quotas) < total else -1
        for i in range(len(quotas)):
            bound = lengths[i] if step > 0 else first[i]
            if sum(quotas) != total and quotas[i] != bound:
                quotas[i] += step
    return quotas


@QUIET
@given(quotas_of())
def test_released_quotas_are_its_loops(case):
    """One unit a pass from left to right, taken or given, until the sum fits."""
    lengths, weights, required, total, min_quota = case
    quotas, _ = allocation.reference_quotas(lengths, weights, weights, required, total, min_quota)
    if min_quota == 0 or len(lengths) <= total:
        assert quotas == released_loops(lengths, weights, total, min_quota)
    assert sum(quotas) == total


def test_released_quotas_end_with_too_many_segments():
    """Sixteen segments and eight units, where the released loop never ends: the heaviest eight."""
    weights = [float(i % 5) for i in range(16)]
    quotas, _ = allocation.reference_quotas([4] * 16, [1.0] * 16, weights, [0] * 16, 8, 8)
    assert quotas == [int(i in {2, 3, 4, 7, 8, 9, 13, 14}) for i in range(16)]


# ------------------------------------------------------------------------------------ AMS, whole


@st.composite
def settings_of_ams(draw) -> dict:
    """Parameters small enough to bind on a few dozen entries."""
    return {
        "segment_mass": draw(st.sampled_from((0.02, 0.1, 0.3, 1.5))),
        "min_segment": draw(st.integers(1, 8)),
        "max_segment": draw(st.integers(4, 20)),
        "min_quota": draw(st.integers(0, 4)),
        "credit": draw(st.booleans()),
        "credit_decay": draw(st.sampled_from((0.0, 0.8, 0.9))),
        "credit_mix": draw(st.sampled_from((0.0, 0.7, 1.0))),
        "credit_of": draw(st.sampled_from(("mass", "usage"))),
        "window": draw(st.integers(1, 12)),
        "pool_kernel": draw(st.sampled_from((1, 3, 5))),
        "suffix_fill": draw(
            st.sampled_from(("head_max", "global_max", "head_mean", "observed", "zero"))
        ),
        "mode": draw(st.sampled_from(("strict", "reference"))),
        "weights": draw(st.sampled_from(("mass", "length", "equal"))),
        "segmentation": draw(st.sampled_from(("mass", "fixed"))),
        "segment_length": draw(st.integers(1, 9)),
    }


@QUIET
@given(settings_of_ams(), st.integers(0, 10_000), st.integers(3, 12), st.data())
def test_ams_is_exact_over_events(params, seed, budget, data):
    """Three events: exactly the budget, the protected in it, credit of the kept alone, sum <= 1."""
    sink = data.draw(st.integers(0, budget))
    recent = data.draw(st.integers(0, budget - sink))
    event = made_up(seed, heads=2, group=2, n=40, row=15)
    credit: list[dict[int, float]] = [{}, {}]
    for row in (15, 23, 39):
        event.live = [
            sorted({*live, *range(event.row + 1, row + 1)} if row > 15 else set(range(16)))
            for live in event.live
        ]
        event.row = row
        protected = ends(event, sink, recent)
        kept, decisions = ams(
            event,
            random_scores(event, seed, distinct=4),
            protected,
            budget=budget,
            params=params,
            credit=credit,
        )
        assert [len(k) for k in kept] == [budget, budget]
        assert all(p <= k <= set(x) for p, k, x in zip(protected, kept, event.live, strict=True))
        assert all(margin >= 0 for margin, _ in decisions)
        for k, c in zip(kept, credit, strict=True):
            assert set(c) == (k if params["credit"] else set())
            assert sum(c.values()) <= 1 + 1e-12
        event.live = [sorted(k) for k in kept]


def test_ams_with_one_segment_is_the_best_of_all():
    """One segment: the protected and the best others."""
    event = made_up(3, heads=2, group=2, n=30)
    scores, protected = random_scores(event, 4), ends(event, 2, 3)
    params = {**AMS, "segment_mass": 1.0, "max_segment": 30}
    kept, _ = ams(event, scores, protected, budget=11, params=params, credit=[{}, {}])
    for found, score, required in zip(kept, scores, protected, strict=True):
        others = sorted((p for p in score if p not in required), key=lambda p: -score[p])
        assert found == required | set(others[:6])


def test_ams_keeps_something_of_every_segment():
    """Entries of one block score highest; every block keeps some, unlike with one segment."""
    event = made_up(5, heads=1, group=1, n=32)
    scores = [{p: float(p // 8 == 1) for p in range(32)}]
    params = {**AMS, "segmentation": "fixed", "segment_length": 8, "weights": "equal"}
    kept, _ = ams(event, scores, [set()], budget=8, params=params, credit=[{}])
    assert kept == [{0, 1, 8, 9, 16, 17, 24, 25}]
    whole = {**params, "segment_length": 32}
    assert ams(event, scores, [set()], budget=8, params=whole, credit=[{}])[0] == [
        set(range(8, 16))
    ]


def test_ams_first_event_is_without_credit():
    """Credit of a first event is a multiple of the mass, so it changes nothing."""
    event = made_up(6, heads=2, group=3, n=36)
    scores, protected = random_scores(event, 7), ends(event, 2, 4)
    found = [
        ams(
            event,
            scores,
            protected,
            budget=12,
            params={**AMS, "credit": credit},
            credit=[{}, {}],
        )[0]
        for credit in (True, False)
    ]
    assert found[0] == found[1]


def test_ams_credit_is_an_average_that_starts_at_zero():
    """c = decay * c + (1 - decay) * m of a survivor, (1 - decay) * m of a newcomer."""
    mixed, c = allocation.credited([0.5, 0.3, 0.2], [0.4, 0.0, 0.0], 0.9, 0.9)
    assert c == pytest.approx([0.41, 0.03, 0.02])
    assert mixed == pytest.approx(
        [0.9 * m + 0.1 * x / 0.46 for m, x in zip((0.5, 0.3, 0.2), (0.41, 0.03, 0.02), strict=True)]
    )


def test_ams_usage_is_smoothed_before_the_suffix_alone():
    """Zero padding counts at the ends of what lies before the window; the suffix is filled."""
    event = Event(np.zeros((1, 8, 8)), [list(range(8))], 7)
    rows = allocation.window_rows(event, 8, 5, {**AMS, "window": 2})
    assert rows == range(6, 8)
    u, observed = allocation.usage(event, 0, rows, 3)
    flat = (1 / 7 + 1 / 8) / 2
    assert list(u) == [0, 1, 2, 3, 4, 5]
    assert list(u.values()) == pytest.approx([flat * x for x in (2 / 3, 1, 1, 1, 1, 2 / 3)])
    assert observed == pytest.approx({6: flat, 7: 1 / 8})
    used = [(u, observed), ({p: 2 * x for p, x in u.items()}, dict(observed))]
    fills = {
        how: [allocation.fill(used, how)[h][7] for h in (0, 1)]
        for how in ("head_max", "global_max", "head_mean", "observed", "zero")
    }
    assert fills["head_max"] == pytest.approx([flat, 2 * flat])
    assert fills["global_max"] == pytest.approx([2 * flat, 2 * flat])
    assert fills["head_mean"] == pytest.approx([flat * 16 / 18, flat * 32 / 18])
    assert fills["observed"] == pytest.approx([1 / 8, 1 / 8])
    assert fills["zero"] == [0, 0]


def test_ams_windows():
    """At most the window, what is held less 1, and the budget; the released buffer is shorter."""
    event = made_up(0, heads=1, group=1, n=40)
    reference = {**AMS, "mode": "reference", "window": 128}
    assert len(allocation.window_rows(event, 40, 30, {**AMS, "window": 9})) == 9
    assert len(allocation.window_rows(event, 20, 30, {**AMS, "window": 128})) == 19
    assert len(allocation.window_rows(event, 40, 30, {**AMS, "window": 128})) == 30
    assert len(allocation.window_rows(event, 40, 30, reference)) == 7  # interval 8
    event.interval = 1
    assert len(allocation.window_rows(event, 40, 30, reference)) == 1


def test_ams_refuses_more_protected_than_budget():
    """Protection of a scorer beyond the budget has no rule."""
    event = made_up(0, heads=1, group=1, n=20)
    with pytest.raises(BudgetError, match="give at least 6"):
        ams(
            event,
            random_scores(event, 0),
            ends(event, 3, 3),
            budget=5,
            params=AMS,
            credit=[{}],
        )


# -------------------------------------------------------------------------------- AdaKV, ChunkKV


@QUIET
@given(st.integers(0, 10_000), st.integers(1, 14), st.floats(0, 1), st.booleans(), st.data())
def test_adakv_is_exact_over_the_layer(seed, budget, floor, inside, data):
    """Heads times budget in the layer; each head its protected entries and its floor."""
    sink = data.draw(st.integers(0, budget))
    event = made_up(seed, heads=3, group=1, n=20)
    event.live[1] = event.live[1][5:]
    scores, protected = random_scores(event, seed, distinct=5), ends(event, sink, 0)
    kept, decisions = adakv(event, scores, protected, budget=budget, floor=floor, inside=inside)
    assert sum(map(len, kept)) == min(3 * budget, 55)
    assert all(margin >= 0 for margin, _ in decisions)
    for k, required, live in zip(kept, protected, event.live, strict=True):
        assert required <= k <= set(live)
        assert len(k) >= (
            int(floor * budget) if inside else min(budget, sink + int(floor * budget))
        )


def test_adakv_between_its_ends():
    """floor=1 is every head alone; floor=0 is the best of the layer, ties to the lower position."""
    event = made_up(1, heads=2, group=1, n=6)
    scores = [{p: float(p) for p in range(6)}, {p: 10.0 + p for p in range(6)}]
    none: list[set[int]] = [set(), set()]
    alone, _ = adakv(event, scores, none, budget=3, floor=1.0, inside=False)
    assert alone == [{3, 4, 5}, {3, 4, 5}]
    shared, decisions = adakv(event, scores, none, budget=3, floor=0.0, inside=False)
    assert shared == [set(), set(range(6))]
    assert decisions[0] == (0.5, 10.0)
    equal = [dict.fromkeys(range(6), 1.0)] * 2
    assert adakv(event, equal, none, budget=3, floor=0.0, inside=False)[0] == [{0, 1, 2}] * 2
    assert adakv(event, equal, none, budget=3, floor=0.0, inside=False)[1][0] == (0.0, 1.0)


def test_adakv_counts_protected_entries_outside_or_inside_the_floor():
    """Two sinks and a floor of 2: two more of the weak head, or none."""
    event = made_up(1, heads=2, group=1, n=12)
    scores = [{p: float(p) for p in range(12)}, {p: 100.0 + p for p in range(12)}]
    sinks = [{0, 1}, {0, 1}]
    outside, _ = adakv(event, scores, sinks, budget=5, floor=0.4, inside=False)
    inside, _ = adakv(event, scores, sinks, budget=5, floor=0.4, inside=True)
    assert outside == [{0, 1, 10, 11}, {0, 1, 8, 9, 10, 11}]
    assert inside == [{0, 1}, {0, 1, 6, 7, 8, 9, 10, 11}]
    one, _ = adakv(event, scores, [set(), set()], budget=5, floor=0.1, inside=True)
    assert one[0] == {11}


@QUIET
@given(st.integers(0, 10_000), st.integers(1, 19), st.integers(1, 25), st.data())
def test_chunkkv_fills_the_budget(seed, budget, chunk, data):
    """Exactly the budget, the same for all heads, and at most one chunk in part."""
    sink = data.draw(st.integers(0, budget))
    recent = data.draw(st.integers(0, budget - sink))
    event = made_up(seed, heads=2, group=1, n=20)
    scores, protected = random_scores(event, seed, distinct=5), ends(event, sink, recent)
    kept, decisions = chunkkv(event, scores, protected, budget=budget, chunk=chunk, exact=True)
    assert kept[0] == kept[1]
    assert len(kept[0]) == budget
    assert protected[0] <= kept[0]
    assert all(margin >= 0 for margin, _ in decisions)
    others = [set(range(a, min(a + chunk, 20))) - protected[0] for a in range(0, 20, chunk)]
    assert sum(bool(kept[0] & x) and not x <= kept[0] for x in others) <= 1


def test_chunkkv_by_hand():
    """Whole chunks of the released code against an exact budget; scores add over heads."""
    event = made_up(0, heads=2, group=1, n=10)
    first = {p: float(p in (3, 4, 5)) for p in range(10)}
    second = {p: 2.0 * (p in (6, 7)) for p in range(10)}
    none: list[set[int]] = [set(), set()]
    means = {"budget": 5, "chunk": 3}  # 0, 1, 4/3, 0 of chunks 0-2, 3-5, 6-8, 9
    exact, decisions = chunkkv(event, [first, second], none, **means, exact=True)
    assert exact == [{3, 4, 6, 7, 8}] * 2
    assert decisions == [(0.0, 1.0), pytest.approx((0.25, 4 / 3)), (1.0, 1.0)]
    whole, _ = chunkkv(event, [first, second], none, **means, exact=False)
    assert whole == [{3, 4, 5, 6, 7, 8}] * 2
    sinks, _ = chunkkv(event, [first, second], [{0}, {0}], budget=3, chunk=3, exact=False)
    assert sinks == [{0, 1, 2}] * 2
    sinks, _ = chunkkv(event, [first, second], [{0}, {0}], budget=3, chunk=3, exact=True)
    assert sinks == [{0, 6, 7}] * 2


def test_chunkkv_released_goes_through_a_ratio():
    """40 of 200 entries are 2 of 10 chunks; 1 - (1 - 40 / 200) is a little less than 0.2, so 1."""
    event = made_up(0, heads=1, group=1, n=200)
    scores = [{p: float(p // 20 in (3, 5)) for p in range(200)}]
    kept, _ = chunkkv(event, scores, [set()], budget=40, chunk=20, exact=False)
    assert kept == [set(range(60, 80))]


def test_chunkkv_released_with_less_than_a_chunk():
    """Then every head keeps its own best, as the scorer alone would."""
    event = made_up(0, heads=2, group=1, n=6)
    scores = [{p: float(p) for p in range(6)}, {p: float(-p) for p in range(6)}]
    kept, _ = chunkkv(event, scores, [set(), set()], budget=2, chunk=8, exact=False)
    assert kept == [{4, 5}, {0, 1}]


# ------------------------------------------------------------------------------ budgets of layers


def pyramid_events(budget: int, held: int, events: int) -> list[list[int]]:
    """Budgets of 28 layers at chained events 512 rows apart, the formula anew at each."""
    layers, found = [held] * 28, []
    for _ in range(events):
        layers = [
            allocation.pyramid_at_event(budget, i, 28, n, window=64, beta=20) if n > budget else n
            for i, n in enumerate(layers)
        ]
        found.append(layers)
        layers = [n + 512 for n in layers]
    return found


def test_pyramid_at_every_event_drifts():
    """Computed at each event from what the layer then holds, the mean wanders about the budget."""
    found = pyramid_events(512, 661, 3)
    assert [(max(x), min(x), round(sum(x) / 28)) for x in found[:2]] == [
        (597, 427, 512),
        (512, 149, 411),
    ]
    assert max(found[2]) == 960
    larger = pyramid_events(1024, 661, 8)
    assert max(map(max, larger)) == 1920
    assert max(round(sum(x) / 28) for x in larger) == 1149
    assert pyramid_events(256, 661, 6) == [[256] * 28] * 6


def test_pyramid_at_an_event_by_hand():
    """The first event of the row above: 597 to 427, in even steps; one layer: the budget."""
    at = [allocation.pyramid_at_event(512, i, 28, 661, window=64, beta=20) for i in (0, 1, 26, 27)]
    assert at == [597, 591, 433, 427]
    assert allocation.pyramid_at_event(512, 0, 1, 661, window=64, beta=20) == 512
    # a falling slope does not fit below 540 entries: flat, not rising
    assert allocation.pyramid_at_event(512, 0, 28, 540, window=64, beta=20) == 512


@QUIET
@given(
    st.integers(1, 12),
    st.integers(1, 9),
    st.integers(0, 60),
    st.floats(1, 40),
    st.integers(1, 80),
)
def test_pyramid_keeps_its_mean(n_layers, window, above, beta, more):
    """Budgets of a schedule never rise: the mean is exact, none below the window."""
    budget = window + above
    found = allocation.pyramid(budget, n_layers, window=window, beta=beta, longest=budget + more)
    assert sum(found) == n_layers * budget
    assert found == sorted(found, reverse=True)
    assert min(found) >= window
    assert max(found) <= budget + more


def test_pyramid_by_hand():
    """From 2c - c/20 down to c/20, which the window lifts to 8, so that all shrink a little."""
    found = allocation.pyramid(100, 4, window=8, beta=20, longest=1000)
    # slope 195, 131.67, 68.33, 5 -> above the window 187, 123.67, 60.33, 0, scaled to 368
    assert found == [193, 131, 68, 8]
    with pytest.raises(BudgetError, match="give at least 8"):
        allocation.pyramid(7, 4, window=8, beta=20, longest=1000)


def test_cake_budgets_follow_preference():
    """Shares by preference above what a layer protects, at most what it holds."""
    assert allocation.cake_budgets([3.0, 1.0], 40, [4, 4], [100, 100]) == [28, 12]
    assert allocation.cake_budgets([3.0, 1.0], 40, [4, 4], [20, 100]) == [20, 20]
    assert allocation.cake_budgets([0.0, 0.0], 40, [4, 4], [100, 100]) == [20, 20]
