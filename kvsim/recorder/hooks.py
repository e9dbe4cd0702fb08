"""Interception of a model's attention kernel inside a ``with`` block.

Forward hooks mark the running attention module. A wrapper around the model's own kernel, in
transformers' table of attention functions, gets the kernel's q, k, v (after any norm and after
RoPE) and its output per head. The model's own computation does not change.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvsim.core.attention import Formula
from kvsim.core.sources import Size
from kvsim.errors import CaptureError
from kvsim.recorder.latent import Latents
from kvsim.recorder.modules import (
    Kernel,
    attention_modules,
    kernel_name,
    replacing_kernel,
    unrecordable,
)
from kvsim.recorder.positions import indexed

#: Returns the mask of a layer's kernel instead of the model's, from the layer's number, the queries
#: [1, qhead, w, dim] and the model's mask.
Masking = Callable[[int, Tensor, Tensor | None], Tensor | None]

#: The kernel of a layer with its options: from queries [B, qhead, w, dim], keys and values
#: [B, head, n, dim] and a mask to the output [B, w, qhead, dim].
Attention = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]

#: Returns the output of a layer's kernel, [1, w, qhead, dim], from the layer's number, the queries
#: [1, qhead, w, dim], keys, values and the kernel; None to call the kernel.
Attending = Callable[[int, Tensor, Tensor, Tensor, Attention], Tensor | None]

#: Kernels whose masks are known: added to the logits, or true where a row sees an entry.
KERNELS = ("eager", "sdpa")

#: Bytes of keys and values that torch's kernel repeats for each query head of a group at once.
REPEATED = 128 << 20


@dataclass(frozen=True)
class KernelCall:
    """One call of the attention kernel for one layer: w new rows, n entries with the new ones.

    Attributes:
        layer: number of the attention module, from 0.
        hidden: input of the module [w, hidden].
        q: queries [qhead, w, dim].
        k: keys [head, n, dim].
        v: values [head, n, value_dim].
        out: output of the kernel, before the output projection [qhead, w, value_dim].
        formula: the attention that the kernel was called to compute.
        again: returns the queries [qhead, w, dim] and keys [head, w, dim] that the module computes
            from other inputs [w, hidden] at the same positions; the output of its kernel is then
            1 everywhere. Works while the call is received.
        up: of latent attention, whose entries are in q, k and v (`kvsim.recorder.latent`), the
            projection from the latent to the kernel's output [qhead, rank, value].
        gate: factor of the output before the projection, like `out`, if there is one.
        residual: input of the decoder layer [w, hidden], if it is recorded.
        residual_norm: length of each of its rows [w], float32, where the input is what the layer
            before returned.
    """

    layer: int
    hidden: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    formula: Formula
    again: Callable[[Tensor], tuple[Tensor, Tensor]]
    up: Tensor | None = None
    gate: Tensor | None = None
    residual: Tensor | None = None
    residual_norm: Tensor | None = None

    @property
    def start(self) -> int:
        """Position of the first new row, of a cache that holds all rows before it."""
        return self.k.shape[1] - self.q.shape[1]

    @property
    def size(self) -> Size:
        """Numbers of query heads, KV heads, dimensions, and dimensions of values."""
        return self.q.shape[0], self.k.shape[0], self.k.shape[2], self.v.shape[2]

    @property
    def rotated(self) -> int:
        """Leading dimensions of queries and keys that positions may rotate, without latent ones."""
        return self.k.shape[2] - (0 if self.up is None else self.v.shape[2])

    @property
    def facts(self) -> dict[str, int]:
        """Fields of a trace's header about entries."""
        return {} if self.up is None else {"latent": self.v.shape[2]}

    @property
    def cached(self) -> tuple[Tensor, Tensor]:
        """Entries as the model adds them to its cache: latent and rotated part, or keys, values."""
        if self.up is None:
            return self.k, self.v
        return self.v, self.k[..., : self.rotated]


