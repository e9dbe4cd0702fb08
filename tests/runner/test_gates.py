"""Live runs and the judge on models with a gate between attention and output projection."""

import functools

import numpy as np
import pytest
import torch
from transformers import cache_utils

import kvsim
from kvsim.runner.decoding import Decoding, RunningModel
from kvsim.runner.judging import Judge
from live_runs import judged_logits
from tests.hybrids import hybrid
from tests.recorder.test_gates import AFMOE

PROMPT, LENGTH, BUDGET = 40, 56, 24
TOKENS = torch.randperm(64, generator=torch.Generator().manual_seed(0))[:LENGTH].tolist()
#: A hybrid needs a cache with states.
MODELS = ["afmoe", *["qwen3_next"] * hasattr(cache_utils, "LinearAttentionLayer")]
LAST = {"interval": 1000, "prefill": True, "layers": [1]}


@functools.cache
def recorded(name):
    """A small random model, and its trace with gates and projections."""
    model = AFMOE.build("sdpa") if name == "afmoe" else hybrid(name)
    trace = kvsim.capture(model, None, TOKENS[:PROMPT], response=TOKENS[PROMPT:], o_proj=True)
    assert trace.has("gate")
    return model, RunningModel(model), trace


@pytest.mark.parametrize("name", MODELS)
def test_one_evicting_layer_keeps_what_its_replay_keeps_and_is_judged(name):
    """The judge gives the logits of that run, and with all entries the model's own."""
    model, running, trace = recorded(name)
    replayed = kvsim.replay(trace, "h2o", BUDGET, **LAST)
    of = {"prompt_len": PROMPT, "n_pos": LENGTH, **LAST}
    with Decoding(running, kvsim.policy("h2o"), BUDGET, **of) as decoding:
        first = decoding.feed(TOKENS[:PROMPT])
        rest = decoding.feed(TOKENS[PROMPT:], logits=LENGTH - PROMPT)
    with torch.no_grad():
        own = model(torch.tensor([TOKENS])).logits[0, PROMPT - 1 : -1]

    of_live, of_full = judged_logits(
        Judge(running, trace), [replayed, kvsim.replay(trace, "full", LENGTH)]
    )

    assert np.array_equal(decoding.record().evicted_at, replayed.evicted_at)
    torch.testing.assert_close(of_live, torch.cat([first, rest[:-1]]), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(of_full, own, atol=1e-4, rtol=1e-4)
    assert float((of_live - of_full).abs().max()) > 1e-3
