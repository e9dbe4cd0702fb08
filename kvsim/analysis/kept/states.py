"""States and reads of the positions of one head after its events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvsim.analysis.arrays import Bools, EvictedAt, Ints
from kvsim.analysis.axes import record_layer, trace_head, trace_layer
from kvsim.analysis.kept.retention import event_row
from kvsim.analysis.kept.text import text_of
from kvsim.analysis.output.error import check_record
from kvsim.core.lazy import torch
from kvsim.core.reading import visible
from kvsim.core.record import Record
from kvsim.core.trace import Trace

#: States of tokens; the order of the codes of `token_states`.
TOKEN_STATES: Final = ("evicted", "retained", "not yet scored", "missed", "held, not read")
#: Length of a region in tokens, as in `wipeout` and in a tile of retention.
REGION = 32


@dataclass(frozen=True)
class TokenStates:
    """States of the tokens in one head of a layer after an event.

    row: of the event. codes [T]: places in `TOKEN_STATES`. text [T]: the tokens, as `spaced`
    returns them.
    """

    row: int
    codes: Ints
    text: Sequence[str]

    def counts(self, start: int = 0, stop: int | None = None) -> dict[str, int]:
        """Count the tokens in each state, of all positions or of some."""
        counts = np.bincount(self.codes[start:stop], minlength=len(TOKEN_STATES))
        return dict(zip(TOKEN_STATES, counts.tolist(), strict=True))


def token_states(
    trace: Trace,
    record: Record,
    *,
    layer: int = -1,
    head: int = 0,
    row: int | None = None,
    needed: Ints | None = None,
) -> TokenStates:
    """Return the state of each token in a head after the event that follows a row.

    layer: index in the trace, -1 for the last. head: KV head; of a record per query head, the first
    query head of its group. row: the layer's last event by default; without an event, the last row.
    needed: the last row that would attend to each position; with it, a token evicted before that
    row is missed. A kept token that the next row (or the last row of the trace) does not read is
    held, not read.

    Raises TraceError where the record is of another trace, NeedsError where the trace has no text
    of tokens, PolicyError for a layer or head that is not there, and PositionError for such a row.
    """
    check_record(trace, record)
    text = text_of(trace)
    layer, head = trace_layer(trace, layer), trace_head(trace, head)
    gone = gone_of(trace, record, layer, head)
    row = event_row(gone, row)
    codes = np.where(np.arange(record.n_pos) > row, 2, gone[0] > row).astype(np.int64)
    if needed is not None:
        codes[(codes == 0) & (needed > gone[0])] = 3
    index = record_layer(record, layer)
    if has_reads(record, index):
        following = min(row + 1, record.n_pos - 1)
        read = read_entries(record, index, slice(following, following + 1))[head * len(gone), 0]
        codes[: len(read)][(codes[: len(read)] == 1) & ~read] = 4
    return TokenStates(row, codes, text)


def gone_of(trace: Trace, record: Record, layer: int, head: int | None) -> EvictedAt:
    """Return the rows after which entries of one KV head of a layer leave, or of all; [H, T].

    H is 1, or in a record per query head the query heads of its group. Raises PolicyError for a
    layer that the record lacks, or a head that the trace does not have.
    """
    gone: EvictedAt = record.gone_after[record_layer(record, trace_layer(trace, layer))]
    if head is None:
        return gone
    size, head = trace.group if record.per_query_head else 1, trace_head(trace, head)
    return gone[head * size : (head + 1) * size]


def has_reads(record: Record, layer: int) -> bool:
    """Whether some row of a layer may leave entries unread; layer: on the record's axis."""
    return record.reads is not None and not record.reads.dense(layer)


def read_entries(record: Record, layer: int, rows: slice) -> Bools:
    """Return which entries rows read, for some query head of each head; bool [H, row, rows.stop].

    layer and heads are on the record's axes. Rows of the prompt read all that they see, and so do
    those of a layer without an account.
    """
    gone = torch.from_numpy(record.evicted_at[layer])
    entries = held_entries(record, layer, rows)
    if record.reads is None or not has_reads(record, layer):
        return entries
    start = max(rows.start, record.reads.first)
    if start < rows.stop:
        read = record.reads.entries(layer, slice(start, rows.stop), gone)
        entries[:, start - rows.start :] = read.unflatten(0, (len(gone), -1)).any(1).numpy()
    return entries


def held_entries(record: Record, layer: int, rows: slice) -> Bools:
    """Return which entries are resident when rows attend; bool [H, row, rows.stop]."""
    return visible(torch.from_numpy(record.evicted_at[layer]), rows).numpy()
