"""Live runs and the judge on models whose layers have different heads or dimensions."""

import functools

import numpy as np
import pytest
import torch
from sized_models import MODELS, SIZES, sized

import kvsim
from kvsim.runner.decoding import Decoding, RunningModel
from kvsim.runner.judging import Judge
from live_runs import judged_logits

PROMPT, LENGTH, BUDGET = 40, 60, 24
TOKENS = torch.randperm(64, generator=torch.Generator().manual_seed(0))[:LENGTH].tolist()


@functools.cache
def running(name):
    """A small random model."""
    return RunningModel(sized(name))


@functools.cache
def trace(name):
    """The tokens, recorded with projections."""
    return kvsim.capture(sized(name), None, TOKENS[:PROMPT], response=TOKENS[PROMPT:], o_proj=True)


def live(name, policy, **options):
    """A finished live run, and the logits that predict the response."""
    of = {"prompt_len": PROMPT, "n_pos": LENGTH, **options}
    with Decoding(running(name), kvsim.policy(policy), BUDGET, **of) as decoding:
        first = decoding.feed(TOKENS[:PROMPT])
        rest = decoding.feed(TOKENS[PROMPT:], logits=LENGTH - PROMPT)
    return decoding, torch.cat([first, rest[:-1]])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("policy", ["h2o", "criticalkv+tova"])
def test_one_evicting_layer_keeps_what_its_replay_keeps(name, policy):
    """Bytes are those of each layer's own heads and dimensions."""
    last, of = len(SIZES[name]) - 1, {"interval": 5, "layers": [len(SIZES[name]) - 1]}

    decoding, _ = live(name, policy, **of)

    record = decoding.record()
    replayed = kvsim.replay(trace(name), policy, BUDGET, **of)
    assert record.layers == replayed.layers == (last,)
    assert np.array_equal(record.evicted_at, replayed.evicted_at)
    sizes = [heads * (dim + value) * 4 for _, heads, dim, value in SIZES[name]]
    assert decoding.full_bytes == sum(sizes) * LENGTH
    held = int((replayed.evicted_at[0] > LENGTH).sum())
    heads, *others = replayed.evicted_at.shape[1], *sizes[:-1]
    assert decoding.cache_bytes == sum(others) * LENGTH + held * sizes[-1] // heads


@pytest.mark.parametrize("name", MODELS)
def test_the_judge_gives_the_logits_of_a_live_run(name):
    """Kept sets of a replay in one forward pass are the live run that evicts after the prompt."""
    of = {"interval": 1000, "prefill": True, "layers": [len(SIZES[name]) - 1]}
    _, expected = live(name, "h2o", **of)
    alone = kvsim.replay(trace(name), "h2o", BUDGET, **of)
    full = kvsim.replay(trace(name), "full", LENGTH)
    with torch.no_grad():
        own = sized(name)(torch.tensor([TOKENS])).logits[0, PROMPT - 1 : -1]

    of_live, of_full = judged_logits(Judge(running(name), trace(name)), [alone, full])

    torch.testing.assert_close(of_live, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(of_full, own, atol=1e-4, rtol=1e-4)
