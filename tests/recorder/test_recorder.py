"""Capture: exactness against the model itself, publication, prompts, refusals."""

from __future__ import annotations

import functools
import json
import os
import shutil
import socket
import socketserver
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import kvsim.tiny
from families import FAMILIES, ids
from kvsim.errors import CaptureError, TraceExistsError
from kvsim.recorder import (
    Prompt,
    blocks,
    capture,
    capture_many,
    load_model,
    read_prompts,
    session,
)
from kvsim.recorder import models as loading
from kvsim.recorder.models import read_ropes, unreachable
from kvsim.recorder.progress import progress_bar
from kvsim.store import describe, verify
from kvsim.tiny import tasks

NAMES = ("llama", "qwen2", "qwen3")
UNKNOWN = "<unk>"


def build(family, attention="sdpa", **changes):
    """A random model whose attention is far from uniform."""
    return replace(FAMILIES[family], changes=changes).build(attention)


@functools.cache
def small(family, attention="sdpa"):
    """A random model of the family, made once."""
    return build(family, attention)


@functools.cache
def tiny():
    """The shipped model and its tokenizer."""
    return load_model("tiny")


def words_tokenizer(template=None):
    """A tokenizer of the words w0 to w62 for the random models."""
    vocab = {UNKNOWN: 63, **{f"w{i}": i for i in range(63)}}
    inner = Tokenizer(models.WordLevel(vocab=vocab, unk_token=UNKNOWN))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token=UNKNOWN, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = template
    return tokenizer


def exact_attention(trace, layer):
    """Attention output [qhead, n, d] in float64 from a trace's q, k, v, by the definition."""
    q, k, v = (trace.read(name, slice(layer, layer + 1))[0].double() for name in "qkv")
    k, v = (x.repeat_interleave(trace.group, 0) for x in (k, v))
    logits = trace.scale * q @ k.mT
    future = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
    return logits.masked_fill(future, -torch.inf).softmax(-1) @ v


