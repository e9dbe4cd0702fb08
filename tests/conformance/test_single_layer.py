"""Replaying one layer equals running the model with only that layer evicting.

The model runs teacher-forced over the recorded tokens; its attention function hides, in one layer,
what the Record says each KV head has evicted. Tolerance: 1e-5 of the largest output in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import kvsim
from kvsim.analysis.output.error import output_error
from kvsim.testing import loops
from reference import metrics as loop_metrics
from traces import changed

TOLERANCE = 1e-5
PROMPT, LENGTH = 40, 90
SETUPS = [
    ("tova", {}, 12, None),
    ("h2o", {}, 12, None),
    ("streaming_llm", {}, 12, None),
    ("random", {}, 12, 5),
    ("snapkv", {"window": 6}, 16, 10),
]


class Evicting:
    """An eager attention function that hides evicted entries in one layer and keeps what it saw."""

    def __init__(self, layer: int, evicted_at: Tensor) -> None:
        self.layer, self.evicted_at = layer, evicted_at  # int32 [head, pos]
        self.seen: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = {}

    def __call__(self, module, q, k, v, mask, scaling, **rest):
        """q [1, qhead, row, dim], k and v [1, head, pos, dim] -> out [1, row, qhead, dim]."""
        n, group = q.shape[2], q.shape[1] // k.shape[1]
        row, pos = torch.arange(n).unsqueeze(-1), torch.arange(n)
        hidden = (pos > row).expand(k.shape[1], n, n)
        if module.layer_idx == self.layer:
            hidden = hidden | (row > self.evicted_at.unsqueeze(1))
        keys, values, hidden = (x.repeat_interleave(group, 0) for x in (k[0], v[0], hidden))
        z = (q[0] @ keys.transpose(-1, -2)) * scaling
        out = z.masked_fill(hidden, -torch.inf).softmax(-1) @ values  # [qhead, row, dim]
        self.seen[module.layer_idx] = (q[0], k[0], v[0], out)
        return out.transpose(0, 1).unsqueeze(0), None


@contextmanager
def attention(model, kernel) -> Iterator[None]:
    """The model with `kernel` as its attention function, and back again."""
    name, before = "kvsim_evicting", model.config._attn_implementation
    ALL_ATTENTION_FUNCTIONS.register(name, kernel)
    model.config._attn_implementation = name
    try:
        yield
    finally:
        model.config._attn_implementation = before
        del ALL_ATTENTION_FUNCTIONS._global_mapping[name]


@pytest.mark.parametrize(
    ("name", "params", "budget", "interval"), SETUPS, ids=[s[0] for s in SETUPS]
)
def test_single_layer_replay_is_a_live_run(random_model, prompt, name, params, budget, interval):
    """Inputs of the layer, its kept sets, its output and its error are those of the live run."""
    model, tokens = random_model(7), prompt(LENGTH, 7)
    recorded = kvsim.capture(model, None, tokens, max_new_tokens=0)
    q, k, v = recorded.q, recorded.k, recorded.v
    # the same rows, of which the first ones are the prompt
    trace = changed(recorded, prompt_len=PROMPT, attn_out=recorded.attn_out, lse=recorded.lse)
    policy = kvsim.policy(name, **params)
    for layer in range(trace.n_layers):
        record = kvsim.replay(trace, policy, budget, interval=interval, layers=[layer])
        kernel = Evicting(layer, torch.from_numpy(record.evicted_at[0]))
        with attention(model, kernel), torch.no_grad():
            model(torch.tensor([tokens]), use_cache=False)
        live_q, live_k, live_v, live_out = kernel.seen[layer]
        size = float(recorded.attn_out[layer].abs().max())

        # what enters the layer does not depend on what the layer evicts
        for mine, its in [(q[layer], live_q), (k[layer], live_k), (v[layer], live_v)]:
            torch.testing.assert_close(mine, its, rtol=TOLERANCE, atol=TOLERANCE)
        # so the policy decides alike on what the live run offers it
        rotary = {"rope": recorded.rope, "scale": recorded.scale, "layer_ids": [0]}
        lived = {"q": live_q[None], "k": live_k[None], "v": live_v[None]}
        again = changed(recorded, **lived, **rotary, prompt_len=PROMPT)
        if name != "random" or layer == 0:  # whose draws depend on the layer's number
            found = kvsim.replay(again, policy, budget, interval=interval)
            assert (found.evicted_at == record.evicted_at).all()

        # the live output is what the naive replay gives
        evicted_at = np.full(k.shape[:3], loops.NEVER)
        evicted_at[layer] = record.evicted_at[0]
        naive = loop_metrics.outputs(q, k, v, evicted_at, scale=recorded.scale)
        gap = np.abs(naive.out_seen[layer] - live_out.numpy()).max()
        assert gap < TOLERANCE * size

        # and its distance from the full output is the error that is reported
        full = recorded.attn_out[layer].double()
        moved = (full - live_out.double()).norm(dim=-1) / full.norm(dim=-1)
        error = output_error(trace, [record])[0].error[0]
        np.testing.assert_allclose(error, moved.numpy(), rtol=1e-3, atol=10 * TOLERANCE)
        assert error[:, :PROMPT].max() == 0
        assert error[:, PROMPT:].max() > 0.01

        # only this layer evicted: deeper ones see everything, of inputs that have moved
        for deeper in range(layer + 1, trace.n_layers):
            assert not torch.allclose(kernel.seen[deeper][0], q[deeper], atol=1e-3)
