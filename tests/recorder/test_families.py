"""Families of models: each is recorded so that its attention follows from the trace alone."""

import functools
import re
import sys
from dataclasses import replace

import pytest
import torch
import transformers
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import families
import kvsim
from families import FAMILIES, NEW, PROMPT, Family, ids
from kvsim.errors import CaptureError
from kvsim.recorder.modules import attention_modules, decoder_layers
from kvsim.recorder.positions import context_length
from kvsim.recorder.steps import PROJECTIONS
from kvsim.store.verification import verify

CASES = [(name, kernel) for name, family in FAMILIES.items() for kernel in family.kernels]


@functools.cache
def recorded(name, kernel):
    """A family's model, what it computes in one forward, and its trace."""
    family = FAMILIES[name]
    model = family.build(kernel)
    return model, kvsim.capture(model, None, ids(PROMPT), **family.response)


def projections(model):
    """The output projections of the attention modules, in order."""
    return [
        next(getattr(module, name) for name in PROJECTIONS if hasattr(module, name))
        for module in attention_modules(model).values()
    ]


def own_outputs(model, tokens, qheads):
    """What each layer's output projection is given in one forward [layer, qhead, n, d]."""
    seen = []
    handles = [
        one.register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))
        for one in projections(model)
    ]
    with torch.no_grad():
        model(torch.as_tensor(tokens)[None])
    for handle in handles:
        handle.remove()
    return torch.stack([x.unflatten(-1, (qheads, -1)).transpose(0, 1) for x in seen])


def by_definition(trace, layer, model):
    """Attention output [qhead, n, d] in float64 from q, k, v and the model's configuration."""
    module = attention_modules(model)[layer]
    q, k, v = (trace.read(name, slice(layer, layer + 1))[0].double() for name in "qkv")
    k, v = (x.repeat_interleave(trace.group, 0) for x in (k, v))
    scale = getattr(module, "scaling", q.shape[-1] ** -0.5)
    z = scale * q @ k.mT
    cap = getattr(model.config, "attn_logit_softcapping", None)
    if cap:
        z = cap * torch.tanh(z / cap)
    back = torch.arange(z.shape[-1])[:, None] - torch.arange(z.shape[-1])
    hidden = back < 0
    window = getattr(model.config, "sliding_window", None)
    kinds = getattr(model.config, "layer_types", None)
    if window and (kinds is None or kinds[layer] == "sliding_attention"):
        hidden |= back >= window
    z = z.masked_fill(hidden, -torch.inf)
    sinks = getattr(module, "sinks", None)
    if sinks is not None:
        z = torch.cat([z, sinks.detach().double()[:, None, None].expand(-1, len(back), 1)], -1)
    return z.softmax(-1)[..., : len(back)] @ v


