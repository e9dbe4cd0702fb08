"""Latent attention live: entries of the model's own cache leave as those of a replay do."""

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from recorder_models import LATENT, latent
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

import kvsim
from kvsim.errors import CaptureError, PolicyError
from kvsim.runner.decoding import Decoding
from kvsim.runner.judging import Judge
from kvsim.runner.model import RunningModel
from kvsim.runner.paged import Paging
from live_runs import judged_logits, live_policies, relative, run_live
from reference.masked import masked_logits

PROMPT, LENGTH, BUDGET, INTERVAL = 80, 130, 48, 8
TOKENS = torch.randperm(256, generator=torch.Generator().manual_seed(0))[:LENGTH].tolist()

POLICIES = ("h2o", "tova", "snapkv", "knorm", "adakv+expected_attention", "ams+tova", "keydiff")

#: Whether caches of the installed transformers hold latents, and not expanded heads.
CACHED = hasattr(DeepseekV3Attention, "expand_kv")


@functools.cache
def recorded(name, kernel="sdpa"):
    """A running model, its trace and its judge."""
    running = RunningModel(latent(name, kernel))
    trace = kvsim.capture(
        running.model, None, TOKENS[:PROMPT], response=TOKENS[PROMPT:], o_proj=True
    )
    return running, trace, Judge(running, trace)


def lived(name, policy, kernel="sdpa", **options):
    """A live run; None where caches hold expanded heads, and it is refused."""
    running, _, _ = recorded(name, kernel)
    arguments = running, policy, BUDGET, TOKENS, PROMPT
    if CACHED:
        return run_live(*arguments, interval=INTERVAL, **options)
    with pytest.raises(CaptureError, match="caches keys of 4 heads, expected the latents"):
        run_live(*arguments, interval=INTERVAL, **options)
    return None


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        *((name, "sdpa") for name in LATENT),
        *(
            pytest.param(name, "eager", marks=[pytest.mark.deep] if number else [])
            for number, name in enumerate(LATENT)
        ),
    ],
)
def test_one_evicting_layer_keeps_what_its_replay_keeps(name, kernel):
    """And the judge predicts what the live run predicts, with all layers evicting."""
    _, trace, judge = recorded(name, kernel)
    for policy in map(live_policies().__getitem__, POLICIES):
        alone = lived(name, policy, kernel, layers=[1])
        if alone is None:
            return
        replayed = kvsim.replay(trace, policy, BUDGET, interval=INTERVAL, layers=[1])
        np.testing.assert_array_equal(alone.record.evicted_at, replayed.evicted_at)

        live = lived(name, policy, kernel)
        record = replace(live.record, closed=False, trace=trace.name)
        assert relative(judged_logits(judge, [record])[0], live.logits[PROMPT - 1 : -1]) < 1e-4, (
            policy.name
        )


@pytest.mark.parametrize("name", LATENT)
def test_the_judge_predicts_what_masks_over_all_heads_do(name):
    """A forward of all rows, with a dense mask from the record and the model's own kernel."""
    running, trace, judge = recorded(name)
    records = [kvsim.replay(trace, x, BUDGET, interval=INTERVAL) for x in POLICIES]

    judge.check()
    found = judged_logits(judge, records)
    if not CACHED:  # rows before those of a mask are in the cache as heads alone
        return

    of_heads = [replace(x, evicted_at=x.evicted_at.repeat(4, axis=1)) for x in records]
    expected = masked_logits(running.model, trace.tokens, of_heads)[:, :-1]
    assert relative(found, expected[:, -found.shape[1] :]) < 1e-4


def test_pages_are_chosen_by_the_absorbed_queries():
    """What rows of a live run read has the predictions of the judge."""
    _, trace, judge = recorded("deepseek_v3")
    policy = kvsim.policy("h2o+quest", page=4, dense_layers=0, heads="layer", share=0.4)
    live = lived("deepseek_v3", policy)
    if live is not None:
        record = replace(live.record, closed=False, trace=trace.name)
        mine, unread = judged_logits(judge, [record, replace(record, reads=None)])
        assert relative(mine, live.logits[PROMPT - 1 : -1]) < 1e-4
        assert relative(unread, live.logits[PROMPT - 1 : -1]) > 1e-3


def test_blocks_of_entries_are_refused():
    """They hold keys and values of one size."""
    running, _, _ = recorded("deepseek_v3")
    with pytest.raises(PolicyError, match="keys of 32 and values of 24 dimensions"):
        Decoding(
            *(running, kvsim.policy("h2o"), BUDGET),
            prompt_len=PROMPT,
            n_pos=LENGTH,
            paging=Paging(16),
        )
