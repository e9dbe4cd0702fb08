"""From kernel calls to blocks of 256 positions, each checked against the kernel's own output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from kvsim.attention import Rope, attend, merge
from kvsim.errors import CaptureError
from kvsim.recorder.hooks import KernelCall, keys_before_rope
from kvsim.schema import CHUNK
from kvsim.store.checks import DTYPES, relative_error, tolerance
from kvsim.store.layout import pos_axis

_KNOWN = "llama, qwen2, qwen3"


class Sink(Protocol):
    """Where blocks go: a writer on disk, or memory."""

    def append(self, name: str, layer: int, block: Tensor) -> None:
        """Take the next positions of one layer: a block [head, pos, ...] or [pos, hidden]."""

    def set_length(self, n_pos: int) -> None:
        """Learn how many positions there will be, before the last block."""


class MemorySink:
    """Blocks in memory."""

    def __init__(self) -> None:
        self.blocks: dict[str, dict[int, list[Tensor]]] = {}

    def append(self, name: str, layer: int, block: Tensor) -> None:
        """Keep a copy of the block."""
        layers = self.blocks.setdefault(name, {})
        layers.setdefault(layer, []).append(block.to("cpu", copy=True))

    def set_length(self, n_pos: int) -> None:
        """Nothing to prepare."""

    def array(self, name: str) -> Tensor:
        """The whole array, its layers stacked."""
        layers, axis = self.blocks[name], pos_axis(name)
        return torch.stack([torch.cat(layers[layer], dim=axis) for layer in sorted(layers)])


class _Layer:
    """The block of one layer that is being filled, on the model's device and in its dtype."""

    def __init__(self, call: KernelCall) -> None:
        def empty(like: Tensor) -> Tensor:
            return like.new_empty((like.shape[0], CHUNK, like.shape[2]))

        self.parts = {
            "q": empty(call.q),
            "k": empty(call.k),
            "v": empty(call.v),
            "attn_out": empty(call.out),
        }
        if call.residual is not None:
            self.parts["residual"] = call.residual.new_empty((CHUNK, call.residual.shape[1]))
        self.start = self.filled = 0
        self.error = 0.0

    def take(self, call: KernelCall, row: int) -> int:
        """Copy rows from `row` of the call on, as many as fit; gives how many."""
        count = min(CHUNK - self.filled, call.q.shape[1] - row)
        to = slice(self.filled, self.filled + count)
        new = slice(call.start + row, call.start + row + count)
        self.parts["q"][:, to] = call.q[:, row : row + count]
        self.parts["attn_out"][:, to] = call.out[:, row : row + count]
        self.parts["k"][:, to] = call.k[:, new]
        self.parts["v"][:, to] = call.v[:, new]
        if call.residual is not None:
            self.parts["residual"][to] = call.residual[row : row + count]
        self.filled += count
        return count


