"""Rows that repeat the context, on a running model: KVzip evicts as the replay of its capture."""

import numpy as np
import pytest
import torch

import kvsim
from kvsim.errors import CaptureError, NeedsError, PolicyError
from kvsim.recorder import capture
from kvsim.runner.closed import ClosedLoop
from kvsim.runner.decoding import RunningModel
from kvsim.runner.paged import Paging
from small_model import small
from traces import changed

PROMPT, NEW, BUDGET = 40, 12, 16


def ids(n):
    """So many tokens of the vocabulary, drawn once."""
    return torch.randint(64, (n,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(scope="module")
def recorded():
    """A small model, and a trace of it with a probe of two chunks and a context of its own."""
    model = small()
    tokens = ids(PROMPT + NEW)
    trace = capture(
        model,
        None,
        tokens[:PROMPT],
        context=PROMPT - 6,
        response=tokens[PROMPT:],
        probe="repeat:20",
    )
    return RunningModel(model), trace


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("name", ["kvzip", "kvzip@uniform", "adakv+kvzip", "kvzip@kvpress"])
def test_a_live_run_repeats_the_context_and_evicts_as_the_replay(recorded, name, paged):
    """Sets after the prompt are those of the replay, and the rows of the probe leave no entry."""
    running, trace = recorded
    policy = kvsim.policy(name)
    loop = ClosedLoop(running, trace, None, None, Paging() if paged else None)

    record, outcome = loop.run(policy, BUDGET, policy.schedule)
    expected = kvsim.replay(trace, policy, BUDGET)

    assert np.array_equal(record.evicted_at, expected.evicted_at)
    assert record.evicted_at.shape[-1] == PROMPT + NEW
    assert np.isfinite(outcome.forced.nll).all()


def test_the_context_is_compressed_before_its_question(recorded):
    """With `compress="context"` the event fires at the end of the context, which is repeated."""
    running, trace = recorded
    policy = kvsim.policy("kvzip")
    schedule = policy.schedule.override(None, None, "context")

    record, _ = ClosedLoop(running, trace, None, None).run(policy, BUDGET, schedule)
    expected = kvsim.replay(trace, policy, BUDGET, compress="context")

    assert np.array_equal(record.evicted_at, expected.evicted_at)
    assert record.events == [PROMPT - 7]


def test_a_trace_without_a_probe_says_how_to_record_it(recorded):
    """Replay and closed loop name the option; a policy that drops rows is refused at once."""
    running, trace = recorded
    plain = changed(trace, context_len=None, tokens=trace.tokens)
    policy = kvsim.policy("kvzip")
    with pytest.raises(NeedsError, match=r"probe_.*--probe repeat"):
        kvsim.replay(plain, policy, BUDGET)
    with pytest.raises(NeedsError, match=r"probe_.*--probe repeat"):
        ClosedLoop(running, plain, None, None).run(policy, BUDGET, policy.schedule)
    with pytest.raises(PolicyError, match="drops rows of the prompt"):
        kvsim.policy("fastkv+kvzip")
    with pytest.raises(PolicyError, match="drops rows of the prompt"):
        kvsim.policy("fastkv+kvzip@uniform")


def test_a_probe_beyond_the_context_of_the_model_is_refused():
    """Prompt and chunk together must fit; smaller chunks do."""
    model = small()
    limit = model.config.max_position_embeddings
    prompt = ids(limit - 40)
    with pytest.raises(CaptureError, match="a probe of 860 rows take 1720 tokens"):
        capture(model, None, prompt, max_new_tokens=0, probe="repeat")
    trace = capture(model, None, prompt, max_new_tokens=0, probe="repeat:20")
    assert trace.header.probe.chunks[-1].stop == len(prompt)
    assert torch.isfinite(trace.read("probe_k")).all()
