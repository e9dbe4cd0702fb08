"""Traces in which some layers have a sliding window: who shares a budget, and what is said."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kvsim
from kvsim.attention import Formula, Rope
from kvsim.errors import PolicyError

DIM = 8
PLAIN = Formula(0.3)
WINDOW = Formula(0.3, window=50)
#: Layers as Gemma 2 has them.
MIXED = (WINDOW, PLAIN, WINDOW, PLAIN, PLAIN)


def make(formulas=MIXED, n=120, *, of=None, name="long", seed=0, **more):
    """A trace whose layers compute by these formulas; of them those at the places `of`, or all."""
    made = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(len(formulas), h, n, DIM, generator=made) * 1.5 for h in (4, 2, 2))
    q *= torch.linspace(0.2, 2.0, len(formulas))[:, None, None, None]  # layers prefer differently
    at = list(range(len(formulas)) if of is None else of)
    return kvsim.Trace.from_arrays(
        *(x[at] for x in (q, k, v)),
        prompt_len=n * 3 // 4,
        rope=Rope.default(DIM),
        formulas=[formulas[layer] for layer in at],
        name=name,
        **more,
    )


@pytest.mark.parametrize(
    "policy", ["pyramidkv", "ams+pyramidkv", "cake", "cake@gkv", "adakv+pyramidkv"]
)
def test_layers_that_see_the_whole_text_share_budgets_as_if_alone(policy):
    """What each keeps is what it keeps in a trace that has these layers alone."""
    trace, alone = make(), make(of=[1, 3, 4])
    one = kvsim.policy(policy, window=8)

    record = kvsim.replay(trace, one, 40, interval=16)

    assert record.layers == (1, 3, 4)
    assert np.array_equal(record.evicted_at, kvsim.replay(alone, one, 40, interval=16).evicted_at)
    dealt = "the budget is dealt over the 3 layers of the trace that see the whole text"
    assert (dealt in record.remark) == (policy != "cake@gkv")  # whose budgets are even


def test_a_layer_replayed_alone_has_the_budget_it_has_among_the_others():
    """The slope of PyramidKV goes over all layers that see the whole text."""
    one = kvsim.policy("pyramidkv", window=8)

    alone = kvsim.replay(make(), one, 40, layers=[3])

    assert np.array_equal(alone.evicted_at[0], kvsim.replay(make(), one, 40).evicted_at[1])
    assert alone.retained(89).sum(-1).mean() != 40


@pytest.mark.parametrize("policy", ["pyramidkv", "cake"])
def test_the_mean_over_replayed_layers_is_the_budget(policy):
    """Budgets differ by layer, and the layers together hold what was asked for."""
    record = kvsim.replay(make(), kvsim.policy(policy, window=8), 40)

    held = record.retained(89).sum(-1)  # after the event that ends the prompt
    assert held.mean() == 40
    assert len(set(held[:, 0].tolist())) == 3


def test_the_rule_of_implementations_goes_by_depth_in_the_model():
    """A layer keeps what it keeps where no layer has a window."""
    one = kvsim.policy("pyramidkv@reference", window=8)

    record = kvsim.replay(make(), one, 50)

    whole = kvsim.replay(make((PLAIN,) * 5), one, 50)
    assert np.array_equal(record.evicted_at, whole.evicted_at[[1, 3, 4]])
    assert len(set(record.retained(89).sum(-1)[:, 0].tolist())) == 3


def test_layers_that_share_a_budget_need_not_follow_each_other():
    """Of a trace without windows too: those asked for share their own part."""
    one = kvsim.policy("cake", window=8)

    some = kvsim.replay(make((PLAIN,) * 5), one, 40, layers=[0, 2, 4])

    alone = kvsim.replay(make((PLAIN,) * 5, of=[0, 2, 4]), one, 40)
    assert np.array_equal(some.evicted_at, alone.evicted_at)


def test_a_window_that_hides_nothing_does_not_tell_layers_apart():
    """A short text goes through layers with and without a window alike."""
    one = kvsim.policy("cake", window=4)

    record = kvsim.replay(make(n=50), one, 20)

    assert record.layers == (0, 1, 2, 3, 4)
    assert record.remark == ""
    plain = kvsim.replay(make((PLAIN,) * 5, n=50), one, 20)
    assert np.array_equal(record.evicted_at, plain.evicted_at)


def test_refusals_name_the_windows_and_a_way_out():
    """Which layers, how many tokens, and what to do, in one line."""
    sinks = Formula(0.3, sinks=(0.0, 1.0, 2.0, 3.0))
    cake = kvsim.policy("cake", window=8)
    with pytest.raises(PolicyError) as differ:
        kvsim.replay(make((WINDOW, PLAIN, WINDOW, sinks)), cake, 40)
    assert "layers 1 and 3 of long differ in their sinks" in str(differ.value)
    assert "without layers 0, 2 (50 tokens), which have a sliding window" in str(differ.value)
    assert "such as snapkv" in str(differ.value)

    narrow = Formula(0.3, window=20)
    with pytest.raises(PolicyError) as across:
        kvsim.replay(make((WINDOW, narrow, WINDOW, PLAIN)), kvsim.policy("asl", window=8), 40)
    assert "layers 0, 2 (50 tokens), layer 1 (20 tokens) have a sliding" in str(across.value)
    assert "at most 20 tokens" in str(across.value)


def test_without_a_layer_to_replay_the_stored_ones_are_spoken_of():
    """A trace of some layers says nothing of the model's others, and budgets are not dealt."""
    some = make(of=[0, 2], layer_ids=(0, 2), meta={"model": {"layers": 5}})
    every = "every layer that it holds has a sliding window that is shorter than its 120 tokens"
    for policy in ("tova", "pyramidkv", "cake"):
        with pytest.raises(PolicyError) as said:
            kvsim.replay(some, kvsim.policy(policy), 70)
        assert f"{every}: layers 0-1 (50 tokens)" in str(said.value)
        assert "record other layers of the model, or a text of at most 50" in str(said.value)
    with pytest.raises(PolicyError) as said:
        kvsim.replay(make((WINDOW,) * 2), kvsim.policy("tova"), 70)
    assert "other layers" not in str(said.value)