def state(model):
    """Everything that a capture touches and must leave as it was."""
    hooks = [
        (len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()
    ]
    attributes = [sorted(vars(module)) for module in model.modules()]
    return (
        hooks,
        attributes,
        dict(ALL_ATTENTION_FUNCTIONS._local_mapping),
        model.training,
    )


@pytest.mark.parametrize(("name", "kernel"), CASES)
def test_attention_follows_from_the_trace(name, kernel):
    """Output by the definition equals the model's to 1e-5, in the prompt and in the response."""
    model, trace = recorded(name, kernel)

    assert (trace.prompt_len, trace.n_pos) == (PROMPT, PROMPT + NEW)
    for layer in range(trace.n_layers):
        expected = by_definition(trace, layer, model)
        found = trace.read("attn_out", slice(layer, layer + 1))[0]
        for rows in (slice(0, PROMPT), slice(PROMPT, None)):
            gap = (found - expected)[:, rows].abs().amax()
            assert float(gap / expected[:, rows].abs().max()) < 1e-5
        again, _ = kvsim.core.attention.causal_attention(
            *(trace.read(x, slice(layer, layer + 1))[0] for x in "qkv"), trace.formulas[layer]
        )
        assert float((again - found).abs().max() / found.abs().max()) < 1e-5
    assert max(trace.meta["capture_check"]["max_relative_error"]) < 1e-5
    # far from uniform, so that errors would show
    assert trace.attention(0, range(50, 100)).amax(-1).mean() > 0.1


@pytest.mark.parametrize(("name", "kernel"), CASES)
def test_the_header_says_what_the_configuration_says(name, kernel):
    """Scale, softcap, window and sinks; how many dimensions turn, and which with which."""
    model, trace = recorded(name, kernel)

    found = [(f.scale, f.softcap, f.window, bool(f.sinks)) for f in trace.formulas]
    assert found == [*FAMILIES[name].formulas]
    turns = [(rope.layout, rope.rotary_dim) for rope in trace.ropes]
    assert turns == [*FAMILIES[name].rotated]
    for module, formula in zip(attention_modules(model).values(), trace.formulas, strict=True):
        sinks = getattr(module, "sinks", None)
        assert formula.sinks == (() if sinks is None else tuple(sinks.double().tolist()))


@pytest.mark.parametrize("name", FAMILIES)
def test_keys_before_the_rotary_embedding_do_not_depend_on_the_position(name):
    """In the first layer equal tokens have equal keys, once what the trace names is undone."""
    family = FAMILIES[name]
    model, _ = recorded(name, family.kernels[0])
    trace = kvsim.capture(model, None, [5] * 40, max_new_tokens=0)

    keys = trace.ropes[0].unrotate(trace.read("k")[0], torch.arange(40))

    same = torch.allclose(keys, keys[:, :1].expand_as(keys), atol=1e-3 * float(keys.abs().max()))
    turns = trace.ropes[0].rotary_dim > 0  # else a position is added to the embeddings
    assert same == turns
    if turns:
        turned = (trace.read("k")[0] - trace.read("k")[0][:, :1]).abs().max()
        assert turned > 0.1 * keys.abs().max()


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "gpt2"])
def test_capture_changes_nothing(name):
    """The model computes the same before and after, and holds no hook, also after an error."""
    model = FAMILIES[name].build(FAMILIES[name].kernels[-1])
    tokens = torch.tensor([ids(30)])
    with torch.no_grad():
        before = model(tokens).logits
    held = state(model)

    def stop(done, total):
        if done > 12:
            raise ArithmeticError

    kvsim.capture(model, None, ids(10), max_new_tokens=3)
    with pytest.raises(ArithmeticError):
        kvsim.capture(model, None, ids(10), max_new_tokens=9, progress=stop)

    assert state(model) == held
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, before)


@pytest.mark.parametrize(
    "name",
    [
        name
        if name in ("llama", "gemma2", "gpt_oss", "gpt2")
        else pytest.param(name, marks=pytest.mark.deep)
        for name in FAMILIES
    ],
)
def test_bfloat16_is_stored_exactly(name, tmp_path):
    """No bit of a bfloat16 model's arrays is lost, and its output is met within its rounding."""
    family = FAMILIES[name]
    model = family.build(family.kernels[0], torch.bfloat16)

    trace = kvsim.capture(model, None, ids(PROMPT), max_new_tokens=5, out=tmp_path / "a.zarr")

    rows = slice(0, PROMPT)
    own = own_outputs(model, ids(PROMPT), trace.n_qheads)
    assert torch.equal(trace.read("attn_out", pos=rows), own.float())
    for array in "qkv":
        found = trace.read(array)
        assert torch.equal(found, found.bfloat16().float())
        assert trace.header.source_dtypes[array] == "bfloat16"
    assert max(trace.meta["capture_check"]["max_relative_error"]) < 5e-2
    assert verify(tmp_path / "a.zarr", deep=True).ok


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "gpt_oss", "smollm3", "mistral"])
def test_a_stored_trace_is_whole(name, tmp_path):
    """It verifies, reads back with the same formulas, and replays where a layer sees everything."""
    trace = families.trace_of(name, out=tmp_path / "a.zarr")

    again = kvsim.open_trace(tmp_path / "a.zarr")

    assert verify(tmp_path / "a.zarr", deep=True).ok
    assert (again.formulas, again.ropes) == (trace.formulas, trace.ropes)
    assert again.digest == recorded(name, FAMILIES[name].kernels[0])[1].digest
    if name == "mistral":
        return
    record = kvsim.replay(again, kvsim.policy("snapkv"), 64)
    assert record.layers == tuple(i for i in range(again.n_layers) if i not in again.windowed)
    mass = kvsim.measure(again, record, metrics=["retained_mass"])["value"]
    assert 0 < mass.min() < 1


