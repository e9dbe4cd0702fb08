"""The error of the attention output of rows that see only the entries that a Record keeps.

For a row, with the full attention over everything before it split into visible and evicted entries,
`o_full - o_seen = missing * (o_evicted - o_seen)`: the error is the missing mass times the distance
between the two means (exact; both factors are kept). `seen` computes visible entries.

Shape letters: H KV heads, G query heads of a group, w rows, n entries, T tokens, d dimension of a
head, D of the residual stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from kvsim.analysis.arrays import Floats
from kvsim.analysis.output.changed import first_moved, first_row
from kvsim.analysis.output.layer import Layer, Rows, length
from kvsim.analysis.output.partial import paged, partial
from kvsim.analysis.output.seen import by_slot, seen
from kvsim.analysis.subject import by_layer
from kvsim.core.lazy import Tensor, torch
from kvsim.core.outcome import OutputDeviation
from kvsim.core.policy import Schedule
from kvsim.core.record import Record
from kvsim.core.trace import Trace
from kvsim.errors import TraceError


def output_error(
    trace: Trace,
    records: Sequence[Record],
    device: str = "cpu",
    *,
    projected: bool = False,
    prompt: bool = True,
) -> list[OutputDeviation]:
    """The error of each record's rows, one layer of the trace in memory at a time.

    Records of one trace share policy-independent values. projected: compute `added` too. prompt:
    include all rows of the prompt; otherwise those after its first event are in
    `OutputDeviation.before`.

    Raises TraceError where a record does not belong to the trace, and NeedsError if `projected`
    where the trace has no output projections.
    """
    for record in records:
        check_record(trace, record)
    results, starts = [], [0 if prompt else first_row(record, trace) for record in records]
    for record, start in zip(records, starts, strict=True):
        shape = len(record.layers), trace.n_qheads, trace.n_pos - start
        error, missing = (np.empty(shape, np.float32) for _ in range(2))
        added = np.empty((shape[0], shape[2]), np.float32) if projected else None
        factored = record.positions != "slot" and record.storage is None
        results.append(OutputDeviation(error, missing, factored, added))
    with torch.inference_mode():
        for layer in sorted({layer for record in records for layer in record.layers}):
            having = [number for number, record in enumerate(records) if layer in record.layers]
            of_layer = [(records[n], records[n].layers.index(layer), starts[n]) for n in having]
            gone = ((record, torch.from_numpy(record.gone_after[i])) for record, i, _ in of_layer)
            firsts = (min(first_row(x, trace), first_moved(x, trace, at)) for x, at in gone)
            first = min([*starts, *firsts])
            rows = Layer.read(trace, layer, torch.device(device), projected=projected, first=first)
            moved = zip(having, of_layer, _of_layer(rows, trace, of_layer), strict=True)
            for result, index, of_record in ((results[n], i, x) for n, (_, i, _), x in moved):
                result.error[index] = of_record.error.flatten(0, 1).cpu().numpy()
                result.missing[index] = of_record.missing.flatten(0, 1).cpu().numpy()
                if result.added is not None:
                    result.added[index] = of_record.added.cpu().numpy()
    if prompt:
        return results
    return [x.parted(trace.prompt_len - start) for x, start in zip(results, starts, strict=True)]


def head_lengths(trace: Trace, records: Sequence[Record], device: str = "cpu") -> list[Floats]:
    """For each record the norm of each head's full output; [layer, qhead, row after the prompt]."""

    def read(layer: int) -> Floats:
        rows = slice(trace.prompt_len, None)
        out = trace.full(slice(layer, layer + 1), rows)[0][0].to(device)
        lengths: Floats = torch.linalg.vector_norm(out.double(), dim=-1).cpu().numpy()
        return lengths

    return [np.stack(layers) for layers in by_layer(records, read, lambda _record, _at, x: x)]


def check_record(trace: Trace, record: Record) -> None:
    """Raise TraceError where the record was not replayed from the trace, if its digests show it."""
    stored = record.digest and trace.path is not None
    same = not stored or record.digest == trace.fingerprint
    heads = trace.n_qheads if record.per_query_head else trace.n_heads
    shape, expected = record.evicted_at.shape[1:], (heads, trace.n_pos)
    same &= (record.prompt_len, shape) == (trace.prompt_len, expected)
    if not same or max(record.layers, default=0) >= trace.n_layers:
        raise TraceError(
            f"the record of {record.policy} is of {record.trace} ({record.digest}, prompt "
            f"{record.prompt_len}, heads and positions {shape}), not of {trace.name} "
            f"({trace.fingerprint}, prompt {trace.prompt_len}, {expected}); measure a record on "
            "the trace it was replayed from"
        )


