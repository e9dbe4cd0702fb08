"""AMS: its vectorised steps against naive loops, and what must hold of whole replays."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import kvsim
import reference
from kvsim.core.policy import Policy, Protection, Schedule, Scorer
from kvsim.core.record import NEVER
from kvsim.errors import PolicyError
from kvsim.policies.ams import AMS, Segments, cuts, merge, reference_quotas, split, strict_quotas
from kvsim.testing.strategies import Case, make_case
from reference import allocation

QUIET = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))

#: Parameters small enough to bind on a few dozen entries.
SMALL = {
    "segment_mass": 0.1,
    "min_segment": 3,
    "max_segment": 8,
    "window": 6,
    "sink": 2,
    "recent": 4,
}


# ------------------------------------------------------------------------------ steps, row by row


@dataclass
class Rows:
    """Mass of heads that hold different numbers of entries: [1, H, n], pads on the left."""

    mass: Tensor
    live: Tensor
    exact: bool  # sums of these masses are exact in any order

    def head(self, h: int) -> list[float]:
        """The masses of one head."""
        return self.mass[0, h][self.live[0, h]].tolist()

    def marked(self, mask: Tensor, h: int) -> list[int]:
        """Where a mask [1, H, n] of one head is set, in slots of that head."""
        return mask[0, h][self.live[0, h]].nonzero().flatten().tolist()

    def slots(self, starts: Tensor, h: int) -> list[int]:
        """Starts [1, H, S] of one head, in slots of that head; n stands for none."""
        n = self.live.shape[-1]
        pads = int((~self.live[0, h]).sum())
        return sorted({s - pads for s in starts[0, h].tolist() if s < n})


def mass_rows(seed: int, heads: int = 6) -> Rows:
    """Rows of a few kinds: even, skewed, peaked, and multiples of 1/1024, whose sums are exact."""
    rng = np.random.default_rng(seed)
    kind = ("even", "skewed", "peaked", "exact")[seed % 4]
    held = rng.integers(1, 61, size=heads)
    if seed % 3 == 0:
        held[:] = held[0]  # no pads
    n = int(held.max())
    mass = np.zeros((1, heads, n))
    for h, count in enumerate(held):
        if kind == "exact":  # thresholds are hit exactly, and segments weigh the same
            units = rng.multinomial(1024 // 64, np.full(count, 1 / count)) * 64
            row = units / 1024
        else:
            row = rng.dirichlet(np.full(count, {"even": 50.0, "skewed": 0.5, "peaked": 0.05}[kind]))
            row = (row + 1e-12) / (row + 1e-12).sum()
        mass[0, h, n - count :] = row
    live = np.arange(n) >= n - held[:, None]
    return Rows(torch.from_numpy(mass), torch.from_numpy(live)[None], kind == "exact")


def as_starts(rows: Rows, starts: list[list[int]]) -> Tensor:
    """Slots of each head as starts [1, H, S], n for none."""
    n, most = rows.live.shape[-1], max(map(len, starts))
    found = torch.full((1, len(starts), most), n)
    for h, of_head in enumerate(starts):
        found[0, h, : len(of_head)] = int((~rows.live[0, h]).sum()) + torch.tensor(of_head)
    return found


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("share", [0.02, 0.1, 0.125, 0.25, 1 / 49, 1 / 3, 0.6, 1.0, 2.0])
def test_cuts_are_those_of_the_loops(share, strict):
    """The first slot that reaches each multiple, on 360 rows, exact hits and pads included."""
    seen: Counter[str] = Counter()
    for seed in range(60):
        rows = mass_rows(seed)
        found = cuts(rows.mass, rows.live, share, keep_unreached=not strict)
        for h in range(6):
            starts, decisions = allocation.cuts(rows.head(h), share, strict=strict)
            margin = min((m for m, _ in decisions), default=1.0)
            hit = margin < 1e-300
            if margin > 1e-12 or (rows.exact and share in (0.125, 0.25)):
                assert rows.slots(found, h) == starts
                seen["compared"] += 1
                seen["hits"] += hit
    assert seen["compared"] >= 300 or share == 1 / 49
    assert seen["hits"] >= 50 or share not in (0.125, 0.25)


@pytest.mark.parametrize("strict", [True, False])
def test_multiples_that_rounding_leaves_unreached(strict):
    """Left out, or as in the release a cut before the last entry; beside a head that has pads."""
    mass = torch.zeros(1, 2, 8, dtype=torch.float64)
    mass[0, 0] = torch.tensor([0.1] * 7 + [0.1999999])
    mass[0, 1, 3:] = torch.tensor([0.1, 0.2, 0.2, 0.2, 0.1999999])
    rows = Rows(mass, mass > 0, exact=False)
    found = cuts(rows.mass, rows.live, 0.9, keep_unreached=not strict)
    for h, last in enumerate((7, 4)):
        starts, _ = allocation.cuts(rows.head(h), 0.9, strict=strict)
        assert rows.slots(found, h) == starts == ([0] if strict else [0, last])


@st.composite
def starts_of(draw, most: int = 40) -> tuple[list[list[int]], list[int]]:
    """Arbitrary starts of three heads that hold different numbers of entries."""
    counts = draw(st.lists(st.integers(1, most), min_size=3, max_size=3))
    starts = [
        [0, *sorted(draw(st.sets(st.integers(1, n - 1), max_size=n)) if n > 1 else [])]
        for n in counts
    ]
    return starts, counts


def plain_rows(counts: list[int]) -> Rows:
    """Even masses of heads that hold `counts` entries."""
    n = max(counts)
    live = torch.arange(n) >= n - torch.tensor(counts)[:, None]
    mass = live / live.sum(-1, keepdim=True)
    return Rows(mass[None].double(), live[None], exact=False)


@settings(QUIET, max_examples=200)
@given(starts_of(), st.integers(1, 9), st.integers(1, 12))
def test_repair_is_that_of_the_loops(case, shortest, longest):
    """Merged then split evenly, or split greedily then merged: 600 heads each way, pads on some."""
    starts, counts = case
    rows = plain_rows(counts)
    mask = as_starts(rows, starts)
    n_slots = rows.live.shape[-1]
    merged = merge(mask, n_slots, shortest, short_tail=False)
    strict = split(merged, n_slots, longest, equal=True)
    released = split(mask, n_slots, longest, equal=False)
    released = merge(released, n_slots, shortest, short_tail=True)
    for h, n in enumerate(counts):
        for found, mode in ((strict, True), (released, False)):
            expected = allocation.repair(starts[h], n, shortest, longest, strict=mode)
            assert rows.slots(found, h) == expected


@settings(QUIET, max_examples=100)
@given(starts_of(), st.integers(1, 9), st.integers(0, 9))
def test_strict_segments_keep_their_bounds(case, shortest, more):
    """Whatever the cuts, if the longest is at least twice the shortest less 1."""
    starts, counts = case
    longest = 2 * shortest - 1 + more
    rows = plain_rows(counts)
    n_slots = rows.live.shape[-1]
    merged = merge(as_starts(rows, starts), n_slots, shortest, short_tail=False)
    found = split(merged, n_slots, longest, equal=True)
    for h, n in enumerate(counts):
        lengths = np.diff([*rows.slots(found, h), n])
        assert lengths.max() <= longest
        assert lengths.min() >= min(shortest, n)


@functools.cache
def segment_rows(seed: int) -> tuple[Rows, Tensor, Tensor, Segments, list[list[int]]]:
    """(rows, protected, starts, segments, starts as slots) of mass rows cut anywhere."""
    rng = np.random.default_rng(1000 + seed)
    rows = mass_rows(seed)
    counts = rows.live.sum(-1)[0].tolist()
    slots = [
        [0, *(s for s in range(1, n) if rng.random() < rng.choice([0.1, 0.5]))] for n in counts
    ]
    protected = rows.live & torch.from_numpy(rng.random(rows.live.shape) < rng.choice([0, 0.1]))
    starts = as_starts(rows, slots)
    return rows, protected, starts, Segments.of(starts, rows.mass, protected, rows.live), slots


@pytest.mark.parametrize("mode", ["strict", "reference"])
@pytest.mark.parametrize("weights", ["mass", "length", "equal"])
@pytest.mark.parametrize("min_quota", [0, 1, 4])
def test_quotas_are_those_of_the_loops(mode, weights, min_quota):
    """On 480 heads, with protected entries, tied weights, and minima that do not fit."""
    seen: Counter[str] = Counter()
    rule = AMS(min_quota=min_quota, weights=weights, mode=mode)
    for seed in range(80):
        rows, protected, _, parts, slots = segment_rows(seed)
        counts = rows.live.sum(-1)
        rng = np.random.default_rng(seed)
        low = protected.sum(-1).clamp(min=1)
        budget = low + (torch.from_numpy(rng.random((1, 6))) * (counts - low + 1)).long()
        found = rule.share(parts, budget)
        assert (found.units.sum(-1) == budget).all()
        for h, starts in enumerate(slots):
            n, mass = int(counts[0, h]), rows.head(h)
            lengths = np.diff([*starts, n]).tolist()
            bounds = list(zip(starts, [*starts[1:], n], strict=True))
            masses = [sum(mass[a:b]) for a, b in bounds]
            required = set(rows.marked(protected, h))
            weight = {"mass": masses, "length": lengths, "equal": [1.0] * len(lengths)}[weights]
            naive = allocation.strict_quotas if mode == "strict" else allocation.reference_quotas
            quotas, decisions = naive(
                lengths,
                weight,
                masses,
                [len(required & set(range(a, b))) for a, b in bounds],
                int(budget[0, h]),
                min_quota,
            )
            margin = min((m for m, _ in decisions), default=1.0)
            tight = bool(found.infeasible[0, h])
            whole = rows.exact or (weights != "mass" and not tight)  # then ties are ties
            if margin > 1e-8 or whole:
                assert found.units[0, h, : len(quotas)].tolist() == quotas
                assert not found.units[0, h, len(quotas) :].any()
                seen["compared"] += 1
                seen["ties"] += margin < 1e-300
                seen["tight"] += tight
    assert seen["compared"] >= 300
    assert seen["ties"] >= 3
    assert seen["tight"] >= 3 or min_quota == 0


def test_quotas_see_a_difference_that_the_loops_see():
    """The comparison is no tautology: with ties to the higher index the quotas are others."""
    rows, protected, _, parts, _ = segment_rows(3)
    budget = protected.sum(-1) + 9
    least = parts.length.clamp(max=1).maximum(parts.kept)
    weight = (parts.length > 0).double()
    found = strict_quotas(parts, weight, least, budget.minimum(rows.live.sum(-1)))
    flipped = strict_quotas(
        parts._replace(length=parts.length.flip(-1), kept=parts.kept.flip(-1)),
        weight.flip(-1),
        least.flip(-1),
        budget.minimum(rows.live.sum(-1)),
    )
    assert (found.units != flipped.units.flip(-1)).any()


def worked_example() -> tuple[Tensor, Tensor, Tensor]:
    """Mass, live and protected of the twelve entries in the specification's worked example."""
    mass = [0.31, 0.02, 0.02, 0.02, 0.02, 0.02, 0.10, 0.10, 0.10, 0.10, 0.10, 0.09]
    live = torch.ones(1, 1, 12, dtype=torch.bool)
    protected = torch.zeros_like(live)
    protected[..., [0, 11]] = True
    return torch.tensor(mass, dtype=torch.float64).view(1, 1, 12), live, protected


