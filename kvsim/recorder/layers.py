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
from kvsim.recorder.generation import device_of, evaluating
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
        kinds = {(len(matrix), matrix.dtype) for matrix in matrices}
        if len(kinds) != 1:
            listed = ", ".join(sorted(f"{rows} rows of {DTYPES[dtype]}" for rows, dtype in kinds))
            raise CaptureError(
                f"the output projections ({', '.join(sorted({*self.names.values()}))}) of "
                f"{type(model).__name__} are {listed}, expected one size and dtype in all layers"
            )
        ((_, dtype),) = kinds
        self.dtype = DTYPES[dtype]
        self.blocks: dict[int, Tensor] = {}
        self._unchecked: dict[int, tuple[Tensor, Tensor]] = {}
        self.gated = False

    def _find_gates(self, model: PreTrainedModel, ids: Sequence[int]) -> None:
        """Run a few tokens with kernels that return 1, and note whether projections get that."""
        inputs: list[Tensor] = []

        def ones(_: int, q: Tensor, k: Tensor, v: Tensor, attention: Attention) -> Tensor:
            return torch.ones_like(attention(q, k, v, None))

        def fits(call: KernelCall) -> None:
            self._weight(call)

        with ExitStack() as stack:
            for module in self.modules.values():
                stack.enter_context(_inputs(module, inputs))
            stack.enter_context(torch.no_grad())
            stack.enter_context(evaluating(model))
            stack.enter_context(intercepting(model, fits, layers=self.modules, attending=ones))
            model(torch.tensor([[*ids[:2]]], device=device_of(model)), use_cache=False)
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
            raise CaptureError(
                f"layer {call.layer} applied its {self.names[call.layer]} {len(inputs)} times, "
                "expected once"
            )
        heads, rows, dim = call.out.shape
        return inputs[0].reshape(rows, heads, dim).transpose(0, 1)

    def _weight(self, call: KernelCall) -> Tensor:
        """Return the weights of the projection [hidden, qheads x dim], of the kernel's size."""
        what = f"{self.names[call.layer]} of layer {call.layer}"
        weight = _matrix(what, self.modules[call.layer])
        heads, _, dim = call.out.shape
        if weight.shape[1] != heads * dim:
            raise CaptureError(
                f"{what} takes {weight.shape[1]} numbers, expected {heads * dim}, {dim} for each "
                "query head"
            )
        return weight

    def receive(self, call: KernelCall) -> None:
        """Take a kernel call, before its output goes through the projection."""
        if call.layer in self.blocks:
            return
        block = self._weight(call).T.unflatten(0, call.out.shape[::2])
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
                layer = min(self._unchecked)
                raise CaptureError(
                    f"layer {layer} applied no {self.names[layer]} after its attention, expected it"
                )

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
                f"{self.names[layer]} of layer {layer} differs by {error:.3g} (relative) from its "
                f"weights times the attention output, expected at most {allowed:g}: there is an "
                "adapter or a norm; merge it into the weights"
            )


def _inputs(module: nn.Module, inputs: list[Tensor]) -> AbstractContextManager[object]:
    """Return a context in which the inputs of a module are added to a list."""
    return module.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))


def _name(layer: int, module: nn.Module) -> str:
    for name in PROJECTIONS:
        projection = getattr(module, name, None)
        if isinstance(projection, nn.Module) and isinstance(
            getattr(projection, "weight", None), Tensor
        ):
            return name
    raise CaptureError(
        f"layer {layer} ({type(module).__name__}) has no output projection, expected a module with "
        f"a weight, named {' or '.join(PROJECTIONS)}"
    )