class _Interceptor:
    """State of the running attention module: set by its pre-hook, read by the wrappers."""

    def __init__(
        self,
        modules: dict[int, nn.Module],
        kernel: str,
        receive: Callable[[KernelCall], None],
        *,
        indexed: bool,
    ) -> None:
        self.indexed = indexed
        self.layer_of = {id(module): layer for layer, module in modules.items()}
        self.kernel = kernel
        self.receive = receive
        self.running: int | None = None
        self.hidden: Tensor | None = None
        self.arguments: tuple[tuple[Any, ...], dict[str, Any]] = (), {}
        # queries and keys, while a module runs on other inputs
        self.recomputed: list[tuple[Tensor, Tensor]] | None = None
        self.calls = 0
        self.sinks: dict[int, tuple[Tensor, tuple[float, ...]]] = {}
        self.formula = functools.cache(Formula)

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        layer = self.layer_of[id(module)]
        hidden = hidden_states(f"layer {layer}", args, kwargs, ": one sequence at a time")
        self.running, self.hidden, self.calls = layer, hidden[0], 0
        self.arguments = args[1:], {key: x for key, x in kwargs.items() if key != "hidden_states"}

    def after(self, *_: object) -> None:
        self.running = self.hidden = None

    def intercepted(self, module: nn.Module, options: Any, dim: int, **of_call: Any) -> None:
        """Pass on a call; dim: of the queries of the kernel. of_call: fields of `KernelCall`."""
        layer = self.layer_of[id(module)]
        self.calls += 1
        if layer != self.running or self.hidden is None or self.calls > 1:
            raise unrecordable(
                f"layer {layer} called the kernel of transformers' table {self.calls} times, "
                "expected once in its attention module"
            )
        formula, again = self._formula(module, dim, options), functools.partial(self._again, module)
        self.receive(KernelCall(layer, self.hidden, **of_call, formula=formula, again=again))

    def _again(self, module: nn.Module, hidden: Tensor) -> tuple[Tensor, Tensor]:
        args, named = self.arguments
        without = functools.partial(_without_cache, rows=len(hidden), indexed=self.indexed)
        self.recomputed = []
        try:
            with torch.no_grad():
                # its hooks do not run
                module.forward(
                    hidden[None],
                    *map(without, args),
                    **{key: without(x) for key, x in named.items()},
                )
            return self.recomputed[0]
        finally:
            self.recomputed = None

    def _formula(self, module: nn.Module, dim: int, options: Mapping[str, Any]) -> Formula:
        scale, sinks = options.get("scaling"), options.get("s_aux")
        # transformers passes the softcap to every kernel, and torch's ignores it
        softcap = None if self.kernel == "sdpa" else options.get("softcap")
        window = options.get("sliding_window")
        return self.formula(
            float(dim**-0.5 if scale is None else scale),
            softcap=None if softcap is None else float(softcap),
            window=None if window is None else int(window),
            sinks=() if sinks is None else self._sinks(self.layer_of[id(module)], sinks),
            chunk=_chunk(module),
        )

    def _sinks(self, layer: int, sinks: Tensor) -> tuple[float, ...]:
        """Return the sinks as numbers, read once because reading waits for the device."""
        if layer not in self.sinks or self.sinks[layer][0] is not sinks:
            known = torch.zeros(sinks.shape) if sinks.is_meta else sinks  # a plan has only shapes
            self.sinks[layer] = sinks, tuple(known.detach().double().flatten().tolist())
        return self.sinks[layer][1]


def _chunk(module: nn.Module) -> int | None:
    """Return the size of a layer's attention chunks, which its kernel knows only from the mask."""
    config: Any = getattr(module, "config", None)
    layer = getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None) or ()
    if not isinstance(layer, int) or layer >= len(kinds) or kinds[layer] != "chunked_attention":
        return None
    return int(config.attention_chunk_size)


def _without_cache(argument: Any, rows: int, *, indexed: bool) -> Any:
    """Return an argument for another run of a module over only the new rows, safe to write to.

    indexed: integers are positions for an indexer, at most those of these rows.
    """
    if isinstance(argument, Cache):
        return None
    if indexed and isinstance(argument, Tensor) and argument.dtype in (torch.int32, torch.int64):
        return argument.clamp(max=rows - 1)
    if isinstance(argument, Tensor) and argument.dim() == 4:  # a mask over the cached entries too
        return argument[..., -rows:]
    return copy.copy(argument) if isinstance(argument, MutableMapping) else argument


def hidden_states(
    what: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], advice: str = ""
) -> Tensor:
    """Return the hidden states [1, rows, hidden] among the arguments of a module, `what`."""
    hidden = kwargs.get("hidden_states", args[0] if args else None)
    if not isinstance(hidden, Tensor) or hidden.dim() != 3 or hidden.shape[0] != 1:
        raise CaptureError(
            f"{what} was called with "
            f"{tuple(hidden.shape) if isinstance(hidden, Tensor) else type(hidden).__name__}, "
            f"expected hidden states [1, rows, hidden]{advice}"
        )
    return hidden


