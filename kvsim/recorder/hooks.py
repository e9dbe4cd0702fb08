"""Interception of a model's attention kernel, for as long as a ``with`` block lasts.

Forward hooks mark which attention module is running. A wrapper around the model's own kernel, put
into transformers' table of attention functions, gets q, k, v exactly as the kernel does (after any
norm and after RoPE), and its output per head. A wrapper around the function that applies RoPE gets
the keys before and after. The model's own computation does not change.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvsim.core.attention import Formula
from kvsim.errors import CaptureError

Kernel = Callable[..., tuple[Tensor, Tensor | None]]

#: Returns the mask that the kernel of a layer gets instead of the one that the model made, from the
#: layer's number, the queries [1, qhead, w, dim] and that mask.
Masking = Callable[[int, Tensor, Tensor | None], Tensor | None]

#: The kernel of a layer with its options: from queries [B, qhead, w, dim], keys and values
#: [B, head, n, dim] and a mask to the output [B, w, qhead, dim].
Attention = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]

#: Returns the output of a layer's kernel, [1, w, qhead, dim], from the layer's number, the
#: queries [1, qhead, w, dim], keys, values and the kernel; None where the kernel is to compute it.
Attending = Callable[[int, Tensor, Tensor, Tensor, Attention], Tensor | None]

#: Kernels whose masks are known: added to the logits, or true where a row sees an entry.
KERNELS = ("eager", "sdpa")

# The table belongs to the process, so captures in several threads take turns.
_TABLE_LOCK = threading.RLock()

#: The name in the files of transformers of the function that applies RoPE to queries and keys.
_ROTARY = "apply_rotary_pos_emb"


@dataclass(frozen=True)
class KernelCall:
    """One call of the attention kernel for one layer: w new rows, n entries with the new ones.

    Attributes:
        layer: number of the attention module, from 0.
        module: the attention module.
        hidden: input of the module [w, hidden].
        q: queries [qhead, w, dim].
        k: keys [head, n, dim].
        v: values [head, n, dim].
        out: output of the kernel, before the output projection [qhead, w, dim].
        formula: the attention that the kernel was called to compute.
        pre_rope: the new keys [head, w, dim] before RoPE; None if the module called no
            `apply_rotary_pos_emb`.
        keys_of_input: returns the keys [head, w, dim] that the module computes if each row of the
            call gets the same input [hidden]; equal if they depend on the input alone. Works while
            the call is received.
        residual: input of the decoder layer [w, hidden], if it is recorded.
        residual_norm: length of each of its rows [w], float32, where the input is what the layer
            before returned.
    """

    layer: int
    module: nn.Module
    hidden: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    formula: Formula
    pre_rope: Tensor | None
    keys_of_input: Callable[[Tensor], Tensor]
    residual: Tensor | None = None
    residual_norm: Tensor | None = None

    @property
    def start(self) -> int:
        """Position of the first new row, of a cache that holds all rows before it."""
        return self.k.shape[1] - self.q.shape[1]


def unrecordable(what: str) -> CaptureError:
    """Return the error of a model that computes something else; what: found and expected."""
    return CaptureError(f"{what}; this model cannot be recorded")


class _Interceptor:
    """The state of the attention module that runs: set by its pre-hook, read by the wrappers."""

    def __init__(
        self, modules: dict[int, nn.Module], kernel: str, receive: Callable[[KernelCall], None]
    ) -> None:
        self.layer_of = {id(module): layer for layer, module in modules.items()}
        self.kernel = kernel
        self.receive = receive
        self.running: int | None = None
        self.hidden: Tensor | None = None
        self.arguments: tuple[tuple[Any, ...], dict[str, Any]] = (), {}
        self.recomputed: list[Tensor] | None = None  # keys, while a module runs on another input
        self.calls = 0
        self.rotations: list[tuple[Tensor, Tensor]] = []
        # other threads may call the same function
        self.thread = threading.get_ident()
        self.sinks: dict[int, tuple[Tensor, tuple[float, ...]]] = {}
        self.formula = functools.cache(Formula)

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        layer = self.layer_of[id(module)]
        hidden = hidden_states(f"layer {layer}", args, kwargs, ": one sequence at a time")
        self.running, self.hidden, self.calls, self.rotations = layer, hidden[0], 0, []
        self.arguments = args[1:], {key: x for key, x in kwargs.items() if key != "hidden_states"}

    def rotating(self, rotate: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that applies RoPE as `rotate` does, and notes keys before and after."""

        @functools.wraps(rotate)
        def wrapper(q: Tensor, k: Tensor, *args: Any, **options: Any) -> Any:
            result = rotate(q, k, *args, **options)
            here = self.running is not None and threading.get_ident() == self.thread
            if here and isinstance(result, tuple):  # some families rotate q and k in two calls
                self.rotations.append((k, result[1]))  # [1, head, w, dim]
            return result

        return wrapper

    def after(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object
    ) -> None:
        layer, calls = self.layer_of[id(module)], self.calls
        self.running = self.hidden = None
        if calls != 1:
            raise unrecordable(
                f"layer {layer} called the kernel of transformers' table {calls} times, not once"
            )

    def intercepted(
        self, module: nn.Module, inputs: tuple[Tensor, Tensor, Tensor], out: Tensor, options: Any
    ) -> None:
        layer = self.layer_of[id(module)]
        if layer != self.running or self.hidden is None:
            raise unrecordable(f"the kernel of layer {layer} ran outside its attention module")
        self.calls += 1
        query, key, value = inputs
        call = KernelCall(
            layer=layer,
            module=module,
            hidden=self.hidden,
            q=query[0],
            k=key[0],
            v=value[0],
            # the kernels of the table return [batch, rows, qhead, dim]
            out=out[0].transpose(0, 1),
            formula=self._formula(layer, query.shape[-1], options),
            pre_rope=self._pre_rope(layer, query.shape[2], key[0]),
            keys_of_input=functools.partial(self._keys_of_input, module, query.shape[2]),
        )
        self.rotations = []
        self.receive(call)

    def _keys_of_input(self, module: nn.Module, rows: int, hidden: Tensor) -> Tensor:
        args, named = self.arguments
        self.recomputed = []
        try:
            with torch.no_grad():
                # its hooks do not run
                module.forward(
                    hidden.expand(1, rows, -1),
                    *map(_without_cache, args),
                    **{key: _without_cache(x) for key, x in named.items()},
                )
            return self.recomputed[0]
        finally:
            self.recomputed = None

    def _formula(self, layer: int, dim: int, options: Mapping[str, Any]) -> Formula:
        """Return the formula that the kernel's keyword arguments define."""
        scale, sinks = options.get("scaling"), options.get("s_aux")
        # transformers passes the softcap to every kernel, and torch's ignores it
        softcap = None if self.kernel == "sdpa" else options.get("softcap")
        window = options.get("sliding_window")
        return self.formula(
            float(dim**-0.5 if scale is None else scale),
            softcap=None if softcap is None else float(softcap),
            window=None if window is None else int(window),
            sinks=() if sinks is None else self._sinks(layer, sinks),
        )

    def _sinks(self, layer: int, sinks: Tensor) -> tuple[float, ...]:
        """Return the sinks as numbers, read once: reading waits for the device."""
        if layer not in self.sinks or self.sinks[layer][0] is not sinks:
            self.sinks[layer] = sinks, tuple(sinks.detach().double().flatten().tolist())
        return self.sinks[layer][1]

    def _pre_rope(self, layer: int, rows: int, key: Tensor) -> Tensor | None:
        if not self.rotations:
            return None
        before, after = (keys[0] for keys in self.rotations[-1])
        new = key[:, key.shape[1] - rows :]
        if len(self.rotations) > 1 or after.shape != new.shape or before.shape != new.shape:
            raise unrecordable(
                f"layer {layer} rotated keys {len(self.rotations)} times, of shape "
                f"{list(after.shape)}, and its kernel got new keys of shape {list(new.shape)}; "
                "expected one rotation of these keys"
            )
        return before