@pytest.mark.parametrize(
    ("mode", "starts", "masses", "quotas"),
    [
        ("strict", [0, 3, 6, 9], [0.35, 0.06, 0.30, 0.29], [2, 1, 2, 1]),
        ("reference", [0, 6, 9], [0.41, 0.30, 0.29], [2, 2, 2]),
    ],
)
def test_worked_example(mode, starts, masses, quotas):
    """Twelve entries, six to keep: merged then split evenly, or split then merged."""
    mass, live, protected = worked_example()
    rule = AMS(segment_mass=0.25, min_segment=2, max_segment=5, mode=mode)
    found = rule.segment(mass, live)
    assert found[0, 0].tolist() == starts
    parts = Segments.of(found, mass, protected, live)
    assert parts.mass.flatten().tolist() == pytest.approx(masses)
    assert rule.share(parts, torch.tensor([[6]])).units.flatten().tolist() == quotas


@dataclass(frozen=True)
class WorkedExample(AMS):
    """AMS whose usage is the mass of the worked example."""

    def _usage(self, view) -> tuple[Tensor, Tensor]:
        mass, live, _ = worked_example()
        return mass, torch.zeros_like(live)


@dataclass(frozen=True)
class Listed(Scorer):
    """Given scores by position; what it protects is given too."""

    scores: tuple[float, ...]
    protects: Protection

    def score(self, view) -> Tensor:
        """The score of each position."""
        return torch.tensor(self.scores, dtype=torch.float64)[view.pos]

    def protection(self, budget: int) -> Protection:
        """What is given."""
        return self.protects


