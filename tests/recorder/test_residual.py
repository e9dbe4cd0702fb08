"""The residual stream of a trace: equal to the model's own, stored, verified, refused."""

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
import zarr

import kvsim
from damage import reseal
from families import FAMILIES, ids
from kvsim.cli import main
from kvsim.core.attention import Rope
from kvsim.core.trace import Trace
from kvsim.errors import CaptureError, NeedsError, TraceError
from kvsim.recorder import capture
from kvsim.recorder.layers import Residual
from kvsim.recorder.modules import attention_modules
from kvsim.store import TraceWriter, describe, open_trace, verify
from kvsim.studies.language import tasks


def build(family="llama", kernel="sdpa", **changes):
    """A random model whose layers, norms included, change the stream a lot."""
    model = replace(FAMILIES[family], changes={"num_hidden_layers": 3, **changes}).random(kernel)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_proj.weight") or "embed" in name:
                parameter.mul_(10)
            elif name.endswith("layernorm.weight"):
                parameter.mul_(torch.rand_like(parameter) + 0.5)
    return model


@functools.cache
def small(family):
    """A random model of the family, made once."""
    return build(family)


def own_stream(model, tokens):
    """The model's own hidden states before each layer, in one forward [layer, n, hidden]."""
    with torch.no_grad():
        states = model(torch.as_tensor(tokens).unsqueeze(0), output_hidden_states=True)
    return torch.cat(states.hidden_states[:-1])