def own_outputs(model, tokens):
    """What each layer's output projection is given in one forward [layer, qhead, n, d]."""
    seen = []
    handles = [
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(torch.tensor([tokens]))
    for handle in handles:
        handle.remove()
    return torch.stack([x.unflatten(-1, (-1, 16)).transpose(0, 1) for x in seen])


def state(model):
    """Everything that a capture touches and must leave as it was."""
    hooks = [
        (len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()
    ]
    return hooks, dict(ALL_ATTENTION_FUNCTIONS._local_mapping), model.training


# --- exactness ---


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", NAMES)
def test_recomputed_attention_equals_the_model(family, attention):
    """Attention recomputed from q, k, v equals the model's own output to 1e-5 in float32."""
    model = small(family, attention)

    trace = capture(model, None, ids(270), max_new_tokens=50)

    assert (trace.n_pos, trace.prompt_len) == (320, 270)
    for layer in range(2):
        expected = exact_attention(trace, layer)
        found = trace.read("attn_out", slice(layer, layer + 1))[0]
        error = float((found - expected).abs().max() / expected.abs().max())
        assert error < 1e-5
    peak = trace.attention(0, range(50, 100)).amax(-1).mean()
    assert peak > 0.2  # far from uniform, so that errors would show
    assert max(trace.meta["capture_check"]["max_relative_error"]) < 1e-5


@pytest.mark.parametrize("family", NAMES)
def test_the_output_is_what_the_model_goes_on_with(family):
    """The recorded output is, bit for bit, what the output projection is given."""
    model = small(family)
    trace = capture(model, None, ids(100), max_new_tokens=0)

    assert torch.equal(trace.attn_out, own_outputs(model, ids(100)))


@pytest.mark.parametrize("family", NAMES)
def test_generation_equals_one_teacher_forced_forward(family):
    """Prefill and generation give what one forward over the same tokens gives, to 1e-4."""
    model = small(family)
    generated = capture(model, None, ids(240), max_new_tokens=40)

    forced = capture(model, None, generated.tokens, max_new_tokens=0)

    assert forced.n_pos == 280
    for name in ("q", "k", "v", "attn_out"):
        found, expected = generated.read(name), forced.read(name)
        assert float((found - expected).abs().max() / expected.abs().max()) < 1e-4


def test_greedy_tokens_equal_those_of_generate():
    """The response is the one that transformers' own `generate` gives."""
    model = small("qwen3")

    trace = capture(model, None, ids(20), max_new_tokens=30)

    expected = model.generate(
        torch.tensor([ids(20)]),
        attention_mask=torch.ones(1, 20, dtype=torch.long),
        max_new_tokens=30,
        do_sample=False,
    )
    assert trace.tokens.tolist() == expected[0].tolist()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_bfloat16_is_kept_exactly(attention, tmp_path):
    """A bfloat16 model's q, k, v and outputs are stored without a changed bit."""
    model = build("qwen2", attention=attention).to(torch.bfloat16)

    trace = capture(model, None, ids(300), max_new_tokens=0, out=tmp_path / "a.zarr")

    assert torch.equal(trace.attn_out, own_outputs(model, ids(300)).float())
    for name in ("q", "k", "v", "attn_out"):
        assert torch.equal(trace.read(name), trace.read(name).bfloat16().float())
        assert trace.source_dtypes[name] == "bfloat16"
    rows = trace.attention(1, range(300))
    assert torch.allclose(rows.sum(-1), torch.ones(6, 300), atol=1e-5)
    assert verify(trace.path, deep=True).ok


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_every_dtype_is_within_its_tolerance(dtype, attention):
    """Models in any dtype are recorded, and a fused kernel stays far below the tolerance."""
    model = build("llama", attention=attention).to(dtype)

    trace = capture(model, None, ids(300), max_new_tokens=10)

    check = trace.meta["capture_check"]
    share = max(check["max_relative_error"]) / check["tolerance"]
    assert share < (1 / 3 if attention == "sdpa" else 1)


def test_keys_are_exactly_the_cache():
    """Recorded keys and values are what the model's own cache holds after the same forward."""
    model = small("qwen3")
    trace = capture(model, None, ids(50), max_new_tokens=0)

    with torch.no_grad():
        cache = model(torch.tensor([ids(50)]), use_cache=True).past_key_values

    for layer in range(2):
        assert torch.equal(trace.k[layer], cache.layers[layer].keys[0])
        assert torch.equal(trace.v[layer], cache.layers[layer].values[0])


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 5e5},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
        {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 256,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rope_is_the_one_in_effect(rope):
    """The stored rotary embedding turns the projected keys into the recorded ones."""
    model = build("llama", rope_parameters=rope)
    trace = capture(model, None, ids(60), max_new_tokens=0)

    inputs = []
    handle = model.model.layers[1].self_attn.k_proj.register_forward_hook(
        lambda _, __, output: inputs.append(output[0])
    )
    with torch.no_grad():
        model(torch.tensor([ids(60)]))
    handle.remove()

    before = inputs[0].unflatten(-1, (2, 16)).transpose(0, 1)
    assert torch.allclose(trace.rope.rotate(before, torch.arange(60)), trace.k[1], atol=1e-4)
    assert torch.allclose(trace.rope.unrotate(trace.k[1], torch.arange(60)), before, atol=1e-4)
    assert (trace.rope.attention_scaling != 1) == (rope["rope_type"] == "yarn")


# --- the model is left as it was ---


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_model_is_left_as_it_was(attention):
    """Outputs before, during and after a capture are identical, and nothing stays behind."""
    model = small("llama", attention)
    tokens = torch.tensor([ids(30)])
    before = state(model)
    with torch.no_grad():
        expected = model(tokens).logits

    trace = capture(model, None, ids(30), max_new_tokens=3)

    with torch.no_grad():
        assert torch.equal(model(tokens).logits, expected)
    assert state(model) == before
    assert trace.tokens[30] == expected[0, -1].argmax()


def test_nothing_stays_behind_after_an_error(tmp_path):
    """After an exception inside, hooks and table are as before and no file is left."""
    model = small("llama")
    before = state(model)

    def fail(done, total):
        if done > 35:
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        capture(model, None, ids(30), out=tmp_path / "a.zarr", progress=fail)

    assert state(model) == before
    assert list(tmp_path.iterdir()) == []


def test_an_entry_of_the_table_is_put_back():
    """A kernel that someone else set locally is called, and is there again afterwards."""
    calls = []
    library = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def other(*args, **kwargs):
        calls.append(1)
        return library(*args, **kwargs)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = other
    try:
        capture(small("llama"), None, ids(5), max_new_tokens=0)
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is other
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]
    assert len(calls) == 2


def test_another_model_runs_undisturbed_meanwhile():
    """A model that runs during the capture of another is not recorded."""
    other = small("qwen2")

    def run_other(done, total):
        with torch.no_grad():
            other(torch.tensor([ids(7)]))

    trace = capture(small("llama"), None, ids(20), max_new_tokens=3, progress=run_other)

    assert trace.digest == capture(small("llama"), None, ids(20), max_new_tokens=3).digest


def test_training_mode_is_restored():
    """A model in training mode is captured without dropout and is in training mode afterwards."""
    model = build("llama", attention_dropout=0.5).train()

    trace = capture(model, None, ids(20), max_new_tokens=0)

    assert model.training
    assert max(trace.meta["capture_check"]["max_relative_error"]) < 1e-5


# --- generation and publication ---


def test_sampling_is_reproducible():
    """The same seed draws the same response, another seed another one."""
    model = small("llama")

    def draw(seed):
        options = {"max_new_tokens": 30, "temperature": 1.0, "seed": seed}
        return capture(model, None, ids(20), **options)

    first = draw(1)

    assert draw(1).digest == first.digest
    assert draw(2).tokens.tolist() != first.tokens.tolist()
    assert first.meta["generation"]["temperature"] == 1.0


@pytest.mark.parametrize(
    ("prompt_len", "new"), [(1, 0), (1, 3), (255, 1), (256, 0), (256, 1), (250, 20), (513, 4)]
)
def test_disk_and_memory_hold_the_same(prompt_len, new, tmp_path):
    """Written in blocks or kept in memory, the trace is the same, for any length."""
    model = small("qwen3")

    stored = capture(model, None, ids(prompt_len), max_new_tokens=new, out=tmp_path / "a.zarr")
    memory = capture(model, None, ids(prompt_len), max_new_tokens=new)

    assert stored.n_pos == prompt_len + new
    assert stored.digest == memory.digest
    assert verify(stored.path, deep=True).ok
    projections = stored.meta["projections"]["digest"][7:23]
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["a.zarr", f"projections-{projections}"]


def test_blocks_are_written_while_the_model_generates(tmp_path):
    """While tokens come, whole blocks of 256 are on disk, in a folder that is not the result's."""
    seen = {}

    def look(done, total):
        (folder,) = tmp_path.iterdir()
        attributes = json.loads((folder / "zarr.json").read_bytes())["attributes"]
        seen[done] = folder.name, attributes["committed_tokens"], attributes["complete"]

    capture(
        small("llama"), None, ids(200), max_new_tokens=320, out=tmp_path / "a.zarr", progress=look
    )

    assert all(name.startswith(".a.zarr.tmp-") for name, _, _ in seen.values())
    assert not any(complete for _, _, complete in seen.values())
    assert {done: seen[done][1] for done in (200, 255, 256, 400, 511, 512)} == {
        200: 0,
        255: 0,
        256: 256,
        400: 256,
        511: 256,
        512: 512,
    }


@pytest.mark.parametrize("prompt", [511, 512])
def test_one_block_is_held_and_none_of_a_prompt_that_ends_with_one(prompt, tmp_path, monkeypatch):
    """Room for 256 rows in each layer, once, from the first that need it on; not for k and v."""
    made, at = [], {}
    new = blocks._empty_block

    def spy(name, like):
        made.append(new(name, like))
        return made[-1]

    monkeypatch.setattr(blocks, "_empty_block", spy)
    trace = capture(
        small("llama"),
        None,
        ids(prompt),
        max_new_tokens=300,
        out=tmp_path / "a.zarr",
        progress=lambda done, _total: at.setdefault(done, len(made)),
    )

    rows = trace.n_layers * (2 * trace.n_qheads + trace.n_heads) * trace.dim
    assert sum(room.nbytes for room in made) == 256 * 4 * (rows + trace.n_layers)  # and a norm
    assert at[prompt] == (0 if prompt == 512 else len(made))


def test_an_interrupt_keeps_what_was_there(tmp_path):
    """Ctrl-C during a capture that overwrites keeps the old trace and leaves nothing else."""
    model, path = small("llama"), tmp_path / "a.zarr"
    old = capture(model, None, ids(20), max_new_tokens=2, out=path)

    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        capture(model, None, ids(30), out=path, overwrite=True, progress=interrupt)

    assert verify(path, deep=True).digest == old.digest
    assert [path.name for path in tmp_path.glob("*.zarr")] == ["a.zarr"]
    assert not any(path.name.startswith(".") for path in tmp_path.iterdir())


def test_an_existing_path_is_refused_before_the_model_runs(tmp_path):
    """An output path that exists is an error at once, unless overwriting is asked for."""
    model, path = small("llama"), tmp_path / "a.zarr"
    capture(model, None, ids(20), max_new_tokens=0, out=path)
    calls = []

    with pytest.raises(TraceExistsError, match="exists, expected a free path"):
        capture(model, None, ids(5), out=path, progress=lambda *_: calls.append(1))
    again = capture(model, None, ids(5), max_new_tokens=0, out=path, overwrite=True)

    assert calls == []
    assert again.n_pos == 5


def test_dense_attention_on_request(tmp_path):
    """Dense attention is stored when asked for, and equals what follows from q, k and lse."""
    trace = capture(
        small("llama"), None, ids(270), max_new_tokens=10, out=tmp_path / "a.zarr", attention=True
    )

    dense = trace.read("attention")
    assert dense.shape == (2, 6, 280, 280)
    assert torch.allclose(dense[1], trace.attention(1, range(280)), atol=1e-6)
    assert torch.equal(dense, dense.tril())
    assert max(verify(trace.path, deep=True).attention_error) < 1e-5


def test_dense_attention_is_refused_where_it_would_be_huge(tmp_path, monkeypatch):
    """Dense attention above the limit is refused before anything is written."""
    monkeypatch.setattr(session, "MAX_ATTENTION_BYTES", 1 << 20)

    with pytest.raises(CaptureError, match="dense attention of up to 1000 tokens"):
        capture(
            small("llama"), None, ids(500), max_new_tokens=500, attention=True,
            out=tmp_path / "a.zarr",
        )  # fmt: skip
    assert list(tmp_path.iterdir()) == []


def projected(model, tokens):
    """What each layer's own output projection gives in one forward [layer, n, hidden]."""
    seen = []
    handles = [
        layer.self_attn.o_proj.register_forward_hook(lambda _, __, out: seen.append(out[0]))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(torch.tensor([tokens]))
    for handle in handles:
        handle.remove()
    return torch.stack(seen)


def through_o_proj(trace):
    """Sum over query heads of the attention output through each head's block [layer, n, hidden]."""
    return torch.einsum("lind,lidh->lnh", trace.attn_out.double(), trace.o_proj.double())


@pytest.mark.parametrize(
    ("family", "bias"),
    [("llama", False), ("llama", True), ("qwen2", False), ("qwen3", False), ("qwen3", True)],
)
def test_the_output_projection_is_the_models_own(family, bias, tmp_path):
    """Attention output through `o_proj`, summed over heads, is what the model's module gives."""
    model = build(family, **({"attention_bias": True} if bias else {}))

    memory = capture(model, None, ids(270), max_new_tokens=5, o_proj=True)
    path = tmp_path / "a.zarr"
    stored = capture(model, None, ids(270), max_new_tokens=5, o_proj=True, out=path)

    expected = projected(model, memory.tokens.tolist()).double()
    if bias:  # belongs to no head, and is not stored
        biases = [layer.self_attn.o_proj.bias.detach() for layer in model.model.layers]
        assert min(own.abs().min() for own in biases) > 0
        expected -= torch.stack(biases).unsqueeze(1)
    assert memory.o_proj.shape == (2, 6, 16, 48)
    error = (through_o_proj(memory) - expected).abs().max() / expected.abs().max()
    assert float(error) < 1e-5
    assert torch.equal(stored.o_proj, memory.o_proj)
    assert stored.digest == memory.digest
    assert verify(path, deep=True).ok
    assert state(model)[0] == [(0, 0)] * len(state(model)[0])


def test_the_output_projection_of_tiny(tmp_path):
    """The same for the model that ships."""
    model, tokenizer = tiny()
    sample = tasks.prompts(1, 3, task="walk", facts=6, lines=4, kinds=2)[0]

    trace = capture(
        model, tokenizer, sample.prompt, max_new_tokens=20, o_proj=True, out=tmp_path / "a.zarr"
    )

    expected = projected(model, trace.tokens.tolist()).double()
    assert float((through_o_proj(trace) - expected).abs().max() / expected.abs().max()) < 1e-5
    assert not capture(model, tokenizer, sample.prompt, max_new_tokens=0).has("o_proj")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_the_output_projection_is_kept_exactly(dtype, tmp_path):
    """Weights in any dtype are recorded without a changed bit; float16 storage rounds them."""
    model = build("qwen3").to(dtype)
    options = {"max_new_tokens": 0, "o_proj": True}

    memory = capture(model, None, ids(40), **options)
    stored = capture(model, None, ids(40), out=tmp_path / "a.zarr", **options)
    narrow = capture(
        model, None, ids(40), out=tmp_path / "b.zarr", store_dtype="float16", **options
    )

    weights = [layer.self_attn.o_proj.weight.T for layer in model.model.layers]
    expected = torch.stack(weights).unflatten(1, (6, 16)).detach()
    assert torch.equal(memory.o_proj, expected.to(memory.dtype))
    assert torch.equal(stored.o_proj, expected.to(memory.dtype))
    assert torch.equal(narrow.o_proj, expected.half().float())
    assert stored.source_dtypes["o_proj"] == str(dtype).removeprefix("torch.")
    assert verify(stored.path, deep=True).ok


class Adapted(torch.nn.Linear):
    """A projection with something beside its weights."""

    def forward(self, x):
        """One percent more than the weights give."""
        return super().forward(x) * 1.01


class Unheard(torch.nn.Linear):
    """A projection that is applied without its hooks."""

    def __call__(self, x):
        """The weights alone."""
        return self.forward(x)


def adapted(layer):
    """Put an adapter around the projection of a layer."""
    old = layer.self_attn.o_proj
    layer.self_attn.o_proj = Adapted(old.in_features, old.out_features, bias=False)
    layer.self_attn.o_proj.weight = old.weight


def gated(layer):
    """Let the projection see something else than the output of the kernel."""
    layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args: (args[0].sigmoid(),))


def renamed(layer):
    """Call the projection something else."""
    layer.self_attn.outward = layer.self_attn.o_proj
    del layer.self_attn.o_proj
    layer.self_attn.register_module("o_proj", None)


def packed(layer):
    """Keep the weights in another form than a matrix of numbers."""
    own = layer.self_attn.o_proj
    own.weight = torch.nn.Parameter(torch.zeros(10, 1, dtype=torch.uint8), requires_grad=False)


def narrow(layer):
    """A projection of half the heads."""
    layer.self_attn.o_proj = torch.nn.Linear(48, 48, bias=False)


def unused(layer):
    """A projection that nobody sees at work."""
    layer.self_attn.o_proj = Unheard(96, 48, bias=False)


@pytest.mark.parametrize(
    ("change", "where", "message"),
    [
        (adapted, [1], r"o_proj of layer 1 differs by 0\.01 .*: there is an adapter or a gate"),
        (gated, [1], "o_proj of layer 1 differs by"),
        (renamed, [0, 1], r"layer 0 \(LlamaAttention\) has no output projection, expected a "),
        (packed, [0], r"o_proj of layer 0 is uint8 \[10, 1\], expected a matrix"),
        (narrow, [1], r"are \[48, 48\] float32, \[48, 96\] float32, expected one shape"),
        (narrow, [0, 1], "o_proj of layer 0 takes 48 numbers, expected 96, 16 for each query head"),
        (unused, [0, 1], "layer 0 applied no o_proj after its attention, expected it"),
    ],
)  # fmt: skip
def test_projections_that_are_something_else_are_refused(change, where, message, tmp_path):
    """A model whose `o_proj` would not be what a trace says is refused, and nothing is written."""
    model = build("llama")
    for layer in where:
        change(model.model.layers[layer])

    with pytest.raises(CaptureError, match=message) as caught:
        capture(model, None, ids(20), max_new_tokens=2, o_proj=True, out=tmp_path / "a.zarr")

    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_half_precision_storage(tmp_path):
    """Stored as float16, attention still follows from what is stored: rows sum to 1."""
    model = small("qwen2")

    trace = capture(
        model, None, ids(300), max_new_tokens=0, out=tmp_path / "a.zarr", store_dtype="float16"
    )

    exact = capture(model, None, ids(300), max_new_tokens=0)
    assert torch.equal(trace.k, exact.k.half().float())
    assert trace.source_dtypes["k"] == "float32"
    assert torch.allclose(trace.attention(1, [299]).sum(-1), torch.ones(6, 1), atol=1e-5)
    assert verify(trace.path, deep=True).ok


def test_the_context_cuts_the_response():
    """A response that would leave the model's context is cut there, with a note."""
    model = build("llama", max_position_embeddings=64)

    trace = capture(model, None, ids(60), max_new_tokens=63)

    assert trace.n_pos == 64
    assert trace.meta["generation"]["stopped"] == "context"
    assert "cut to 4 of 63" in trace.meta["notes"][0]


def test_the_response_stops_at_eos():
    """The token that ends a response is the last one of the trace."""
    model = build("llama")
    free = capture(model, None, ids(20), max_new_tokens=40).tokens.tolist()
    model.generation_config.eos_token_id = [free[25]]

    trace = capture(model, None, ids(20), max_new_tokens=40)

    assert trace.tokens.tolist() == free[: free.index(free[25], 20) + 1]
    assert trace.meta["generation"]["stopped"] == "eos"


# --- the shipped model ---


def test_tiny_is_recorded_exactly_and_answers(tmp_path):
    """A capture of tiny is exact to 1e-5, and its answer is checked against the right one."""
    sample = tasks.prompts(1, 3, task="walk", facts=12, lines=10, kinds=6)[0]

    trace = capture("tiny", None, sample.prompt, out=tmp_path / "walk.zarr")

    for layer in range(trace.n_layers):
        expected = exact_attention(trace, layer)
        found = trace.read("attn_out", slice(layer, layer + 1))[0]
        assert float((found - expected).abs().max() / expected.abs().max()) < 1e-5
    report = verify(trace.path, deep=True)
    assert report.ok
    assert max(report.output_error) < 1e-5
    assert trace.meta["answer_check"]["right"] is True
    assert trace.meta["answer_check"]["expected"] == sample.response
    assert trace.meta["text"] == {
        "prompt": sample.prompt,
        "messages": None,
        "response": sample.response,
    }
    assert trace.meta["model"]["name"] == "tiny"
    assert trace.token_text[0] == "<bos>"
    assert trace.token_text[1 : trace.prompt_len] == sample.prompt.split()
    assert str(kvsim.tiny.PATH) not in json.dumps(dict(trace.meta))


def test_a_wrong_answer_of_tiny_is_seen():
    """A response that was cut is recorded as wrong."""
    model, tokenizer = tiny()
    sample = tasks.prompts(1, 3, facts=12, lines=10, kinds=6)[0]

    trace = capture(model, tokenizer, sample.prompt, max_new_tokens=5)

    assert trace.meta["answer_check"]["right"] is False


def test_a_prompt_of_tiny_without_an_answer():
    """Words of the language that make no question have no answer to check."""
    model, tokenizer = tiny()

    trace = capture(model, tokenizer, "facts : kuga", max_new_tokens=2)

    assert trace.meta["answer_check"]["right"] is None
    assert "expected" in trace.meta["answer_check"]["reason"]


# --- many prompts ---


def test_capture_many(tmp_path):
    """Each prompt gets a trace of its own, named by its id, with its answer checked."""
    rows = [
        {"id": "a/1", "prompt": "w1 w2 w3", "answer": "nothing of the sort"},
        {"prompt": "w4 w5"},
        {"id": "chat", "messages": [{"role": "user", "content": "w6"}]},
    ]
    source = tmp_path / "prompts.jsonl"
    source.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    template = "{% for m in messages %}{{ m['role'] }} w0 {{ m['content'] }}{% endfor %} w9"
    tokenizer = words_tokenizer(template.replace("{{ m['role'] }}", "w7"))

    traces = capture_many(
        small("llama"), tokenizer, read_prompts(source), tmp_path / "out", max_new_tokens=3
    )

    assert [trace.path.name for trace in traces] == ["a-1.zarr", "prompt-0001.zarr", "chat.zarr"]
    assert [trace.prompt_len for trace in traces] == [3, 2, 4]
    assert [trace.name for trace in traces] == ["a/1", "prompt-0001", "chat"]
    assert traces[0].meta["answer_check"]["right"] is False
    assert traces[1].meta["answer_check"] is None
    assert traces[2].meta["text"]["prompt"] == "w7 w0 w6 w9"
    assert traces[2].meta["text"]["messages"] == [{"role": "user", "content": "w6"}]


def test_labels_of_a_prompt_go_into_its_trace(tmp_path):
    """Task, domain and level, as far as a line has them; other fields of the line do not."""
    rows = [
        {"prompt": "w1", "task": "walk", "domain": "ore", "level": 2, "tokens": 9},
        {"prompt": "w2", "level": "hard", "task": None},
        {"prompt": "w3"},
    ]
    source = tmp_path / "prompts.jsonl"
    source.write_text("\n".join(json.dumps(row) for row in rows))
    model = small("llama")

    many = capture_many(
        model, words_tokenizer(), read_prompts(source), tmp_path / "out", max_new_tokens=0
    )
    one = capture(model, None, [1, 2], max_new_tokens=0, labels={"domain": "fruit"})

    expected = [{"task": "walk", "domain": "ore", "level": 2}, {"level": "hard"}, {}]
    assert [trace.meta["labels"] for trace in many] == expected
    assert [trace.labels for trace in many] == expected
    assert [describe(trace.path)["labels"] for trace in many] == expected
    assert one.labels == {"domain": "fruit"}


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ({"colour": "red"}, "label 'colour', expected one of task, domain, level, length"),
        ({"level": 0.5}, "level is 0.5, expected text or a whole number"),
        ({"level": True}, "level is True, expected text or a whole number"),
        ({"length": "512"}, "length is '512', expected a whole number"),
        ({"depth": 1.5}, "depth is 1.5, expected a number from 0 to 1"),
        ({"depth": float("nan")}, "depth is nan, expected a number from 0 to 1"),
    ],
)
def test_bad_labels(labels, message, tmp_path):
    """A label that no table has a place for is refused before the model runs."""
    with pytest.raises(CaptureError, match=f"^{message}"):
        capture(small("llama"), None, [1, 2], labels=labels)
    with pytest.raises(CaptureError, match=f"^prompt 'p': {message}"):
        capture_many(small("llama"), None, [Prompt("p", [1, 2], labels=labels)], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_expected_answer_is_found(tmp_path):
    """An expected answer is right where it stands as whole words after the reasoning."""
    model, tokenizer = small("llama"), words_tokenizer()
    response = capture(model, tokenizer, "w1 w2", max_new_tokens=6).meta["text"]["response"]
    last = response.split()[-1]

    right, wrong = capture_many(
        model,
        tokenizer,
        [Prompt("right", "w1 w2", last), Prompt("wrong", "w1 w2", last + "0")],
        tmp_path,
        max_new_tokens=6,
    )

    assert right.meta["answer_check"]["right"] is True
    assert wrong.meta["answer_check"]["right"] is False


def test_all_prompts_are_checked_before_the_first_runs(tmp_path):
    """A bad prompt among many is named, and none is recorded."""
    prompts = [Prompt("good", "w1"), Prompt("bad", "w1 hello")]

    with pytest.raises(CaptureError, match="prompt 'bad': the tokenizer does not know 'hello'"):
        capture_many(small("llama"), words_tokenizer(), prompts, tmp_path / "out")

    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no prompts"),
        ("{", "line 1: .* expected one JSON object"),
        ('{"prompt": "a"}\n{"text": "b"}', "line 2: no prompt, expected an object with 'prompt'"),
        ('{"prompt": 3}', "line 1: no prompt"),
        ('{"prompt": "a", "level": [1]}', r"line 1: level is \[1\], expected text or a whole"),
        ("[1]", "line 1: a JSON array, expected one JSON object on each line"),
        ('{"id": "a b", "prompt": "x"}\n{"id": "a-b", "prompt": "x"}', "expected distinct ids"),
    ],
)
def test_bad_prompt_files(text, message, tmp_path):
    """A line that is no prompt is named by its number."""
    source = tmp_path / "prompts.jsonl"
    source.write_text(text)

    with pytest.raises(CaptureError, match=message) as caught:
        read_prompts(source)
    assert "\n" not in str(caught.value)