#: Cumulative mass of the worked example: later entries score higher.
RISING = (0.31, 0.33, 0.35, 0.37, 0.39, 0.41, 0.51, 0.61, 0.71, 0.81, 0.91, 1.0)
#: Slots 4 and 5 score highest of all.
PEAKED = (0.0, 0.1, 0.2, 0.3, 0.9, 0.8, 0.4, 0.6, 0.5, 0.35, 0.7, 0.05)


@pytest.mark.parametrize("protects", [Protection(), Protection(1, 1)])
@pytest.mark.parametrize(
    ("mode", "scores", "kept"),
    [
        ("strict", RISING, {0, 2, 5, 7, 8, 11}),
        ("reference", RISING, {0, 5, 7, 8, 10, 11}),
        # what the scorer protects takes a place of its segment's two: slot 5 is no candidate
        ("reference", PEAKED, {0, 4, 7, 8, 10, 11}),
    ],
)
def test_worked_example_whole(mode, scores, kept, protects):
    """Six of twelve entries stay, the first and the last protected, by the scorer too or not."""
    if scores is PEAKED and not protects.sink:
        kept = {0, 4, 5, 7, 10, 11}  # slots 4 and 5 are candidates, and the final cut drops 8
    rule = WorkedExample(
        segment_mass=0.25, min_segment=2, max_segment=5, mode=mode, window=6, sink=1, recent=1
    )
    trace = make(n=12, layers=1, heads=1, group=1, prompt_len=12).trace()
    policy = Policy("worked", Listed(scores, protects), rule, Schedule(None))
    record = kvsim.replay(trace, policy, 6)
    assert set((record.evicted_at[0, 0] == NEVER).nonzero()[0].tolist()) == kept