def hooks(model):
    """Number of hooks of each module."""
    return [
        (len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()
    ]


def make(n=300, layers=2, hidden=12, **options):
    """A trace in memory with a random residual stream over random tokens."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(layers, heads, n, 8, generator=generator) for heads in (4, 2, 2))
    tokens = torch.randint(0, 30, (n,), generator=generator)
    residual = torch.randn(layers, n, hidden, generator=generator)
    residual[0] = torch.randn(30, hidden, generator=generator)[tokens]
    settings = {"prompt_len": 10, "rope": Rope.default(8), "tokens": tokens, "residual": residual}
    return Trace.from_arrays(q, k, v, **{**settings, **options})


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_every_dtype_is_kept_exactly(dtype, attention, tmp_path):
    """A stream in any dtype is recorded without a changed bit; float16 storage rounds it."""
    model = build("qwen3", attention).to(dtype)
    options = {"max_new_tokens": 0, "residual": True}

    stored = capture(model, None, ids(300), out=tmp_path / "a.zarr", **options)
    narrow = capture(
        model, None, ids(300), out=tmp_path / "b.zarr", store_dtype="float16", **options
    )

    expected = own_stream(model, ids(300))
    assert torch.equal(stored.residual, expected.to(stored.dtype))
    assert torch.equal(narrow.residual, expected.half().float())
    assert stored.source_dtypes["residual"] == str(dtype).removeprefix("torch.")
    assert zarr.open_group(narrow.path, mode="r")["residual"].dtype == np.float16
    assert verify(stored.path, deep=True).ok
    assert verify(narrow.path, deep=True).ok


def test_other_arrays_and_digest_are_the_same(tmp_path):
    """Recording the residual changes no other array and no digest; without it there is none."""
    model = small("qwen2")
    without = capture(model, None, ids(270), max_new_tokens=5)

    memory = capture(model, None, ids(270), max_new_tokens=5, residual=True)
    stored = capture(
        model, None, ids(270), max_new_tokens=5, residual=True, out=tmp_path / "a.zarr"
    )

    for name in ("tokens", "q", "k", "v", "attn_out", "lse"):
        assert torch.equal(memory.read(name), without.read(name))
    assert without.digest == memory.digest == stored.digest
    assert not without.has("residual")


def test_more_than_float16_holds_is_refused(tmp_path):
    """Massive activations do not fit into float16 storage: one clear line, no trace."""
    model = build()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(1e6)
    options = {"max_new_tokens": 0, "residual": True, "out": tmp_path / "a.zarr"}

    with pytest.raises(TraceError, match=r"residual reaches .* in layer 2, float16 holds at most"):
        capture(model, None, ids(20), store_dtype="float16", **options)

    assert list(tmp_path.iterdir()) == []
    assert float(capture(model, None, ids(20), **options).residual.abs().max()) > 65504


class Wrapper(torch.nn.Module):
    """A module between layer and attention."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, **options):
        """What the attention gives."""
        return self.inner(**options)


def changed_between(layer):
    """Give the layer something else than the layer before returned."""
    layer.register_forward_pre_hook(lambda _, args: (args[0] * 1.001, *args[1:]))


def changed_in_place(layer):
    """Write into what the layer before returned."""

    def write(_, args):
        args[0].mul_(1.001)

    layer.register_forward_pre_hook(write)


def scaled_norm(layer):
    """Let attention see more than the norm of the residual."""
    layer.self_attn.register_forward_pre_hook(
        lambda _, args, kwargs: (args, {**kwargs, "hidden_states": kwargs["hidden_states"] * 1.01}),
        with_kwargs=True,
    )


def one_row_off(layer):
    """Let attention see the norms of the residual in another order."""
    layer.input_layernorm.register_forward_hook(lambda _, __, out: out.roll(1, dims=1))


def wrapped(layer):
    """Put a module between layer and attention."""
    layer.self_attn = Wrapper(layer.self_attn)


@pytest.mark.parametrize(
    ("change", "where", "message"),
    [
        (changed_between, [1], "the input of decoder layer 1 is not the output of layer 0"),
        (changed_in_place, [2], "the input of decoder layer 2 is not the output of layer 1"),
        (scaled_norm, [1], r"attention of layer 1 differs by 0\.01"),
        (one_row_off, [2], "attention of layer 2 differs by"),
    ],
)
def test_streams_that_are_something_else_are_refused(change, where, message, tmp_path):
    """A model whose residual would not be what a trace says is refused, and nothing stays."""
    model = build()
    for layer in where:
        change(model.model.layers[layer])
    before = hooks(model)

    with pytest.raises(CaptureError, match=message) as caught:
        capture(model, None, ids(20), max_new_tokens=2, residual=True, out=tmp_path / "a.zarr")

    assert "\n" not in str(caught.value)
    assert "--residual" in str(caught.value)
    assert hooks(model) == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([0, 2, 1], "decoder layer 1 keeps its entries as layer 2, expected the same number"),
        ([1, 0, 2], "decoder layer 0 keeps its entries as layer 1, expected the same number"),
    ],
)
def test_layers_in_another_order_are_refused(order, message):
    """The number of a layer in the model is its number in the cache."""
    model = build()
    model.model.layers = torch.nn.ModuleList(model.model.layers[i] for i in order)

    with pytest.raises(CaptureError, match=message):
        capture(model, None, ids(5), max_new_tokens=0)


@pytest.mark.parametrize("layers", [1, 3])
def test_a_module_around_the_attention_is_no_layer(layers):
    """The residual stream is the input of the decoder layer, not that of a wrapper inside it."""
    options = {"max_new_tokens": 3, "residual": True}
    expected = capture(build(num_hidden_layers=layers), None, ids(5), **options).residual
    model = build(num_hidden_layers=layers)
    for layer in model.model.layers:
        wrapped(layer)

    assert torch.equal(capture(model, None, ids(5), **options).residual, expected)


def test_the_stream_begins_with_what_the_first_layer_is_given():
    """What a model does between embedding and first layer is part of the stream."""
    model = build()
    changed_between(model.model.layers[0])
    model.model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))
    seen = []

    trace = capture(model, None, ids(20), max_new_tokens=0, residual=True)

    assert torch.equal(trace.residual[0], seen[-1])
    assert torch.equal(trace.residual[0], model.get_input_embeddings().weight[ids(20)] * 1.001)