def test_a_missing_prompt_file(tmp_path):
    """A file that is not there is one clear line."""
    with pytest.raises(CaptureError, match="cannot be read"):
        read_prompts(tmp_path / "none.jsonl")


@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_prompts_are_read_from_regular_files_alone(kind, tmp_path):
    """A pipe that nobody writes to, or a device without end, is refused and not waited for."""
    source = tmp_path / "prompts.jsonl" if kind == "fifo" else Path("/dev/zero")
    if kind == "fifo":
        os.mkfifo(source)

    with pytest.raises(CaptureError, match="is not a regular file, expected a JSONL file"):
        read_prompts(source)


def test_the_coldest_temperature_takes_the_most_likely_token():
    """Logits that overflow when they are divided by it have one outcome, and no error."""
    tokens = [
        capture(small("llama"), None, [1, 2], max_new_tokens=4, temperature=temperature).tokens
        for temperature in (0.0, 1e-320)
    ]

    assert torch.equal(*tokens)


# --- bad input ---


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        ("  \n", "the prompt is empty"),
        ([], "the prompt is empty"),
        (torch.zeros(0, dtype=torch.long), "the prompt is empty"),
        ("w1 hello w2 world hello", "does not know 'hello', 'world', expected words"),
        ([1, 64], "token id 64 is not in the model's vocabulary, expected 0 to 63"),
        ([-1], "token id -1"),
        ([0.5], "expected text, a list of chat messages, or a list of token ids"),
        ([[1, 2], [3]], "expected text, a list of chat messages"),
        ([1] * 1025, "a prompt of 1025 tokens, expected at most the model's context of 1024"),
        ([{"role": "user", "content": "w1"}], "no chat template"),
    ],
)
def test_bad_prompts(prompt, message):
    """A prompt that cannot be run is one line that says found and expected."""
    with pytest.raises(CaptureError, match=message) as caught:
        capture(small("llama"), words_tokenizer(), prompt)
    assert "\n" not in str(caught.value)


