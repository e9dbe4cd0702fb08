"""Logits under Records, against a model whose cache really loses the entries."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Gemma2Config,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
)

import kvsim
from kvsim.errors import CaptureError, PolicyError
from kvsim.recorder.cache import cache_option
from kvsim.recorder.hooks import kernel_name
from kvsim.schema import NEVER
from tests.reference.masked import masked_logits

PROMPT, NEW, BUDGET, INTERVAL = 24, 30, 12, 5
LAYERS, HEADS = 3, 2
CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
SOFTCAPPED = {"gemma2": Gemma2Config}
POLICIES = ("random", "h2o", "knorm", "oracle")
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def make_model(family="qwen2", attention="sdpa"):
    """A random model whose attention is far from even, in float32."""
    config = (CONFIGS | SOFTCAPPED)[family](
        num_hidden_layers=LAYERS,
        hidden_size=48,
        intermediate_size=96,
        num_attention_heads=6,
        num_key_value_heads=HEADS,
        vocab_size=200,
        max_position_embeddings=256,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "q_proj.weight" in name or "k_proj.weight" in name:
                weight.normal_(std=0.25)
            elif weight.dim() == 2:
                weight.normal_(std=0.12)
    return model


def make_trace(model):
    """A random prompt, answered greedily."""
    ids = torch.randint(0, 200, (PROMPT,), generator=torch.Generator().manual_seed(1)).tolist()
    return kvsim.capture(model, None, ids, max_new_tokens=NEW)


@pytest.fixture(scope="module")
def model():
    """The model of most tests."""
    return make_model()


@pytest.fixture(scope="module")
def trace(model):
    """Its trace."""
    return make_trace(model)


def replayed(trace, name):
    """One record."""
    return kvsim.replay(trace, kvsim.policy(name), BUDGET, interval=INTERVAL, prefill=True)


class Deleting:
    """The model row by row with its own kernel, and a cache out of which entries are taken."""

    def __init__(self, model, record):
        self.model, self.record = model, record
        self.cache = DynamicCache()
        self.pos = torch.empty(LAYERS, HEADS, 0, dtype=torch.long)
        self.at = 0

    @torch.no_grad()
    def read(self, tokens):
        """Logits after some more tokens [V]; then what leaves after the last of them is deleted."""
        at = torch.arange(self.at, self.at + len(tokens))
        logits = self.model(
            tokens[None],
            position_ids=at[None],
            use_cache=True,
            **cache_option(self.model, self.cache),
        ).logits[0, -1]
        self.pos = torch.cat([self.pos, at.expand(LAYERS, HEADS, -1)], dim=-1)
        self.at = row = self.at + len(tokens)
        last = torch.from_numpy(self.record.evicted_at).gather(-1, self.pos)
        keep = last >= row  # seen by the next row
        assert len(keep.sum(-1).unique()) == 1  # the cache's arrays stay rectangular
        for layer, held in enumerate(self.cache.layers):
            for name in ("keys", "values"):
                array = getattr(held, name)
                setattr(held, name, array[0][keep[layer]].view(1, HEADS, -1, array.shape[-1]))
        self.pos = self.pos[keep].view(LAYERS, HEADS, -1)
        return logits


@pytest.mark.parametrize("family", CONFIGS)
def test_logits_are_those_of_a_cache_without_the_entries(family):
    """Every row of every policy, each head with a set of its own, fed the recorded tokens."""
    model = make_model(family)
    trace = make_trace(model)
    tokens = trace.read("tokens")
    records = [replayed(trace, name) for name in POLICIES]
    assert any((x.evicted_at[:, 0] != x.evicted_at[:, 1]).any() for x in records)

    found = masked_logits(model, tokens, records)

    assert found.shape == (len(records), NEW + 1, 200)
    for record, logits in zip(records, found, strict=True):
        live = Deleting(model, record)
        expected = [live.read(tokens[:PROMPT]), *(live.read(t[None]) for t in tokens[PROMPT:])]
        torch.testing.assert_close(logits, torch.stack(expected), **CLOSE)


@pytest.mark.parametrize("name", POLICIES)
def test_greedy_decoding_without_the_entries_is_most_likely_under_the_masks(model, trace, name):
    """What a cache without the entries writes by itself is what the masked model would write."""
    record = replayed(trace, name)
    live = Deleting(model, record)
    written = [live.read(trace.read("tokens")[:PROMPT]).argmax()]
    while len(written) < NEW:
        written.append(live.read(written[-1][None]).argmax())
    tokens = torch.cat([trace.read("tokens")[:PROMPT], torch.stack(written)])

    likely = masked_logits(model, tokens, [record])[0].argmax(-1)

    assert tokens[PROMPT:].tolist() != trace.read("tokens")[PROMPT:].tolist()  # evictions matter
    assert likely[:-1].tolist() == tokens[PROMPT:].tolist()


@pytest.mark.parametrize(
    ("family", "attention"), [("qwen2", "sdpa"), ("qwen2", "eager"), ("gemma2", "eager")]
)
def test_without_evictions_logits_are_the_models_own(family, attention):
    """`full` changes nothing, whatever the kernel does to logits; it is back afterwards."""
    model = make_model(family, attention)
    trace = make_trace(model)
    tokens = trace.read("tokens")

    found = masked_logits(model, tokens, [replayed(trace, "full")])[0]

    with torch.no_grad():
        own = model(tokens[None]).logits[0, PROMPT - 1 :]
    torch.testing.assert_close(found, own, **CLOSE)
    assert kernel_name(model) == attention


def test_one_entry_of_one_head_matters_from_its_row_on(model, trace):
    """Logits up to the last row that sees the entry stay, and those behind it change."""
    record = replayed(trace, "full")
    gone, last = 3, PROMPT + 9
    for layer in range(LAYERS):
        evicted_at = record.evicted_at.copy()
        evicted_at[layer, 1, gone] = last
        found = masked_logits(
            model, trace.read("tokens"), [record, replace(record, evicted_at=evicted_at)]
        )
        moved = (found[0] - found[1]).abs().amax(-1)  # row PROMPT - 1 is the first
        same = last - PROMPT + 2
        assert float(moved[:same].max()) < 1e-5
        assert float(moved[same]) > 1e-4


def test_sets_of_query_heads(model, trace):
    """A record by query head with the sets of the KV heads gives the same logits."""
    record = replayed(trace, "h2o")
    repeated = record.evicted_at.repeat(3, axis=1)
    other = replace(record, evicted_at=repeated, per_query_head=True)

    one, same = masked_logits(model, trace.read("tokens"), [record, other])

    assert torch.equal(one, same)


def test_a_trace_of_the_prompt_alone(model, trace):
    """The only row is the last one of the prompt."""
    ids = trace.read("tokens")[:PROMPT]
    alone = kvsim.capture(model, None, ids.tolist(), max_new_tokens=0)

    found = masked_logits(model, ids, [replayed(alone, "h2o"), replayed(alone, "full")])

    with torch.no_grad():
        own = model(ids[None]).logits[:, -1:]
    torch.testing.assert_close(found, own.expand(2, -1, -1), **CLOSE)


def test_unfit_records_are_refused(model, trace):
    """Other lengths, prompts, layers, positions, and prompts that do not see themselves."""
    tokens, record = trace.read("tokens"), replayed(trace, "h2o")
    absent = np.full_like(record.evicted_at, NEVER)
    absent[1, :, 4] = 3  # a row of the prompt that did not go on to layer 1
    unfit = {
        "positions": replace(record, positions="slot"),
        r"expected \[3, 2, 54\]": replace(record, evicted_at=record.evicted_at[..., :-1]),
        "of all 3 layers": kvsim.replay(trace, kvsim.policy("h2o"), BUDGET, layers=[0, 2]),
        "rows of the prompt miss earlier rows": replace(record, evicted_at=absent),
        "each row up to 2": replace(record, prompt_len=PROMPT + 1),
    }
    for said, one in unfit.items():
        with pytest.raises(PolicyError, match=said):
            masked_logits(model, tokens, [record, one])


@pytest.mark.parametrize("row", [PROMPT - 1, PROMPT + 3])
def test_logits_that_are_not_finite_are_refused(row, trace):
    """In the prompt's last row and behind it; the row is named."""
    model = make_model()
    start = row - PROMPT if row >= PROMPT else -1

    def spoil(_, args, logits):
        if (logits.shape[1] == PROMPT) == (row < PROMPT):
            logits[0, start, 5] = float("inf")

    model.lm_head.register_forward_hook(spoil)
    with pytest.raises(CaptureError, match=rf"^row {row} has NaN or infinity in its logits"):
        masked_logits(model, trace.read("tokens"), [replayed(trace, "knorm")])
