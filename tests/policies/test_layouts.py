"""One set for all heads or layers, and whole pages, by hand and by what they promise."""

import numpy as np
import pytest
import torch
from torch import Tensor

import kvsim
from kvsim.core.policy import Policy, Protection, Schedule, Scorer
from kvsim.core.view import View
from kvsim.errors import PolicyError
from kvsim.policies.paged import Paged
from kvsim.policies.union import Union
from kvsim.testing.strategies import make_case

#: Scores of five entries in two layers of two heads; the last entry is protected.
SCORES = [[[5, 1, 2, 0, 1.5], [1, 3, 2, 4, -9]], [[0, 8, 1, 2, 3], [6, 0, 2, 1, 7]]]


class Given(Scorer):
    """Scores by layer and head; those of protected entries mean nothing."""

    scale = "signed"

    def score(self, view: View) -> Tensor:
        """The given scores; [L, H, n]."""
        return torch.tensor(SCORES, dtype=torch.float64)[view.layers]

    def protection(self, budget: int) -> Protection:
        """The last entry."""
        return Protection(recent=1)


@pytest.mark.parametrize(
    ("across", "reduction", "expected"),
    [
        ("heads", "max", ({0, 3, 4}, {0, 1, 4})),  # 5 3 2 4 and 6 8 2 2
        ("heads", "mean", ({0, 1, 4}, {0, 1, 4})),  # 6 4 4 4 and 6 8 3 3
        ("heads", "rank", ({0, 1, 4}, {0, 1, 4})),  # 3+0 1+2 2+1 0+3, twice
        ("layers", "max", ({0, 1, 4}, {0, 1, 4})),  # 6 8 2 4
        ("layers", "mean", ({0, 1, 4}, {0, 1, 4})),  # 12 12 7 7
        ("layers", "rank", ({0, 1, 4}, {0, 1, 4})),  # 6 6 6 6
    ],
)
def test_one_set_is_that_of_the_reduced_score(across, reduction, expected):
    """Of ties the lower positions stay; what is protected counts in no rank."""
    trace = make_case("normal", layers=2, heads=2, n=5, prompt_len=5).trace()
    policy = Policy("given", Union(Given(), across, reduction), schedule=Schedule(None))
    kept = kvsim.replay(trace, policy, 3).retained(4)

    for layer, entries in enumerate(expected):
        for head in kept[layer]:
            assert set(head.nonzero()[0]) == entries


def test_one_set_needs_heads_that_hold_the_same():
    """An allocator that gives heads different sets ends with an error, as does a propagation."""
    trace = make_case("sharp", layers=2, heads=2, n=60, prompt_len=30, seed=2).trace()

    with pytest.raises(PolicyError, match="union: heads hold different entries"):
        kvsim.replay(trace, kvsim.policy("criticalkv+union+knorm"), 12, interval=8)
    with pytest.raises(PolicyError, match="drops rows of the prompt"):
        kvsim.policy("asl+union+snapkv", across="layers")


@pytest.mark.parametrize("interval", [3, 4, 16])
def test_pages_leave_as_they_were_written(interval):
    """After the prompt only whole pages of the written order leave, and the newest page stays."""
    trace = make_case("sharp", layers=2, heads=2, n=90, prompt_len=40, seed=5).trace()
    policy = kvsim.policy("paged+norm_ratio", page=4)
    record = kvsim.replay(trace, policy, 18, interval=interval)

    for evicted_at in record.evicted_at.reshape(-1, 90):
        written = np.flatnonzero((evicted_at >= 40) | (np.arange(90) >= 40))
        for start in range(0, len(written), 4):
            rows = evicted_at[written[start : start + 4]]
            assert len(set(rows)) == 1
        for row in record.events:
            assert 14 < (evicted_at[: row + 1] > row).sum() <= 18


def test_a_page_larger_than_the_budget_keeps_its_best_entries():
    """No event empties a cache, and protected entries stay whatever their page does."""
    trace = make_case("sharp", n=40, prompt_len=12, seed=1).trace()
    sink = kvsim.policy("paged+knorm", page=16, protect=Protection(sink=2))
    record = kvsim.replay(trace, sink, 5, interval=4)

    for row in record.events:
        kept = record.retained(row)
        assert kept[..., :2].all()
        assert (kept.sum(-1) <= 5).all()
        assert (kept.sum(-1) > 2).all() or row % 16 == 15
    assert Paged().effect == "near"