def test_unknown_words_of_tiny_point_to_its_generator():
    """For tiny, unknown words are listed with the command that writes prompts."""
    model, tokenizer = tiny()

    with pytest.raises(CaptureError, match=r"'hello', 'there', .*`kvsim prompts`"):
        capture(model, tokenizer, "hello there")


def test_text_needs_a_tokenizer():
    """Text or a chat without a tokenizer is refused; token ids are not."""
    for prompt in ("w1", [{"role": "user", "content": "w1"}]):
        with pytest.raises(CaptureError, match="there is no tokenizer"):
            capture(small("llama"), None, prompt)

    trace = capture(small("llama"), None, [1, 2], max_new_tokens=1)
    assert trace.token_text is None
    assert trace.meta["text"]["response"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens is -1; expected an integer of at least 0"),
        ({"temperature": -0.5}, "temperature is -0.5"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf; expected a finite number"),
        ({"temperature": "warm"}, "temperature is 'warm'; expected a finite number of at least 0"),
        ({"seed": 2**64}, "seed is 18446744073709551616; expected an integer from"),
        ({"chat": 1}, "chat is 1; expected True or False"),
        ({"store_dtype": "int8"}, "store_dtype is 'int8'; expected 'float16' or None"),
        ({"attention": True}, "out is None"),
    ],
)
def test_bad_options(options, message):
    """Options out of range are one clear line."""
    with pytest.raises(CaptureError, match=message):
        capture(small("llama"), None, [1], **options)


