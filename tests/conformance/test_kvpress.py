"""Kept sets at the end of the prefill equal kvpress's, outside ties at the cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import DynamicCache

import kvsim
from kvsim.testing import reference

pytestmark = pytest.mark.peers

LENGTH = 150

# (press, its arguments, kernel, our policy, its parameters, last columns that are not scored)
PAIRS = [
    ("SnapKVPress", {"window_size": 64}, "sdpa", "snapkv@kvpress", {}, 64),
    ("SnapKVPress", {"window_size": 16}, "sdpa", "snapkv@kvpress", {"window": 16}, 16),
    (
        "SnapKVPress",
        {"window_size": 8, "kernel_size": 7},
        "eager",
        "snapkv@kvpress",
        {"window": 8, "pool_kernel": 7},
        8,
    ),
    ("TOVAPress", {}, "sdpa", "tova@kvpress", {}, 1),
    ("TOVAPress", {}, "eager", "tova@kvpress", {}, 1),
    ("StreamingLLMPress", {}, "sdpa", "streaming_llm", {}, None),
    ("StreamingLLMPress", {"n_sink": 1}, "sdpa", "streaming_llm", {"sink": 1}, None),
    ("ObservedAttentionPress", {}, "eager", "h2o@kvpress", {}, 0),
]


def pressed(press, model, tokens):
    """Scores of a press [layer, head, pos], and the keys that it left in the cache, per layer."""
    scores = {}
    score = press.score

    def listening(module, *args):
        scores[module.layer_idx] = score(module, *args)
        return scores[module.layer_idx]

    press.score = listening
    cache = DynamicCache()
    with torch.no_grad(), press(model):
        model(torch.tensor([tokens]), past_key_values=cache)
    stacked = torch.cat([scores[layer] for layer in sorted(scores)])
    return stacked.double().numpy(), [layer.keys[0] for layer in cache.layers]


def assert_same_set(kept: set[int], scores: np.ndarray, budget: int) -> None:
    """The kept set has the budget's size, all that scores above the cut, and nothing below it."""
    cut = np.sort(scores)[-budget]
    near = 1e-5 * abs(cut)
    assert len(kept) == budget
    assert set(np.flatnonzero(scores > cut + near)) <= kept
    assert kept <= set(np.flatnonzero(scores >= cut - near))


def positions_of(keys: torch.Tensor, recorded: torch.Tensor) -> set[int]:
    """Positions of cached keys [n, dim] among the recorded ones [pos, dim]."""
    distance = torch.cdist(keys.double(), recorded.double())
    assert float(distance.min(-1).values.max()) < 1e-4
    return set(distance.argmin(-1).tolist())


@pytest.mark.parametrize("ratio", [0.2, 0.5, 0.55])
@pytest.mark.parametrize(
    ("press", "arguments", "kernel", "name", "params", "unscored"),
    PAIRS,
    ids=[f"{press}-{kernel}-{i}" for i, (press, _, kernel, *_) in enumerate(PAIRS)],
)
def test_prefill_sets_equal_kvpress(
    kvpress, random_model, prompt, press, arguments, kernel, name, params, unscored, ratio
):
    """On random models of three families: scores, kept sets and cached keys of every head."""
    seed = int(100 * ratio)
    model, tokens = random_model(seed, kernel), prompt(LENGTH, seed)
    trace = kvsim.capture(model, None, tokens, max_new_tokens=0)
    subject = getattr(kvpress, press)(ratio, **arguments)
    scores, cached = pressed(subject, model, tokens)
    budget = kvpress.utils.compute_n_kept(LENGTH, ratio)
    # the prefill event alone, whatever the policy's own schedule
    record = kvsim.replay(
        trace, kvsim.policy(name, **params), budget, interval=LENGTH, internals=True
    )
    naive = reference.replay(
        trace.q,
        trace.k,
        trace.v,
        prompt_len=LENGTH,
        policy=name,
        params=params,
        budget=budget,
        interval=LENGTH,
        scale=trace.scale,
    )
    assert record.events == [LENGTH - 1]
    (plans,) = record.internals
    if unscored is not None:
        ours, theirs = (x[..., : LENGTH - unscored] for x in (plans.scores, scores))
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-7)
    for layer in range(trace.n_layers):
        for head in range(trace.n_heads):
            for evicted_at in (record.evicted_at, naive.evicted_at):
                kept = set(np.flatnonzero(evicted_at[layer, head] > LENGTH))
                assert_same_set(kept, scores[layer, head], budget)
            left = positions_of(cached[layer][head], trace.k[layer, head])
            assert_same_set(left, scores[layer, head], budget)
