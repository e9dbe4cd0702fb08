"""The error of the attention output of rows that see only what a Record leaves them.

For a row, with the full attention over everything before it split into what is seen and what was
evicted, `o_full - o_seen = missing * (o_evicted - o_seen)`: the error is the missing mass times the
distance between the two means (exact; both factors are kept). Attention over parts merges exactly
through the log-sum-exp, so a row costs as many products as it sees entries.

Shape letters: H KV heads, G query heads of a group, w rows, n entries, T tokens, d dimension of a
head, D of the residual stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvsim.analysis.arrays import Floats
from kvsim.analysis.walk import by_layer
from kvsim.core.attention import Formula, Rope, attend, merge, with_sinks
from kvsim.core.record import Record
from kvsim.core.trace import Trace
from kvsim.errors import TraceError
from kvsim.schema import NEVER

#: Rows of a block. Their own entries form a triangle that is computed apart; the entries before
#: them need no mask.
ROWS = 64

#: Error and missing mass by head and row, and `OutputError.added` by row.
Moved = tuple[Tensor, Tensor, Tensor]

# Distance is error / missing mass; below this the mass is rounding noise of two log-sum-exps.
_LEAST_MISSING = 1e-5


@dataclass(frozen=True)
class OutputError:
    """Per layer, query head and row; float32 [layer, qhead, row], 0 error before the first event.

    NaN for rows of the prompt that were not propagated to the layer: they have no attention there.

    error: |o_full - o_seen| / |o_full| against the output that the model computed.
    mass: share of the full attention that lies on what the row sees, and on the model's sinks if it
        has them, which no policy evicts.
    missing: 1 - mass, without the cancellation.
    distance: |o_evicted - o_seen| / |o_full|; NaN where missing is below 1e-5 (rounding noise).
    rotated: keys were rotated to slots, so the error is no product of the two; distance is NaN.
    added: |W_o (o_seen - o_full)| of all heads of a layer together [layer, row]: the length of what
        eviction adds to the residual stream; None unless it was computed.
    """

    error: NDArray[np.float32]
    missing: NDArray[np.float32]
    rotated: bool = False
    added: NDArray[np.float32] | None = None

    @property
    def mass(self) -> NDArray[np.float32]:
        """1 - missing [layer, qhead, row]."""
        return 1.0 - self.missing

    @property
    def distance(self) -> NDArray[np.float32]:
        """|o_evicted - o_seen| / |o_full| [layer, qhead, row]."""
        known = (self.missing >= _LEAST_MISSING) & (not self.rotated)
        out = np.full_like(self.error, np.nan)
        np.divide(self.error, self.missing, out=out, where=known)
        return out


def output_error(
    trace: Trace, records: Sequence[Record], device: str = "cpu", *, projected: bool = False
) -> list[OutputError]:
    """The error of each record's rows, one layer of the trace in memory at a time.

    Records of one trace share what does not depend on the policy. projected: compute `added` too.

    Raises TraceError where a record does not belong to the trace, and NeedsError if `projected`
    where the trace has no output projections.
    """
    for record in records:
        check_record(trace, record)
    results = []
    for record in records:
        shape = len(record.layers), trace.n_qheads, trace.n_pos
        error, missing = (np.empty(shape, np.float32) for _ in range(2))
        added = np.empty((len(record.layers), trace.n_pos), np.float32) if projected else None
        results.append(OutputError(error, missing, record.positions == "slot", added))
    with torch.inference_mode():
        for layer in sorted({layer for record in records for layer in record.layers}):
            rows = Layer.read(trace, layer, torch.device(device), projected=projected)
            for record, result in zip(records, results, strict=True):
                if layer in record.layers:
                    at = record.layers.index(layer)
                    moved = [x.cpu().numpy() for x in _of_layer(rows, record, at)]
                    result.error[at], result.missing[at] = moved[:2]
                    if result.added is not None:
                        result.added[at] = moved[2]
    return results


def head_lengths(trace: Trace, records: Sequence[Record], device: str = "cpu") -> list[Floats]:
    """For each record the length of each head's full output; [layer, qhead, row after the prompt].

    Lengths of a layer are computed once for all records.
    """

    def read(layer: int) -> Floats:
        out = trace.full(slice(layer, layer + 1))[0][0, :, trace.prompt_len :].to(device)
        lengths: Floats = torch.linalg.vector_norm(out.double(), dim=-1).cpu().numpy()
        return lengths

    return [np.stack(layers) for layers in by_layer(records, read, lambda _record, _at, x: x)]


def residual_norms(trace: Trace, records: Sequence[Record], device: str = "cpu") -> list[Floats]:
    """For each record the length of the residual stream [layer, row after the prompt].

    That which enters each layer. Raises NeedsError where the trace does not have it.
    """

    def read(layer: int) -> Floats:
        one, rows = slice(layer, layer + 1), slice(trace.prompt_len, None)
        if trace.has("residual_norm"):
            recorded: Floats = trace.read("residual_norm", one, rows)[0].double().numpy()
            return recorded
        stream = trace.read("residual", one, rows)[0].to(device)
        lengths: Floats = torch.linalg.vector_norm(stream.double(), dim=-1).cpu().numpy()
        return lengths

    return [np.stack(layers) for layers in by_layer(records, read, lambda _record, _at, x: x)]


def check_record(trace: Trace, record: Record) -> None:
    """Raise TraceError where the record was not replayed from the trace, as far as can be told."""
    stored = record.digest and trace.path is not None
    if (stored and record.digest != trace.digest) or record.prompt_len != trace.prompt_len:
        raise TraceError(
            f"the record of {record.policy} was replayed from {record.trace} ({record.digest}, "
            f"prompt {record.prompt_len}), not from {trace.name} ({trace.digest}, prompt "
            f"{trace.prompt_len}); measure a record on the trace it was replayed from"
        )
    heads = trace.n_qheads if record.per_query_head else trace.n_heads
    shape, expected = record.evicted_at.shape[1:], (heads, trace.n_pos)
    if shape != expected or max(record.layers, default=0) >= trace.n_layers:
        raise TraceError(
            f"the record of {record.policy} has {shape} heads and positions, the trace "
            f"{trace.name} has {expected}; measure a record on the trace it was replayed from"
        )


@dataclass
class Layer:
    """One layer of a trace: q [H, G, T, d], k, v [H, T, d], full output and log-sum-exp.

    o_proj: the output projection [H * G * d, D], None where it is not needed.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    formula: Formula
    rope: Rope
    o_proj: Tensor | None = None
    _own: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)

    @classmethod
    def read(
        cls, trace: Trace, layer: int, device: torch.device, *, projected: bool = False
    ) -> Layer:
        """Read a layer of a trace; with its output projection if `projected`."""
        one = slice(layer, layer + 1)
        q, k, v = (trace.read(name, one)[0].to(device) for name in ("q", "k", "v"))
        out, lse = (x[0].to(device).unflatten(0, (len(k), -1)) for x in trace.full(one))
        o_proj = trace.read("o_proj", one)[0].flatten(0, 1).to(device) if projected else None
        q, formula, rope = q.unflatten(0, (len(k), -1)), trace.formulas[layer], trace.ropes[layer]
        return cls(q, k, v, out, lse, formula, rope, o_proj)

    def per_query_head(self) -> Layer:
        """The same layer with every query head its own KV head."""
        k, v = (x.repeat_interleave(self.q.shape[1], 0) for x in (self.k, self.v))
        q, out, lse = (x.flatten(0, 1).unsqueeze(1) for x in (self.q, self.out, self.lse))
        return replace(self, q=q, k=k, v=v, out=out, lse=lse, _own={})

    @cached_property
    def unrotated(self) -> tuple[Tensor, Tensor]:
        """q and k before RoPE."""
        pos = torch.arange(self.k.shape[1], device=self.k.device)
        return self.rope.unrotate(self.q, pos), self.rope.unrotate(self.k, pos)

    def own(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Attention of rows start..stop-1 over their own entries: no policy changes it."""
        if (start, stop) not in self._own:
            k, v = (x[:, None, start:stop] for x in (self.k, self.v))
            self._own[start, stop] = self.attend(self.q[:, :, start:stop], k, v, causal=True)
        return self._own[start, stop]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **seen: Any) -> tuple[Tensor, Tensor]:
        """`attend` by the layer's formula; of part of what a row sees, so without sinks."""
        return attend(q, k, v, self.formula.scale, softcap=self.formula.softcap, **seen)

    def whole(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """All visible entries with the sinks; out [H, G, w, d], lse [H, G, w]."""
        if not self.formula.sinks:
            return out, lse
        return with_sinks(out, lse, self.formula.sink(out, len(out)))


def _of_layer(layer: Layer, record: Record, at: int) -> Moved:
    """Error and missing mass [qhead, T] of a record's layer at place `at`, and `added` [T]."""
    last = torch.from_numpy(record.gone_after[at]).to(layer.k.device)  # [H, T]
    slots = record.positions == "slot"
    if len(last) != len(layer.k):
        layer = layer.per_query_head()
    error, missing = (torch.zeros_like(layer.lse) for _ in range(2))
    added = torch.zeros_like(layer.lse[0, 0])
    for start, stop, out, lse in (_by_slot if slots else _by_prefix)(layer, last):
        rows = slice(start, stop)
        error[:, :, rows], missing[:, :, rows], added[rows] = _moved(layer, rows, out, lse)
    prompt = torch.from_numpy(record.evicted_at[at, 0, : record.prompt_len])
    present = prompt >= torch.arange(record.prompt_len)  # rows of the prompt that reach the layer
    if not bool(present.all()):
        before = slice(record.prompt_len)
        of_prompt = _prompt_error(layer, present, slots=slots)
        error[:, :, before], missing[:, :, before], added[before] = of_prompt
    return error.flatten(0, 1), missing.flatten(0, 1), added


def _moved(layer: Layer, rows: slice | Tensor, out: Tensor, lse: Tensor) -> Moved:
    """Error and missing mass [H, G, w], and `added` [w], of rows with output `out`, overwritten."""
    full = layer.out[:, :, rows]
    size = torch.linalg.vector_norm(full, dim=-1)
    gap = torch.linalg.vector_norm(out.sub_(full), dim=-1)
    added = gap.new_zeros(gap.shape[-1])
    if layer.o_proj is not None:
        concat = out.flatten(0, 1).transpose(0, 1).flatten(1)  # [w, H * G * d]
        added = torch.linalg.vector_norm(concat @ layer.o_proj, dim=-1)
    # an output of exactly 0 that stays 0 has not moved
    error = torch.where(gap == 0, gap, gap / size)
    return error, (-torch.expm1(lse - layer.lse[:, :, rows])).clamp_(0.0, 1.0), added


def _prompt_error(layer: Layer, present: Tensor, *, slots: bool) -> Moved:
    """Error and missing mass [H, G, P], `added` [P], of rows of the prompt that see those present.

    NaN for the others. slots: they were at positions 0, 1, 2, ...; the mass is that of their own.
    """
    at = present.nonzero()[:, 0].to(layer.k.device)
    q, k, v = layer.q[:, :, at], layer.k[:, None, at], layer.v[:, None, at]
    out, lse = layer.whole(*layer.attend(q, k, v, causal=True))
    if slots:
        rope, new = layer.rope, torch.arange(len(at), device=at.device)
        q, k = (rope.rotate(rope.unrotate(x, at), new) for x in (q, k))
        out, _ = layer.whole(*layer.attend(q, k, v, causal=True))
    shape = (*layer.lse.shape[:2], len(present))
    error, missing = (layer.lse.new_full(shape, torch.nan) for _ in range(2))
    added = layer.lse.new_full(shape[-1:], torch.nan)
    error[:, :, at], missing[:, :, at], added[at] = _moved(layer, at, out, lse)
    return error, missing, added


Seen = Iterator[tuple[int, int, Tensor, Tensor]]


def _by_prefix(layer: Layer, last: Tensor) -> Seen:
    """(start, stop, out [H, G, w, d], lse [H, G, w]) of blocks of rows after the first event.

    Between two events the visible entries only grow: the retained ones, then the new. Blocks of
    rows attend to that growing prefix without a mask, and their own triangle is merged in. Where
    events are close together, or heads hold different numbers, `_by_mask` does.
    """
    events = [int(e) for e in last.unique() if e != NEVER]
    pending = 0  # first row of a run of intervals that go by mask, 0 for none
    for event, stop in pairwise([*events, last.shape[-1] - 1]):
        held = last[:, : event + 1] > event
        count = held.sum(-1)
        if stop - event < ROWS or int(count.min()) != int(count.max()):
            pending = pending or event + 1
            continue
        if pending:
            yield from _by_mask(layer, last, pending, event + 1)
            pending = 0
        slot = held.nonzero()[:, 1].view(len(held), -1)
        new = torch.arange(event + 1, stop + 1, device=slot.device).expand(len(held), -1)
        k, v = _take((layer.k, layer.v), torch.cat([slot, new], dim=-1))
        for start in range(event + 1, stop + 1, ROWS):
            end = min(start + ROWS, stop + 1)
            before = slot.shape[-1] + start - event - 1
            # without a mask all rows of a group are alike, so they go as one long block of rows of
            # a single head: the kernel's products are larger, and nearer to the machine's rate
            q = layer.q[:, :, start:end]
            rows = q.flatten(1, 2).unsqueeze(1)
            parts = layer.attend(rows, k[:, None, :before], v[:, None, :before])
            out, lse = (x.squeeze(1).unflatten(1, q.shape[1:3]) for x in parts)
            yield start, end, *layer.whole(*merge(out, lse, *layer.own(start, end)))
    if pending:
        yield from _by_mask(layer, last, pending, last.shape[-1])


def _by_mask(layer: Layer, last: Tensor, first: int, stop: int) -> Seen:
    """The same for any Record, by its definition: row r sees p iff p <= r <= evicted_at[p]."""
    pos = torch.arange(last.shape[-1], device=last.device)
    for start in range(first, stop, ROWS):
        end = min(start + ROWS, stop)
        at = _marked((pos < end) & (last >= start))  # seen by at least one of the rows
        row = torch.arange(start, end, device=last.device).unsqueeze(-1)
        mask = (at.unsqueeze(1) <= row) & (last.gather(1, at).unsqueeze(1) >= row)
        k, v = _take((layer.k, layer.v), at)
        out, lse = layer.attend(
            layer.q[:, :, start:end], k[:, None], v[:, None], mask=mask.unsqueeze(1)
        )
        yield start, end, *layer.whole(out, lse)


def _by_slot(layer: Layer, last: Tensor) -> Seen:
    """The same with the output of keys and queries rotated to their slot in the cache.

    The log-sum-exp, and so the mass, is that of the model's own positions: how much full attention
    lies on what is seen. Slots change with every event and not between two of them. For presets
    that re-rotate only, so rows attend one by one.
    """
    queries, keys = layer.unrotated
    events = {int(e) for e in last.unique() if e != NEVER}
    for event, stop in pairwise(sorted({*events, last.shape[-1] - 1})):
        retained = last[:, : event + 1] > event
        old = _marked(retained)
        new = torch.arange(event + 1, stop + 1, device=old.device).expand(len(old), -1)
        shown = torch.cat([retained.gather(1, old), new > event], dim=-1)
        k, v, moved = _take((layer.k, layer.v, keys), torch.cat([old, new], dim=-1))
        rows = slice(event + 1, stop + 1)
        _, lse = _row_by_row(layer, layer.q[:, :, rows], k, v, shown)
        slot = (shown.cumsum(-1) - 1).clamp_(min=0)
        k = layer.rope.rotate(moved, slot)
        q = layer.rope.rotate(queries[:, :, rows], slot[:, None, old.shape[-1] :])
        out, _ = _row_by_row(layer, q, k, v, shown)
        yield event + 1, stop + 1, out, lse


def _row_by_row(
    layer: Layer, q: Tensor, k: Tensor, v: Tensor, shown: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention of rows q [H, G, w, d] to entries k, v [H, n, d] where `shown` [H, n], with sinks.

    The last w entries are the rows' own; each row sees its own and what is before it.
    """
    before = k.shape[1] - q.shape[2]
    mask = None if bool(shown.all()) else shown[:, None, None]
    parts = []
    for row in range(q.shape[2]):
        entries = slice(before + row + 1)
        seen = None if mask is None else mask[..., entries]
        one = q[:, :, row : row + 1]
        parts.append(layer.attend(one, k[:, None, entries], v[:, None, entries], mask=seen))
    out, lse = (torch.cat(each, dim=2) for each in zip(*parts, strict=True))
    return layer.whole(out, lse)


def _marked(mask: Tensor) -> Tensor:
    """Positions marked in mask [H, T], ascending; [H, n], heads with fewer padded on the left."""
    count = mask.sum(-1)
    longest = int(count.max())
    if int(count.min()) == longest:
        return mask.nonzero()[:, 1].view(len(mask), longest)
    return mask.byte().sort(dim=-1, stable=True).indices[:, mask.shape[-1] - longest :]


def _take(stored: Sequence[Tensor], at: Tensor) -> list[Tensor]:
    """Rows at[H, n] of tensors [H, T, d]; [H, n, d] each."""
    heads, total, dim = stored[0].shape
    base = torch.arange(heads, device=at.device).mul_(total).unsqueeze(-1)
    flat = (at + base).flatten()
    return [x.reshape(-1, dim).index_select(0, flat).view(heads, -1, dim) for x in stored]
