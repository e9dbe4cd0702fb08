"""Output projections of a model's layers, checked while the model runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from kvsim.core.checks import DTYPES, compute_dtype, relative_error, tolerance
from kvsim.errors import CaptureError
from kvsim.recorder.hooks import KernelCall, attention_modules
from kvsim.schema import CHUNK

#: Names of the output projection in attention modules: most families, GPT-NeoX, GPT-2, OPT.
NAMES = ("o_proj", "dense", "c_proj", "out_proj")


class Projections:
    """The output projections of some layers of a model, for one capture.

    Each is checked on the first call of its layer: the module's output must be the sum over query
    heads of the kernel's output times the head's block, plus the bias. So gates between kernel and
    projection, adapters and the like are refused instead of ignored.

    Attributes:
        blocks: after the first call of a layer, its weights [qhead, dim, hidden]; views.

    Raises:
        CaptureError: a layer has no projection of a known name, or one that is no plain matrix.
    """

    def __init__(self, model: PreTrainedModel, layers: Collection[int]) -> None:
        attention = {
            layer: module for layer, module in attention_modules(model).items() if layer in layers
        }
        self.names = {layer: _name(layer, module) for layer, module in attention.items()}
        self.modules = {
            layer: module.get_submodule(self.names[layer]) for layer, module in attention.items()
        }
        matrices = [
            _matrix(f"{self.names[layer]} of layer {layer}", module)
            for layer, module in self.modules.items()
        ]
        kinds = {(matrix.shape, matrix.dtype) for matrix in matrices}
        if len(kinds) != 1:
            listed = ", ".join(sorted(f"{list(shape)} {DTYPES[dtype]}" for shape, dtype in kinds))
            raise CaptureError(
                f"the output projections ({', '.join(sorted({*self.names.values()}))}) of "
                f"{type(model).__name__} are {listed}, expected one shape and dtype in all layers; "
                "record the model without --o-proj"
            )
        ((shape, dtype),) = kinds
        self.hidden, self.dtype = int(shape[0]), DTYPES[dtype]
        self.blocks: dict[int, Tensor] = {}
        self._unchecked: dict[int, Tensor] = {}

    def receive(self, call: KernelCall) -> None:
        """Take a kernel call, before its output goes through the projection."""
        if call.layer in self.blocks:
            return
        what = f"{self.names[call.layer]} of layer {call.layer}"
        weight = _matrix(what, self.modules[call.layer])
        heads, _, dim = call.out.shape
        if weight.shape[1] != heads * dim:
            raise CaptureError(
                f"{what} takes {weight.shape[1]} numbers, expected {heads * dim}, {dim} for each "
                "query head; record the model without --o-proj"
            )
        self.blocks[call.layer] = weight.T.unflatten(0, (heads, dim))
        self._unchecked[call.layer] = call.out[:, :CHUNK]

    @contextmanager
    def checking(self, store: Callable[[int, Tensor], None]) -> Iterator[None]:
        """Check each projection when it is first applied, and at the end that all were applied.

        store: called for each layer after its check: number, weights as in `blocks`.
        """

        def applied(layer: int, _: nn.Module, __: object, output: Tensor) -> None:
            out = self._unchecked.pop(layer, None)
            if out is not None:
                self._check(layer, out, output)
                store(layer, self.blocks[layer])

        with ExitStack() as stack:
            for layer, module in self.modules.items():
                hook = partial(applied, layer)
                stack.enter_context(module.register_forward_hook(hook))
            yield
        if self._unchecked:
            layer = min(self._unchecked)
            raise CaptureError(
                f"layer {layer} did not apply its {self.names[layer]}, expected it after the "
                "attention kernel; record the model without --o-proj"
            )

    def _check(self, layer: int, out: Tensor, output: Tensor) -> None:
        dtype = compute_dtype(out.dtype)
        expected = torch.einsum("iwd,idh->wh", out.to(dtype), self.blocks[layer].to(dtype))
        bias = getattr(self.modules[layer], "bias", None)
        if isinstance(bias, Tensor):
            expected += bias.detach().to(dtype)
        actual = output[:, : out.shape[1]].to(dtype)
        error = float(relative_error(actual, expected.unsqueeze(0)).max())
        allowed = tolerance(self.dtype, DTYPES[out.dtype])
        if not error <= allowed:
            raise CaptureError(
                f"{self.names[layer]} of layer {layer} differs by {error:.3g} (relative) from its "
                f"weights times the attention output, expected at most {allowed:g}: there is an "
                "adapter or a gate; merge it into the weights, or record the model without --o-proj"
            )


def _name(layer: int, module: nn.Module) -> str:
    """Return the name of the output projection in an attention module."""
    for name in NAMES:
        projection = getattr(module, name, None)
        if isinstance(projection, nn.Module) and isinstance(
            getattr(projection, "weight", None), Tensor
        ):
            return name
    raise CaptureError(
        f"layer {layer} ({type(module).__name__}) has no output projection, expected a module "
        f"{', '.join(NAMES[:-1])} or {NAMES[-1]} with a weight; record the model without --o-proj"
    )


def _matrix(what: str, projection: nn.Module) -> Tensor:
    """Return the weights [hidden, qheads x dim] of an output projection, as a view."""
    weight = cast("Tensor", projection.weight).detach()
    if weight.is_meta:
        raise CaptureError(
            f"{what} is offloaded until the layer runs, expected weights that stay on a device; "
            "use another --device-map, or record the model without --o-proj"
        )
    if weight.dim() != 2 or weight.dtype not in DTYPES:
        raise CaptureError(
            f"{what} is {str(weight.dtype).removeprefix('torch.')} {list(weight.shape)}, expected "
            f"a matrix of {', '.join(DTYPES.values())}; record the model unquantised or without "
            "--o-proj"
        )
    return weight.T if isinstance(projection, Conv1D) else weight