def test_a_softcap_that_the_kernel_does_not_apply_is_no_part_of_the_trace(monkeypatch):
    """torch's kernel has none; what it computed is recorded, and a note says what is missing."""
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def without(*args, **options):  # newer releases refuse a softcap instead of ignoring it
        return sdpa(*args, **{key: x for key, x in options.items() if key != "softcap"})

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", without)
    monkeypatch.setattr(transformers.Gemma2PreTrainedModel, "_supports_sdpa", True)
    model = FAMILIES["gemma2"].build("sdpa")

    trace = kvsim.capture(model, None, ids(40), max_new_tokens=2)

    assert [formula.softcap for formula in trace.formulas] == [None, None]
    assert any("softcap of 5.0" in note and "eager" in note for note in trace.meta["notes"])


@pytest.mark.parametrize(("prompt", "new", "factor"), [(500, 12, 1), (520, 0, 2), (520, 30, 2)])
def test_frequencies_that_depend_on_the_length_are_those_in_effect(prompt, new, factor):
    """Longrope has two sets, and a prompt longer than the original context takes the long one."""
    model = FAMILIES["phi4-mini"].build()

    trace = kvsim.capture(model, None, ids(prompt), max_new_tokens=new)

    short = [1e4 ** (-i / 6) / (1.0 + i) for i in range(6)]
    expected = torch.tensor(short) / factor
    assert torch.allclose(torch.tensor(trace.ropes[0].inv_freq), expected, rtol=1e-5)


DYNAMIC = FAMILIES["llama, dynamic scaling"]


def ntk(n):
    """Frequencies of dynamic scaling by 4 for n tokens, of a model of 256 positions."""
    base = 1e4 * (4 * max(n, 256) / 256 - 3) ** (16 / 14)
    return torch.tensor([base ** (-i / 8) for i in range(8)], dtype=torch.float64)


def test_dynamic_frequencies_are_those_of_the_whole_text(tmp_path):
    """By the formula, for prompt and response together; an earlier, longer text has no effect."""
    model = DYNAMIC.build("sdpa")
    kvsim.capture(model, None, ids(400), max_new_tokens=0)

    long = kvsim.capture(model, None, ids(PROMPT), response=ids(NEW), out=tmp_path / "a.zarr")
    short = kvsim.capture(model, None, ids(200), max_new_tokens=20)

    for trace in (long, short):
        found = torch.tensor(trace.ropes[0].inv_freq, dtype=torch.float64)
        assert torch.allclose(found, ntk(trace.n_pos), rtol=1e-5)
    assert verify(tmp_path / "a.zarr", deep=True).ok


@pytest.mark.parametrize(
    ("name", "prompt", "kept", "end"),
    [
        ("phi4-mini", 500, 12, "frequencies of its RoPE change with the length, beyond 512 tokens"),
        ("phi4-mini", 1000, 24, "the model's context of 1024 ends"),
        ("llama, dynamic scaling", 250, 6, "frequencies of its RoPE change .*, beyond 256 tokens"),
        ("llama, dynamic scaling", 300, 0, "frequencies of its RoPE change .*, beyond 300 tokens"),
    ],
)
def test_responses_end_where_frequencies_change(name, prompt, kept, end):
    """No trace has keys of two kinds: a response is cut before them, with a note."""
    trace = kvsim.capture(FAMILIES[name].build("sdpa"), None, ids(prompt), max_new_tokens=30)

    assert trace.n_pos == prompt + kept
    (note,) = trace.meta["notes"]
    assert re.search(f"the response was cut to {kept} of 30 new tokens, where {end}", note)
    assert trace.meta["generation"]["stopped"] == "context"


