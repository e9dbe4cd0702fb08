"""The attention of rows of a model to the entries that records retain, for the judge.

Shape letters: B records, H KV heads, w rows, T tokens, M candidates for entries, d head dimension.
A candidate is an entry as some of the rows see it: as it was, rounded, or after others merged in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, cast

import torch
from torch import Tensor

from kvsim.analysis.output.changed import first_row, folds, log_weights, rounded
from kvsim.core.merging import Merger
from kvsim.core.reading import Reads
from kvsim.core.record import Record
from kvsim.core.trace import Trace
from kvsim.engine.reading import account, chosen_pages, note, reads_all
from kvsim.engine.source import ended
from kvsim.policies.naming import stored_piece
from kvsim.recorder.hooks import Attention, kernel_mask
from kvsim.runner.full import FullPass
from kvsim.runner.model import RunningModel, computable
from kvsim.schema import NEVER

#: Rows that attend to one selection of entries.
_ROWS = 64

#: Of keys and of values: whether each candidate of four is rounded.
_ROUNDED = (0, 1, 0, 1), (0, 0, 1, 1)


class _Candidates(NamedTuple):
    """Entries that rows of a record may attend to in a layer.

    tables: keys and values [H, n, d]; at: where candidates are in each of them, [H, M]. pos [M];
    first, last [H or qhead, M]: the rows that see one.
    """

    tables: Sequence[Tensor]
    at: Sequence[Tensor]
    pos: Tensor
    first: Tensor
    last: Tensor


class JudgedRows:
    """The attention of rows from `start` on under each of some records."""

    def __init__(
        self,
        trace: Trace,
        full: FullPass,
        records: Sequence[Record],
        start: int,
        running: RunningModel,
    ) -> None:
        self._trace, self._full, self._records, self._start = trace, full, records, start
        self._added = running.added
        self._pos = torch.arange(trace.n_pos, device=running.device)
        own = torch.arange(len(records), device=running.device)[:, None] * (trace.n_pos - start)
        #: where the rows of each record are, behind those that all share [B, T]
        self._rows = torch.where(self._pos < start, self._pos, self._pos + own)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, attention: Attention
    ) -> Tensor:
        """Attention output [1, B * w, qhead, d] of queries [1, qhead, B * w, d]."""
        layer, new, start = self._trace.layer_ids.index(layer), query.shape[2], self._start
        pairs = (self._full.keys[layer], key[0]), (self._full.values[layer], value[0])
        tables = [torch.cat([full[:, :start], x[:, -new:]], dim=1) for full, x in pairs]
        q = query.unflatten(2, (len(self._records), -1))
        each = enumerate(zip(self._records, self._rows, strict=True))
        parts = [self._of(layer, *of, tables, q[:, :, i], attention) for i, of in each]
        return torch.cat(parts, dim=1)

    def _of(
        self,
        layer: int,
        record: Record,
        places: Tensor,
        tables: Sequence[Tensor],
        q: Tensor,
        attention: Attention,
    ) -> Tensor:
        """Attention output [1, w, qhead, d] of a record's queries [1, qhead, w, d].

        places: where its rows are in the tables, [T].
        """
        heads, n = len(tables[0]), self._trace.n_pos
        if layer in record.layers:
            gone = torch.from_numpy(record.evicted_at[record.layers.index(layer)]).to(q.device)
        else:
            gone = torch.full((heads, n), NEVER, dtype=torch.int32, device=q.device)
        entries = self._candidates(layer, record, places, tables, gone)
        reads, parts = None, []
        if record.reads is not None and layer in record.layers:
            own = [computable(table[:, places]) for table in tables]
            reads = self._read(layer, record, gone, computable(q[0]), *own)
        for start in range(self._start, n, _ROWS):
            rows = slice(start, min(start + _ROWS, n))
            part = q[:, :, rows.start - self._start : rows.stop - self._start]
            keys, values, seen, place = self._seen(entries, rows, part.shape[1])
            weights = None
            if reads is not None:
                read = reads.entries(0, rows, gone)
                seen &= read.repeat_interleave(len(seen) // len(read), 0).gather(-1, place)
                of_group = computable(part[0].unflatten(0, (heads, -1)))
                weights = log_weights(reads, 0, rows, gone, of_group, own[0][:, : rows.stop])
                weights = None if weights is None else weights.gather(-1, place)[None]
            mask = kernel_mask(seen[None], part, added=self._added, weights=weights)
            parts.append(attention(part, keys[None], values[None], mask))
        return torch.cat(parts, dim=1)

    def _candidates(
        self, layer: int, record: Record, places: Tensor, tables: Sequence[Tensor], gone: Tensor
    ) -> _Candidates:
        """The candidates of a layer under a record; gone: the last row that sees an entry."""
        last, pos = gone, self._pos
        if self._trace.formulas[layer].reach is not None:
            last = torch.minimum(last, self._trace.formulas[layer].last_rows(pos).int())
        at, first = places.expand(len(tables[0]), -1), pos.expand_as(last)
        storage = stored_piece(record.storage)
        if storage is None or layer not in record.layers:  # such as one whose window bounds it
            return _Candidates(tables, (at, at), pos, first, last)
        exact = [table[:, places] for table in tables]
        if isinstance(storage, Merger):
            return self._merged(storage, exact, gone, last)
        stored = rounded(
            storage, self._trace, layer, last, first_row(record, self._trace) - 1, exact
        )
        until = [torch.minimum(each.after, last) for each in stored]
        since = [torch.maximum(first, each.after.long() + 1) for each in stored]
        both, at = (torch.minimum(*until), torch.maximum(*since)), pos.expand_as(last)
        # exact and exact; rounded key; rounded value; both rounded
        begins, ends = (first, *since, both[1]), (both[0], until[1], until[0], last)
        return _Candidates(
            [torch.cat([each.exact, each.rounded], dim=1) for each in stored],
            [torch.cat([at + len(pos) * x for x in which], -1) for which in _ROUNDED],
            pos.repeat(4),
            torch.cat(begins, dim=-1),
            torch.cat(ends, dim=-1),
        )

    def _merged(
        self, merger: Merger, tables: list[Tensor], gone: Tensor, end: Tensor
    ) -> _Candidates:
        """A candidate for each entry, and one for each time that others merge into it.

        tables: keys and values [H, T, d]. gone: after which row an entry leaves, [H, T]; end: the
        last row that sees it.
        """
        at = self._pos.expand_as(gone).clone()  # the candidate that an entry is now
        pos, first, last = [self._pos], [self._pos.expand_as(gone)], end
        parts, now = [[x] for x in tables], [x.clone() for x in tables]
        for row, changed in folds(merger, now[0], now[1], gone):
            places = changed.any(0).nonzero()[:, 0]
            here, old = changed[:, places], at[:, places]
            ends = last.gather(1, old)
            last = last.scatter(1, old, ends.clamp(max=row).where(here, ends))
            new = last.shape[1] + torch.arange(len(places), device=at.device)
            at[:, places] = new.where(here, old)
            last = torch.cat([last, end[:, places].where(here, -1)], dim=1)
            first.append(torch.full_like(old, row + 1))
            pos.append(places)
            for part, array in zip(parts, now, strict=True):
                part.append(array[:, places])
        of_head = torch.arange(last.shape[1], device=at.device).expand_as(last)
        tables = [torch.cat(part, dim=1) for part in parts]
        begins = torch.cat(first, dim=1)
        return _Candidates(tables, (of_head, of_head), torch.cat(pos), begins, last)

    def _seen(
        self, of: _Candidates, rows: slice, qheads: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Keys and values [H, m, d] of candidates, and which rows see them [qhead, w, m].

        Last the positions of these, as the second.
        """
        heads, group = len(of.at[0]), len(of.last) // len(of.at[0])
        some = (of.last >= rows.start) & (of.first < rows.stop) & (of.last >= of.first)
        some = some.unflatten(0, (heads, group)).any(1)  # [H, M]
        slot, counts = some.cumsum(-1) - 1, some.sum(-1, keepdim=True)
        m = int(counts.max())
        candidates = torch.arange(some.shape[-1], device=some.device)
        index = slot.new_zeros(heads, m + 1)
        index.scatter_(-1, slot.where(some, m), candidates.expand_as(slot))
        index, valid = index[:, :m], candidates[:m] < counts
        base = torch.arange(heads, device=index.device)[:, None]
        keys, values = (
            table.flatten(0, 1)[at.gather(-1, index) + base * table.shape[1]]
            for table, at in zip(of.tables, of.at, strict=True)
        )
        wide = index.repeat_interleave(group, 0)
        first, last = (x.gather(-1, wide)[:, None] for x in (of.first, of.last))
        row = torch.arange(rows.start, rows.stop, device=index.device)[:, None]
        seen = (first <= row) & (last >= row) & valid.repeat_interleave(group, 0)[:, None]
        seen = seen.repeat_interleave(qheads // len(seen), 0)
        place = of.pos[index].repeat_interleave(qheads // heads, 0)[:, None].expand_as(seen)
        return keys, values, seen, place

    def _read(self, layer: int, record: Record, gone: Tensor, *qkv: Tensor) -> Reads:
        """The pages that rows of a record choose to read in a layer, by the q, k, v of this pass.

        As in a live run. Its first row is the first that reads, because nothing leaves before.
        """
        reads, trace = cast("Reads", record.reads), ended(self._trace, self._start)
        sparse = stored_piece(reads.sparse)
        bits = account(trace, sparse, [layer])
        if not reads_all(trace, sparse, layer):
            for row, chosen in chosen_pages(trace, layer, sparse, gone, record.budget, qkv):
                note(bits[0], chosen, row - self._start)
        return replace(reads, bits=bits, first=self._start)