def _without_cache(argument: Any) -> Any:
    return None if isinstance(argument, Cache) else argument


def hidden_states(
    what: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], advice: str = ""
) -> Tensor:
    """Return the hidden states [1, rows, hidden] that a module, `what`, was called with."""
    hidden = kwargs.get("hidden_states", args[0] if args else None)
    if not isinstance(hidden, Tensor) or hidden.dim() != 3 or hidden.shape[0] != 1:
        raise CaptureError(
            f"{what} was called with "
            f"{tuple(hidden.shape) if isinstance(hidden, Tensor) else type(hidden).__name__}, "
            f"expected hidden states [1, rows, hidden]{advice}"
        )
    return hidden


def attention_modules(model: PreTrainedModel) -> dict[int, nn.Module]:
    """Return the model's attention modules by layer number, in order.

    Raises CaptureError for a layer without an attention module, or with two.
    """
    modules: dict[int, nn.Module] = {}
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int) or "Attention" not in type(module).__name__:
            continue
        if layer in modules:
            raise unrecordable(f"layer {layer} has two attention modules, expected one")
        modules[layer] = module
    if not modules:
        raise CaptureError(
            f"{type(model).__name__} has no attention modules with a layer_idx, expected a "
            "decoder model of transformers"
        )
    layers = getattr(model.config.get_text_config(), "num_hidden_layers", len(modules))
    if len(modules) != layers:
        raise unrecordable(
            f"{len(modules)} of the model's {layers} layers have attention, expected all"
        )
    return dict(sorted(modules.items()))