@pytest.mark.parametrize(
    ("rope", "positions", "expected"),
    [
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 32768, 131072),
        ({"rope_type": "yarn", "factor": 4.0}, 96, 384),
        # as published: the positions are the scaled ones
        ({"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}, 163840, 163840),
        ({"rope_type": "linear", "factor": 4.0}, 96, 384),
        ({"rope_type": "dynamic", "factor": 2.0}, 96, 192),
        ({"rope_type": "llama3", "factor": 32.0, "original_max_position_embeddings": 8192,
          "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 131072, 131072),
        ({"rope_type": "default"}, 96, 96),
    ],
)  # fmt: skip
def test_the_context_has_the_scaling_of_positions(rope, positions, expected):
    """A factor lengthens the trained positions, as model cards of Qwen2.5 and others state."""
    rope = {"rope_theta": 1e4, **rope}
    changes = {"rope_parameters": rope, "max_position_embeddings": positions}
    model = replace(FAMILIES["qwen2"], changes=changes).random()

    assert context_length(model) == expected
    if expected < 1000:
        trace = kvsim.capture(model, None, ids(90), max_new_tokens=6)
        assert trace.meta["model"]["context"] == expected
        over = expected - 89
        with pytest.raises(CaptureError, match=f"the model's context of {expected}"):
            kvsim.capture(model, None, ids(90), response=ids(over))


def test_a_rotation_that_differs_late_is_refused(monkeypatch):
    """Rotations are checked behind the first rows, too."""
    model, _ = recorded("llama", "sdpa")
    home = sys.modules[type(attention_modules(model)[0]).__module__]
    turn = home.apply_rotary_pos_emb

    def off(q, k, cos, sin, *args):
        q, after = turn(q, k, cos, sin, *args)
        return q, after * 1.01 if k.shape[2] == 1 else after

    monkeypatch.setattr(home, "apply_rotary_pos_emb", off)
    with pytest.raises(CaptureError, match=r"keys of layer 0 from position 299 on differ by 0\.0"):
        kvsim.capture(model, None, ids(PROMPT), max_new_tokens=NEW)


REFUSED = {
    "ALiBi": (
        lambda: transformers.BloomForCausalLM(
            transformers.BloomConfig(vocab_size=64, hidden_size=48, n_layer=2, n_head=6)
        ),
        "called the kernel of transformers' table 0 times",
    ),
    "a class of caches of its own": (
        lambda: transformers.MiniMaxForCausalLM(
            transformers.MiniMaxConfig(
                vocab_size=64,
                hidden_size=48,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=12,
                num_local_experts=2,
                layer_types=["full_attention"] * 2,
            )
        ),
        "takes a MiniMaxCache alone",
    ),
    "rows that see later ones": (
        lambda: Family(
            "Gemma3",
            "",
            config="Gemma3TextConfig",
            changes={"use_bidirectional_attention": True},
        ).build("sdpa"),
        "recomputed from its q, k, v, differs",
    ),
    "no attention": (
        lambda: transformers.MambaForCausalLM(
            transformers.MambaConfig(vocab_size=64, hidden_size=48, num_hidden_layers=2)
        ),
        "called the kernel of transformers' table 0 times in a run|takes a MambaCache alone",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_models_that_compute_something_else_are_refused(case, tmp_path):
    """What a trace cannot describe is refused in one line, and nothing is written."""
    make_model, message = REFUSED[case]
    model = make_model().eval()

    with pytest.raises(CaptureError, match=message) as caught:
        kvsim.capture(model, None, ids(40), max_new_tokens=4, out=tmp_path / "a.zarr")

    assert "\n" not in str(caught.value)
    assert not any(module._forward_hooks for module in model.modules())
    assert list(tmp_path.iterdir()) == []


def random_biases(model):
    """The model with other biases of its output projections than 0, which would test nothing."""
    with torch.no_grad():
        for projection in projections(model):
            if getattr(projection, "bias", None) is not None:
                projection.bias.copy_(torch.randn(projection.bias.shape))
    return model


def own_stream(model, tokens):
    """Layer inputs and outputs of projections in one forward, [layer, n, hidden] each."""
    inputs, outputs = [], []

    def before(_, args, kwargs):
        inputs.append((args[0] if args else kwargs["hidden_states"])[0].clone())

    handles = [
        one.register_forward_pre_hook(before, with_kwargs=True) for one in decoder_layers(model)
    ]
    handles += [
        one.register_forward_hook(lambda _, __, output: outputs.append(output[0].clone()))
        for one in projections(model)
    ]
    with torch.no_grad():
        model(torch.as_tensor(tokens)[None])
    for handle in handles:
        handle.remove()
    return torch.stack(inputs), torch.stack(outputs)


def gap(found, expected):
    """Largest difference in a layer, over its largest number."""
    difference = (found.double() - expected.double()).abs().amax((1, 2))
    return float((difference / expected.double().abs().amax((1, 2))).max())


def projected(trace, model):
    """Attention output through the recorded projection, and the model's bias [layer, n, hidden]."""
    sums = torch.einsum("lind,lidh->lnh", trace.full()[0].double(), trace.read("o_proj").double())
    for layer, projection in enumerate(projections(model)):
        if getattr(projection, "bias", None) is not None:
            sums[layer] += projection.bias.detach()
    return sums


@pytest.mark.parametrize("name", FAMILIES)
def test_the_stream_and_the_projections_are_the_models_own(name, tmp_path):
    """Layer inputs, and outputs of the projections by the trace, are those of one forward."""
    family = FAMILIES[name]
    model = random_biases(family.build(family.kernels[0]))
    options = {"max_new_tokens": 5, "residual": True, "o_proj": True}

    stored = kvsim.capture(model, None, ids(PROMPT), out=tmp_path / "a.zarr", **options)
    memory = kvsim.capture(model, None, ids(PROMPT), **options)

    inputs, outputs = own_stream(model, stored.tokens)
    assert gap(stored.read("residual"), inputs) < 1e-5
    assert gap(projected(stored, model), outputs) < 1e-5
    # another layer, row or head would show
    assert gap(stored.read("residual")[1:], inputs[:-1]) > 0.1
    assert gap(stored.read("residual").roll(1, 1), inputs) > 0.1
    swapped = torch.einsum(
        "lind,lidh->lnh", stored.full()[0].double(), stored.read("o_proj").double().roll(1, 1)
    )
    assert gap(swapped, outputs) > 0.1
    assert torch.equal(stored.read("residual"), memory.read("residual"))
    assert torch.equal(stored.read("o_proj"), memory.read("o_proj"))
    assert verify(stored.path, deep=True).ok


def test_the_stream_begins_as_the_model_begins(tmp_path):
    """Gemma 2 and Granite scale the embedding, GPT-2 adds positions; verify tells them apart."""
    granite = replace(FAMILIES["granite"], changes={"embedding_multiplier": 12.0})
    models = {
        "gemma2": FAMILIES["gemma2"].build("eager"),
        "granite": granite.build("sdpa"),
        "gpt2": FAMILIES["gpt2"].build("sdpa"),
    }
    tokens = [3, 5, 5, 3, 5, 9]
    rows = {name: one.get_input_embeddings().weight[tokens] for name, one in models.items()}
    expected = {
        "gemma2": rows["gemma2"] * 48**0.5,
        "granite": rows["granite"] * 12.0,
        "gpt2": rows["gpt2"] + models["gpt2"].base_model.wpe.weight[: len(tokens)],
    }

    for name, model in models.items():
        trace = kvsim.capture(
            model, None, tokens, max_new_tokens=2, residual=True, out=tmp_path / f"{name}.zarr"
        )
        assert torch.allclose(trace.read("residual")[0, : len(tokens)], expected[name], rtol=1e-6)
        assert torch.equal(trace.read("residual")[0, 1], trace.read("residual")[0, 2]) == (
            name != "gpt2"
        )
        assert verify(trace.path, deep=True).ok


def test_a_model_with_other_layers_beside_attention_gets_their_caches():
    """Falcon-H1 has a recurrent state in each layer next to its attention, which is recorded."""
    sizes = {"vocab_size": 64, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    state = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}
    torch.manual_seed(0)
    model = transformers.FalconH1ForCausalLM(transformers.FalconH1Config(**sizes, **heads, **state))

    if hasattr(sys.modules[model.__module__], "FalconHybridMambaAttentionDynamicCache"):
        with pytest.raises(CaptureError, match="takes a FalconHybrid"):  # until transformers 5.3
            kvsim.capture(model.eval(), None, ids(20), max_new_tokens=4)
        return
    trace = kvsim.capture(model.eval(), None, ids(20), max_new_tokens=4)

    assert trace.n_layers == 2
    for layer in range(2):
        expected = by_definition(trace, layer, model)
        actual = trace.read("attn_out", slice(layer, layer + 1))[0].double()
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
