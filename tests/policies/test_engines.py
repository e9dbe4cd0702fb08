"""Rules of engines: sets that heads or layers share."""

from dataclasses import replace

import pytest
import torch

import kvsim
import reference
from kvsim.core.policy import Allocator, Plan
from kvsim.errors import PolicyError
from kvsim.testing import loops
from kvsim.testing.strategies import make_case


CASE = make_case("sharp", layers=3, heads=2, group=2, n=60, prompt_len=30, seed=3)


@pytest.fixture
def trace():
    """Three layers of two KV heads, two query heads each."""
    return CASE.trace()


def kept(trace, name, budget=36, **params):
    """Entries that stay at the end, bool [layer, head, pos]."""
    if "triattention" in name:
        params["calibration"] = "prefix:9"
    record = kvsim.replay(trace, kvsim.policy(name, **params), budget, interval=10)
    assert len(record.events) > 1
    return record.retained(max(record.events))


def test_nominations_rank_as_the_largest_score(trace):
    """The best by the largest score of any head are nominated by that head, so union is a union."""
    ours = kept(trace, "triattention@union")
    composed = kept(trace, "union+triattention", across="layers", protect_prompt=True)
    assert (ours == composed).all()
    assert (ours == ours[:1, :1]).all()
    assert (ours != kept(trace, "triattention")).any()


def test_heads_of_one_place_share_a_set(trace):
    """With `per_head`, KV heads differ, and layers do not."""
    for name in ("@per_head", "@vllm", "@sglang"):
        sets = kept(trace, f"triattention{name}", **({"recent": 4} if name == "@vllm" else {}))
        assert (sets == sets[:1]).all()
        assert (sets[:, 0] != sets[:, 1]).any()


class Ragged(Allocator):
    """The first head keeps fewer."""

    shared = "heads"

    def plan(self, view, scores, protected):
        """Two entries fewer in the first head."""
        fewer = torch.tensor([2, 0])
        return Plan(view.budget - fewer)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("h2o@sparse_vllm", {"recent": 4}),
        ("snapkv@sparse_vllm", {"sink": 2, "recent": 4}),
        ("rkv@sparse_vllm", {"sink": 2, "recent": 4}),
        ("triattention@union", {"protect_prompt": False, "calibration": "prefix:9"}),
    ],
)
def test_heads_without_a_common_set_are_refused(trace, name, params):
    """Heads share a set; where an allocator leaves them different entries there is none."""
    policy = kvsim.policy(name, **params)
    sets = kvsim.replay(trace, policy, 16, interval=10).retained(59)
    assert (sets == sets[:, :1]).all()
    with pytest.raises(PolicyError, match="expected one set for all"):
        kvsim.replay(trace, replace(policy, allocator=Ragged()), 16, interval=10)


@pytest.mark.parametrize("budgets", ["h2o", "pyramidkv"])
@pytest.mark.parametrize("prefill", [True, False])
def test_each_row_votes_once_in_h2o(prefill, budgets):
    """Chunks that are not cut vote by themselves, and layers start after their own last event."""
    policy, layers = kvsim.policy("h2o@sparse_vllm", recent=3, window=5), kvsim.policy(budgets)
    rule, same = reference.rule_of(policy), reference.rule_of(layers)
    policy = replace(policy, layer_budgets=layers.layer_budgets)
    rule = replace(rule, layer_budgets=same.layer_budgets)

    for chunk in (None, 8, 13):
        fires = {"interval": 7, "prefill": prefill}
        record = kvsim.replay(CASE.trace(), policy, 28, prefill_chunk=chunk, **fires)
        naive = loops.replay(CASE, rule, budget=28, chunk=chunk, **fires)
        assert naive.agrees(record.evicted_at, CASE.tolerance)
