"""Live runs and judge of models whose layers read the entries of earlier ones."""

import functools

import numpy as np
import pytest
import torch
from shared_models import MODELS, OWNERS, shared

import kvsim
from kvsim.errors import CaptureError, PolicyError
from kvsim.runner.decoding import Decoding, RunningModel
from kvsim.runner.judging import Judge
from kvsim.runner.paged import Paging
from live_runs import judged_logits, output_gap, run_live

PROMPT, LENGTH, BUDGET = 40, 60, 24
TOKENS = torch.randperm(64, generator=torch.Generator().manual_seed(0))[:LENGTH].tolist()
POLICIES = {"snapkv": {"window": 4}, "h2o": {}, "adakv+snapkv": {"window": 4}, "knorm+quest": {}}


@functools.cache
def running(name):
    """A small random model of a family."""
    return RunningModel(shared(name))


@functools.cache
def trace(name):
    """The tokens, recorded."""
    return kvsim.capture(shared(name), None, TOKENS[:PROMPT], response=TOKENS[PROMPT:])


def policy(name):
    """A policy with a window that fits."""
    return kvsim.policy(name, **POLICIES[name])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rule", POLICIES)
def test_a_live_run_keeps_one_set_for_all_readers(name, rule):
    """Its sets are those of a replay of its own numbers, and outputs are by definition."""
    live = run_live(running(name), policy(rule), BUDGET, TOKENS, PROMPT, interval=5)

    record = live.record
    expected = kvsim.replay(live.trace(), policy(rule), BUDGET, interval=5)
    assert np.array_equal(record.evicted_at, expected.evicted_at)
    for layer, owner in enumerate(OWNERS):
        assert np.array_equal(record.evicted_at[layer], record.evicted_at[owner])
        if record.reads is None:
            assert output_gap(live, layer, record.evicted_at[layer]) < 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_one_evicting_layer_keeps_what_its_replay_keeps(name):
    """With its readers, after the prompt; and the caches hold each entry once."""
    rule, of = policy("snapkv"), {"interval": 1000, "layers": [3]}

    live = run_live(running(name), rule, BUDGET, TOKENS, PROMPT, **of)

    replayed = kvsim.replay(trace(name), rule, BUDGET, interval=1000, layers=[3, 5])
    assert live.record.layers == replayed.layers == (3, 5)
    assert np.array_equal(live.record.evicted_at, replayed.evicted_at)
    entries = 3 * LENGTH + (BUDGET + LENGTH - PROMPT)  # layers 0, 1, 2 whole
    assert live.decoding.cache_bytes == entries * 2 * 2 * 16 * 4
    assert live.decoding.full_bytes == 4 * LENGTH * 2 * 2 * 16 * 4


@pytest.mark.parametrize("name", MODELS)
def test_the_judge_gives_the_logits_of_a_live_run(name):
    """Kept sets of a replay in one forward pass are the live run that evicts after the prompt."""
    rule = policy("snapkv")
    record = kvsim.replay(trace(name), rule, BUDGET, interval=1000, layers=[3, 5])
    live = run_live(running(name), rule, BUDGET, TOKENS, PROMPT, interval=1000, layers=[3])
    judge = Judge(running(name), trace(name))
    if name == "Gemma3n":  # several streams
        with pytest.raises(CaptureError, match="one stream, which judged and live runs need"):
            judged_logits(judge, [record])
        return

    logits = judged_logits(judge, [record])[0]

    torch.testing.assert_close(logits, live.logits[PROMPT - 1 : -1], atol=1e-4, rtol=1e-4)


def test_blocks_of_a_pool_are_refused():
    """One line says which layers read the entries of another."""
    with pytest.raises(PolicyError, match=r"layers \[5\] read the entries of layer 3"):
        Decoding(
            *(running("Gemma3n"), policy("snapkv"), BUDGET),
            prompt_len=PROMPT,
            n_pos=LENGTH,
            layers=[3],
            paging=Paging(8),
        )