# --- models that must be refused ---


@pytest.mark.parametrize("wrong_from", [0, 50, 300])
def test_a_kernel_that_computes_something_else_is_refused(wrong_from, tmp_path):
    """A kernel that differs in any row, early or late, is refused with layer and error."""
    library = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def off(module, query, key, value, *args, **kwargs):
        out, weights = library(module, query, key, value, *args, **kwargs)
        first = key.shape[2] - query.shape[2]
        rows = torch.arange(first, key.shape[2]) >= wrong_from
        if module.layer_idx == 1:
            out = torch.where(rows[None, :, None, None], out * 1.001, out)
        return out, weights

    ALL_ATTENTION_FUNCTIONS["sdpa"] = off
    try:
        with pytest.raises(CaptureError, match=r"attention of layer 1, .* differs by 0.00"):
            capture(small("llama"), None, ids(280), max_new_tokens=40, out=tmp_path / "a.zarr")
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]
    assert list(tmp_path.iterdir()) == []


# --- loading ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a small model and its tokenizer."""
    path = tmp_path_factory.mktemp("model") / "small-qwen2"
    small("qwen2").save_pretrained(path)
    words_tokenizer().save_pretrained(path)
    return path


def test_a_local_folder_is_loaded(folder, tmp_path):
    """A folder's weights and tokenizer are loaded, in float32 on the CPU unless asked otherwise."""
    model, tokenizer = load_model(folder)
    brain, _ = load_model(folder, dtype="bfloat16", attention="eager")

    assert model.dtype == torch.float32
    assert not model.training
    assert tokenizer.unk_token == UNKNOWN
    assert brain.dtype == torch.bfloat16
    assert brain.config._attn_implementation == "eager"
    trace = capture(str(folder), None, "w1 w2", max_new_tokens=2)
    assert trace.meta["model"]["name"] == "small-qwen2"
    expected = capture(small("qwen2"), None, [1, 2], max_new_tokens=2)
    assert torch.allclose(trace.q, expected.q, atol=1e-4)  # weights lie at other addresses