def test_more_segments_than_entries_ends():
    """Sixteen segments and eight entries, where the released passes never end."""
    live = torch.ones(1, 1, 64, dtype=torch.bool)
    starts = torch.arange(0, 64, 4).expand(1, 1, 16)
    mass = torch.linspace(1, 2, 64, dtype=torch.float64).expand_as(live) / 96
    parts = Segments.of(starts, mass, torch.zeros_like(live), live)
    found = reference_quotas(parts, parts.mass, parts.length.clamp(max=8), torch.tensor([[8]]))
    assert found.infeasible.all()
    assert found.units.flatten().tolist() == [0] * 8 + [1] * 8


# -------------------------------------------------------------------------------- whole replays


@dataclass(frozen=True)
class Constant(Scorer):
    """Every entry is as good as any other."""

    def score(self, view) -> Tensor:
        """1 for every entry."""
        return torch.ones_like(view.pos, dtype=torch.float64)


def make(seed: int = 0, kind: str = "sink", **shape: int) -> Case:
    """A trace of 64 positions, 2 layers, 3 heads and groups of 2, unless `shape` says otherwise."""
    sizes = {"layers": 2, "heads": 3, "group": 2, "n": 64, "dim": 8, "prompt_len": 20, **shape}
    return make_case(kind, seed=seed, **sizes)


def with_heads(case: Case, order: list[int]) -> kvsim.Trace:
    """Some heads of a trace, in this order, each with its group of two."""
    qheads = [2 * h + g for h in order for g in range(2)]
    return kvsim.Trace.from_arrays(
        case.q[:, qheads],
        case.k[:, order],
        case.v[:, order],
        prompt_len=case.prompt_len,
        rope=kvsim.Rope.default(case.k.shape[-1]),
        scale=case.scale,
    )


