"""Rollouts under eviction and the objective of RL-Sparse."""

from math import exp

import pytest
import torch

import kvsim
from kvsim.errors import CaptureError, PolicyError
from kvsim.runner.decoding import Decoding, RunningModel
from kvsim.studies.interop.masks import Masks
from kvsim.studies.interop.rollouts import advantages, log_likelihoods, objective, rollouts
from small_model import small

PROMPT, NEW, BUDGET, INTERVAL, COUNT = [*range(1, 31)], 30, 20, 8, 3
STOP = {7, 11}


def sampled(name: str = "gkv", count: int = COUNT, **params: int):
    """Rollouts of the small model, with a fixed seed."""
    return rollouts(
        RunningModel(small()),
        PROMPT,
        kvsim.policy(name, **params),
        BUDGET,
        count=count,
        new_tokens=NEW,
        stop=STOP,
        generator=torch.Generator().manual_seed(3),
        interval=INTERVAL,
        prefill=True,
    )


@pytest.mark.parametrize(
    ("name", "params"), [("gkv", {"window": 4}), ("h2o", {}), ("adakv+snapkv", {"window": 4})]
)
def test_rollouts_are_those_of_the_live_runner(name, params):
    """Each response, fed to a live run by itself, has the same kept sets and likelihoods."""
    running, policy = RunningModel(small()), kvsim.policy(name, **params)
    group = sampled(name, **params)
    assert len(group) == COUNT
    for each in group:
        n, options = len(each.tokens), {"interval": INTERVAL, "prefill": True}
        with Decoding(running, policy, BUDGET, prompt_len=30, n_pos=n, **options) as live:
            logits = live.feed(each.tokens, logits=n - 29)
        seen = [masks.last_row.clamp(max=n - 1) for masks in (each.masks, Masks.of(live.record()))]
        assert torch.equal(*seen)
        assert int(seen[0].min()) < n - 1
        own = logits[:-1].log_softmax(-1).gather(1, torch.tensor(each.tokens[30:])[:, None])
        torch.testing.assert_close(each.logprobs, own.flatten(), rtol=1e-4, atol=1e-4)
        ends = [token in STOP for token in each.tokens[30:]]
        assert not any(ends[:-1])
        assert each.ended == ends[-1]
        assert each.ended or n == 60


def test_training_sees_what_the_sampler_saw():
    """The pass with gradients has the sampler's likelihoods; without masks it has others."""
    group = sampled(window=4)
    for new, each in zip(log_likelihoods(small(), group), group, strict=True):
        torch.testing.assert_close(new.detach(), each.logprobs, rtol=1e-4, atol=1e-4)
    dense = log_likelihoods(small(), group, masked=False)
    gaps = [
        float((new.detach() - each.logprobs).abs().max())
        for new, each in zip(dense, group, strict=True)
    ]
    assert max(gaps) > 1e-3


def test_the_objective_is_equation_6():
    """A loop over tokens of the clipped, weighted ratios; its gradient at ratio 1 is the weight."""
    group = sampled(window=4)
    weights = torch.tensor([1.5, -0.5, -1.0])
    shift = torch.Generator().manual_seed(1)
    new = [
        (each.logprobs + 0.3 * torch.randn(len(each.logprobs), generator=shift)).requires_grad_()
        for each in group
    ]
    expected = 0.0
    for values, each, weight in zip(new, group, weights.tolist(), strict=True):
        terms = []
        for a, b in zip(values.tolist(), each.logprobs.tolist(), strict=True):
            ratio = exp(a - b)
            terms.append(min(ratio * weight, min(max(ratio, 0.8), 1.2) * weight))
        expected += sum(terms) / len(terms) / COUNT
    assert float(objective(new, group, weights).detach()) == pytest.approx(expected, abs=1e-5)
    objective(new, group, weights, corrected=False).backward()
    for values, weight in zip(new, weights.tolist(), strict=True):
        expected = weight / len(values) / COUNT
        torch.testing.assert_close(values.grad, torch.full_like(values, expected))


def test_advantages_compare_with_the_group():
    """Rewards are standardised; equal ones and responses that were cut say nothing."""
    assert advantages([1, 0, 0, 1], [False] * 4).tolist() == [1, -1, -1, 1]
    assert advantages([1, 0, 0, 1], [True, False, False, False]).tolist() == [0, -1, -1, 1]
    assert advantages([1, 1], [False] * 2).tolist() == [0, 0]


@pytest.mark.parametrize("name", ["kivi", "quest", "fastkv", "kvzip", "streaming_llm@original"])
def test_what_a_mask_cannot_say_is_refused(name):
    """Rounded or rotated keys, readers, dropped rows and repeated contexts have no mask."""
    with pytest.raises(PolicyError, match="expected a policy that evicts alone"):
        sampled(name)


def test_no_responses_are_refused():
    """A count below 1 is one line."""
    with pytest.raises(CaptureError, match="count is 0, expected at least 1 response"):
        sampled(count=0)
