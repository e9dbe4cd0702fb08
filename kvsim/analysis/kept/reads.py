"""The part of a head's entries that rows read, from the account of a reader."""

from __future__ import annotations

import numpy as np
import torch

from kvsim.analysis.arrays import Bools, Ints
from kvsim.core.record import Record

#: Rows of an account that are unpacked at once.
_BLOCK = 256


def has_reads(record: Record, layer: int) -> bool:
    """Whether some row of a layer may leave entries unread; layer: on the record's axis."""
    return record.reads is not None and not record.reads.dense(layer)


def read_entries(record: Record, layer: int, rows: slice) -> Bools:
    """Return which entries rows read, for some query head of each head; bool [H, row, rows.stop].

    layer and heads are on the record's axes. Rows of the prompt read all that they see, and so do
    those of a layer without an account.
    """
    gone = torch.from_numpy(record.evicted_at[layer])
    out = held_entries(record, layer, rows)
    if record.reads is None or not has_reads(record, layer):
        return out
    first = max(rows.start, record.reads.first)
    if first < rows.stop:
        read = record.reads.entries(layer, slice(first, rows.stop), gone)
        out[:, first - rows.start :] = read.unflatten(0, (len(gone), -1)).any(1).numpy()
    return out


def held_entries(record: Record, layer: int, rows: slice) -> Bools:
    """Return which entries are resident when rows attend; bool [H, row, rows.stop]."""
    pos, row = np.arange(rows.stop), np.arange(rows.start, rows.stop)[:, None]
    held: Bools = (pos <= row) & (record.evicted_at[layer][:, None, : rows.stop] >= row)
    return held


def read_counts(record: Record, layer: int) -> tuple[Ints, Ints]:
    """Return the entries that each row after the prompt sees, and those that it reads; [H, R]."""
    held, read = [], []
    for first in range(record.prompt_len, record.n_pos, _BLOCK):
        rows = slice(first, min(first + _BLOCK, record.n_pos))
        held.append(held_entries(record, layer, rows).sum(-1))
        read.append(read_entries(record, layer, rows).sum(-1))
    empty = [np.empty((record.evicted_at.shape[1], 0), np.int64)]
    return np.concatenate(held or empty, axis=1), np.concatenate(read or empty, axis=1)