def run(case: Case | kvsim.Trace, name: str = "ams", *, budget: int = 16, **params) -> kvsim.Record:
    """Events after rows 19, 31, 43 and 55, with what was decided at each."""
    trace = case.trace() if isinstance(case, Case) else case
    policy = kvsim.policy(name, **(params if not name.startswith("ams") else {**SMALL, **params}))
    return kvsim.replay(trace, policy, budget, interval=12, prefill=True, internals=True)


@pytest.mark.parametrize("mode", ["strict", "reference"])
def test_mix_of_one_does_not_depend_on_decay(mode):
    """beta = 1: the credit counts for nothing, however it decays; with beta = 0.1 it counts."""
    for seed in range(5):
        same = [
            run(make(seed), mode=mode, credit_mix=1.0, credit_decay=decay).evicted_at
            for decay in (0.0, 0.5, 0.9)
        ]
        assert (same[0] == same[1]).all()
        assert (same[0] == same[2]).all()
    assert any(
        (
            run(make(seed), mode=mode, credit_mix=0.1, credit_decay=0.0).evicted_at
            != run(make(seed), mode=mode, credit_mix=0.1, credit_decay=0.9).evicted_at
        ).any()
        for seed in range(5)
    )


def test_the_tova_of_the_release_protects_the_last_token():
    """It ranks first, as a token that kvpress's TOVA protects; also without recent entries."""
    case = make_case("sharp", layers=2, heads=2, group=2, n=60, prompt_len=20, seed=5)
    params = {"min_segment": 3, "max_segment": 9, "min_quota": 1, "recent": 0, "sink": 1}
    kept = [
        kvsim.replay(case.trace(), kvsim.policy(name, **params, **more), 12, interval=4)
        for name, more in (
            ("ams@release", {}),
            ("ams@release+tova@kvpress", {}),
            ("ams@release", {"protect_last": False}),
        )
    ]

    assert np.array_equal(kept[0].evicted_at, kept[1].evicted_at)
    assert not np.array_equal(kept[0].evicted_at, kept[2].evicted_at)
    assert all(kept[0].retained(row)[..., row].all() for row in kept[0].events)


@pytest.mark.parametrize("name", ["ams", "ams@release"])
def test_credit_of_usage_is_the_same_at_the_first_event_alone(name):
    """Usage that is not normalised is a multiple of the mass until two events are averaged."""
    later = 0
    for seed in range(5):
        terms = {"credit_mix": 0.3, "credit_decay": 0.5}
        mass = run(make(seed), name, **terms)
        usage = run(make(seed), name, **terms, credit_of="usage")
        assert ((mass.evicted_at == 19) == (usage.evicted_at == 19)).all()
        later += bool((mass.evicted_at != usage.evicted_at).any())
        for plans in usage.internals:
            np.testing.assert_allclose(plans.notes["mass"].sum(-1), 1.0)
    assert later >= 3


def test_first_event_is_without_credit():
    """Credit changes nothing at the first event, and something later."""
    later = 0
    for seed in range(5):
        on = run(make(seed), credit_mix=0.5)
        off = run(make(seed), credit=False)
        first = on.events[0]
        assert ((on.evicted_at == first) == (off.evicted_at == first)).all()
        later += (on.evicted_at != off.evicted_at).any()
    assert later > 0


@pytest.mark.parametrize(
    ("outer", "alone", "params"),
    [
        ("ams+tova", "tova", {"heads": "group"}),
        ("ams+snapkv", "snapkv", {"window": 3}),
        ("ams@release+snapkv", "snapkv", {"window": 3}),
        ("ams+h2o", "h2o", {}),
    ],
)
def test_one_segment_is_the_scorer_with_protection(outer, alone, params):
    """segment_mass >= 1 and no entry too many for a segment: sinks, recent, and the best others."""
    inner = {f"scorer__{key}": value for key, value in params.items()}
    # the released mode ranks protected entries with the others, and its quota is for all of them
    inner |= {"mode": "strict"}
    for seed in range(3):
        found = run(make(seed), outer, segment_mass=1.0, max_segment=64, **inner)
        expected = run(make(seed), alone, protect=Protection(sink=2, recent=4), **params)
        assert (found.evicted_at == expected.evicted_at).all()
        cut = run(make(seed), outer, **inner)
        assert (cut.evicted_at != expected.evicted_at).any()


