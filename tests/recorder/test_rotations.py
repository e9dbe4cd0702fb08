"""Rotations of queries and keys: measured, whatever function of the model rotates them."""

import cmath
import functools
import math
import sys
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from recorder_models import several_axes

import kvsim
from families import Family, ids
from kvsim.errors import CaptureError, NeedsError
from kvsim.recorder.hooks import attention_modules
from kvsim.store.verification import verify

THETA = 1e4
ROPE = {"rope_type": "default", "rope_theta": THETA}


@dataclass(frozen=True)
class Kind:
    """A model, where its keys before RoPE are, and how its configuration rotates them.

    keys: the module whose output they are; normed: RoPE comes before a norm. dim: rotated
    dimensions. turn: -1 where they rotate the other way round.
    """

    model: str
    changes: dict[str, Any] = field(default_factory=dict)
    config: str = ""
    keys: str = "k_proj"
    normed: bool = False
    dim: int = 16
    layout: str = "half"
    turn: int = 1

    def build(self):
        """A random model with attention that is far from uniform."""
        return Family(self.model, "", config=self.config, changes=self.changes).build("eager")


KINDS = {
    "one tensor a call, from a table": Kind(
        "GPTJ",
        {"n_embd": 48, "n_layer": 2, "n_head": 3, "rotary_dim": 4},
        dim=4,
        layout="interleaved",
    ),
    "a slice": Kind("Phi", {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}}, dim=8),
    "one tensor a call": Kind(
        "Gemma3n",
        {
            "num_kv_shared_layers": 0,
            "layer_types": ["full_attention"] * 2,
            "intermediate_size": [64] * 2,
            "activation_sparsity_pattern": [0.0] * 2,
            "vocab_size_per_layer_input": 64,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 4,
            "altup_num_inputs": 2,
            "rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE},
        },
        config="Gemma3nTextConfig",
        keys="k_norm",
    ),
    "a norm after RoPE": Kind("HunYuanDenseV1", {"rope_parameters": ROPE}, normed=True),
    "the other way round": Kind("NanoChat", {"rope_parameters": ROPE}, normed=True, turn=-1),
}


def own_keys(kind, model, tokens):
    """Keys before RoPE in one forward, [layer, head, n, d] in float64."""
    seen = []
    handles = [
        getattr(module, kind.keys).register_forward_hook(lambda _, __, out: seen.append(out[0]))
        for module in attention_modules(model).values()
    ]
    with torch.no_grad():
        model(torch.as_tensor(tokens)[None], use_cache=False)
    for handle in handles:
        handle.remove()
    size = attention_modules(model)[0].head_dim
    keys = torch.stack([x.reshape(len(tokens), -1, size) for x in seen]).transpose(1, 2).double()
    return keys / keys.square().mean(-1, keepdim=True).sqrt() if kind.normed else keys


