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


def kept(name, **params):
    """Entries of TriAttention that stay at the end, bool [layer, head, pos]."""
    policy = kvsim.policy(name, calibration="prefix:9", **params)
    record = kvsim.replay(CASE.trace(), policy, 36, interval=10)
    assert len(record.events) > 1
    return record.retained(max(record.events))


def test_nominations_rank_as_the_largest_score():
    """The best by the largest score of any head are nominated by that head, so union is a union."""
    ours = kept("triattention@union")
    composed = kept("union+triattention", across="layers", protect_prompt=True)
    assert (ours == composed).all()
    assert (ours == ours[:1, :1]).all()
    assert (ours != kept("triattention")).any()


def test_heads_of_one_place_share_a_set():
    """With `per_head`, KV heads differ, and layers do not."""
    for name in ("@per_head", "@vllm", "@sglang"):
        sets = kept(f"triattention{name}", **({"recent": 4} if name == "@vllm" else {}))
        assert (sets == sets[:1]).all()
        assert (sets[:, 0] != sets[:, 1]).any()


class Ragged(Allocator):
    """The first head keeps fewer."""

    shared = "heads"

    def plan(self, view, scores, protected):
        """Two entries fewer in the first head."""
        return Plan(view.budget - torch.tensor([2, 0]))


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("h2o@sparse_vllm", {"recent": 4}),
        ("rkv@sparse_vllm", {"sink": 2, "recent": 4}),
        ("triattention@union", {"protect_prompt": False, "calibration": "prefix:9"}),
    ],
)
def test_heads_without_a_common_set_are_refused(name, params):
    """Heads share a set; where an allocator leaves them different entries there is none."""
    policy = kvsim.policy(name, **params)
    sets = kvsim.replay(CASE.trace(), policy, 16, interval=10).retained(59)
    assert (sets == sets[:, :1]).all()
    with pytest.raises(PolicyError, match="expected one set for all"):
        kvsim.replay(CASE.trace(), replace(policy, allocator=Ragged()), 16, interval=10)


@pytest.mark.parametrize("budgets", ["h2o", "pyramidkv"])
@pytest.mark.parametrize("prefill", [True, False])
def test_each_row_votes_once_in_h2o(prefill, budgets):
    """Chunks that are not cut vote by themselves, and layers start after their own last event."""
    policy, layers = kvsim.policy("h2o@sparse_vllm", recent=3, window=5), kvsim.policy(budgets)
    rule = replace(reference.rule_of(policy), layer_budgets=reference.rule_of(layers).layer_budgets)
    policy = replace(policy, layer_budgets=layers.layer_budgets)

    for chunk in (None, 8, 13):
        fires = {"interval": 7, "prefill": prefill}
        record = kvsim.replay(CASE.trace(), policy, 28, prefill_chunk=chunk, **fires)
        naive = loops.replay(CASE, rule, budget=28, chunk=chunk, **fires)
        assert naive.agrees(record.evicted_at, CASE.tolerance)