def test_layers_that_cannot_be_identified_are_refused():
    """Attention modules that lie in no layer of their own leave no way to tell the layers."""
    model = build()
    home = torch.nn.ModuleList()
    for layer in model.model.layers:
        own = layer.self_attn
        home.append(own)
        del layer.self_attn
        layer.__dict__["self_attn"] = own  # called, but no part of the layer
    model.model.home = home
    assert capture(model, None, ids(5), max_new_tokens=0).n_layers == 3

    with pytest.raises(
        CaptureError, match="the attention of layer 0 is outside a list of decoder layers"
    ):
        capture(model, None, ids(5), max_new_tokens=0, residual=True)


def test_hidden_states_of_another_shape_are_refused():
    """Layers must be given one sequence of hidden states, of one width and dtype."""
    model = build()
    attention_modules(model)  # while it runs
    model.model.layers[1].register_forward_pre_hook(lambda _, args: (args[0][0], *args[1:]))
    with pytest.raises(
        CaptureError, match=r"layer 1 \(LlamaDecoderLayer\) was called with \(7, 48\), expected hid"
    ):
        capture(model, None, ids(7), max_new_tokens=0, residual=True)

    model = build()
    attention_modules(model)
    model.model.layers[2].register_forward_pre_hook(lambda _, args: (args[0].double(), *args[1:]))
    with pytest.raises(
        CaptureError, match=r"layer 2 is \[1, rows, 48\] float64, expected \[1, rows, 48\] float32"
    ):
        capture(model, None, ids(7), max_new_tokens=0, residual=True)


def test_attention_of_other_rows_is_refused():
    """Attention over more rows than the layer was given has no residual for each of them."""
    model = build()
    layer = model.model.layers[0]

    def cut(_, args, options):
        hidden, (cos, sin) = options["hidden_states"], options["position_embeddings"]
        cos, sin = cos[:, :-1], sin[:, :-1]
        return args, {
            **options,
            "hidden_states": hidden[:, :-1],
            "position_embeddings": (cos, sin),
            "attention_mask": None,
        }

    layer.self_attn.register_forward_pre_hook(cut, with_kwargs=True)

    with pytest.raises(CaptureError, match="layer 0 has 9 input rows and its attention 8, expect"):
        capture(model, None, ids(9), max_new_tokens=0, residual=True)


def test_no_hidden_state_is_held_after_an_error():
    """When a layer fails, what flowed into and out of layers is let go."""
    model = build()
    stream = Residual(model)
    held = []

    def fail(*_):
        held.append((stream._returned, stream._running))
        raise RuntimeError("inside")

    model.model.layers[1].mlp.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="inside"), stream.following():
        model(torch.tensor([ids(5)]))

    assert held[0][1][0] == 1
    assert (stream._returned, stream._running) == (None, None)


def test_a_trace_without_it_says_how_to_record_it():
    """Asking for a residual stream that is not there names the option."""
    with pytest.raises(NeedsError, match=r"no array 'residual', it has .* with --residual"):
        _ = make(residual=None).residual


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"residual": torch.zeros(2, 299, 12)}, r"residual has shape \(2, 299, 12\), expected \(2"),
        ({"residual": torch.zeros(1, 300, 12)}, r"residual has shape \(1, 300, 12\), expected \(2"),
        ({"residual": torch.zeros(2, 300)}, r"expected \[layer, pos, hidden\], none of them 0"),
        ({"residual": torch.zeros(2, 300, 12, dtype=torch.int32)}, "residual has dtype int32"),
        ({"o_proj": torch.zeros(2, 4, 8, 11)}, r"residual has shape .*, expected \(2, 300, 11\)"),
    ],
)
def test_what_does_not_fit_is_refused(options, message):
    """Wrong shapes and dtypes are refused, and a width that the output projection has not."""
    with pytest.raises(TraceError, match=message):
        make(**options)