def test_loading_shows_no_progress_bar(folder, capfd):
    """Loading prints nothing, and transformers' progress bars are on again afterwards."""
    transformers.utils.logging.enable_progress_bar()  # scripts of other tests turn it off

    load_model(folder)

    assert transformers.utils.logging.is_progress_bar_enabled()
    assert capfd.readouterr().err == ""


def test_pickled_weights_are_never_loaded(folder, tmp_path):
    """A folder with pickled weights alone is refused and told how to be converted."""
    path = tmp_path / "pickled"
    path.mkdir()
    (path / "config.json").write_bytes((folder / "config.json").read_bytes())
    torch.save({}, path / "pytorch_model.bin")

    with pytest.raises(CaptureError, match=r"only pytorch_model.bin, expected \*.safetensors"):
        load_model(path)


@pytest.mark.parametrize("change", ["gone", "other shape"])
def test_weights_that_would_be_random_are_refused(folder, tmp_path, change):
    """A folder without all weights, or with some in other shapes: one line names the first."""
    path = shutil.copytree(folder, tmp_path / "part")
    weights = load_file(path / "model.safetensors")
    names = [name for name in sorted(weights) if "mlp" in name]
    for name in names:
        weights[name] = weights[name][:1].clone()
        if change == "gone":
            del weights[name]
    save_file(weights, path / "model.safetensors", {"format": "pt"})

    with pytest.raises(CaptureError, match=f"part lacks {len(names)} of .*{names[0]}, ") as caught:
        load_model(path)

    assert "\n" not in str(caught.value)


