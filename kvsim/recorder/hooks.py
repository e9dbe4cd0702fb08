"""Listening at the attention kernel of a model, for as long as a ``with`` block lasts.

Forward hooks mark which attention module is running; a wrapper around the model's own kernel, put
into transformers' table of attention functions, sees q, k, v exactly as the kernel gets them (after
any norm and after RoPE) and keeps the output per head. The model computes what it always computes.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvsim.errors import CaptureError

Kernel = Callable[..., tuple[Tensor, Tensor | None]]

# The table belongs to the process, so captures in several threads take turns.
_TABLE_LOCK = threading.RLock()

# Arguments that change what attention computes; what they stand for is not in a trace.
_UNSUPPORTED = {"softcap": "soft-capped logits", "s_aux": "attention sinks beside the softmax"}


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
        out: what the kernel returned, before the output projection [qhead, w, dim].
        scale: factor of the logits.
        residual: input of the decoder layer [w, hidden] where it is recorded.
    """

    layer: int
    module: nn.Module
    hidden: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    scale: float
    residual: Tensor | None = None

    @property
    def start(self) -> int:
        """Position of the first new row."""
        return self.k.shape[1] - self.q.shape[1]


class _Listener:
    """What is known while a module runs: set by its pre-hook, used by the kernel wrapper."""

    def __init__(
        self, modules: dict[int, nn.Module], limit: int, receive: Callable[[KernelCall], None]
    ) -> None:
        self.layer_of = {id(module): layer for layer, module in modules.items()}
        self.limit = limit
        self.receive = receive
        self.running: int | None = None
        self.hidden: Tensor | None = None
        self.calls = 0

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = kwargs.get("hidden_states", args[0] if args else None)
        if not isinstance(hidden, Tensor) or hidden.dim() != 3 or hidden.shape[0] != 1:
            raise CaptureError(
                f"layer {self.layer_of[id(module)]} was called with "
                f"{tuple(hidden.shape) if isinstance(hidden, Tensor) else type(hidden).__name__}, "
                "expected hidden states [1, rows, hidden]: one sequence at a time"
            )
        self.running, self.hidden, self.calls = self.layer_of[id(module)], hidden[0], 0

    def after(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object
    ) -> None:
        layer, calls = self.layer_of[id(module)], self.calls
        self.running = self.hidden = None
        if calls != 1:
            raise CaptureError(
                f"layer {layer} ({type(module).__name__}) called the attention kernel of "
                f"transformers' table {calls} times, expected once; "
                "this model cannot be recorded"
            )

    def heard(
        self, module: nn.Module, inputs: tuple[Tensor, Tensor, Tensor], out: Tensor, options: Any
    ) -> None:
        layer = self.layer_of[id(module)]
        if layer != self.running or self.hidden is None:
            raise CaptureError(
                f"the kernel of layer {layer} ran outside its attention module; "
                "this model cannot be recorded"
            )
        self.calls += 1
        query, key, value = inputs
        for name, meaning in _UNSUPPORTED.items():
            if options.get(name) is not None:
                raise CaptureError(
                    f"layer {layer} uses {meaning} ({name}), which a trace does not hold; "
                    "expected plain causal attention"
                )
        window = options.get("sliding_window")
        if window is not None and window < self.limit:
            raise CaptureError(
                f"layer {layer} sees a sliding window of {window} tokens, but up to {self.limit} "
                "are to be recorded; expected full causal attention, ask for fewer tokens"
            )
        scale = options.get("scaling")
        call = KernelCall(
            layer=layer,
            module=module,
            hidden=self.hidden,
            q=query[0],
            k=key[0],
            v=value[0],
            # the kernels of the table return [batch, rows, qhead, dim]
            out=out[0].transpose(0, 1),
            scale=float(query.shape[-1] ** -0.5 if scale is None else scale),
        )
        self.receive(call)


