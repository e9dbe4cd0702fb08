"""Further arrays of a capture besides queries, keys, values and outputs: one step each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from kvsim.core.checks import DTYPES, compute_dtype, relative_error, tolerance
from kvsim.core.header import Header
from kvsim.errors import CaptureError
from kvsim.recorder.forward import device_of, evaluating, run_model
from kvsim.recorder.hooks import Attention, KernelCall, intercepting
from kvsim.recorder.layers import Residual
from kvsim.recorder.modules import as_largest, attention_modules, layer_sizes
from kvsim.recorder.repetition import check_length, read_probe, repetition
from kvsim.recorder.sensitivity import LayerEntries, layer_sensitivity
from kvsim.schema import CHUNK, REPETITION
from kvsim.store.projections import KEY, Facts

#: Names of the output projection in attention modules: most families, GPT-NeoX, GPT-2, OPT.
PROJECTIONS = ("o_proj", "dense", "c_proj", "out_proj")


class Step:
    """A part of a capture (`Session`), left out with a note where it fails.

    option: requires it, unless it is None or False. arrays: those that it fills, by name. sizes: of
    their axes, if they are written only at the end.
    """

    option: str
    arrays: tuple[str, ...]
    sizes: Mapping[str, int] = {}

    def __init__(self, session: Any) -> None:
        self.session, self.active = session, True
        self.required = bool(getattr(session.options, self.option))
        with self.guard():
            self.prepare()

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Leave the step out, with a note, where a CaptureError is raised, unless required."""
        try:
            yield
        except CaptureError as error:
            if self.required:
                option = self.option.replace("_", "-")
                raise CaptureError(f"{error}; record the model without --{option}") from error
            if self.active:
                reason = str(error).partition(";")[0]
                self.session.notes.append(f"recorded without {self.arrays[0]}: {reason}")
            self.active = False
            for name in self.arrays if self.session.sink is not None else ():
                self.session.sink.drop(name)

    @classmethod
    def wanted(cls, session: Any) -> bool:
        """Return whether a capture has the step."""
        return bool(getattr(session.options, cls.option))

    def prepare(self) -> None:
        """Find the parts of the model that the step reads."""

    def hooks(self) -> AbstractContextManager[None]:
        """Return the context in which the model runs."""
        return nullcontext()

    def receive(self, call: KernelCall) -> KernelCall:
        """Return a kernel call with the step's additions."""
        return call

    def received(self, call: KernelCall) -> None:
        """Take a call that was recorded, before its output is projected."""

    def finish(self, header: Header, tokens: list[int]) -> Header:
        """Store arrays of the whole sequence; return the header with their facts."""
        return header


class Stream(Step):
    """The residual stream, and the length of its rows."""

    option, arrays = "residual", ("residual_norm",)

    @classmethod
    def wanted(cls, _session: Any) -> bool:
        """Always: the length of rows takes little space."""
        return True

    def prepare(self) -> None:
        """Find the decoder layers."""
        self.residual = Residual(self.session.model)

    def hooks(self) -> AbstractContextManager[None]:
        """Follow the stream."""
        return self.residual.following(self.guard)

    def receive(self, call: KernelCall) -> KernelCall:
        """Add the rows of the stream."""
        rows = self.residual.rows(call)
        norm = torch.linalg.vector_norm(rows, dim=-1, dtype=compute_dtype(rows.dtype)).float()
        return replace(call, residual=rows if self.required else None, residual_norm=norm)