def test_a_number_that_is_not_finite_is_named(tmp_path):
    """NaN is named by layer, position and dimension, in memory, while writing and in a file."""
    bad = make().residual.clone()
    bad[1, 270, 3] = torch.nan
    with pytest.raises(TraceError, match="residual is nan at layer 1, pos 270, hidden 3, expected"):
        make(residual=bad)

    writer = TraceWriter(
        tmp_path / "a.zarr",
        shapes={"q": (2, 2, 300, 8), "residual": (2, 300, 12)},
        source_dtypes={"q": "float32", "residual": "float32"},
        layer_ids=[0, 1],
    )
    with writer:
        writer.append("residual", 1, bad[1, :256])
        with pytest.raises(TraceError, match="residual is nan at layer 1, pos 270, hidden 3"):
            writer.append("residual", 1, bad[1, 256:])
        with pytest.raises(ValueError, match="a block of 5 positions, expected 256"):
            writer.append("residual", 0, bad[0, :5])

    path = make().save(tmp_path / "b.zarr")
    rewrite(path, lambda values: values.__setitem__((1, 270, 3), np.nan))
    trace = open_trace(path)
    with pytest.raises(TraceError, match="residual is nan at layer 1, pos 270, hidden 3"):
        trace.read("residual", slice(1, 2), slice(260, 280))
    assert "residual is nan" in verify(path, deep=True).problems[0]


def rewrite(path, change):
    """Change the stored values, with valid chunks and a valid seal."""
    array = zarr.open_group(path, mode="r+", use_consolidated=False)["residual"]
    values = np.asarray(array[:])
    change(values)
    array[:] = values
    reseal(path)


def test_verify_finds_a_stream_of_other_tokens(tmp_path):
    """In the model's first layer a token is the same wherever it stands, in no other layer."""
    shifted = make().residual.roll(1, dims=1)

    (problem,) = verify(make(residual=shifted).save(tmp_path / "a.zarr")).problems

    assert "residual of layer 0 differs between positions" in problem
    assert "which are the same token" in problem
    later = make(residual=shifted, layer_ids=[1, 2]).save(tmp_path / "b.zarr")
    assert verify(later, deep=True).ok
    assert verify(make(residual=shifted, tokens=None).save(tmp_path / "c.zarr")).ok


def test_verify_knows_streams_that_hold_positions(tmp_path):
    """Where no layer turns anything, positions are in the stream, and equal tokens differ."""
    shifted = make().residual.roll(1, dims=1)
    ropes = [Rope(()), Rope.default(8)]

    none = make(residual=shifted, rope=[Rope(())] * 2).save(tmp_path / "none.zarr")
    one = make(residual=shifted, rope=ropes).save(tmp_path / "one.zarr")

    assert verify(none, deep=True).ok
    (problem,) = verify(one, deep=True).problems
    assert "residual of layer 0 differs between positions" in problem


def test_capture_info_and_verify(tmp_path, capsys):
    """`--residual` records it, `info` shows its size, `verify` reads it."""
    out = tmp_path / "t.zarr"
    prompt = tasks.prompts(1, 3, task="walk", facts=6, lines=4, kinds=2)[0].prompt
    arguments = ["--prompt", prompt, "--max-new-tokens", "2", "--residual", "--out", str(out)]

    def run(*command):
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main(list(command))
        assert end.value.code == 0
        return capsys.readouterr().out

    run("capture", "--model", "tiny", *arguments)

    trace = kvsim.open_trace(out)
    assert trace.residual.shape[:2] == (trace.n_layers, trace.n_pos)
    (line,) = (line for line in run("info", str(out)).splitlines() if line.startswith("residual "))
    assert " x ".join(map(str, trace.residual.shape)) in line
    assert "complete" in run("info", str(out), "--deep")
    assert describe(out)["arrays"]["residual"]["bytes"] > 0
