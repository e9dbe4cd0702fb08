"""AMS: its worked example, and what must hold of whole replays."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

import kvsim
from kvsim.core.policy import Policy, Protection, Schedule, Scorer
from kvsim.core.record import NEVER
from kvsim.policies.ams import AMS, SegmentSums, cuts
from kvsim.testing.strategies import Case, make_case
from reference import allocation

#: Parameters small enough to bind on a few dozen entries.
SMALL = {
    "segment_mass": 0.1,
    "min_segment": 3,
    "max_segment": 8,
    "window": 6,
    "sink": 2,
    "recent": 4,
}


@pytest.mark.parametrize("strict", [True, False])
def test_multiples_that_rounding_leaves_unreached(strict):
    """Left out, or as in the release a cut before the last entry; beside a head that has pads."""
    mass = torch.zeros(1, 2, 8, dtype=torch.float64)
    mass[0, 0] = torch.tensor([0.1] * 7 + [0.1999999])
    mass[0, 1, 3:] = torch.tensor([0.1, 0.2, 0.2, 0.2, 0.1999999])
    starts = cuts(mass, mass > 0, 0.9, keep_unreached=not strict)

    cut = [{slot for slot in row if slot < 8} for row in starts[0].tolist()]
    assert cut == ([{0}, {3}] if strict else [{0, 7}, {3, 7}])


@pytest.mark.parametrize("mode", ["strict", "reference"])
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 64)), min_size=1, max_size=8),
    st.integers(0, 4),
    st.data(),
)
def test_quotas_are_those_of_the_loops(mode, segments, min_quota, data):
    """With protected entries, tied weights, and minima that do not fit."""
    lengths, units = zip(*segments, strict=True)
    assume(sum(units) > 0)
    kept = [data.draw(st.integers(0, length)) for length in lengths]
    budget = data.draw(st.integers(max(1, sum(kept)), sum(lengths)))
    mass = [each / 64 for each in units]  # whose sums are exact
    sizes = (torch.tensor(x).view(1, 1, -1) for x in (lengths, kept))
    parts = SegmentSums(torch.zeros(1, 1, 1), *sizes, torch.tensor(mass).double().view(1, 1, -1))

    found = AMS(min_quota=min_quota, mode=mode).share(parts, torch.tensor([[budget]]))

    naive = allocation.strict_quotas if mode == "strict" else allocation.reference_quotas
    quotas, _ = naive([*lengths], mass, mass, kept, budget, min_quota)
    assert found.units[0, 0].tolist() == quotas


def worked_example() -> tuple[Tensor, Tensor, Tensor]:
    """Mass, live and protected of the twelve entries in the specification's worked example."""
    mass = [0.31, 0.02, 0.02, 0.02, 0.02, 0.02, 0.10, 0.10, 0.10, 0.10, 0.10, 0.09]
    live = torch.ones(1, 1, 12, dtype=torch.bool)
    protected = torch.zeros_like(live)
    protected[..., [0, 11]] = True
    return torch.tensor(mass, dtype=torch.float64).view(1, 1, 12), live, protected


class WorkedExample(AMS):
    """AMS whose usage is the mass of the worked example."""

    def _usage(self, view) -> tuple[Tensor, Tensor]:
        mass, live, _ = worked_example()
        return mass, torch.zeros_like(live)


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


@pytest.mark.parametrize(
    ("fill", "weights"), [("head_max", "mass"), ("observed", "length"), ("zero", "equal")]
)
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


def test_budgets_below_what_is_protected():
    """Strict shortens the recent entries, the released mode the sinks."""
    strict = run(make(3), sink=4, recent=32, budget=6)
    released = run(make(3), "ams@release", sink=4, recent=32, budget=6)
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
