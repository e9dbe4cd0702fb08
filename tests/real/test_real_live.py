"""A policy on the running SmolLM2, against its replay, a Record as a mask, and plain generation."""

import numpy as np
import pytest
import torch
from transformers import DynamicCache

import kvsim
from kvsim.recorder.forward import cache_option
from kvsim.runner.decoding import Decoding, RunningModel
from live_runs import logits_behind_masks, output_gap, run_live
from tests.reference.masked import masked_logits

pytestmark = pytest.mark.real

BUDGET, INTERVAL = 48, 4
CHAT = [
    {
        "role": "user",
        "content": "Three friends meet in Lisbon. Anna brings bread, Ben brings cheese, and Clara "
        "brings a map of the old town. Where do they meet, and who brings the map?",
    }
]


@pytest.fixture(scope="module")
def text(smollm2):
    """The model as it runs, and the tokens of a chat with its greedy answer."""
    model, tokenizer = smollm2
    trace = kvsim.capture(model, tokenizer, CHAT, max_new_tokens=13)
    return RunningModel(model), trace.tokens.tolist(), trace.prompt_len


def test_a_layer_that_alone_evicts_is_its_replay(text):
    """Kept sets are those of the replay of the same q, k, v, and outputs are by definition."""
    run, tokens, prompt_len = text
    layer, policy = 14, kvsim.policy("adakv+snapkv")
    options = {"interval": INTERVAL, "layers": [layer]}
    live = run_live(run, policy, BUDGET, tokens, prompt_len, **options)

    record = kvsim.replay(live.trace(), policy, BUDGET, **options)
    assert len(record.events) > 2
    assert np.array_equal(live.record.evicted_at, record.evicted_at)
    assert output_gap(live, layer, record.evicted_at[0]) < 1e-5


def test_logits_are_those_of_the_record_as_a_mask(text):
    """All 30 layers evict, and the gathered cache gives the logits of the masked full cache."""
    run, tokens, prompt_len = text
    live = run_live(run, kvsim.policy("pyramidkv"), BUDGET, tokens, prompt_len, interval=INTERVAL)

    masked = masked_logits(run.model, torch.tensor(tokens), [live.record])[0].double()
    gap = (live.logits[prompt_len - 1 :] - masked).norm(dim=-1) / masked.norm(dim=-1)
    assert float(gap.max()) < 1e-5


@pytest.mark.parametrize(
    ("name", "params"), [("fastkv", {"layer": 9, "rows": 40}), ("asl", {"tau": 2.0, "window": 8})]
)
def test_rows_that_are_dropped_on_the_way_down(monkeypatch, text, name, params):
    """Logits of prefill and decoding are those of a model that masks the dropped rows out."""
    run, tokens, prompt_len = text
    policy = kvsim.policy(name, **params)
    with Decoding(run, policy, 32, prompt_len=prompt_len, n_pos=len(tokens)) as live:
        logits = live.feed(tokens[:prompt_len]), live.feed(tokens[prompt_len:], logits=len(tokens))

    masked = logits_behind_masks(monkeypatch, run.model, tokens, live.record())[prompt_len - 1 :]
    gap = (torch.cat(logits) - masked).norm(dim=-1) / masked.norm(dim=-1)
    assert live.record().selection.dropped
    assert float(gap.max()) < 1e-5


def test_with_room_for_all_it_is_plain_generation(text):
    """Greedy tokens are those of `generate`, and bytes those of transformers' own cache."""
    run, tokens, prompt_len = text
    cache, new = DynamicCache(config=run.model.config), 8
    expected = run.model.generate(
        torch.tensor([tokens[:prompt_len]]),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        **cache_option(run.model, cache),
    )[0].tolist()

    n = prompt_len + new
    with Decoding(run, kvsim.policy("snapkv"), n, prompt_len=prompt_len, n_pos=n) as live:
        logits = live.feed(tokens[:prompt_len])
        while len(live.tokens) < n - 1:  # the last token is in no cache
            logits = live.feed([int(logits[-1].argmax())])

    assert [*live.tokens, int(logits[-1].argmax())] == expected
    stored = (array.nbytes for part in cache.layers for array in (part.keys, part.values))
    assert live.cache_bytes == sum(stored)