@contextmanager
def intercepting(
    model: PreTrainedModel,
    receive: Callable[[KernelCall], None] | None,
    *,
    layers: Collection[int] | None = None,
    masking: Masking | None = None,
    attending: Attending | None = None,
) -> Iterator[None]:
    """Pass every kernel call of `model` to `receive` until the block ends, also by an error.

    receive: called after the kernel, before the output projection; may raise. None where kernels
    are only masked or replaced: then several sequences may run together. layers: numbers of the
    layers to intercept; None for all. masking: replaces the model's mask, and so changes its
    output. attending: computes instead of the kernel.
    """
    modules = {
        layer: module
        for layer, module in attention_modules(model).items()
        if layers is None or layer in layers
    }
    name = kernel_name(model)
    chooses = indexed(model) is not None
    interceptor = _Interceptor(modules, name, receive or (lambda _: None), indexed=chooses)

    def wrap(original: Kernel) -> Kernel:
        original = _sparing(original) if name == "sdpa" else original

        def kernel(
            module: nn.Module,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Tensor | None,
            *args: Any,
            **options: Any,
        ) -> tuple[Tensor, Tensor | None]:
            layer = interceptor.layer_of.get(id(module))
            inputs, again = (query, key, value), interceptor.recomputed is not None
            latent = latents.absorbed(layer, *inputs, keep=not again)
            q, k, v = inputs if latent is None else (latent.q, latent.k, latent.v)
            if interceptor.recomputed is not None:
                interceptor.recomputed.append((q[0], k[0]))
                return query.new_ones(1, *query.shape[2:0:-1], value.shape[3]), None
            if masking is not None and layer is not None:
                attention_mask = masking(layer, q, attention_mask)

            def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
                if latent is None:
                    return original(module, q, k, v, mask, *args, **options)[0]
                k, v = (x.to(q).expand(-1, q.shape[1], -1, -1) for x in (k, v))
                scaling = options.get("scaling") or query.shape[-1] ** -0.5
                scaled = {**options, "scaling": scaling}
                return original(module, q, k, v, mask, *args, **scaled)[0]

            computed = None
            if attending is not None and layer is not None:
                computed = attending(layer, q, k, v, attention)
            if computed is None:
                result = original(module, *inputs, attention_mask, *args, **options)
            else:
                result = computed if latent is None else latent.expanded(computed, query), None
            if receive is not None and layer is not None:
                # the kernels of the table return [batch, rows, qhead, dim]
                parts = {"q": q[0], "k": k[0], "v": v[0], "out": result[0][0].transpose(0, 1)}
                up = None if latent is None else latent.up
                interceptor.intercepted(module, options, query.shape[-1], **parts, up=up)
            return result

        return kernel

    with ExitStack() as stack:
        # a compiled model runs uncompiled, because graphs would include `receive`
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        latents = Latents(modules, stack)
        stack.enter_context(replacing_kernel(name, wrap))
        if receive is None:
            yield
            return
        for module in modules.values():
            stack.enter_context(
                module.register_forward_pre_hook(interceptor.before, with_kwargs=True)
            )
            stack.enter_context(module.register_forward_hook(interceptor.after))
        yield


def _sparing(original: Kernel) -> Kernel:
    """Return torch's kernel, run on some KV heads at a time because it copies keys and values."""

    @functools.wraps(original)
    def kernel(module: nn.Module, *inputs: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        query, key, value, mask, *args = inputs
        heads, group = key.shape[1], query.shape[1] // key.shape[1]
        each = max(1, REPEATED * heads // max(1, group * (key.nbytes + value.nbytes)))
        whole = mask is None or each >= heads or group == 1 or query.device.type != "cpu"
        if whole or options.get("position_bias") is not None:
            return original(module, *inputs, **options)
        keys, values = key.split(each, 1), value.split(each, 1)
        masks = [mask] * len(keys) if mask.shape[1] == 1 else mask.split(each * group, 1)
        parts = zip(query.split(each * group, 1), keys, values, masks, strict=True)
        return torch.cat([original(module, *part, *args, **options)[0] for part in parts], 2), None

    return kernel


def kernel_mask(
    visible: Tensor, query: Tensor, *, added: bool, weights: Tensor | None = None
) -> Tensor:
    """Return the mask of visible entries as a kernel takes it: bool, or `added` to the logits.

    weights: their logarithms, which force an added mask.
    """
    if not added and weights is None:
        return visible
    logs = torch.zeros_like(visible, dtype=query.dtype) if weights is None else weights
    least = torch.finfo(query.dtype).min
    return torch.where(visible, logs.to(query.dtype), least)