class Projections(Step):
    """Output projections, the gates before them, and the sensitivity of the response to each layer.

    Each is checked on the first call of its layer: the module's output must be the sum over query
    heads of the kernel's output, times the gate if there is one, times the head's block, plus the
    bias. So norms between kernel and projection, adapters and the like raise CaptureError, and so
    does a layer without a projection of a usual name, or with one that is no plain matrix.

    blocks: after the first call of a layer, its weights [qhead, dim, hidden]; views, or products
    with `KernelCall.up`. gated: whether something acts on the output of a kernel before its
    projection.
    """

    option, arrays = "o_proj", ("o_proj", "gate")
    facts: Facts | None = None
    gated = False

    @classmethod
    def wanted(cls, session: Any) -> bool:
        """By default those of stored traces."""
        given = session.options.o_proj
        return bool(session.out is not None if given is None else given)

    def prepare(self) -> None:
        """Find the projections of the recorded layers."""
        self.blocks: dict[int, Tensor] = {}
        self._unchecked: dict[int, tuple[Tensor, Tensor]] = {}
        self._entries: dict[int, LayerEntries] = {}  # entries of the last call of each layer
        model, layers = self.session.model, self.session.layer_ids
        found = {x: _projection(x, y) for x, y in attention_modules(model).items() if x in layers}
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

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Find gates in a run of a few tokens, and check each projection when it is applied."""
        with self.guard():
            self._find_gates()
        with ExitStack() as stack:
            for layer, module in self.modules.items():
                hook = partial(self._applied, layer)
                stack.enter_context(module.register_forward_hook(hook))
            yield
        if self._unchecked and self.active:
            with self.guard():
                raise self._unused(min(self._unchecked))

    def _find_gates(self) -> None:
        """Run a few tokens with kernels that return 1, and note whether projections get that."""
        model, inputs = self.session.model, list[Tensor]()

        def ones(_: int, q: Tensor, k: Tensor, v: Tensor, attention: Attention) -> Tensor:
            return torch.ones_like(attention(q, k, v, None))

        ids = torch.tensor([self.session.encoded.ids[:2]], device=device_of(model))
        with ExitStack() as stack:
            for module in self.modules.values():
                stack.enter_context(_inputs(module, inputs))
            stack.enter_context(torch.no_grad())
            stack.enter_context(evaluating(model))
            stack.enter_context(intercepting(model, None, layers=self.modules, attending=ones))
            run_model(model, ids, use_cache=False)
        self.gated = any(bool((x != 1).any()) for x in inputs)

    def _gate(self, call: KernelCall) -> Tensor | None:
        """Return the input of the projection where the kernel returns 1, like `call.out`.

        None in a model without gates, and with a `KernelCall.up`; the check of the projection finds
        a gate of these, and a norm.
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

    def receive(self, call: KernelCall) -> KernelCall:
        """Add the gate."""
        return replace(call, gate=self._gate(call))

    def received(self, call: KernelCall) -> None:
        """Keep the values for the check of the projection."""
        begin, end = len(self.session.encoded.ids), self.session.recorder.last
        LayerEntries.note(self._entries, call, begin, end)
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

    def _applied(self, layer: int, _: nn.Module, __: object, output: Tensor) -> None:
        """Check a projection; store all of them once all are checked."""
        unchecked = self._unchecked.pop(layer, None)
        if unchecked is None or not self.active:
            return
        with self.guard():
            self._check(layer, *unchecked, output)
            if self.blocks.keys() == self.modules.keys() and not self._unchecked:
                parts = [
                    as_largest("o_proj", x, self.session.sizes)
                    for _, x in sorted(self.blocks.items())
                ]
                shape, dtype = (len(parts), *parts[0].shape), DTYPES[parts[0].dtype]
                store = self.session.sink.write_projections
                self.facts = store(shape, parts.__getitem__, dtype)

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

    def finish(self, header: Header, tokens: list[int]) -> Header:
        """Add the sensitivity, where all layers have projections."""
        more: dict[str, Any] = {} if self.facts is None else {KEY: asdict(self.facts)}
        blocks = self.blocks if self.session.options.sensitivity else {}
        given = self.session.model, tokens, header.prompt_len, self._entries, blocks
        try:
            values = layer_sensitivity(*given)
            more |= {} if values is None else {"layer_sensitivity": values}
        except CaptureError as error:
            reason = str(error).partition(";")[0]
            self.session.notes.append(f"recorded without layer_sensitivity: {reason}")
        self._entries.clear()
        return replace(header, meta={**header.meta, **more})


class RepeatedContext(Step):
    """Rows that repeat the context."""

    option, arrays = "probe", REPETITION

    def prepare(self) -> None:
        """Build the rows, and check that the model can read them after the context."""
        session, n = self.session, len(self.session.encoded.ids) + len(self.session.response)
        chat, chunk = session.encoded.messages is not None, session.options.probe_chunk
        self.probe = repetition(session.context, session.tokenizer, chat=chat, chunk=chunk)
        check_length(session.model, len(session.context), self.probe, n)
        layer_sizes(session.model, session.layer_ids, self.probe)
        self.sizes = {"probe": len(self.probe.tokens)}

    def finish(self, header: Header, tokens: list[int]) -> Header:
        """Run the rows after the context, or copy them from the trace that shares it."""
        session = self.session
        if session.begun:
            session.shared.store(session.sink, REPETITION, 0)
        else:
            given = session.context, self.probe, session.layer_ids, session.chunk
            for name, values in zip(REPETITION, read_probe(session.model, *given), strict=True):
                for layer, of_layer in enumerate(values):
                    session.sink.write_layer(name, layer, of_layer)
        return replace(header, meta={**header.meta, "probe": self.probe.document()})


#: All steps, in the order in which they get a call.
STEPS: tuple[type[Step], ...] = (Stream, Projections, RepeatedContext)


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
    if offloaded or sharded or weight.dim() != 2 or str(weight.dtype) not in DTYPES:
        kind = f"{str(weight.dtype).removeprefix('torch.')} {list(weight.shape)}"
        kind = "offloaded" if offloaded else "sharded" if sharded else kind
        raise CaptureError(
            f"{name} of layer {layer} is {kind}, expected a matrix of floating-point numbers that "
            "stays on a device; use another --device-map, or record the model unquantised"
        )
    return name, module, weight.T if isinstance(module, Conv1D) else weight
