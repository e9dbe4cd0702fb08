"""Blocks of 256 positions, cut from kernel calls and checked against the kernel's own output."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kvsim.core.attention import Rope, causal_attention
from kvsim.core.checks import (
    DTYPES,
    compute_dtype,
    logit_rounding,
    on_host,
    relative_error,
    tolerance,
)
from kvsim.core.header import Header
from kvsim.core.left_out import LeftOut, Sums
from kvsim.core.sources import Size
from kvsim.errors import CaptureError
from kvsim.recorder.hooks import KernelCall
from kvsim.recorder.modules import as_largest, unrecordable
from kvsim.recorder.positions import (
    NO_ROPE,
    UNKNOWN,
    matching_ropes,
    rope_candidates,
    rotation_tolerance,
)
from kvsim.schema import CHUNK, OF_ROWS, numbered
from kvsim.store.layout import pos_axis

#: Share of the tolerance beyond which factors of queries at different positions differ.
_FACTOR = 0.3


class _Layer:
    """One layer so far, with the incomplete block on the model's device in its dtype.

    ropes: possible rotary embeddings; several only while they rotate alike, as at position 0.
    origin: query and key of some input at position 0. factors: the least and the largest factor of
    queries besides RoPE. Keys and values are not in the block, because every call has all of them.
    """

    def __init__(self, call: KernelCall, ropes: list[Rope]) -> None:
        self.formula, self.ropes = call.formula, ropes
        self.facts = call.facts
        self.origin: list[Tensor] = []
        self.factors: list[float] = []
        self.owner = call.layer  # the layer that holds its entries, itself or an earlier one
        self.keys: Tensor | None = call.k  # in the first forward
        self.shape = call.size
        self.pieces: list[dict[str, Tensor]] = []
        self.sums: Sums | None = None  # of rows up to those that are left out
        self.start = self.filled = 0
        self.error = 0.0

    def take(self, call: KernelCall, row: int) -> int:
        """Copy rows from `row` of the call on, as many as fit; return how many."""
        count = min(CHUNK - self.filled, call.q.shape[1] - row)
        self.pieces.append({name: x.clone() for name, x in _rows(call, row, count).items()})
        self.filled += count
        return count

    def block(self) -> dict[str, Tensor]:
        pieces, self.pieces, self.filled = self.pieces, [], 0
        return {name: torch.cat([x[name] for x in pieces], pos_axis(name)) for name in pieces[-1]}


def _same_keys(keys: Tensor | None, other: Tensor) -> bool:
    """Return whether two layers share keys: the same memory, or a copy elsewhere."""
    if keys is None or keys.shape != other.shape:
        return False
    here = keys.to(other.device)
    return here.data_ptr() == other.data_ptr() or (here is not keys and torch.equal(here, other))


def _rows(call: KernelCall, row: int, count: int) -> dict[str, Tensor]:
    """Return views of the arrays of a call that have only its own rows."""
    parts = {"q": call.q, "attn_out": call.out, "gate": call.gate}
    parts |= {"residual": call.residual, "residual_norm": call.residual_norm}
    return {
        name: part.narrow(pos_axis(name), row, count)
        for name, part in parts.items()
        if part is not None
    }


class BlockRecorder:
    """Collects the kernel calls of one sequence and passes complete blocks to a sink.

    Every row is checked: attention is recomputed from q, k, v by the kernel's formula and compared
    with the kernel's output. Rotations are checked in every row of a call that completes a block. A
    mismatch raises CaptureError during the call.

    open_sink: opens the sink after the check of the first call, which has the shapes. read_ropes:
    returns the rotary embeddings in effect. layer_ids: the recorded layers, ascending. sizes: of
    each layer where they differ, else empty; blocks are padded to the largest. store_dtype:
    ``float16`` if the sink has less precision than the model. rounds_logits: the kernel keeps
    logits in the model's dtype (eager), so in 16 bits its rounding, and the tolerance, grow with
    the logits. left_out: rows of which the sink gets only sums.
    """

    def __init__(
        self,
        open_sink: Callable[[KernelCall], Any],
        read_ropes: Callable[[], Sequence[Rope]],
        *,
        layer_ids: Sequence[int],
        sizes: tuple[Size, ...] = (),
        store_dtype: torch.dtype | None = None,
        rounds_logits: bool = False,
        left_out: LeftOut = None,
    ) -> None:
        self.left_out = left_out
        self.open_sink, self.read_ropes, self.store_dtype = open_sink, read_ropes, store_dtype
        self.layer_ids, self.rounds_logits = layer_ids, rounds_logits
        self.sizes = sizes
        self.sink: Any = None  # set by the first call
        self.layers: dict[int, _Layer] = {}
        self._begun: Mapping[int, _Layer] = {}
        self.without_moments = False  # queries before RoPE are unknown
        self.last: int | None = None
        self.allowed = 0.0

    def saved(self) -> tuple[dict[int, _Layer], float]:
        """Return a copy of the layers so far, and the tolerance."""
        return copy.deepcopy(self.layers), self.allowed

    def restore(self, saved: tuple[dict[int, _Layer], float]) -> None:
        """Continue after the rows of another recorder (`saved`), whose blocks are in the sink."""
        self._begun, self.allowed = copy.deepcopy(saved[0]), saved[1]

    def finish_at(self, n_pos: int) -> None:
        """Announce, before the last forward, that the sequence will have `n_pos` positions."""
        self.last = n_pos
        if self.sink is not None:
            self.sink.set_length(n_pos)

    def receive(self, call: KernelCall) -> None:
        """Receive one kernel call."""
        layer = self.layers.get(call.layer)
        if layer is None:
            layer = self._first(call)
            if call.layer == self.layer_ids[-1]:
                for each in self.layers.values():
                    each.keys = None
        if call.start != layer.start + layer.filled:
            raise CaptureError(
                f"layer {call.layer} has {call.start} earlier entries, expected "
                f"{layer.start + layer.filled}; record with a cache that keeps every entry"
            )
        if call.formula != layer.formula:
            raise unrecordable(
                f"layer {call.layer} computes {call.formula} after {layer.formula}, expected one "
                "formula for all rows"
            )
        end = call.k.shape[1]
        if call.start <= 1 or call.start // CHUNK < end // CHUNK or end == self.last:
            self._check_rotation(call, layer)
        row, history = 0, _History(call)
        while row < call.q.shape[1]:
            if not layer.filled and call.q.shape[1] - row >= CHUNK:
                self._flush(layer, _rows(call, row, CHUNK), history)
                row += CHUNK
                continue
            row += layer.take(call, row)
            if layer.filled == CHUNK or layer.start + layer.filled == self.last:
                self._flush(layer, layer.block(), history)

    def described(self, header: Header) -> Header:
        """Return the header with formulas, rotary embeddings and errors of the layers so far."""
        if len(self.layers) != len(self.layer_ids):
            raise unrecordable(
                f"{len(self.layers)} of {len(self.layer_ids)} layers called the attention kernel "
                "of transformers' table, expected all"
            )
        layers = [self.layers[number] for number in self.layer_ids]
        errors = [layer.error for layer in layers]  # the largest value of a head and block
        check = {"max_relative_error": errors, "tolerance": self.allowed}
        owners = tuple(self.layer_ids.index(layer.owner) for layer in layers)
        return replace(
            header,
            formulas=tuple(layer.formula for layer in layers),
            ropes=tuple(layer.ropes[0] for layer in layers),
            owners=owners if owners != tuple(range(len(layers))) else (),
            sizes=self.sizes,
            meta={**header.meta, "capture_check": check, **layers[0].facts},
        )

    def _first(self, call: KernelCall) -> _Layer:
        """Begin a layer, with a check of its first call."""
        self._check_shapes(call)
        rows = min(CHUNK, call.q.shape[1])
        first = _History(call).attend(call.q[:, :rows], call.start)
        self._check_output(call, call.out[:, :rows], *first)
        if self.sink is None:
            self.sink = self.open_sink(call)
            if self.last is not None:
                self.sink.set_length(self.last)
        layer = self._begun.get(call.layer)
        if layer is None:
            layer = _Layer(call, [NO_ROPE, *rope_candidates(self.read_ropes())])
            shared = (at for at, each in self.layers.items() if _same_keys(each.keys, call.k))
            layer.owner = next(shared, call.layer)
        self.layers[call.layer] = layer
        return layer

    def _check_shapes(self, call: KernelCall) -> None:
        shape = call.size
        sizes = self.sizes or tuple(layer.shape for layer in self.layers.values())[:1]
        expected = sizes[self.layer_ids.index(call.layer) if self.sizes else 0] if sizes else shape
        if shape != expected or shape[0] % shape[1]:
            raise unrecordable(
                f"layer {call.layer} has (query heads, KV heads, dimensions, of values) {shape}, "
                f"expected {expected}, and as many query heads for each KV head"
            )

    def _check_rotation(self, call: KernelCall, layer: _Layer) -> None:
        """Compare queries and keys of one input at all positions with those of position 0, rotated.

        The module computes them. Queries may have a factor for each head and row. A layer whose
        first rows have an unknown rotation is marked so.
        """
        start, rope = call.start, layer.ropes[0]
        end, dtype = call.k.shape[1], compute_dtype(call.q.dtype)
        if rope == UNKNOWN:
            return
        if not call.rotated:
            layer.ropes = [NO_ROPE]
            return
        size = call.hidden.shape[1]
        same = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(call.hidden)
        q, keys = (x[..., : call.rotated] for x in call.again(same.expand(end - start, -1)))
        layer.origin = layer.origin or [x[:, :1].clone() for x in (q, keys)]
        query, key = layer.origin
        # keys of another layer do not depend on the input
        shared = keys.shape == call.k.shape and torch.equal(keys, call.k)
        fits, least = matching_ropes(*((query, q) if shared else (key, keys)), start, layer.ropes)
        rope = fits[0] if fits else rope
        zero, at = (torch.arange(*ends, device=q.device) for ends in ((0, 1), (start, end)))
        x, y = rope.rotate(rope.unrotate(query.to(dtype), zero), at), q.to(dtype)
        square = x.square().sum(-1, keepdim=True)
        factor = (x * y).sum(-1, keepdim=True) / square.where(square > 0, 1.0)  # [qhead, w, 1]
        error = float(relative_error(x * factor, y).max())
        if not fits or not error <= rotation_tolerance(call.out.dtype, rope, end):
            if start > 1:
                raise CaptureError(
                    f"queries and keys of layer {call.layer} from position {start} on differ by "
                    f"{max(error, least):.3g} (relative) from the model's rotary embedding; if its "
                    "frequencies change with the length (dynamic, longrope), record no further "
                    "than they stay, else this family cannot be recorded yet"
                )
            fits = [UNKNOWN]
        layer.ropes = fits
        factors = [*layer.factors, *factor.mean(0)[square.amin(0) > 0].tolist()]
        layer.factors = [min(factors), max(factors)] if factors else []

    def remarks(self) -> list[str]:
        """Return notes for policies that read queries and keys before RoPE."""
        layers = {number: self.layers[number] for number in self.layer_ids}
        unknown = [number for number, layer in layers.items() if layer.ropes[0] == UNKNOWN]
        scaled = {
            number: layer.factors
            for number, layer in layers.items()
            if number not in unknown
            and layer.factors
            and layer.factors[1] - layer.factors[0] > _FACTOR * self.allowed * layer.factors[1]
        }
        remarks = []
        if unknown:
            remarks.append(
                f"queries and keys of {numbered(unknown)} are rotated in an unknown way, so "
                "policies that read them before RoPE are refused"
            )
        if scaled:
            least, most = min(x for x, _ in scaled.values()), max(x for _, x in scaled.values())
            remarks.append(
                f"{numbered([*scaled])}: queries have a factor of their position, {least:.4g} to "
                f"{most:.4g}, which they keep before RoPE"
            )
        return remarks

    def _flush(self, layer: _Layer, rows: dict[str, Tensor], history: _History) -> None:
        """Check a block as stored and pass it to the sink, with the call's keys and values."""
        number, size = history.call.layer, rows["q"].shape[1]
        new = slice(layer.start, layer.start + size)
        block = {**rows, "k": history.call.k[:, new], "v": history.call.v[:, new]}
        recomputed, lse = history.attend(block["q"], layer.start)
        error = self._check_output(history.call, block["attn_out"], recomputed, lse)
        layer.error = max(layer.error, error)
        if history.call.up is not None:  # the kernel's own is expanded
            block["attn_out"] = recomputed
        if self.store_dtype is not None and self.store_dtype != block["q"].dtype:
            # attention weights must follow from the stored values
            history = _History(history.call, self.store_dtype)
            _, lse = history.attend(block["q"].to(self.store_dtype), layer.start)
        first, stop = self.left_out or (0, 0)
        if layer.start < stop:
            self._add_up(layer, block["q"], history)
        held = {
            name: as_largest(name, part, self.sizes)
            for name, part in {**block, "lse": lse}.items()
            if name not in OF_ROWS or not first <= layer.start < stop
        }
        for name, part in on_host(held).items():
            self.sink.append(name, self.layer_ids.index(number), part)
        layer.start += size

    def _add_up(self, layer: _Layer, q: Tensor, history: _History) -> None:
        """Add the rows of a block to the sums of a layer, and store these after the last one."""
        end, rope, keys = layer.start + q.shape[1], layer.ropes[0], history.kv[0]
        if layer.sums is None:
            layer.sums = Sums(layer.formula, None if rope == UNKNOWN else rope)
        layer.sums.add(q.to(self.store_dtype or q.dtype).to(keys.dtype), keys[:, :end])
        if end < (self.left_out or (0, 0))[1]:
            return
        arrays, place = layer.sums.arrays(), self.layer_ids.index(history.call.layer)
        if "moments" not in arrays or rope != layer.sums.rope:
            self.sink.drop("moments")
            self.without_moments = True
        for name, values in arrays.items():
            if name != "moments" or not self.without_moments:
                self.sink.write_layer(name, place, values)

    def _check_output(
        self, call: KernelCall, out: Tensor, recomputed: Tensor, lse: Tensor
    ) -> float:
        if call.up is not None:
            recomputed = recomputed @ call.up
        error = float(relative_error(out.to(recomputed.dtype), recomputed).max())
        allowed = max(tolerance(DTYPES[out.dtype]), logit_rounding(lse))
        if self.rounds_logits and out.dtype.itemsize == 2:
            # relevant logits are close to their log-sum-exp, and off by up to half a last bit
            allowed += torch.finfo(out.dtype).eps / 2 * float(lse.abs().max())
        self.allowed = max(self.allowed, allowed)
        if not error <= allowed:
            raise unrecordable(
                f"attention of layer {call.layer}, recomputed from its q, k, v, differs by "
                f"{error:.3g} (relative) from the model's own, expected at most "
                f"{allowed:.3g}"
            )
        return error


class _History:
    """All keys and values of a call, converted once, for attention from any block of rows."""

    def __init__(self, call: KernelCall, rounded: torch.dtype | None = None) -> None:
        self.call, self.rounded = call, rounded or call.k.dtype  # keys are rounded to this dtype

    @cached_property
    def kv(self) -> tuple[Tensor, Tensor]:
        dtype = compute_dtype(self.call.q.dtype)
        return self.call.k.to(self.rounded).to(dtype), self.call.v.to(dtype)

    def attend(self, q: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Compute attention of rows start, start + 1, ...: q [qhead, w, d] -> out, lse."""
        end = start + q.shape[1]
        k, v = (part[:, :end] for part in self.kv)
        return causal_attention(q.to(k.dtype), k, v, self.call.formula, start)
