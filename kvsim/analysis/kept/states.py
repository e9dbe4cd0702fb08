"""States of the positions of one head after an event: kept, dropped, or not yet scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvsim.analysis.kept.retention import event_rows
from kvsim.analysis.output.error import check_record
from kvsim.core.record import Record
from kvsim.core.trace import Trace
from kvsim.errors import NeedsError, PolicyError

Ints = NDArray[np.int64]

#: States of tokens; the order of the codes of `token_states`.
TOKEN_STATES: Final = ("dropped", "retained", "not yet scored")
#: States of positions; the order of the codes of `Strip.codes`.
STRIP_STATES: Final = ("kept", "dropped before", "dropped at the event")


@dataclass(frozen=True)
class TokenStates:
    """States of the tokens in one head of a layer after an event.

    row: of the event. codes [T]: places in `TOKEN_STATES`. text [T]: the tokens as recorded; where
    none of them holds a blank, each is followed by one.
    """

    row: int
    codes: Ints
    text: Sequence[str]

    def counts(self, start: int = 0, stop: int | None = None) -> dict[str, int]:
        """Tokens in each state, of all positions or of some."""
        found = np.bincount(self.codes[start:stop], minlength=len(TOKEN_STATES))
        return dict(zip(TOKEN_STATES, found.tolist(), strict=True))


@dataclass(frozen=True)
class Strip:
    """One head of a record after an event.

    name: of the policy, with the budget where budgets differ. codes [N]: places in `STRIP_STATES`
    of the positions so far, the event being the last that dropped anything. runs [n, 2]: first and
    last position of every maximal run of dropped positions, ascending.
    """

    name: str
    codes: Ints
    runs: Ints

    @property
    def lengths(self) -> Ints:
        """Positions of each run; [n]."""
        out: Ints = self.runs[:, 1] - self.runs[:, 0] + 1
        return out

    @property
    def kept(self) -> int:
        """Number of positions that are kept."""
        return int((self.codes == 0).sum())


def token_states(
    trace: Trace, record: Record, *, layer: int = -1, head: int = 0, row: int | None = None
) -> TokenStates:
    """Return the state of each token in a head after the event that follows a row.

    Args:
        trace: of the record, with the text of its tokens.
        record: of any policy.
        layer: index in the trace; -1 is the last.
        head: KV head; of a record per query head, the first query head of its group.
        row: the layer's last event by default; without an event, the last row.

    Raises:
        TraceError: the record is of another trace.
        NeedsError: the trace has no text of tokens.
        IndexError: the row is not in the trace.
    """
    check_record(trace, record)
    if trace.token_text is None:
        raise NeedsError(
            f"{trace.name}: the trace has no text of its tokens to show; record it with a "
            "tokenizer (kvsim capture)"
        )
    gone = _gone(trace, record, layer % trace.n_layers, head)
    if row is None:
        rows = event_rows(gone)
        row = int(rows[-1]) if len(rows) else record.n_pos - 1
    if not 0 <= row < record.n_pos:
        raise IndexError(f"row is {row}; expected 0..{record.n_pos - 1}")
    codes = np.where(np.arange(record.n_pos) > row, 2, gone[0] > row).astype(np.int64)
    text: Sequence[str] = trace.token_text
    if not any(character.isspace() for piece in text for character in piece):
        text = [f"{piece} " for piece in text]  # tokens without blanks are words
    return TokenStates(row, codes, text)


def strips_after(
    trace: Trace,
    records: Sequence[Record],
    *,
    layer: int = 0,
    head: int = 0,
    row: int | None = None,
) -> tuple[int, list[Strip]]:
    """Return the row of an event, and the states of a head after it for each record.

    row: by default the earliest of the records' last events in the layer, so that all policies have
    evicted by then. Of a record per query head, the first query head of the group.

    Raises:
        TraceError: a record is of another trace.
        PolicyError: nothing left the layer in any record.
        IndexError: the row is not in the trace.
    """
    for record in records:
        check_record(trace, record)
    gone = [_gone(trace, record, layer, head) for record in records]
    if row is None:
        last = [rows[-1] for heads in gone if len(rows := event_rows(heads[:1]))]
        if not last:
            raise PolicyError("nothing left the cache, so there is nothing to show; lower --budget")
        row = int(min(last))
    if not 0 <= row < trace.n_pos:
        raise IndexError(f"row is {row}; expected 0..{trace.n_pos - 1}")
    budgets = [record.share or str(record.budget) for record in records]
    several = len({*budgets}) > 1
    return row, [
        strip(f"{record.policy}, {size}" if several else record.policy, heads[0, : row + 1], row)
        for record, size, heads in zip(records, budgets, gone, strict=True)
    ]


def strip(name: str, gone: NDArray[np.int32], row: int) -> Strip:
    """Return the strip of a head after a row; gone [N]: the rows after which positions left."""
    dropped = gone <= row
    last = gone[dropped].max(initial=-1)
    codes = np.where(dropped, np.where(gone == last, 2, 1), 0)
    edges = np.flatnonzero(np.diff(dropped.astype(np.int8), prepend=0, append=0))
    runs = np.stack([edges[::2], edges[1::2] - 1], axis=1)
    return Strip(name, codes, runs)


def _gone(trace: Trace, record: Record, layer: int, head: int) -> NDArray[np.int32]:
    """The rows [heads, T] after which the entries of a KV head are gone.

    heads: 1, or the query heads of the KV head.
    """
    size = trace.group if record.per_query_head else 1
    of_layer = record.gone_after[record.layers.index(layer)]
    heads: NDArray[np.int32] = of_layer[head * size : (head + 1) * size]
    return heads
