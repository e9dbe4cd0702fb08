"""Prompts that run through the model in chunks, over its own cache."""

import functools
import sys

import numpy as np
import pytest
import torch
from hybrids import hybrid, newer
from recorder_models import LATENT, latent, several_axes
from shared_models import MODELS, shared
from torch.utils._python_dispatch import TorchDispatchMode

import kvsim
from families import FAMILIES, Family
from kvsim.errors import CaptureError
from kvsim.recorder import forward, hooks

#: Longer than a block, the windows of the families and the chunks of Llama 4.
PROMPT, NEW, CHUNK = 270, 6, 75
IDS = [(7 * i * i + 3 * i) % 60 for i in range(1024)]
LLAMA4 = {
    "num_hidden_layers": 4,
    "intermediate_size_mlp": 64,
    "attention_chunk_size": 100,
    "num_local_experts": 2,
    "floor_scale": 8,
    "attn_scale": 0.5,
    "pad_token_id": 0,
}

HYBRIDS = ("qwen3_next", "bamba", "lfm2")
MODELS_OF = {
    **{
        f"{name}, {kernel}": functools.partial(FAMILIES[name].build, kernel)
        for name, kernel in (
            ("llama", "sdpa"),
            ("llama", "eager"),
            ("mistral", "sdpa"),
            ("gemma2", "eager"),
            ("gemma3", "sdpa"),
            ("gpt_oss", "eager"),
            ("gpt2", "sdpa"),
        )
    },
    **{name: functools.partial(hybrid, name) for name in HYBRIDS},
    **{name: functools.partial(latent, name) for name in LATENT},
    **{name: functools.partial(shared, name) for name in MODELS},
    "chunks": Family("Llama4", "", config="Llama4TextConfig", changes=LLAMA4).build,
    "positions of several axes": several_axes,
}


def recorded(model, n=PROMPT, **options):
    """A trace of a prompt and a generated response."""
    return kvsim.capture(model, None, IDS[:n], max_new_tokens=NEW, **options)