def attention_modules(model: PreTrainedModel) -> dict[int, nn.Module]:
    """The model's attention modules by layer number, in order.

    Raises:
        CaptureError: there are none, or two of one layer.
    """
    found: dict[int, nn.Module] = {}
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int) or "Attention" not in type(module).__name__:
            continue
        if layer in found:
            raise CaptureError(
                f"layer {layer} has two attention modules, expected one; "
                f"{type(model).__name__} cannot be recorded"
            )
        found[layer] = module
    if not found:
        raise CaptureError(
            f"{type(model).__name__} has no attention modules with a layer_idx, expected a "
            "decoder model of transformers; families known to work: llama, qwen2, qwen3"
        )
    return dict(sorted(found.items()))


def kernel_name(model: PreTrainedModel) -> str:
    """The name of the model's attention kernel, such as ``sdpa`` or ``eager``."""
    return str(model.config._attn_implementation or "eager")  # noqa: SLF001  its only home


@contextmanager
def listening(
    model: PreTrainedModel,
    receive: Callable[[KernelCall], None],
    *,
    limit: int,
    layers: Collection[int] | None = None,
) -> Iterator[None]:
    """Give every kernel call of `model` to `receive` until the block is left, however it is left.

    Args:
        model: a decoder model of transformers.
        receive: called after the kernel, before the output projection; may raise.
        limit: the longest sequence that may come; a layer that would see less of it is refused.
        layers: the layers to listen at, by number; None for all. What others do is not looked at.
    """
    modules = {
        layer: module
        for layer, module in attention_modules(model).items()
        if layers is None or layer in layers
    }
    listener = _Listener(modules, limit, receive)
    name = kernel_name(model)
    with _TABLE_LOCK, ExitStack() as stack:
        listed = cast("Kernel | None", ALL_ATTENTION_FUNCTIONS.get(name))

        def kernel(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any
        ) -> tuple[Tensor, Tensor | None]:
            own = listed if listed is not None else _eager_kernel(module)
            result = own(module, query, key, value, *args, **options)
            if id(module) in listener.layer_of:
                listener.heard(module, (query, key, value), result[0], options)
            return result

        stack.callback(_put_back, name, ALL_ATTENTION_FUNCTIONS._local_mapping.get(name))  # noqa: SLF001
        ALL_ATTENTION_FUNCTIONS[name] = kernel
        for module in modules.values():
            before = module.register_forward_pre_hook(listener.before, with_kwargs=True)
            stack.callback(before.remove)
            after = module.register_forward_hook(listener.after, with_kwargs=True)
            stack.callback(after.remove)
        yield


def _put_back(name: str, previous: object) -> None:
    """The entry of the table as it was: a local one, or none, which shows the library's again."""
    if previous is None:
        ALL_ATTENTION_FUNCTIONS._local_mapping.pop(name, None)  # noqa: SLF001
    else:
        ALL_ATTENTION_FUNCTIONS[name] = previous


def _eager_kernel(module: nn.Module) -> Kernel:
    """The eager kernel, which is no part of the table but of the model's own file."""
    home = sys.modules[type(module).__module__]
    kernel = getattr(home, "eager_attention_forward", None)
    if kernel is None:
        raise CaptureError(
            f"{home.__name__} has no eager_attention_forward; "
            "load the model with attn_implementation='sdpa'"
        )
    return cast("Kernel", kernel)


def keys_before_rope(call: KernelCall, rows: int) -> Tensor | None:
    """The first new keys [head, rows, dim] before the rotary embedding, or None if unknown.

    Computed as llama, qwen2 and qwen3 compute them: a projection, and a norm over the head where
    there is one.
    """
    projection = getattr(call.module, "k_proj", None)
    if not isinstance(projection, nn.Module):
        return None
    heads, _, dim = call.k.shape
    with torch.no_grad():
        keys: Tensor = projection(call.hidden[:rows])
        if keys.shape[-1] != heads * dim:
            return None
        keys = keys.unflatten(-1, (heads, dim))
        norm = getattr(call.module, "k_norm", None)
        if isinstance(norm, nn.Module):
            if getattr(norm, "weight", keys[0, 0]).shape != (dim,):
                return None
            keys = norm(keys)
    return keys.transpose(0, 1)
