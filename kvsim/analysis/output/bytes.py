"""Bytes of the cache that a serving engine holds, and that a row reads, in stored precision.

Values that are not quantized take 16 bits, whatever the trace has. Summaries of pages and scales of
quantized values count. Query heads of one KV head read an entry once, and a summary once.

Shape letters: H KV heads, w rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvsim.analysis.arrays import Floats
from kvsim.analysis.output.changed import first_row, shortened
from kvsim.core.lazy import Tensor, torch
from kvsim.core.reading import visible
from kvsim.core.record import Record
from kvsim.core.storing import EXACT
from kvsim.core.trace import Trace
from kvsim.policies.naming import stored_piece

# Entries of rows that are processed together.
_MOST = 1 << 24


#: Bytes of each layer that are resident, and that rows read, means over the answer rows of each
#: turn; [turn, layer, H].
Bytes = tuple[Floats, Floats]


def cache_bytes(trace: Trace, records: Sequence[Record], device: str = "cpu") -> list[Bytes]:
    """The bytes of each record."""
    return [_of(trace, record, device) for record in records]


def _of(trace: Trace, record: Record, device: str) -> Bytes:
    shape = len(trace.answers), *record.evicted_at.shape[:2]
    resident, read = (np.full(shape, np.nan) for _ in range(2))
    owners = [trace.owners[layer] for layer in record.layers]
    for index, evicted_at in enumerate(record.gone_after):
        gone = torch.from_numpy(evicted_at).to(device)
        for turn, rows in enumerate(slice(*x) for x in trace.header.answers(trace.n_pos)):
            if rows.start < rows.stop:
                both = _of_layer(trace, record, index, gone, rows)
                resident[turn, index], read[turn, index] = (x.cpu().numpy() / 8 for x in both)
                if owners[index] in owners[:index]:  # an earlier layer holds the entries
                    resident[turn, index] = 0
    return resident, read


def _of_layer(
    trace: Trace, record: Record, index: int, gone: Tensor, rows: slice
) -> tuple[Tensor, Tensor]:
    """Resident bits and bits read in a layer, mean over rows; [H] each."""
    key, value = EXACT * trace.dim, EXACT * (trace.entry_size - trace.dim)
    exact = float(key), float(value)
    storage, last = stored_piece(record.storage), first_row(record, trace) - 1
    owner = trace.owners[record.layers[index]]
    short = shortened(storage, owner, gone, last, (trace.dim, trace.value_dim))
    reads = record.reads
    if reads is not None and reads.dense(index):
        reads = None
    stored, taken = (gone.new_zeros(len(gone), dtype=torch.float64) for _ in range(2))
    step = max(1, _MOST // (trace.n_qheads * rows.stop))
    for start in range(rows.start, rows.stop, step):
        part = slice(start, min(start + step, rows.stop))
        seen = visible(gone, part)  # [H, w, n]
        read = seen
        if reads is not None:
            read = reads.entries(index, part, gone)
            read = read.unflatten(0, (len(gone), -1)).any(1)
        row = torch.arange(part.start, part.stop, device=gone.device).unsqueeze(-1)
        keys = seen if reads is not None and reads.keys else read
        for bits, both in ((stored, (seen, seen)), (taken, (keys, read))):
            for entries, whole in zip(both, exact, strict=True):
                bits.add_(entries.sum((1, 2)), alpha=whole)
            for entries, whole, (after, of_entry) in zip(both, exact, short, strict=False):
                rounded = entries & (after[:, None, : part.stop] < row)
                bits.sub_(rounded.sum((1, 2)), alpha=whole - of_entry)
        if reads is not None:
            pages = -(-seen.sum(-1) // reads.page)  # [H, w]
            stored += reads.summary[0] * pages.sum(-1)
            taken += reads.summary[1] * pages.sum(-1)
    count = rows.stop - rows.start
    return stored / count, taken / count
