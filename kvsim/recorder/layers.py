"""Output projections and residual stream of a model's layers, checked while the model runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from kvsim.core.checks import DTYPES, compute_dtype, relative_error, tolerance
from kvsim.core.sources import writes_to
from kvsim.errors import CaptureError
from kvsim.recorder.generation import device_of, evaluating, run_model
from kvsim.recorder.hooks import Attention, KernelCall, hidden_states, intercepting
from kvsim.recorder.modules import attention_modules, decoder_layers
from kvsim.schema import CHUNK

#: Names of the output projection in attention modules: most families, GPT-NeoX, GPT-2, OPT.
PROJECTIONS = ("o_proj", "dense", "c_proj", "out_proj")

#: Names of the norm between residual stream and attention: most families, GPT-2.
NORMS = ("input_layernorm", "ln_1")

#: Returns a context in which a check runs, and which may catch its CaptureError.
Guard = Callable[[], AbstractContextManager[None]]


class ProjectionModules:
    """The output projections of some layers of a model, for one capture.

    Each is checked on the first call of its layer: the module's output must be the sum over query
    heads of the kernel's output, times the gate if there is one, times the head's block, plus the
    bias. So norms between kernel and projection, adapters and the like are refused instead of
    ignored, and so is a layer without a projection of a usual name, or with one that is no plain
    matrix (CaptureError).

    blocks: after the first call of a layer, its weights [qhead, dim, hidden]; views, but of latent
    attention products with the projection from the latent to values. gated: whether something acts
    on the output of a kernel before its projection.
    """

    def __init__(self, model: PreTrainedModel, layers: Collection[int]) -> None:
        attention = attention_modules(model).items()
        found = {x: _projection(x, module) for x, module in attention if x in layers}
        self.names = {x: f"{name} of layer {x}" for x, (name, _, _) in found.items()}
        self.modules = {x: module for x, (_, module, _) in found.items()}
        self._weights = {x: weight for x, (_, _, weight) in found.items()}
        kinds = {(len(weight), DTYPES[weight.dtype]) for weight in self._weights.values()}
        if len(kinds) != 1:
            listed = ", ".join(f"{rows} rows of {dtype}" for rows, dtype in sorted(kinds))
            raise CaptureError(
                f"the output projections of {type(model).__name__} are {listed}, expected one size "
                "and dtype in all layers"
            )
        ((_, self.dtype),) = kinds
        self.blocks: dict[int, Tensor] = {}
        self._unchecked: dict[int, tuple[Tensor, Tensor]] = {}
        self.gated = False

    def _find_gates(self, model: PreTrainedModel, ids: Sequence[int]) -> None:
        """Run a few tokens with kernels that return 1, and note whether projections get that."""
        inputs: list[Tensor] = []

        def ones(_: int, q: Tensor, k: Tensor, v: Tensor, attention: Attention) -> Tensor:
            return torch.ones_like(attention(q, k, v, None))

        with ExitStack() as stack:
            for module in self.modules.values():
                stack.enter_context(_inputs(module, inputs))
            stack.enter_context(torch.no_grad())
            stack.enter_context(evaluating(model))
            stack.enter_context(intercepting(model, None, layers=self.modules, attending=ones))
            run_model(model, torch.tensor([[*ids[:2]]], device=device_of(model)), use_cache=False)
        self.gated = any(bool((x != 1).any()) for x in inputs)

    def gate(self, call: KernelCall) -> Tensor | None:
        """Return what the projection gets where the kernel returns 1, like `call.out`.

        None in a model without gates, and of latents. The check of the projection finds a norm, and
        a gate of those.
        """
        if not self.gated or call.up is not None:
            return None
        inputs: list[Tensor] = []
        with _inputs(self.modules[call.layer], inputs):
            call.again(call.hidden)
        if len(inputs) != 1:
            raise self._unused(call.layer)
        heads, rows, dim = call.out.shape
        return inputs[0].reshape(rows, heads, dim).transpose(0, 1)

    def receive(self, call: KernelCall) -> None:
        """Take a kernel call, before its output goes through the projection."""
        if call.layer in self.blocks:
            return
        weight, (heads, _, dim) = self._weights[call.layer], call.out.shape
        if weight.shape[1] != heads * dim:
            raise CaptureError(
                f"{self.names[call.layer]} takes {weight.shape[1]} numbers, expected "
                f"{heads * dim}, {dim} for each query head"
            )
        block = weight.T.unflatten(0, (heads, dim))
        self.blocks[call.layer] = block if call.up is None else call.up @ block.to(call.up)
        out = call.out[:, :CHUNK]
        gated = out if call.gate is None else out * call.gate[:, :CHUNK]
        self._unchecked[call.layer] = gated, block

    @contextmanager
    def checking(
        self,
        model: PreTrainedModel,
        ids: Sequence[int],
        store: Callable[[], None],
        guard: Guard = nullcontext,
    ) -> Iterator[None]:
        """Check each projection when it is first applied, and at the end that all were applied.

        Before that, a run of the first `ids` shows whether there are gates. store: called when all
        are checked. guard: a context for each check.
        """
        with guard():
            self._find_gates(model, ids)

        def applied(layer: int, _: nn.Module, __: object, output: Tensor) -> None:
            unchecked = self._unchecked.pop(layer, None)
            if unchecked is not None:
                with guard():
                    self._check(layer, *unchecked, output)
                if self.blocks.keys() == self.modules.keys() and not self._unchecked:
                    store()

        with ExitStack() as stack:
            for layer, module in self.modules.items():
                hook = partial(applied, layer)
                stack.enter_context(module.register_forward_hook(hook))
            yield
        with guard():
            if self._unchecked:
                raise self._unused(min(self._unchecked))

    def _unused(self, layer: int) -> CaptureError:
        return CaptureError(f"{self.names[layer]} was not applied once to its attention")

    def _check(self, layer: int, out: Tensor, block: Tensor, output: Tensor) -> None:
        dtype = compute_dtype(out.dtype)
        # as one matrix, of which einsum would make a copy
        expected = out.transpose(0, 1).flatten(1).to(dtype) @ block.flatten(0, 1).to(dtype)
        bias = getattr(self.modules[layer], "bias", None)
        if isinstance(bias, Tensor):
            expected += bias.detach().to(dtype)
        actual = output[:, : out.shape[1]].to(dtype)
        error = float(relative_error(actual, expected.unsqueeze(0)).max())
        allowed = tolerance(self.dtype, DTYPES[out.dtype])
        if not error <= allowed:
            raise CaptureError(
                f"{self.names[layer]} differs by {error:.3g} (relative) from its weights times the "
                f"attention output, expected at most {allowed:g}: there is an adapter or a norm; "
                "merge it into the weights"
            )


def _inputs(module: nn.Module, inputs: list[Tensor]) -> AbstractContextManager[object]:
    """Return a context in which the inputs of a module are added to a list."""
    return module.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))


def _projection(layer: int, attention: nn.Module) -> tuple[str, nn.Module, Tensor]:
    """Return name and module of an output projection, and its weights [hidden, qheads x dim]."""
    modules = {name: getattr(attention, name, None) for name in PROJECTIONS}
    name = next((x for x, y in modules.items() if hasattr(y, "weight")), None)
    if name is None:
        kind = type(attention).__name__
        raise CaptureError(f"layer {layer} ({kind}) has no {', '.join(PROJECTIONS)} with a weight")
    module = cast("nn.Module", modules[name])
    weight = cast("Tensor", module.weight).detach()
    offloaded = weight.is_meta and hasattr(module, "_hf_hook")  # else of a plan
    sharded = hasattr(weight, "full_tensor")
    if hasattr(weight, "__tensor_flatten__") and not sharded:  # quantised (torchao, quanto)
        weight = weight.dequantize()
    if offloaded or sharded or weight.dim() != 2 or weight.dtype not in DTYPES:
        kind = f"{str(weight.dtype).removeprefix('torch.')} {list(weight.shape)}"
        kind = "offloaded" if offloaded else "sharded" if sharded else kind
        raise CaptureError(
            f"{name} of layer {layer} is {kind}, expected a matrix of floating-point numbers that "
            "stays on a device; use another --device-map, or record the model unquantised"
        )
    return name, module, weight.T if isinstance(module, Conv1D) else weight


class Residual:
    """The inputs of a model's decoder layers, for one capture.

    The stream begins with the input of the first layer: some models scale the embedding before it,
    some add positions. Two checks:

    * The chain, in every row: the input of layer l + 1 is, bit for bit, the output of layer l, also
      of layers without attention. So nothing acts between two layers. The output of the last layer
      is not checked.
    * The norm, in the first rows of each layer: the input of the attention module is the layer's
      norm (`NORMS`) of the residual. So q, k, v of a row were computed from the residual of that
      row. A layer without a module of such a name is not checked.

    Raises:
        CaptureError: attention modules that are not in decoder layers of their own.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.layers = decoder_layers(model)
        self._checked: set[int] = set()
        # the layer that ran last, its output and how often that was written to until then; and the
        # running layer and its input
        self._returned: tuple[int, Tensor, int] | None = None
        self._running: tuple[int, Tensor] | None = None

    @contextmanager
    def following(self, guard: Guard = nullcontext) -> Iterator[None]:
        """Follow the stream through the layers until the block ends, by an error too.

        guard: a context for each check.
        """

        def enter(layer: int, *call: Any) -> None:
            with guard():
                self._enter(layer, *call)

        with ExitStack() as stack:
            stack.callback(setattr, self, "_returned", None)
            stack.callback(setattr, self, "_running", None)
            for layer, module in enumerate(self.layers):
                before, after = partial(enter, layer), partial(self._leave, layer)
                stack.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
                stack.enter_context(module.register_forward_hook(after))
            yield

    def rows(self, call: KernelCall) -> Tensor:
        """Return the residual [w, hidden] that the rows of a kernel call were computed from."""
        running, hidden = self._running or (None, call.hidden)
        if running != call.layer or len(hidden) != call.q.shape[1]:
            raise CaptureError(
                f"attention of layer {call.layer} ran with {call.q.shape[1]} rows in layer "
                f"{running} with {len(hidden)}, expected the same layer and rows"
            )
        if call.layer not in self._checked:
            self._check_norm(call, hidden)
            self._checked.add(call.layer)
        return hidden

    def _enter(
        self, layer: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        what = f"decoder layer {layer} ({type(module).__name__})"
        advice = ": one stream, which judged and live runs need; replay the trace instead"
        hidden = hidden_states(what, args, kwargs, advice)
        last, returned, writes = self._returned or (-1, hidden, writes_to(hidden))
        self._returned = None
        chained = last == layer - 1 and writes == writes_to(returned)
        if returned is not hidden:
            alike = (returned.shape, returned.dtype) == (hidden.shape, hidden.dtype)
            chained &= alike and torch.equal(returned.to(hidden.device), hidden)
        if not chained:
            raise CaptureError(
                f"the input of decoder layer {layer} is not the output of layer {layer - 1}"
            )
        self._running = layer, hidden[0]

    def _leave(self, layer: int, _: nn.Module, __: object, output: Any) -> None:
        output = output[0] if isinstance(output, tuple) else output
        ended = layer == len(self.layers) - 1 or not isinstance(output, Tensor)
        self._running, self._returned = None, None if ended else (layer, output, writes_to(output))

    def _check_norm(self, call: KernelCall, hidden: Tensor) -> None:
        children = dict(self.layers[call.layer].named_children())
        name = next((name for name in NORMS if name in children), None)
        if name is None:
            return
        norm = children[name]
        dtype = compute_dtype(hidden.dtype)
        actual = call.hidden[:CHUNK]
        with torch.no_grad():
            # a layer on another device gets its input before it is moved there
            expected: Tensor = norm(hidden[:CHUNK].to(actual.device))
        # [row, 1, hidden]: each row by itself, so that no large one masks another
        rows = (x.to(dtype).unsqueeze(1) for x in (actual, expected))
        error = float(relative_error(*rows).max())
        allowed = tolerance(DTYPES[hidden.dtype], DTYPES[actual.dtype])
        if not error <= allowed:
            raise CaptureError(
                f"the input of the attention of layer {call.layer} differs by {error:.3g} "
                f"(relative) from {name} of the residual, expected at most {allowed:g}"
            )
