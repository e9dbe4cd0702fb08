"""AMS: its vectorised steps against naive loops, and what must hold of whole replays."""

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
from kvsim.core.policy import Policy, Protection, Schedule, Scorer
from kvsim.core.record import NEVER
from kvsim.policies.ams import AMS, SegmentSums, cuts, merge, split
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


@functools.cache
def segment_rows(seed: int) -> tuple[Rows, Tensor, Tensor, SegmentSums, list[list[int]]]:
    """(rows, protected, starts, segments, starts as slots) of mass rows cut anywhere."""
    rng = np.random.default_rng(1000 + seed)
    rows = mass_rows(seed)
    counts = rows.live.sum(-1)[0].tolist()
    slots = [
        [0, *(s for s in range(1, n) if rng.random() < rng.choice([0.1, 0.5]))] for n in counts
    ]
    protected = rows.live & torch.from_numpy(rng.random(rows.live.shape) < rng.choice([0, 0.1]))
    starts = as_starts(rows, slots)
    return rows, protected, starts, SegmentSums.of(starts, rows.mass, protected, rows.live), slots


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


def worked_example() -> tuple[Tensor, Tensor, Tensor]:
    """Mass, live and protected of the twelve entries in the specification's worked example."""
    mass = [0.31, 0.02, 0.02, 0.02, 0.02, 0.02, 0.10, 0.10, 0.10, 0.10, 0.10, 0.09]
    live = torch.ones(1, 1, 12, dtype=torch.bool)
    protected = torch.zeros_like(live)
    protected[..., [0, 11]] = True
    return torch.tensor(mass, dtype=torch.float64).view(1, 1, 12), live, protected


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


def make(seed: int = 0, kind: str = "sink", **shape: int) -> Case:
    """A trace of 64 positions, 2 layers, 3 heads and groups of 2, unless `shape` says otherwise."""
    sizes = {"layers": 2, "heads": 3, "group": 2, "n": 64, "dim": 8, "prompt_len": 20, **shape}
    return make_case(kind, seed=seed, **sizes)


def run(case: Case | kvsim.Trace, name: str = "ams", *, budget: int = 16, **params) -> kvsim.Record:
    """Events after rows 19, 31, 43 and 55, with what was decided at each."""
    trace = case.trace() if isinstance(case, Case) else case
    policy = kvsim.policy(name, **(params if not name.startswith("ams") else {**SMALL, **params}))
    return kvsim.replay(trace, policy, budget, interval=12, prefill=True, internals=True)


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
