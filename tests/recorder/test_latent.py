"""Latent attention: traces have the entries that the cache holds, by an independent computation."""

import functools
import math
from types import SimpleNamespace

import pytest
import torch
import transformers
from recorder_models import LATENT, LATENT_SIZES, latent, small

import kvsim
from kvsim.errors import CaptureError
from kvsim.recorder import Prompt, capture_many
from kvsim.recorder.forward import cache_option, full_cache
from kvsim.recorder.latent import caches_heads
from kvsim.recorder.positions import indexed
from kvsim.runner.model import RunningModel
from kvsim.store.verification import verify

PROMPT, N = 270, 290
IDS = torch.randint(0, 256, (N,), generator=torch.Generator().manual_seed(3)).tolist()


@functools.cache
def recorded(name, kernel="sdpa"):
    """The trace of a model."""
    return kvsim.capture(
        latent(name, kernel), None, IDS[:PROMPT], response=IDS[PROMPT:], o_proj=True
    )


def norm(x, module):
    """RMS norm in float64."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", 1e-6))
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * module.weight.double()


def turned(x, theta, *, pairs):
    """x [..., n, d] rotated, of neighbouring dimensions or halves; halves come out as halves."""
    n, d = x.shape[-2:]
    angle = torch.arange(n).double()[:, None] * theta ** (-2 * torch.arange(d // 2).double() / d)
    a, b = (x[..., 0::2], x[..., 1::2]) if pairs else x.chunk(2, -1)
    return a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()


def expected(name, layer, hidden):
    """q, k, v, output and what a layer adds, in float64, of inputs hidden [n, D] and weights."""
    model = latent(name)
    config, module = model.config, model.model.layers[layer].self_attn
    heads, size, rank = 4, 12, 24

    def linear(x, module):
        return x @ module.weight.double().T

    if config.q_lora_rank is None:
        q = linear(hidden, module.q_proj)
    else:
        q = linear(norm(linear(hidden, module.q_a_proj), module.q_a_layernorm), module.q_b_proj)
    q = q.unflatten(-1, (heads, -1)).transpose(0, 1)
    down = linear(hidden, module.kv_a_proj_with_mqa)
    c = norm(down[:, :rank], module.kv_a_layernorm)
    pairs = name == "deepseek_v2" or getattr(config, "rope_interleave", False)
    theta = config.rope_parameters["rope_theta"]

    def rotated(x):
        a, b = turned(x, theta, pairs=pairs)
        if name == "deepseek_v2":
            return torch.stack([a, b], -1).flatten(-2)
        return torch.cat([a, b], -1)

    up = module.kv_b_proj.weight.double().view(heads, -1, rank)
    q = torch.cat(
        [rotated(q[..., size:]), torch.einsum("hnd,hdr->hnr", q[..., :size], up[:, :size])], -1
    )
    k = torch.cat([rotated(down[:, rank:]), c], -1)
    z = q @ k.T / math.sqrt(size + 8)
    z = z.masked_fill(torch.ones(len(z[0]), len(z[0])).triu(1).bool(), -torch.inf)
    out = z.softmax(-1) @ c
    values = torch.einsum("hnr,hdr->nhd", out, up[:, size:]).flatten(1)
    return q, k[None], c[None], out, linear(values, module.o_proj)


def gap(mine, other):
    """The largest difference, relative to the largest number."""
    mine, other = mine.detach().double(), other.detach()
    return float((mine - other).abs().max() / other.abs().max())


@pytest.mark.parametrize("name", LATENT)
def test_everything_follows_from_configuration_and_weights(name):
    """q, k, v, output and projected output, in float64 and apart from the model's own forward."""
    model, trace = latent(name), recorded(name)
    inputs = {}
    handles = [
        layer.input_layernorm.register_forward_hook(
            lambda _, __, out, i=i: inputs.__setitem__(i, out[0].double())
        )
        for i, layer in enumerate(model.model.layers)
    ]
    with torch.no_grad():
        model(torch.tensor([IDS]))
    for handle in handles:
        handle.remove()

    for layer in range(2):
        q, k, v, out, added = expected(name, layer, inputs[layer])
        assert gap(trace.read("q")[layer], q) < 2e-5
        assert gap(trace.read("k")[layer], k) < 2e-5
        assert gap(trace.read("v")[layer], v) < 2e-5
        assert gap(trace.full()[0][layer], out) < 1e-4
        projected = torch.einsum("hnr,hrD->nD", trace.full()[0][layer], trace.read("o_proj")[layer])
        assert gap(projected, added) < 1e-4


@pytest.mark.parametrize("name", LATENT)
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_traces_say_that_entries_are_latents(name, kernel, tmp_path):
    """One KV head, 8 rotated numbers and then the latent, which is the value and counts once."""
    trace = recorded(name, kernel)
    kvsim.save_trace(trace, tmp_path / "a.zarr")
    stored = kvsim.open_trace(tmp_path / "a.zarr")

    assert (trace.n_heads, trace.dim, trace.value_dim, trace.entry_size) == (1, 32, 24, 32)
    assert stored.header.latent == trace.meta["latent"] == 24
    assert stored.entry_size == 32
    assert torch.equal(trace.read("k")[..., 8:], trace.read("v"))
    assert {rope.rotary_dim for rope in trace.ropes} == {8}
    layout = "interleaved" if name == "deepseek_v2" else "half"
    assert {rope.layout for rope in trace.ropes} == {layout}
    assert verify(tmp_path / "a.zarr", deep=True).ok


