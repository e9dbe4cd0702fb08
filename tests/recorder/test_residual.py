"""The residual stream of a trace: equal to the model's own, stored, verified, refused."""

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
import zarr

import kvsim
from families import FAMILIES, ids
from kvsim.cli import main
from kvsim.core.attention import Rope
from kvsim.core.trace import Trace
from kvsim.errors import CaptureError
from kvsim.recorder import capture
from kvsim.store.verification import describe, verify
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
    assert torch.equal(stored.read("residual"), expected.to(stored.dtype))
    assert torch.equal(narrow.read("residual"), expected.half().float())
    assert stored.header.source_dtypes["residual"] == str(dtype).removeprefix("torch.")
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


def changed_between(layer):
    """Give the layer something else than the layer before returned."""
    layer.register_forward_pre_hook(lambda _, args: (args[0] * 1.001, *args[1:]))


def changed_in_place(layer):
    """Write into what the layer before returned."""

    def write(_, args):
        args[0].mul_(1.001)

    layer.register_forward_pre_hook(write)


@pytest.mark.parametrize(
    ("change", "where", "message"),
    [
        (changed_between, [1], "the input of decoder layer 1 is not the output of layer 0"),
        (changed_in_place, [2], "the input of decoder layer 2 is not the output of layer 1"),
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
    assert trace.read("residual").shape[:2] == (trace.n_layers, trace.n_pos)
    (line,) = (line for line in run("info", str(out)).splitlines() if line.startswith("residual "))
    assert " x ".join(map(str, trace.read("residual").shape)) in line
    assert "complete" in run("info", str(out), "--deep")
    assert describe(out)["arrays"]["residual"]["bytes"] > 0