def test_remote_code_is_not_run(folder, tmp_path):
    """A folder that brings its own code is refused unless it is trusted."""
    path = tmp_path / "custom"
    path.mkdir()
    (path / "config.json").write_text(
        json.dumps(
            {
                "model_type": "custom",
                "auto_map": {"AutoConfig": "c.C", "AutoModelForCausalLM": "c.M"},
            }
        )
    )
    (path / "c.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    (path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())

    with pytest.raises(CaptureError, match="cannot be loaded") as caught:
        load_model(path)

    assert "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "name", ["./none", "/none/at/all", "~none/at", "a/b/c", r"a\b", r"C:\a", "", "./" + 300 * "n"]
)
def test_a_folder_that_is_not_there(name, monkeypatch):
    """What can only be a path, and has no model, is one clear line; nobody asks the hub."""
    monkeypatch.setattr(loading, "unreachable", pytest.fail)

    with pytest.raises(CaptureError, match="no model folder at") as caught:
        load_model(name)
    assert "\n" not in str(caught.value)


def test_a_misspelled_folder_is_told_apart(folder, monkeypatch):
    """A model beside it, or one that ships, of a similar name is named."""
    monkeypatch.chdir(folder.parent)

    for name, close in {
        "./smal-qwen2": "small-qwen2",
        str(folder)[:-1]: "small-qwen2",
        "small-qwen": "small-qwen2",
        "tinny": "tiny",
    }.items():
        with pytest.raises(CaptureError, match=f"; did you mean '{close}'\\?$"):
            load_model(name)