class _LayerError:
    """Error and missing mass [H, G, w] of a layer's rows from `start` on, and `added` [w]."""

    def __init__(self, layer: Layer, start: int) -> None:
        self._layer, self._start = layer, start
        rows = layer.lse[:, :, start - layer.first :]
        self.error, self.missing = (torch.zeros_like(rows) for _ in range(2))
        self.added = torch.zeros_like(rows[0, 0])

    def put(self, rows: Rows) -> None:
        """Fill rows from their output, which is overwritten, and their mass."""
        skip, at = 0, rows.at
        if isinstance(at, slice):  # single rows are of the prompt, of which all are kept
            skip = max(0, self._start - at.start)
            at = slice(at.start + skip - self._start, max(0, at.stop - self._start))
        gap = rows.out.sub_(rows.full)
        if self._layer.o_proj is not None:
            gate = self._layer.gate
            passed = gap if gate is None else gap * self._layer.at(gate, rows.at)
            concat = passed.flatten(0, 1).transpose(0, 1).flatten(1)  # [w, H * G * d]
            self.added[at] = length(concat @ self._layer.o_proj, -1)[skip:]
        moved = length(gap, -1)
        # an output of exactly 0 that stays 0 has no error
        error = torch.where(moved == 0, moved, moved / rows.size)
        self.error[:, :, at] = error[..., skip:]
        self.missing[:, :, at] = (1.0 - rows.mass).clamp_(0.0, 1.0)[..., skip:]

    def put_prompt(self, present: Tensor, *, slots: bool) -> None:
        """Fill the rows of the prompt, of which those present [P] see each other; NaN for others.

        slots: they were at positions 0, 1, 2, ...; the mass is that of their own.
        """
        layer, positions = self._layer, present.nonzero()[:, 0].to(self.added.device)
        q, k, v = layer.q[:, :, positions], layer.k[:, None, positions], layer.v[:, None, positions]
        out, lse = layer.whole(*layer.attend(q, k, v, causal=True))
        mass = (lse - layer.lse[:, :, positions]).exp_()
        if slots:
            rope, new = layer.rope, torch.arange(len(positions), device=positions.device)
            q, k = (rope.rotate(rope.unrotate(x, positions), new) for x in (q, k))
            out, _ = layer.whole(*layer.attend(q, k, v, causal=True))
        for values in (self.error, self.missing, self.added):
            values[..., : len(present)] = torch.nan
        self.put(Rows.of(layer, positions, out, mass))


def _of_layer(
    layer: Layer, trace: Trace, records: Sequence[tuple[Record, int, int]]
) -> Iterator[_LayerError]:
    """Yield the errors under each record; records: with the layer's index, and their first row."""
    of_heads, errors = {len(layer.k): layer}, list[_LayerError]()
    alike: dict[tuple[int, Schedule], list[tuple[_LayerError, Tensor]]] = {}
    for record, index, start in records:
        heads = record.evicted_at.shape[1]
        if heads not in of_heads:
            of_heads[heads] = layer.per_query_head()
        part = of_heads[heads]
        errors.append(_LayerError(part, start))
        gone = torch.from_numpy(record.gone_after[index]).to(layer.k.device)
        dense = record.reads is None or record.reads.dense(index)
        if dense and record.storage is None and record.positions != "slot":
            terms = heads, replace(record.schedule, prefill=True)
            alike.setdefault(terms, []).append((errors[-1], gone))
            continue
        slots = dense and record.storage is None
        for rows in by_slot(part, gone) if slots else _read(part, record, index, trace, gone):
            errors[-1].put(rows)
    for (heads, schedule), pairs in alike.items():
        events = schedule.rows(*trace.extent)
        for number, rows in seen(of_heads[heads], [gone for _, gone in pairs], events):
            pairs[number][0].put(rows)
    for error, (record, index, start) in zip(errors, records, strict=True):
        prompt = torch.from_numpy(record.evicted_at[index, 0, : record.prompt_len - start])
        present = prompt >= torch.arange(len(prompt))  # rows that reach the layer
        if not bool(present.all()):
            error.put_prompt(present, slots=record.positions == "slot")
        yield error


def _read(layer: Layer, record: Record, index: int, trace: Trace, gone: Tensor) -> Iterator[Rows]:
    """Blocks of rows that read only some resident entries, or quantized ones."""
    reads = record.reads if record.storage is None else None
    if reads is None or reads.weighted:
        return partial(layer, record, index, trace, gone, trace.n_pos)
    before = partial(layer, record, index, trace, gone, reads.first)
    return chain(before, paged(layer, reads, index, gone))