def kernel_name(model: PreTrainedModel) -> str:
    """Return the name of the model's attention kernel, such as ``sdpa`` or ``eager``."""
    return str(model.config._attn_implementation or "eager")  # noqa: SLF001  its only home


@contextmanager
def intercepting(
    model: PreTrainedModel,
    receive: Callable[[KernelCall], None] | None,
    *,
    layers: Collection[int] | None = None,
    masking: Masking | None = None,
    attending: Attending | None = None,
) -> Iterator[None]:
    """Pass every kernel call of `model` to `receive` until the block ends, by an error too.

    receive: called after the kernel, before the output projection; may raise. None where kernels
    are only given masks, or are replaced: then several sequences may run together. layers: the
    layers to intercept, by number; None for all. masking: gives kernels another mask than the
    model's, which then computes something else. attending: computes instead of the kernel.
    """
    modules = {
        layer: module
        for layer, module in attention_modules(model).items()
        if layers is None or layer in layers
    }
    name = kernel_name(model)
    interceptor = _Interceptor(modules, name, receive or (lambda _: None))
    with _TABLE_LOCK, ExitStack() as stack:
        listed = cast("Kernel | None", ALL_ATTENTION_FUNCTIONS.get(name))

        def kernel(
            module: nn.Module,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Tensor | None,
            *args: Any,
            **options: Any,
        ) -> tuple[Tensor, Tensor | None]:
            if interceptor.recomputed is not None:
                interceptor.recomputed.append(key[0])
                return query.new_zeros(1, *query.shape[2:0:-1], value.shape[3]), None
            original = listed if listed is not None else _eager_kernel(module)
            layer = interceptor.layer_of.get(id(module))
            if masking is not None and layer is not None:
                attention_mask = masking(layer, query, attention_mask)

            def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
                return original(module, q, k, v, mask, *args, **options)[0]

            computed = None
            if attending is not None and layer is not None:
                computed = attending(layer, query, key, value, attention)
            if computed is None:
                result = original(module, query, key, value, attention_mask, *args, **options)
            else:
                result = computed, None
            if receive is not None and layer is not None:
                interceptor.intercepted(module, (query, key, value), result[0], options)
            return result

        table = ALL_ATTENTION_FUNCTIONS._local_mapping  # noqa: SLF001  the library's entries stay
        before = {name: table[name]} if name in table else {}
        stack.callback(table.update, before)
        stack.callback(table.pop, name, None)
        table[name] = kernel
        if receive is None:
            yield
            return
        for home in {sys.modules[type(module).__module__] for module in modules.values()}:
            rotate = vars(home).get(_ROTARY)
            if rotate is not None:
                stack.callback(setattr, home, _ROTARY, rotate)
                setattr(home, _ROTARY, interceptor.rotating(rotate))
        for module in modules.values():
            stack.enter_context(
                module.register_forward_pre_hook(interceptor.before, with_kwargs=True)
            )
            stack.enter_context(module.register_forward_hook(interceptor.after, with_kwargs=True))
        yield


def kernel_mask(visible: Tensor, query: Tensor, *, added: bool) -> Tensor:
    """Return the mask of visible entries as a kernel takes it: bool, or `added` to the logits."""
    if not added:
        return visible
    least = torch.finfo(query.dtype).min
    return torch.zeros_like(visible, dtype=query.dtype).masked_fill_(~visible, least)


def _eager_kernel(module: nn.Module) -> Kernel:
    """Return the eager kernel, which is not in the table but in the model's own file."""
    home = sys.modules[type(module).__module__]
    kernel = getattr(home, "eager_attention_forward", None)
    if kernel is None:
        raise CaptureError(
            f"{home.__name__} has no eager_attention_forward, expected one as in the model files "
            "of transformers; load the model with attn_implementation='sdpa'"
        )
    return cast("Kernel", kernel)