def _matrix(what: str, projection: nn.Module) -> Tensor:
    """Return the weights [hidden, qheads x dim] of an output projection, as a view."""
    weight = cast("Tensor", projection.weight).detach()
    offloaded = weight.is_meta and hasattr(projection, "_hf_hook")  # else of a plan
    away = "offloaded" if offloaded else "sharded" if hasattr(weight, "full_tensor") else ""
    if away:
        raise CaptureError(
            f"{what} is {away} until the layer runs, expected weights that stay on a device; "
            "use another --device-map"
        )
    if hasattr(weight, "__tensor_flatten__"):  # quantised (torchao, quanto)
        weight = weight.dequantize()
    if weight.dim() != 2 or weight.dtype not in DTYPES:
        raise CaptureError(
            f"{what} is {str(weight.dtype).removeprefix('torch.')} {list(weight.shape)}, expected "
            f"a matrix of {', '.join(DTYPES.values())}; record the model unquantised"
        )
    return weight.T if isinstance(projection, Conv1D) else weight


class Residual:
    """The inputs of a model's decoder layers, for one capture.

    The stream begins with the input of the first layer: some models scale the embedding before it,
    some add positions. Two checks:

    * The chain, in every row: the layers run in order, also those without attention, each once in a
      forward, and the input of layer l + 1 is, bit for bit, the output of layer l. So nothing acts
      between two layers, and residual[l + 1] is the output of layer l. The output of the last layer
      is not checked.
    * The norm, in the first rows of each layer: the input of the attention module is the layer's
      norm (`NORMS`) of the residual. So q, k, v of a row were computed from the residual of that
      row. A layer without a module of such a name is not checked.

    Raises:
        CaptureError: attention modules that are not in decoder layers of their own.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.layers = decoder_layers(model)
        self._kind: tuple[int, torch.dtype] | None = None
        self._checked: set[int] = set()
        # the layer that ran last, its output and how often that tensor was written to until then
        # (None after the last layer); and the running layer and its input
        self._returned: tuple[int, object, int] | None = None
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
        running, hidden = self._running or (None, None)
        if hidden is None or running != call.layer:
            raise CaptureError(
                f"attention of layer {call.layer} ran outside its decoder layer, expected inside"
            )
        if len(hidden) != call.q.shape[1]:
            raise CaptureError(
                f"layer {call.layer} has {len(hidden)} input rows and its attention "
                f"{call.q.shape[1]}, expected the same"
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
        kind = hidden.shape[-1], hidden.dtype
        self._kind = self._kind or kind
        if kind != self._kind or hidden.dtype not in DTYPES:
            raise CaptureError(
                f"the input of decoder layer {layer} is {_describe(kind)}, expected "
                f"{_describe(self._kind)} as before, of {', '.join(DTYPES.values())}"
            )
        last, returned, writes = self._returned or (None, None, 0)
        before = layer - 1 if layer else None
        self._returned = None
        if last != before:
            raise CaptureError(
                f"decoder layer {layer} ran {_order(last)}, expected {_order(before)}"
            )
        if before is not None and not (writes == _writes(returned) and _same(returned, hidden)):
            raise CaptureError(
                f"the input of decoder layer {layer} is not the output of layer {before}"
            )
        self._running = layer, hidden[0]

    def _leave(self, layer: int, _: nn.Module, __: object, output: object) -> None:
        self._running = None
        if isinstance(output, tuple):
            output = output[0]
        self._returned = None if layer == len(self.layers) - 1 else (layer, output, _writes(output))

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


def _same(returned: object, hidden: Tensor) -> bool:
    """Return whether the output of a layer is the input of the next, bit for bit."""
    return returned is hidden or (
        isinstance(returned, Tensor)
        and (returned.shape, returned.dtype) == (hidden.shape, hidden.dtype)
        and torch.equal(returned.to(hidden.device), hidden)
    )


def _writes(output: object) -> int:
    return writes_to(output) if isinstance(output, Tensor) else 0


def _order(before: int | None) -> str:
    return "first" if before is None else f"after layer {before}"


def _describe(kind: tuple[int, torch.dtype]) -> str:
    hidden, dtype = kind
    return f"[1, rows, {hidden}] {str(dtype).removeprefix('torch.')}"