def rotated(kind, key, pos):
    """A key at a position by the configuration's frequencies, pair by pair."""
    out = [*key]
    for i in range(kind.dim // 2):
        a, b = (i, i + kind.dim // 2) if kind.layout == "half" else (2 * i, 2 * i + 1)
        angle = kind.turn * pos * THETA ** (-2 * i / kind.dim)
        turned = complex(key[a], key[b]) * cmath.exp(1j * angle)
        out[a], out[b] = turned.real, turned.imag
    return out


@functools.cache
def recorded(name):
    """The model of a kind and its trace; None where an old version of it has its own kernel."""
    model = KINDS[name].build()
    if not hasattr(sys.modules[type(model).__module__], "ALL_ATTENTION_FUNCTIONS"):
        with pytest.raises(CaptureError, match="the kernel of transformers' table 0 times"):
            kvsim.capture(model, None, ids(20), max_new_tokens=0)
        return model, None
    return model, kvsim.capture(model, None, ids(40), max_new_tokens=8)


@pytest.mark.parametrize("name", KINDS)
def test_rotations_are_those_of_the_configuration(name):
    """Keys of one forward before RoPE, rotated pair by pair in float64, are the recorded ones."""
    kind, (model, trace) = KINDS[name], recorded(name)
    if trace is None:
        return
    before = own_keys(kind, model, trace.tokens)

    for layer, rope in enumerate(trace.ropes):
        assert (rope.layout, rope.rotary_dim) == (kind.layout, kind.dim)
        keys, at = trace.read("k")[layer].double(), torch.arange(trace.n_pos)
        expected = [
            [rotated(kind, row, i) for i, row in enumerate(x.tolist())] for x in before[layer]
        ]
        size = float(keys.abs().max())
        assert torch.allclose(keys, torch.tensor(expected).double(), atol=2e-5 * size)
        assert torch.allclose(rope.unrotate(keys, at), before[layer], atol=2e-5 * size)
    assert trace.meta["notes"] == [x for x in trace.meta["notes"] if "before RoPE" not in x]


@pytest.mark.parametrize("name", KINDS)
def test_a_token_has_the_same_keys_and_queries_at_all_positions_before_rope(name):
    """Also where the prompt is one token, at which nothing is rotated yet."""
    model, trace = recorded(name)
    if trace is None:
        return
    same = kvsim.capture(model, None, [5], response=[5] * 30)

    assert same.ropes == trace.ropes
    for x in (same.read("k")[0], same.read("q")[0]):
        plain = same.ropes[0].unrotate(x, torch.arange(31))
        assert torch.allclose(plain, plain[:, :1].expand_as(x), atol=1e-4 * float(x.abs().max()))
        assert (x - x[:, :1]).abs().max() > 0.1 * x.abs().max()


def test_layers_with_keys_of_another_layer_are_rotated_as_their_queries():
    """Their keys do not depend on their input."""
    kind = KINDS["one tensor a call"]
    changes = {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["full_attention"] * 4,
        "intermediate_size": [64] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
    }
    trace = kvsim.capture(
        replace(kind, changes={**kind.changes, **changes}).build(), None, ids(40), max_new_tokens=8
    )

    assert torch.equal(trace.read("k")[3], trace.read("k")[1])
    assert set(trace.ropes) == set(recorded("one tensor a call")[1].ropes)


def test_positions_of_three_axes_have_the_order_of_the_configuration():
    """ERNIE-VL holds frequencies in the order of its axes and rotates text in the usual one."""
    trace = kvsim.capture(several_axes(), None, [5] * 30, max_new_tokens=0)

    expected = [THETA ** (-i / 8) for i in range(8)]
    assert trace.ropes[0].layout == "interleaved"
    assert trace.ropes[0].inv_freq == pytest.approx(expected, rel=1e-5)
    keys = trace.ropes[0].unrotate(trace.read("k")[0], torch.arange(30))
    assert torch.allclose(keys, keys[:, :1].expand_as(keys), atol=1e-4 * float(keys.abs().max()))


def test_a_factor_of_queries_is_stated():
    """Ministral 3 lengthens queries with the position: 1 + 0.1 ln(1 + floor(position / 32))."""
    rope = {"rope_type": "yarn", "rope_theta": THETA, "factor": 4.0, "beta_fast": 32.0}
    rope |= {"original_max_position_embeddings": 32, "beta_slow": 1.0, "mscale": 1.0}
    rope |= {"mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}

    trace = kvsim.capture(
        Family("Ministral3", "", changes={"rope_parameters": rope}).build("sdpa"),
        *(None, [5] * 110),
        max_new_tokens=0,
    )

    plain = trace.ropes[0].unrotate(trace.read("q")[0], torch.arange(110))[:, [0, 109]]
    size = 1 + 0.1 * math.log(1 + 109 // 32)
    torch.testing.assert_close(plain[:, 1], plain[:, 0] * size, rtol=1e-3, atol=1e-3)
    (note,) = trace.meta["notes"]
    assert note == (
        f"layers 0-1: queries have a factor of their position, 1 to {size:.4g}, which they keep "
        "before RoPE"
    )


def test_an_unknown_rotation_is_stated_and_policies_that_undo_it_are_refused(tmp_path):
    """The weight of a norm after RoPE scales the dimensions of a pair apart."""
    model = KINDS["a norm after RoPE"].build()
    with torch.no_grad():
        for module in attention_modules(model).values():
            module.key_layernorm.weight.copy_(1 + torch.rand(16))

    trace = kvsim.capture(model, None, ids(40), max_new_tokens=8, out=tmp_path / "a.zarr")

    assert [rope.layout for rope in trace.ropes] == ["unknown"] * 2
    (note,) = trace.meta["notes"]
    assert note == (
        "queries and keys of layers 0-1 are rotated in an unknown way, so policies that read them "
        "before RoPE are refused"
    )
    assert verify(tmp_path / "a.zarr", deep=True).ok
    assert kvsim.replay(trace, "tova", 16).events
    with pytest.raises(NeedsError, match="before RoPE, which this model rotates in an unknown way"):
        kvsim.replay(trace, "expected_attention", 16)
    with pytest.raises(NeedsError, match="in an unknown way"):
        trace.ropes[0].unrotate(trace.read("k")[0], torch.arange(trace.n_pos))
