"""Listening at the attention kernel of a model, for as long as a ``with`` block lasts.

Forward hooks mark which attention module is running; a wrapper around the model's own kernel, put
into transformers' table of attention functions, sees q, k, v exactly as the kernel gets them (after
any norm and after RoPE) and keeps the output per head. A wrapper around the function by which the
model's file turns its keys sees them before and after. The model computes what it always computes.
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
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvsim.core.attention import Formula
from kvsim.errors import CaptureError

Kernel = Callable[..., tuple[Tensor, Tensor | None]]

# The table belongs to the process, so captures in several threads take turns.
_TABLE_LOCK = threading.RLock()

#: What the files of transformers call the function that turns queries and keys.
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
        out: what the kernel returned, before the output projection [qhead, w, dim].
        formula: what the kernel was asked to compute.
        unturned: the new keys [head, w, dim] before the rotary embedding; None where the module
            called no function of the known name to turn them.
        residual: input of the decoder layer [w, hidden] where it is recorded.
    """

    layer: int
    module: nn.Module
    hidden: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    formula: Formula
    unturned: Tensor | None
    residual: Tensor | None = None

    @property
    def start(self) -> int:
        """Position of the first new row."""
        return self.k.shape[1] - self.q.shape[1]


class _Listener:
    """What is known while a module runs: set by its pre-hook, used by the kernel wrapper."""

    def __init__(
        self, modules: dict[int, nn.Module], kernel: str, receive: Callable[[KernelCall], None]
    ) -> None:
        self.layer_of = {id(module): layer for layer, module in modules.items()}
        self.kernel = kernel
        self.receive = receive
        self.running: int | None = None
        self.hidden: Tensor | None = None
        self.calls = 0
        self.turns: list[tuple[Tensor, Tensor]] = []
        # other threads may turn keys by the same function
        self.thread = threading.get_ident()
        self.sinks: dict[int, tuple[Tensor, tuple[float, ...]]] = {}

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = kwargs.get("hidden_states", args[0] if args else None)
        if not isinstance(hidden, Tensor) or hidden.dim() != 3 or hidden.shape[0] != 1:
            raise CaptureError(
                f"layer {self.layer_of[id(module)]} was called with "
                f"{tuple(hidden.shape) if isinstance(hidden, Tensor) else type(hidden).__name__}, "
                "expected hidden states [1, rows, hidden]: one sequence at a time"
            )
        self.running, self.hidden, self.calls = self.layer_of[id(module)], hidden[0], 0
        self.turns = []

    def turned(self, before: Tensor, after: Tensor) -> None:
        """The running module's keys [1, head, w, dim] before and after the rotary embedding."""
        if self.running is not None and threading.get_ident() == self.thread:
            self.turns.append((before, after))

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
            unturned=self._unturned(layer, query.shape[2], key[0]),
        )
        self.turns = []
        self.receive(call)

    def _formula(self, layer: int, dim: int, options: Mapping[str, Any]) -> Formula:
        """What the kernel's keyword arguments say."""
        scale, sinks = options.get("scaling"), options.get("s_aux")
        # transformers hands the softcap to every kernel, and torch's has no such argument
        softcap = None if self.kernel == "sdpa" else options.get("softcap")
        window = options.get("sliding_window")
        return Formula(
            float(dim**-0.5 if scale is None else scale),
            softcap=None if softcap is None else float(softcap),
            window=None if window is None else int(window),
            sinks=() if sinks is None else self._sinks(layer, sinks),
        )

    def _sinks(self, layer: int, sinks: Tensor) -> tuple[float, ...]:
        """The sinks as numbers; read once, because a device has to be waited for."""
        known = self.sinks.get(layer)
        if known is None or known[0] is not sinks:
            known = self.sinks[layer] = sinks, tuple(sinks.detach().double().flatten().tolist())
        return known[1]

    def _unturned(self, layer: int, rows: int, key: Tensor) -> Tensor | None:
        if not self.turns:
            return None
        before, after = (keys[0] for keys in self.turns[-1])
        new = key[:, key.shape[1] - rows :]
        if len(self.turns) > 1 or after.shape != new.shape or before.shape != new.shape:
            raise CaptureError(
                f"layer {layer} turned keys {len(self.turns)} times, of shape "
                f"{list(after.shape)}, and its kernel got {list(new.shape)} new ones; expected "
                "once, the same; this model cannot be recorded"
            )
        return before


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
            "decoder model of transformers"
        )
    layers = getattr(model.config.get_text_config(), "num_hidden_layers", len(found))
    if len(found) != layers:
        raise CaptureError(
            f"{len(found)} of {layers} layers of {type(model).__name__} have attention, expected "
            "all; models whose other layers hold a state instead cannot be recorded"
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
    layers: Collection[int] | None = None,
) -> Iterator[None]:
    """Give every kernel call of `model` to `receive` until the block is left, however it is left.

    Args:
        model: a decoder model of transformers.
        receive: called after the kernel, before the output projection; may raise.
        layers: the layers to listen at, by number; None for all. What others do is not looked at.
    """
    modules = {
        layer: module
        for layer, module in attention_modules(model).items()
        if layers is None or layer in layers
    }
    name = kernel_name(model)
    listener = _Listener(modules, name, receive)
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
        for home in {sys.modules[type(module).__module__] for module in modules.values()}:
            turn = vars(home).get(_ROTARY)
            if turn is not None:
                stack.callback(setattr, home, _ROTARY, turn)
                setattr(home, _ROTARY, _heard_turning(turn, listener))
        for module in modules.values():
            before = module.register_forward_pre_hook(listener.before, with_kwargs=True)
            stack.callback(before.remove)
            after = module.register_forward_hook(listener.after, with_kwargs=True)
            stack.callback(after.remove)
        yield


def _heard_turning(turn: Callable[..., Any], listener: _Listener) -> Callable[..., Any]:
    """The function that turns queries and keys, with the listener told of the keys."""

    @functools.wraps(turn)
    def heard(q: Tensor, k: Tensor, *args: Any, **options: Any) -> Any:
        result = turn(q, k, *args, **options)
        if isinstance(result, tuple):  # some turn queries and keys in calls of their own
            listener.turned(k, result[1])
        return result

    return heard


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


def projected_keys(call: KernelCall, rows: int) -> Tensor | None:
    """The first new keys [head, rows, dim] as they come from the projection, or None if unknown.

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