@pytest.mark.parametrize("fill", ["head_max", "global_max", "head_mean", "observed", "zero"])
@pytest.mark.parametrize("weights", ["mass", "length", "equal"])
def test_every_segment_keeps_its_quota(fill, weights):
    """Segments between their bounds, each with exactly its quota, sinks and recent among them."""
    record = run(make(1), suffix_fill=fill, weights=weights)
    assert len(record.internals) == 4
    for plans in record.internals:
        kept = record.evicted_at[:, :, : plans.row + 1] > plans.row
        for i, h in np.ndindex(2, 3):
            pos = plans.pos[i, h]
            size = np.bincount(plans.groups[i, h])
            stays = np.bincount(plans.groups[i, h], weights=kept[i, h][pos])
            assert size.min() >= 3
            assert size.max() <= 8
            assert stays.tolist() == plans.quotas[i, h, : len(size)].tolist()
            assert stays.min() >= 1
            assert kept[i, h].sum() == 16
            assert kept[i, h][[0, 1]].all()
            assert kept[i, h][plans.row - 3 :].all()


@pytest.mark.parametrize("mode", ["strict", "reference"])
def test_minima_that_do_not_fit_still_give_the_budget(mode):
    """min_quota as long as the segments: as many of them as possible keep something."""
    record = run(make(2), mode=mode, min_quota=9, max_segment=8, budget=9)
    for plans in record.internals:
        kept = (record.evicted_at[:, :, : plans.row + 1] > plans.row).sum(-1)
        assert (kept == 9).all()
    if mode == "strict":
        assert all(plans.notes["infeasible"].all() for plans in record.internals)
        assert not any(plans.notes["infeasible"].any() for plans in run(make(2)).internals)


def test_budgets_below_what_is_protected():
    """Strict shortens the recent entries, the released mode the sinks; the record says so."""
    strict = run(make(3), sink=4, recent=32, budget=6)
    released = run(make(3), "ams@release", sink=4, recent=32, budget=6)
    for record in (strict, released):
        assert "budget 6 holds" in record.remark
    row = strict.events[-1]
    alive = [r.evicted_at[:, :, : row + 1] > row for r in (strict, released)]
    assert (alive[0].nonzero()[2].reshape(2, 3, 6) == [0, 1, 2, 3, row - 1, row]).all()
    assert (alive[1].nonzero()[2].reshape(2, 3, 6) == range(row - 5, row + 1)).all()


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("ams", {}),
        ("ams+snapkv", {"scorer__window": 3}),
        ("ams@release+h2o", {}),
        ("ams", {"suffix_fill": "global_max"}),
    ],
)
def test_heads_in_another_order(name, params):
    """The heads of the trace in another order: the same sets in that order."""
    case, order = make(4), [2, 0, 1]
    record, other = run(case, name, **params), run(with_heads(case, order), name, **params)
    assert (record.evicted_at[:, order] == other.evicted_at).all()


@pytest.mark.parametrize("fill", ["head_max", "head_mean", "observed", "zero", "global_max"])
def test_a_head_does_not_know_of_the_others(fill):
    """A head alone evicts what it does among others; with global_max it does not."""
    alike = []
    for seed in range(6):
        case = make(seed, kind="normal")
        params = {"suffix_fill": fill, "window": 10, "weights": "mass"}
        among = run(case, **params).evicted_at[:, :1]
        alone = run(with_heads(case, [0]), **params).evicted_at
        alike.append(bool((alone == among).all()))
    assert all(alike) == (fill != "global_max")