@pytest.fixture
def no_hub(monkeypatch, tmp_path):
    """A hub that refuses connections, and an empty cache, whose path it gives."""
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setenv("NO_PROXY", "*")
        monkeypatch.setattr(time, "sleep", pytest.fail)  # between one try and the next
        yield tmp_path / "hub"


@pytest.mark.parametrize("name", ["none", "some/none"])
def test_a_hub_that_cannot_be_reached(name, no_hub):
    """A model that only the hub could have is refused at the first refusal, in one line."""
    with pytest.raises(
        CaptureError, match=r"http://127\.0\.0\.1:\d+ cannot be reached \("
    ) as caught:
        load_model(name)

    assert f"model {name!r} cannot be loaded: it is not a folder" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_model_that_the_hub_gave_before(folder, no_hub):
    """What is in the cache is loaded without the hub, under its own name."""
    place = no_hub / "models--some--small"
    shutil.copytree(folder, place / "snapshots" / "0abc")
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("0abc")

    model, tokenizer = load_model("some/small")

    assert tokenizer.unk_token == UNKNOWN
    trace = capture(model, tokenizer, "w1 w2", max_new_tokens=0)
    assert trace.meta["model"]["name"] == "some/small"


def test_the_hub_is_there_whatever_it_says(no_hub, monkeypatch):
    """Any answer is one; none at all within the time is a reason."""
    with socketserver.TCPServer(("127.0.0.1", 0), Answering) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
        assert unreachable() is None
        server.shutdown()
        thread.join(10)
        monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.1)
        assert "cannot be reached (timed out)" in unreachable()
    monkeypatch.setattr(constants, "ENDPOINT", "nonsense")
    assert unreachable().startswith("nonsense cannot be reached (")


class Answering(socketserver.StreamRequestHandler):
    """Says of everything that it is not there."""

    def handle(self):
        """Read a request and answer it."""
        while self.rfile.readline().strip():
            pass
        self.wfile.write(b"HTTP/1.1 404 Not Found\r\nConnection: close\r\n\r\n")


def test_a_folder_without_weights(tmp_path):
    """An empty folder is one clear line."""
    with pytest.raises(CaptureError, match=r"has no weights, expected \*.safetensors"):
        load_model(tmp_path)


def test_an_unknown_dtype(folder):
    """A dtype that does not exist lists those that do."""
    with pytest.raises(CaptureError, match="dtype is 'int4', expected float32"):
        load_model(folder, dtype="int4")


def test_a_short_name_of_a_dtype(folder):
    """As `bf16`, which papers and other tools write."""
    model, _ = load_model(folder, dtype="bf16")

    assert model.dtype == torch.bfloat16


def test_read_ropes_of_tiny():
    """The rotary embedding of tiny has its base and rotates whole heads."""
    model, _ = tiny()

    (rope,) = read_ropes(model)

    assert rope.rotary_dim == 32
    assert rope.layout == "half"
    assert rope.inv_freq[1] == pytest.approx(1e6 ** (-2 / 32))


# --- progress ---


def test_progress_counts_tokens(capfd):
    """A callback sees tokens done and in all; the bar is silent where there is no terminal."""
    seen = []

    capture(small("llama"), None, ids(20), max_new_tokens=3, progress=lambda *now: seen.append(now))
    capture(small("llama"), None, ids(20), max_new_tokens=3, progress=True)

    assert seen == [(20, 23), (21, 23), (22, 23), (23, 23)]
    assert capfd.readouterr() == ("", "")


def test_the_bar_is_shown_on_a_terminal(monkeypatch, capsys):
    """On a terminal the bar is drawn on standard error, and nothing on standard output."""
    import sys

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")

    with progress_bar("tokens", "walk") as show:
        show(5, 10)

    printed = capsys.readouterr()
    assert "walk" in printed.err
    assert printed.out == ""
