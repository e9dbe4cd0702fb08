"""Compiled, sharded and quantised models are recorded like plain ones, or a note says less."""

from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from recorder_models import small
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

from kvsim.errors import CaptureError
from kvsim.recorder import capture
from kvsim.recorder.provenance import weights_digest

IDS = [7 * i % 60 for i in range(40)]


def recorded(model, path):
    """A trace on disk, with output projections where the model has them."""
    return capture(model, None, IDS, max_new_tokens=4, out=path)


def check_same(trace, expected):
    """Check that two traces have the same tokens and attention."""
    assert trace.tokens.tolist() == expected.tokens.tolist()
    for name in ("q", "k", "v", "attn_out", "lse"):
        assert torch.allclose(trace.read(name), expected.read(name), atol=1e-5), name


def compiled(model):
    """The model in the wrapper of `torch.compile`."""
    return torch.compile(model, backend="eager")


def compiled_in_place(model):
    """The model, compiled by its own method."""
    model.compile(backend="eager")
    return model


@pytest.mark.parametrize(
    "wrap", [compiled, pytest.param(compiled_in_place, marks=pytest.mark.deep)]
)
def test_a_compiled_model_is_recorded(wrap, tmp_path):
    """Hooks see every call, and nothing of the recorder is compiled."""
    expected = recorded(small("llama"), tmp_path / "plain.zarr")

    trace = recorded(wrap(deepcopy(small("llama"))), tmp_path / "a.zarr")

    check_same(trace, expected)
    assert trace.meta["notes"] == []
    assert torch.equal(trace.read("o_proj"), expected.read("o_proj"))


class Adapter(nn.Module):
    """A model in the wrapper of PEFT: only what recording asks of it."""

    def __init__(self, model, *, prompt=False):
        super().__init__()
        self.inner = model
        facts = {"is_prompt_learning": prompt, "peft_type": "PREFIX_TUNING"}
        self.active_peft_config = SimpleNamespace(**facts)
        model.peft_config = {"tuned": self.active_peft_config}

    def get_base_model(self):
        """The model that the adapter's layers are in."""
        return self.inner


def test_the_model_inside_an_adapter_is_recorded():
    """Its layers have the adapter in them; one that adds entries instead is refused."""
    model = small("llama")

    trace = capture(torch.compile(Adapter(model), backend="eager"), None, IDS, max_new_tokens=4)

    check_same(trace, capture(model, None, IDS, max_new_tokens=4))
    assert trace.meta["model"]["name"] == "llama+tuned"
    with pytest.raises(CaptureError, match=r"\(PREFIX_TUNING\) adds entries of no token, expected"):
        capture(Adapter(model, prompt=True), None, IDS)


def test_a_sharded_model_is_recorded_without_its_weights(tmp_path):
    """Weights that FSDP gathers for a layer alone are neither stored nor digested."""
    expected = recorded(small("llama"), tmp_path / "plain.zarr")
    model = deepcopy(small("llama"))
    distributed.init_process_group("gloo", f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        for layer in model.model.layers:
            fully_shard(layer)
        trace = recorded(fully_shard(model), tmp_path / "a.zarr")
    finally:
        distributed.destroy_process_group()

    check_same(trace, expected)
    (note,) = trace.meta["notes"]
    assert note.startswith("recorded without o_proj: o_proj of layer 0 is sharded, expected")
    assert "weights" not in trace.meta["model"]


class Quantised(torch.Tensor):
    """A weight of int8 and a scale, as libraries make them: most operations are unknown."""

    @staticmethod
    def __new__(cls, weight):
        """A tensor with the shape and dtype of `weight`."""
        return torch.Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype)

    def __init__(self, weight):
        self.scale = weight.abs().max() / 127
        self.numbers = (weight / self.scale).round().to(torch.int8)

    def __tensor_flatten__(self):
        """The tensors that it consists of."""
        return ["scale", "numbers"], None

    def dequantize(self):
        """The weight as a plain tensor."""
        return self.numbers * self.scale

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        """A linear layer alone computes with it."""
        if function is nn.functional.linear:
            x, weight, *bias = args
            return nn.functional.linear(x, weight.dequantize(), *bias)
        return super().__torch_function__(function, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        """Detached for parameters; everything else is missing."""
        if function is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(function)


def test_a_quantised_model_is_recorded_with_dequantised_projections(tmp_path):
    """The projection is what the layer multiplies by, and the weights have no digest."""
    model = deepcopy(small("llama"))
    for layer in model.model.layers:
        weight = layer.self_attn.o_proj.weight.detach()
        layer.self_attn.o_proj.weight = nn.Parameter(Quantised(weight), requires_grad=False)

    trace = recorded(model, tmp_path / "a.zarr")

    assert trace.meta["notes"] == []
    assert weights_digest(model) is None
    weight = model.model.layers[1].self_attn.o_proj.weight.dequantize()
    assert torch.allclose(trace.read("o_proj")[1].flatten(0, 1), weight.T)