@pytest.mark.parametrize("mode", ["strict", "reference"])
def test_ties_keep_the_lowest_slots_of_a_segment(mode):
    """Scores that are all equal: of every segment the protected, then the lowest slots."""
    policy = kvsim.policy("ams", **SMALL, mode=mode)
    policy = replace(policy, scorer=Constant())
    record = kvsim.replay(make(5).trace(), policy, 16, interval=12, prefill=True, internals=True)
    again = kvsim.replay(make(5).trace(), policy, 16, interval=12, prefill=True)
    assert (record.evicted_at == again.evicted_at).all()
    for plans in record.internals:
        kept = record.evicted_at > plans.row
        for i, h in np.ndindex(2, 3):
            pos = plans.pos[i, h].tolist()
            required = {p for p in pos if p < 2 or p > plans.row - 4}
            segment = plans.groups if mode == "strict" else plans.notes["segment"]
            quotas = plans.quotas if mode == "strict" else plans.notes["quota"]
            parts = [
                [p for p, s in zip(pos, segment[i, h], strict=True) if s == g]
                for g in range(int(segment[i, h].max()) + 1)
            ]
            pick = allocation.pick_strict if mode == "strict" else allocation.pick_reference
            expected, decisions = pick(
                parts, quotas[i, h].tolist()[: len(parts)], dict.fromkeys(pos, 1.0), required
            )
            assert {p for p in pos if kept[i, h, p]} == expected
            assert all(margin == 0 for margin, _ in decisions)


def sharp_case(seed: int) -> Case:
    """Logits from -600 to -200 but for one peak at 0: all other weights are 0 in float32."""
    rng = np.random.default_rng(seed)
    case = make(seed, layers=1)
    z = rng.uniform(-600, -200, size=case.k.shape[:3])
    z[..., 2] = 0.0
    k, q = (np.zeros(x.shape, np.float32) for x in (case.k, case.q))
    k[..., 3], q[..., 3] = z, 1.0  # of eight dimensions the one that RoPE turns least
    return replace(case, q=q, k=k, v=case.v.astype(np.float32), scale=1.0)


@pytest.mark.parametrize(
    "name", ["ams+tova", "ams@release+tova", "ams+expected_attention@kvpress", "asl+ams+tova"]
)
def test_weights_that_underflow_are_ranked_by_their_logits(name):
    """In every segment the highest logits stay where all weights but one are 0, as in float64."""
    case = sharp_case(1)
    small = {**SMALL, "mode": "strict", "min_quota": 2}
    policy = kvsim.policy(name, **small)
    assert policy.scorer.log
    if policy.propagation is not None:
        return
    record = kvsim.replay(case.trace(), policy, 16, interval=12, prefill=True, internals=True)
    underflow = kvsim.policy(name, **small, log=False)
    other = kvsim.replay(case.trace(), underflow, 16, interval=12, prefill=True)
    assert (record.evicted_at != other.evicted_at).any()
    for plans in record.internals:
        kept = record.evicted_at > plans.row
        for h in range(3):
            pos, group = plans.pos[0, h], plans.groups[0, h]
            free = (pos >= 4) & (pos <= plans.row - 4)
            for g in np.unique(group[free]):
                inside = pos[free & (group == g)]
                stays = kept[0, h, inside]
                score = dict(zip(pos.tolist(), plans.scores[0, h].tolist(), strict=True))
                least = min((score[p] for p in inside[stays].tolist()), default=np.inf)
                assert all(score[p] <= least for p in inside[~stays].tolist())
                if name == "ams+tova":
                    z = case.k[0, h, inside, 3]
                    assert (np.argsort(z) == np.argsort([score[p] for p in inside])).all()


def test_logarithms_are_taken_where_order_is_all_that_counts():
    """Directly inside AMS: not where a wrapper computes with scores, nor where an epsilon helps."""
    assert kvsim.policy("ams").scorer.log
    assert not kvsim.policy("ams", log=False).scorer.log
    assert not kvsim.policy("ams+global+tova").scorer.scorer.log
    assert not kvsim.policy("ams+expected_attention").scorer.log
    assert kvsim.policy("ams+expected_attention", epsilon=0.0).scorer.log
    for name in ("tova", "adakv+tova", "chunkkv+tova", "criticalkv+tova"):
        assert not kvsim.policy(name).params.get("log", False), name


@pytest.mark.parametrize("name", ["tova", "tova@kvpress", "expected_attention", "ams"])
def test_logarithms_rank_as_the_scores_do(name):
    """Where nothing underflows the same entries stay, at any interval, and as the naive rule."""
    case = make(3, "normal")
    for interval in (1, 12):
        setup = {"interval": interval, "prefill": True}
        a, b = (
            kvsim.replay(case.trace(), kvsim.policy(name, log=log), 40, **setup)
            for log in (True, False)
        )
        assert (a.evicted_at == b.evicted_at).all()


