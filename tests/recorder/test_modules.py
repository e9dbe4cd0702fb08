"""Which modules are the attention of a model; models in which not all layers have attention."""

import functools

import pytest
import torch
from torch.nn.functional import linear
from transformers import PreTrainedModel

import kvsim
from kvsim.errors import CaptureError
from kvsim.recorder.modules import attention_modules
from tests.hybrids import HYBRIDS, hybrid, newer


def ids(n: int) -> list[int]:
    """Random token ids."""
    return torch.randint(1, 64, (n,), generator=torch.Generator().manual_seed(0)).tolist()


@functools.cache
def recorded(name: str) -> tuple[PreTrainedModel, kvsim.Trace]:
    """A hybrid and its trace of prompt and response."""
    model = hybrid(name)
    return model, kvsim.capture(model, None, ids(50), max_new_tokens=12)


def rotated(x: torch.Tensor, rope: dict) -> torch.Tensor:
    """RoPE of [head, n, d] in float64, by the configuration."""
    size = int(x.shape[-1] * rope.get("partial_rotary_factor", 1.0))
    frequency = rope["rope_theta"] ** (-torch.arange(0, size, 2).double() / size)
    angle = torch.arange(x.shape[1]).double()[:, None] * frequency
    a, b, rest = x[..., : size // 2], x[..., size // 2 : size], x[..., size:]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


@newer
@pytest.mark.parametrize("name", HYBRIDS)
def test_layers_without_attention_are_no_layers_of_a_trace(name):
    """A trace has the layers with attention under the model's numbers, and names the others."""
    model, trace = recorded(name)

    kinds = model.config.layer_types
    others = {i: kind for i, kind in enumerate(kinds) if kind in ("linear_attention", "conv")}
    assert trace.header.other_layers == others
    assert list(trace.layer_ids) == [i for i in range(4) if i not in others]
    assert trace.header.whole
    assert trace.has("residual_norm")
    assert max(trace.meta["capture_check"]["max_relative_error"]) < 1e-5
    part = kvsim.capture(model, None, ids(9), max_new_tokens=0, layers=[-1])
    assert part.layer_ids == (3,)
    assert not part.header.whole


@newer
@pytest.mark.parametrize("name", HYBRIDS)
def test_attention_of_hybrids_follows_from_configuration_and_weights(name):
    """q, k, v and output are those of float64, from the input of the attention in one forward."""
    model, trace = recorded(name)
    inputs: dict[int, torch.Tensor] = {}
    handles = [
        module.register_forward_pre_hook(
            lambda _, args, kw, n=number: inputs.update({n: kw.get("hidden_states", *args[:1])[0]}),
            with_kwargs=True,
        )
        for number, module in attention_modules(model).items()
    ]
    with torch.no_grad():
        model(trace.tokens[None], use_cache=False)
    for handle in handles:
        handle.remove()

    for place, (number, module) in enumerate(attention_modules(model).items()):
        x, size = inputs[number].double(), model.config.head_dim
        made = {}
        for letter in "qkv":
            projection = getattr(module, f"{letter}_proj")
            bias = None if projection.bias is None else projection.bias.double()
            y = linear(x, projection.weight.double(), bias)
            if letter == "q" and name == "qwen3_next":  # the other half is the gate
                y = y.unflatten(-1, (4, -1))[..., :size].flatten(1)
            norm = getattr(module, f"{letter}_norm", getattr(module, f"{letter}_layernorm", None))
            over_heads = norm is not None and len(norm.weight) == y.shape[-1]
            parts = y if over_heads else y.unflatten(-1, (-1, size))
            if norm is not None:
                scale = norm.weight.double() + (name == "qwen3_next")
                parts = parts * (parts.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * scale
            heads = parts.reshape(len(x), -1, size).transpose(0, 1).detach()
            made[letter] = heads if letter == "v" else rotated(heads, model.config.rope_parameters)
        q, k, v = made["q"], *(made[x].repeat_interleave(2, 0) for x in "kv")
        logits = q @ k.mT * trace.formulas[place].scale
        hidden = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        made["attn_out"] = logits.masked_fill(hidden, -torch.inf).softmax(-1) @ v
        for array, expected in made.items():
            actual = trace.read(array, slice(place, place + 1))[0].double()
            torch.testing.assert_close(actual, expected, rtol=0, atol=2e-5 * expected.abs().max())


def test_layers_that_hold_keys_without_the_kernel_are_refused():
    """A layer that attends by a kernel of its own is not taken for a layer without attention."""
    model = hybrid("qwen3")
    model.model.layers[1].self_attn.forward = functools.partial(_attend, model.model.layers[1])

    with pytest.raises(CaptureError, match=r"layers \[1\] of .* hold keys and never called"):
        kvsim.capture(model, None, ids(9))


def _attend(layer, hidden_states, **options):
    """Fill the cache and attend to nothing."""
    cache = options.get("cache", options.get("past_key_values"))
    if cache is not None:
        keys = hidden_states.new_zeros(1, 2, hidden_states.shape[1], 16)
        cache.update(keys, keys, layer.self_attn.layer_idx)
    return torch.zeros_like(hidden_states), None


@pytest.mark.parametrize("late", [False, True])
def test_what_a_model_raises_becomes_one_line(late):
    """Any exception in a forward is a CaptureError with its type and text, and its cause."""
    model = hybrid("qwen3")
    if late:
        attention_modules(model)

    def fail(*_):
        raise KeyError("no such\nthing")

    model.model.norm.register_forward_pre_hook(fail)
    with pytest.raises(CaptureError, match=r"Qwen3ForCausalLM raised KeyError .*no such") as caught:
        kvsim.capture(model, None, ids(9))

    assert "\n" not in str(caught.value)
    assert isinstance(caught.value.__cause__, KeyError)