class BlockRecorder:
    """Collects kernel calls of one sequence and hands finished blocks to a sink.

    Every row is checked: attention is recomputed from q, k, v and compared with what the model's
    kernel returned. Keys are checked against the rotary embedding on the first call.

    Args:
        open_sink: makes the sink from the first call, which shows the shapes, once that call has
            been checked.
        rope: the rotary embedding as read from the model.
        store_dtype: ``float16`` where the sink stores less than the model's precision.
        begin: called with the number of each layer when its first call has been checked, before its
            first block is handed on.
        rounds_logits: the kernel keeps logits in the model's dtype (eager), so in 16 bits its own
            rounding grows with the logits, and with it the error that is allowed.

    Raises:
        CaptureError: (while calls come in) the model computes something else than causal
            attention of these q, k, v, or rotates in another way.
    """

    def __init__(
        self,
        open_sink: Callable[[KernelCall], Sink],
        rope: Rope,
        *,
        begin: Callable[[int], None],
        store_dtype: torch.dtype | None = None,
        rounds_logits: bool = False,
    ) -> None:
        self.open_sink, self.rope, self.store_dtype = open_sink, rope, store_dtype
        self.begin, self.rounds_logits = begin, rounds_logits
        self.sink: Sink | None = None
        self.layers: dict[int, _Layer] = {}
        self.scale: float | None = None
        self.last: int | None = None
        self.allowed = 0.0

    def finish_at(self, n_pos: int) -> None:
        """Say, before the last forward, that it will bring the sequence to `n_pos` positions."""
        self.last = n_pos
        if self.sink is not None:
            self.sink.set_length(n_pos)

    def receive(self, call: KernelCall) -> None:
        """Take one kernel call."""
        layer = self.layers.get(call.layer)
        if layer is None:
            layer = self._first(call)
            self.begin(call.layer)
        if call.start != layer.start + layer.filled:
            raise CaptureError(
                f"layer {call.layer} holds {call.start} earlier entries, expected "
                f"{layer.start + layer.filled}; only caches that keep everything can be recorded"
            )
        row = 0
        history = _History(call, self._compute_dtype(call.q))
        while row < call.q.shape[1]:
            row += layer.take(call, row)
            if layer.filled == CHUNK or layer.start + layer.filled == self.last:
                self._flush(call.layer, layer, history)

    @property
    def errors(self) -> list[float]:
        """Largest relative error of a head and block, for each layer."""
        return [self.layers[layer].error for layer in sorted(self.layers)]

    def _first(self, call: KernelCall) -> _Layer:
        """The first call of a layer: check what can be checked before anything is stored."""
        if self.scale is None:
            self.scale = call.scale
        if call.scale != self.scale:
            raise CaptureError(
                f"layer {call.layer} scales its logits by {call.scale}, earlier layers by "
                f"{self.scale}; expected one scale, this model cannot be recorded"
            )
        rows = min(CHUNK, call.q.shape[1])
        history = _History(call, self._compute_dtype(call.q))
        self._judge(call.layer, call.out[:, :rows], *history.attend(call.q[:, :rows], 0))
        self._check_rope(call, rows)
        if self.sink is None:
            self.sink = self.open_sink(call)
            if self.last is not None:
                self.sink.set_length(self.last)
        layer = self.layers[call.layer] = _Layer(call)
        return layer

    def _check_rope(self, call: KernelCall, rows: int) -> None:
        before = keys_before_rope(call, rows)
        if before is None:
            raise CaptureError(
                f"layer {call.layer} ({type(call.module).__name__}) makes its keys in an unknown "
                f"way, so its rotary embedding cannot be checked; families known to work: {_KNOWN}"
            )
        dtype = self._compute_dtype(call.q)
        at = torch.arange(rows, device=before.device)
        rotated = self.rope.rotate(before.to(dtype), at)
        error = float(relative_error(call.k[:, :rows].to(dtype), rotated).max())
        # models take cosine and sine in float32, and round them to their own dtype
        allowed = max(tolerance("float32"), tolerance(DTYPES[call.k.dtype]))
        if not error <= allowed:
            raise CaptureError(
                f"the keys of layer {call.layer} differ by {error:.3g} from the model's rotary "
                f"embedding (layout {self.rope.layout}), expected at most {allowed:g}; this "
                f"family cannot be recorded yet, families known to work: {_KNOWN}"
            )

    def _flush(self, number: int, layer: _Layer, history: _History) -> None:
        block = {
            name: part.narrow(pos_axis(name), 0, layer.filled) for name, part in layer.parts.items()
        }
        recomputed, lse = history.attend(block["q"], layer.start)
        layer.error = max(layer.error, self._judge(number, block["attn_out"], recomputed, lse))
        if self.store_dtype is not None and self.store_dtype != block["q"].dtype:
            # attention weights must follow from what is stored
            _, lse = history.rounded(self.store_dtype).attend(
                block["q"].to(self.store_dtype), layer.start
            )
        if self.sink is None:  # set by the first call
            raise RuntimeError("no sink")
        for name, part in block.items():
            self.sink.append(name, number, part)
        self.sink.append("lse", number, lse)
        layer.start += layer.filled
        layer.filled = 0

    def _judge(self, layer: int, found: Tensor, recomputed: Tensor, lse: Tensor) -> float:
        error = float(relative_error(found.to(recomputed.dtype), recomputed).max())
        allowed = tolerance(DTYPES[found.dtype])
        if self.rounds_logits and found.dtype.itemsize == 2:
            # logits that matter are close to their log-sum-exp, and off by up to half a last bit
            allowed += torch.finfo(found.dtype).eps / 2 * float(lse.abs().max())
        self.allowed = max(self.allowed, allowed)
        if not error <= allowed:
            raise CaptureError(
                f"attention of layer {layer}, recomputed from its q, k, v, differs by {error:.3g} "
                f"(relative) from what the model computed, expected at most {allowed:.3g}; "
                f"this model cannot be recorded exactly, families known to work: {_KNOWN}"
            )
        return error

    def _compute_dtype(self, like: Tensor) -> torch.dtype:
        return torch.float64 if like.dtype == torch.float64 else torch.float32


class _History:
    """All keys and values of a call, converted once, to attend to from any block of rows."""

    def __init__(self, call: KernelCall, dtype: torch.dtype) -> None:
        self.call, self.dtype = call, dtype
        self.kv: tuple[Tensor, Tensor] | None = None

    def rounded(self, dtype: torch.dtype) -> _History:
        """The same with keys rounded to `dtype`."""
        history = _History(self.call, self.dtype)
        history.kv = self.call.k.to(dtype).to(self.dtype), self.call.v.to(self.dtype)
        return history

    def attend(self, q: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Causal attention of rows start, start + 1, ...: q [qhead, w, d] -> out, lse."""
        if self.kv is None:
            self.kv = self.call.k.to(self.dtype), self.call.v.to(self.dtype)
        k, v = (part.unsqueeze(1) for part in self.kv)  # [head, 1, n, d]
        rows = q.to(self.dtype).unflatten(0, (k.shape[0], -1))  # [head, group, w, d]
        end = start + q.shape[1]
        new = slice(start, end)
        out, lse = attend(rows, k[:, :, new], v[:, :, new], self.call.scale, causal=True)
        if start:
            old = attend(rows, k[:, :, :start], v[:, :, :start], self.call.scale)
            out, lse = merge(out, lse, *old)
        return out.flatten(0, 1), lse.flatten(0, 1)