@pytest.mark.parametrize("name", LATENT)
def test_entries_are_those_of_the_cache(name):
    """Bit for bit, where the release of transformers caches latents."""
    model, trace = latent(name), recorded(name)
    cache = full_cache(model)
    with torch.no_grad():
        model(torch.tensor([IDS]), use_cache=True, **cache_option(model, cache))
    for layer, part in enumerate(cache.layers):
        if part.keys.shape[1] > 1:
            continue  # older releases cache expanded heads
        both = torch.cat([part.values, part.keys], -1)[0]
        assert gap(trace.read("k")[layer], both.double()) < 1e-5


@pytest.mark.parametrize("name", LATENT)
def test_a_shared_context_is_recorded_with_its_latents(name, tmp_path):
    """It runs once where the cache holds latents, and with each question in older releases."""
    prompts = [
        Prompt(x, [*IDS[:PROMPT], *asked], response=[3, 4], context=PROMPT)
        for x, asked in (("a", [5, 6]), ("b", [9]))
    ]

    traces = capture_many(latent(name), None, prompts, tmp_path)

    how = "with each: " if caches_heads(latent(name)) else "in a forward of its own"
    for prompt, trace in zip(prompts, traces, strict=True):
        alone = kvsim.capture(latent(name), None, prompt)
        assert gap(trace.read("k"), alone.read("k").double()) < 1e-5
        assert gap(trace.read("q"), alone.read("q").double()) < 1e-5
        assert any(f"was run {how}" in note for note in trace.meta["notes"])
    assert not caches_heads(small("llama"))


def test_rounded_models_and_short_prompts_are_recorded():
    """bfloat16; a prompt of one token, and a response that the model writes."""
    trace = kvsim.capture(
        latent("deepseek_v3", dtype=torch.bfloat16), None, IDS[:1], max_new_tokens=30, o_proj=True
    )

    assert trace.header.source_dtypes["k"] in ("bfloat16", "float32")
    assert {rope.rotary_dim for rope in trace.ropes} == {8}
    assert trace.n_pos == 31


def test_a_probe_and_sensitivity_are_in_the_same_form(tmp_path):
    """Rows that repeat the context have queries and keys of the absorbed form."""
    trace = kvsim.capture(
        *(latent("deepseek_v3"), None, IDS[:60]),
        response=IDS[60:80],
        probe="repeat",
        sensitivity=True,
        out=tmp_path / "a.zarr",
    )

    assert trace.read("probe_k").shape[1::2] == (1, 32)
    assert trace.read("probe_q").shape[1::2] == (4, 32)
    assert len(trace.header.layer_sensitivity) == 2
    assert min(trace.header.layer_sensitivity) > 0
    assert verify(tmp_path / "a.zarr", deep=True).ok


def test_a_model_whose_keys_do_not_follow_from_latents_is_refused():
    """One line, which says by how much they differ."""
    model = latent("deepseek_v3")
    up = model.model.layers[1].self_attn.kv_b_proj
    hook = up.register_forward_hook(lambda _, __, out: out * 1.01)
    try:
        with pytest.raises(CaptureError, match="layer 1 do not follow from its latents: they diff"):
            kvsim.capture(model, None, IDS[:20], max_new_tokens=0)
    finally:
        hook.remove()


def test_an_indexer_is_noted_while_it_chooses_everything():
    """Up to as many tokens as it chooses; beyond, and live, it is refused."""
    if not hasattr(transformers, "DeepseekV32Config"):  # an older release
        return
    config = transformers.DeepseekV32Config(
        **{**LATENT_SIZES, "index_topk": 40, "index_n_heads": 2, "index_head_dim": 16},
        first_k_dense_replace=2,
    )
    torch.manual_seed(1)
    model = transformers.DeepseekV32ForCausalLM(config).eval()

    trace = kvsim.capture(model, None, IDS[:30], max_new_tokens=10)

    assert trace.header.latent == 24
    assert any("an indexer chooses 40 entries for each row" in x for x in trace.meta["notes"])
    with pytest.raises(CaptureError, match="the text may have 41 tokens; expected at most 40"):
        kvsim.capture(model, None, IDS[:31], max_new_tokens=10)
    with pytest.raises(CaptureError, match="has an indexer that chooses entries for each row"):
        RunningModel(model)


@pytest.mark.parametrize(
    ("config", "count"),
    [
        ({"index_topk": 40}, 40),
        ({"index_topk_blocks": 3, "index_block_size": 16}, 48),
        ({"indexer_budget": 32, "indexer_compress_ratio": 4}, 32),
        ({"indexer_budget": None}, None),
        ({}, None),
    ],
)
def test_an_indexer_chooses_entries_or_blocks(config, count):
    """The longest text of which it leaves nothing out is that of its configuration."""
    text = SimpleNamespace(**config)
    model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text))

    assert indexed(model) == count
