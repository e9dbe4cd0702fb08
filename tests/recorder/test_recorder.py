"""Capture: exactness against the model itself, publication, progress."""

import pytest
import torch
from recorder_models import build, small
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from families import ids
from kvsim.errors import CaptureError
from kvsim.recorder import capture
from kvsim.recorder.forward import cache_of
from kvsim.recorder.modules import attention_modules
from kvsim.store.verification import verify


def test_generation_equals_one_teacher_forced_forward():
    """Prefill and generation give what one forward over the same tokens gives, to 1e-4."""
    model = small("qwen3")
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
        cache = cache_of(model(torch.tensor([ids(50)]), use_cache=True))

    for layer in range(2):
        assert torch.equal(trace.read("k")[layer], cache.layers[layer].keys[0])
        assert torch.equal(trace.read("v")[layer], cache.layers[layer].values[0])


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
    assert torch.allclose(
        trace.ropes[0].rotate(before, torch.arange(60)), trace.read("k")[1], atol=1e-4
    )
    assert torch.allclose(
        trace.ropes[0].unrotate(trace.read("k")[1], torch.arange(60)), before, atol=1e-4
    )
    assert (trace.ropes[0].attention_scaling != 1) == (rope["rope_type"] == "yarn")


def test_training_mode_is_restored():
    """A model in training mode is captured without dropout and is in training mode afterwards."""
    model = build("llama", attention_dropout=0.5).train()

    trace = capture(model, None, ids(20), max_new_tokens=0)

    assert model.training
    assert max(trace.meta["capture_check"]["max_relative_error"]) < 1e-5


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
    assert torch.equal(memory.read("o_proj"), expected.to(memory.dtype))
    assert torch.equal(stored.read("o_proj"), expected.to(memory.dtype))
    assert torch.equal(narrow.read("o_proj"), expected.half().float())
    assert stored.header.source_dtypes["o_proj"] == str(dtype).removeprefix("torch.")
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


def shorter(layer):
    """A projection to half of the residual stream."""
    layer.self_attn.o_proj = torch.nn.Linear(96, 24, bias=False)


def unused(layer):
    """A projection that nobody sees at work."""
    layer.self_attn.o_proj = Unheard(96, 48, bias=False)


@pytest.mark.parametrize(
    ("change", "where", "message"),
    [
        (adapted, [1], r"o_proj of layer 1 differs by 0\.01 .*: there is an adapter or a norm"),
        (gated, [1], "o_proj of layer 1 differs by"),
        (renamed, [0, 1], r"layer 0 \(LlamaAttention\) has no o_proj, dense"),
        (packed, [0], r"o_proj of layer 0 is uint8 \[10, 1\], expected a matrix"),
        (shorter, [1], "are 24 rows of float32, 48 rows of float32, expected one size and dtype"),
        (narrow, [1], "LlamaForCausalLM raised RuntimeError"),
        (unused, [0, 1], "o_proj of layer 0 was not applied once"),
    ],
)  # fmt: skip
def test_projections_that_are_something_else_are_refused(change, where, message, tmp_path):
    """A model whose `o_proj` would not be what a trace says is refused, and nothing is written."""
    model = build("llama")
    attention_modules(model)  # while it runs
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
    assert torch.equal(trace.read("k"), exact.read("k").half().float())
    assert trace.header.source_dtypes["k"] == "float32"
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


def test_progress_counts_tokens(capfd):
    """A callback sees tokens done and in all; the bar is silent where there is no terminal."""
    seen = []

    capture(small("llama"), None, ids(20), max_new_tokens=3, progress=lambda *now: seen.append(now))
    capture(small("llama"), None, ids(20), max_new_tokens=3, progress=True)

    assert seen == [(20, 23), (21, 23), (22, 23), (23, 23)]
    assert capfd.readouterr() == ("", "")
