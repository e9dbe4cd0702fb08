"""Live runs and the judge on models in which some layers keep a state instead of entries."""

import functools

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import kvsim
from kvsim.errors import CaptureError, PolicyError
from kvsim.recorder.forward import cache_option, full_cache
from kvsim.recorder.hooks import intercepting
from kvsim.runner.closed import ClosedLoop
from kvsim.runner.decoding import Decoding
from kvsim.runner.judging import Judge
from kvsim.runner.model import RunningModel
from live_runs import judged_logits
from tests.hybrids import HYBRIDS, hybrid, newer

pytestmark = newer

PROMPT, LENGTH, BUDGET = 60, 74, 40
TOKENS = torch.randint(1, 64, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()


@functools.cache
def recorded(name: str) -> tuple[PreTrainedModel, RunningModel, kvsim.Trace]:
    """A hybrid, and a trace of it with a given response."""
    model = hybrid(name)
    trace = kvsim.capture(model, None, TOKENS[:PROMPT], response=TOKENS[PROMPT:], o_proj=False)
    return model, RunningModel(model), trace


def by_rows(model: PreTrainedModel, record: kvsim.Record) -> Tensor:
    """Logits [R, V] that predict the response, each row alone, with evicted entries masked out."""
    numbers, out = list(record.layer_ids), []
    gone = torch.from_numpy(record.evicted_at)

    def masking(layer: int, query: Tensor, _: Tensor | None) -> Tensor | None:
        if layer not in numbers:
            return None
        row = len(out) + PROMPT - 1
        seen = gone[numbers.index(layer), :, : row + 1] >= row
        return seen.repeat_interleave(query.shape[1] // len(seen), 0)[None, :, None]

    cache = full_cache(model)
    option = cache_option(model, cache)
    at = torch.arange(LENGTH)[None]
    ids = torch.tensor([TOKENS])
    with torch.no_grad():
        model(ids[:, : PROMPT - 1], position_ids=at[:, : PROMPT - 1], use_cache=True, **option)
        with intercepting(model, lambda _: None, masking=masking):
            for row in range(PROMPT - 1, LENGTH - 1):
                row_at = at[:, row : row + 1]
                made = model(ids[:, row : row + 1], position_ids=row_at, use_cache=True, **option)
                out.append(made.logits[0, -1])
    return torch.stack(out)


@pytest.mark.parametrize(("name", "policy"), [*zip(HYBRIDS, ["h2o", "snapkv"] * 3, strict=True)])
def test_one_layer_that_evicts_keeps_what_the_replay_keeps(name, policy):
    """Below the only layer that evicts nothing changes, so that live and replay decide alike."""
    _, running, trace = recorded(name)
    last = trace.n_layers - 1

    replay = kvsim.replay(trace, policy, BUDGET, interval=8, prefill=True, layers=[last])
    live = Decoding(
        *(running, kvsim.policy(policy), BUDGET),
        prompt_len=PROMPT,
        n_pos=LENGTH,
        interval=8,
        prefill=True,
        layers=[last],
    )
    with live:
        live.feed(TOKENS)

    assert np.array_equal(live.record().evicted_at, replay.evicted_at)
    assert live.record().layer_ids == replay.layer_ids == (3,)
    itemsize, shape = 4, trace.source.shapes["k"]
    kept = (replay.evicted_at == kvsim.schema.NEVER).sum()
    entries = kept + (trace.n_layers - 1) * shape[1] * LENGTH
    assert live.cache_bytes == 2 * itemsize * shape[3] * entries


@pytest.mark.parametrize("name", ["qwen3_next", "bamba", "falcon_h1"])
def test_the_closed_loop_has_the_logits_of_masks(name):
    """Evicted entries are masked out row by row, and other layers keep the model's own states."""
    model, running, trace = recorded(name)
    loop = ClosedLoop(running, trace, None, None)
    policy = kvsim.policy("h2o")

    record, outcome = loop.run(policy, BUDGET, kvsim.policy("h2o").schedule)

    expected = by_rows(model, record).double().log_softmax(-1)
    nll = -expected.gather(-1, torch.tensor(TOKENS[PROMPT:])[:, None])[:, 0]
    np.testing.assert_allclose(outcome.forced.nll, nll, rtol=0, atol=1e-4)
    full = -np.array(trace.header.response_logprobs)
    np.testing.assert_allclose(outcome.forced.full_nll, full, rtol=0, atol=1e-4)
    assert np.abs(outcome.forced.nll - full).max() > 1e-3


@pytest.mark.parametrize("name", ["qwen3_next", "bamba", "falcon_h1"])
def test_the_judge_has_the_logits_of_masks(name):
    """One forward under each record, from the states of the rows before its first eviction."""
    model, running, trace = recorded(name)
    records = [kvsim.replay(trace, policy, BUDGET, interval=8) for policy in ("h2o", "snapkv")]

    logits = judged_logits(Judge(running, trace), records)

    for record, found in zip(records, logits, strict=True):
        expected = by_rows(model, record)
        torch.testing.assert_close(found, expected, rtol=0, atol=3e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("policy", ["asl", "asl_2pass", "fastkv", "gemfilter", "pyramidinfer"])
def test_policies_that_hand_rows_to_the_next_layer_are_refused(policy):
    """A state has read every row, so that no later layer can go on with some of them."""
    _, running, trace = recorded("lfm2")

    with pytest.raises(PolicyError, match=r"pass a state .*\(conv\)") as caught:
        kvsim.replay(trace, policy, BUDGET)

    assert "\n" not in str(caught.value)
    with pytest.raises(PolicyError):
        Decoding(running, kvsim.policy(policy), BUDGET, prompt_len=PROMPT, n_pos=LENGTH)


def test_a_judge_without_states_of_the_rows_before_is_refused(monkeypatch):
    """Some families begin with empty states in every forward of several rows."""
    _, running, trace = recorded("lfm2")
    monkeypatch.setitem(running.__dict__, "continues", [])

    with pytest.raises(CaptureError, match="a forward of several rows starts from empty states"):
        Judge(running, trace)