class Largest(TorchDispatchMode):
    """The most numbers that a tensor has which an operation made."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, torch.Tensor):
                size = x.untyped_storage().nbytes() // x.element_size()
                self.numbers = max(self.numbers, size)
        return out


def largest(model, n, **options):
    """The numbers of the largest tensor in a capture of n tokens."""
    with Largest() as mode:
        kvsim.capture(model, None, IDS[:n], max_new_tokens=0, **options)
    return mode.numbers


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=newer) if x in HYBRIDS else x for x in MODELS_OF]
)
def test_chunks_record_what_one_forward_records(name):
    """Tokens are the same, arrays equal up to rounding, and so do kept sets."""
    try:
        model = MODELS_OF[name]()
    except AttributeError:
        pytest.xfail("not in this release of transformers")
    # random layers that share their entries are sharp, and make rounding larger
    allowed = 1e-3 if name in MODELS else 1e-5
    whole, trace = (recorded(model, chunk=chunk) for chunk in (None, CHUNK))

    assert trace.tokens.tolist() == whole.tokens.tolist()
    assert (trace.formulas, trace.ropes, trace.owners) == (
        *(whole.formulas, whole.ropes, whole.owners),
    )
    for array in ("q", "k", "v", "attn_out", "lse"):
        found, expected = trace.read(array), whole.read(array)
        sharp = 3 if array == "attn_out" else 1  # logits of some hundred make rounding larger
        assert float((found - expected).abs().max() / expected.abs().max()) < sharp * allowed, array
    assert trace.has("gate") == whole.has("gate")
    if len(whole.windowed) < whole.n_layers:
        sets = [kvsim.replay(x, kvsim.policy("snapkv"), 64).evicted_at for x in (whole, trace)]
        assert np.mean(sets[0] != sets[1]) < 1e-3  # ties


def test_a_given_response_runs_in_chunks():
    """Likelihoods are those of one forward, wherever chunks end."""
    model, response = FAMILIES["llama"].build("sdpa"), IDS[300:340]
    expected = kvsim.capture(model, None, IDS[:90], response=response).header.response_logprobs

    for chunk in (45, 89, 91):
        found = kvsim.capture(model, None, IDS[:90], response=response, chunk=chunk)
        assert found.header.response_logprobs == pytest.approx(expected, abs=1e-4)


def test_a_probe_runs_in_chunks():
    """Its rows have the queries and keys that they have after a context in one piece."""
    model = FAMILIES["llama"].build("sdpa")
    rows = []
    handle = model.register_forward_pre_hook(lambda _, args: rows.append(args[0].shape[1]))
    whole, trace = (recorded(model, chunk=chunk, probe="repeat:300") for chunk in (None, 60))
    handle.remove()

    assert rows[: rows.index(60)].count(PROMPT) == 3  # prompt, context and its repetition
    assert trace.header.probe == whole.header.probe
    for name in ("probe_q", "probe_k"):
        torch.testing.assert_close(trace.read(name), whole.read(name), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_memory_does_not_grow_with_the_square_of_the_prompt(kernel):
    """No tensor has a number for each pair of tokens; the largest is linear in the prompt."""
    model = FAMILIES["mistral"].build(kernel)
    short, long = (largest(model, n, chunk=32) for n in (128, 512))

    assert long <= 4 * short
    assert long < 512**2 // 2
    assert largest(model, 512) >= 512**2  # the mask of its window


def test_a_long_prompt_runs_in_chunks_by_default(monkeypatch):
    """Chunks have whole blocks of rows, and a short prompt runs in one piece, bit for bit."""
    model, rows = FAMILIES["llama"].build("sdpa"), []
    monkeypatch.setattr(forward, "PAIRS", 400**2)
    handle = model.register_forward_pre_hook(lambda _, args: rows.append(args[0].shape[1]))

    short, long = recorded(model, 400), recorded(model, 600)
    handle.remove()

    assert [n for n in rows if n > forward._FEW] == [400, 256, 256, 88]
    assert torch.equal(short.read("k"), recorded(model, 400, chunk=400).read("k"))
    assert long.n_pos == 600 + NEW
    assert long.meta["notes"] == []


def test_frequencies_of_the_whole_prompt_need_one_forward(monkeypatch):
    """A model whose frequencies change on the way runs whole, with a note, or is refused."""
    model = FAMILIES["llama, dynamic scaling"].build("sdpa")
    monkeypatch.setattr(forward, "PAIRS", 1)
    trace = kvsim.capture(model, None, IDS[:300], max_new_tokens=0)

    assert trace.meta["notes"] == [
        "the prompt was run in one piece: frequencies of its RoPE change with the length"
    ]
    with pytest.raises(CaptureError, match=r"chunk is 70 .* 300 tokens, and freq.* leave --chunk"):
        kvsim.capture(model, None, IDS[:300], max_new_tokens=0, chunk=70)


@newer
def test_a_model_that_forgets_its_state_runs_in_one_piece(monkeypatch):
    """A layer that starts anew in each forward of several rows is noticed before it is recorded."""
    model = hybrid("qwen3_next")
    home = sys.modules[type(model).__module__]
    rule = home.torch_chunk_gated_delta_rule

    def anew(*args, **options):
        return rule(*args, **{**options, "initial_state": None})

    monkeypatch.setattr(home, "torch_chunk_gated_delta_rule", anew)
    monkeypatch.setattr(forward, "PAIRS", 1)

    trace = recorded(model)

    assert "Qwen3NextForCausalLM starts from empty states" in trace.meta["notes"][0]
    with pytest.raises(CaptureError, match="starts from empty states in a forward of several rows"):
        recorded(model, chunk=90)


@pytest.mark.parametrize("name", ["llama, sdpa", "mistral, sdpa", "gemma3, sdpa"])
def test_kv_heads_one_by_one_are_all_together(name, monkeypatch):
    """Torch's kernel gets views of keys and values, and computes the same bit for bit."""
    model, copies, views = MODELS_OF[name](), [], []
    together = recorded(model, chunk=CHUNK)
    attention = torch.nn.functional.scaled_dot_product_attention

    def noted(q, k, *args, **options):
        (copies if k.stride(1) else views).append(q.shape)
        return attention(q, k, *args, **options)

    monkeypatch.setattr(hooks, "REPEATED", 0)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    alone = recorded(model, chunk=CHUNK)

    # at least: some releases of transformers have masks in more calls
    assert len(views) >= (PROMPT // CHUNK) * model.config.num_hidden_layers * 2, copies
    for array in ("q", "k", "v", "attn_out"):
        assert torch.equal(alone.read(array), together.read(array)), array