@st.composite
def params_of_ams(draw) -> dict:
    """Every switch, and numbers that bind on a few dozen entries."""
    shortest = draw(st.integers(1, 6))
    return {
        "segment_mass": draw(st.sampled_from((0.02, 0.1, 1 / 7, 0.3, 1.5))),
        "min_segment": shortest,
        "max_segment": draw(st.integers(shortest, 14)),
        "min_quota": draw(st.integers(0, 4)),
        "credit": draw(st.booleans()),
        "credit_of": draw(st.sampled_from(("mass", "usage"))),
        "credit_decay": draw(st.sampled_from((0.0, 0.5, 0.9))),
        "credit_mix": draw(st.sampled_from((0.0, 0.5, 0.9))),
        "window": draw(st.integers(1, 14)),
        "pool_kernel": draw(st.sampled_from((1, 3, 5))),
        "suffix_fill": draw(
            st.sampled_from(("head_max", "global_max", "head_mean", "observed", "zero"))
        ),
        "mode": draw(st.sampled_from(("strict", "reference"))),
        "weights": draw(st.sampled_from(("mass", "length", "equal"))),
        "segmentation": draw(st.sampled_from(("mass", "mass", "fixed"))),
        "segment_length": draw(st.integers(1, 9)),
        "sink": draw(st.integers(0, 5)),
        "recent": draw(st.integers(0, 8)),
    }


def test_replay_with_any_parameters_equals_the_naive_replay():
    """40 replays of several events; most are decided without a near-tie to the end."""
    seen: Counter[str] = Counter()

    @settings(QUIET, max_examples=40)
    @given(
        params_of_ams(),
        st.sampled_from(
            (
                *("ams+tova", "ams+snapkv", "ams@release+tova", "ams+random"),
                *("ams@release+snapkv", "ams+global+tova"),
            )
        ),
        st.sampled_from(("normal", "sink", "sharp", "half")),
        st.integers(0, 10_000),
        st.integers(8, 20),
        st.sampled_from((2, 4, 8, 12)),
        st.booleans(),
    )
    def check(params, name, kind, seed, budget, interval, prefill):
        if name.endswith("snapkv"):
            params["scorer__window"] = 3
        case = make(seed, kind, n=44, prompt_len=14)
        setup = {"interval": interval, "prefill": prefill}
        outcome = reference.replay(
            case.q,
            case.k,
            case.v,
            prompt_len=case.prompt_len,
            policy=name,
            params=params,
            budget=budget,
            scale=case.scale,
            **setup,
        )
        record = kvsim.replay(case.trace(), kvsim.policy(name, **params), budget, **setup)
        assert outcome.agrees(record.evicted_at, case.tolerance, faint=case.faint)
        sure = outcome.sure_until(case.tolerance, faint=case.faint)
        seen["sure"] += int((sure == reference.NEVER).sum())
        seen["heads"] += sure.size
        seen["evict"] += bool((record.evicted_at != NEVER).any())

    check()
    assert seen["evict"] >= 28
    assert seen["sure"] >= 0.5 * seen["heads"]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"segment_mass": 0.0}, "segment_mass is 0.0; expected a number"),
        ({"min_segment": 0}, "min_segment is 0; expected an integer of at least 1"),
        ({"min_segment": 9, "max_segment": 8}, "max_segment is 8; expected at least min_segment"),
        ({"pool_kernel": 4}, "pool_kernel is 4; expected an odd integer of at least 1"),
        ({"credit_decay": 1.5}, "credit_decay is 1.5; expected a number from 0 to 1"),
        ({"credit_of": "score"}, "credit_of is 'score'; expected 'mass' or 'usage'"),
        ({"suffix_fill": "max"}, "suffix_fill is 'max'; expected 'head_max'"),
        ({"min_quota": -1}, "min_quota is -1; expected an integer of at least 0"),
    ],
)
def test_what_cannot_be_is_refused(params, message):
    """One line that says what was got and what was expected."""
    with pytest.raises(PolicyError, match=message):
        kvsim.policy("ams", **params)
