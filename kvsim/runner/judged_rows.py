"""The attention of rows of a model to the entries that records retain, for the judge.

Shape letters: B records, H KV heads, w rows, T tokens, M candidates for entries, d head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from kvsim.analysis.output.changed import first_row, log_weights
from kvsim.core.merging import Merger, folds
from kvsim.core.reading import Reads
from kvsim.core.record import Record
from kvsim.core.shared_results import DEFAULT_MEMORY
from kvsim.core.storing import Stored, rounded
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


class _Layer(NamedTuple):
    """Entries that rows of a layer may attend to: candidates of each record.

    keys, values [H, n, d], those of all records one after the other; key_at, value_at [B, H, M]
    where candidates are in them. pos [M]; first, last [B, H or qhead, M]: the rows that see one.
    reads: the account of each record, of this layer alone.
    """

    keys: Tensor
    values: Tensor
    key_at: Tensor
    value_at: Tensor
    pos: Tensor
    first: Tensor
    last: Tensor
    reads: Sequence[Reads | None] = ()


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
        layer, new = self._trace.layer_ids.index(layer), query.shape[2]
        q = query[0].unflatten(1, (len(self._records), -1)).transpose(0, 1)
        of_layer = self._of_layer(layer, key[0, :, -new:], value[0, :, -new:])
        reads = [self._read(layer, of_layer, *each) for each in enumerate(q)]
        of_layer = of_layer._replace(reads=reads)
        parts = []
        for first in range(self._start, self._trace.n_pos, _ROWS):
            rows = slice(first, min(first + _ROWS, self._trace.n_pos))
            part = q[:, :, rows.start - self._start : rows.stop - self._start]
            parts.append(self._attended(layer, of_layer, rows, part, attention))
        return torch.cat(parts, dim=1).flatten(0, 1)[None]

    def _gone(self, layer: int, record: Record, heads: int) -> Tensor:
        """The last row that sees each entry of a layer of H heads, int32 [H or qhead, T]."""
        if layer in record.layers:
            gone = torch.from_numpy(record.evicted_at[record.layers.index(layer)])
            return gone.to(self._pos.device)
        return torch.full((heads, len(self._pos)), NEVER, dtype=torch.int32).to(self._pos.device)

    def _of_layer(self, layer: int, key: Tensor, value: Tensor) -> _Layer:
        """The candidates of a layer; key, value [H, B * w, d] of the rows of all records."""
        trace, full, start = self._trace, self._full, self._start
        shared = (full.keys[layer][:, :start], full.values[layer][:, :start])
        tables = [torch.cat(pair, dim=1) for pair in zip(shared, (key, value), strict=True)]
        gone = [self._gone(layer, record, len(key)) for record in self._records]
        heads = max(map(len, gone))
        last = torch.stack([x.repeat_interleave(heads // len(x), 0) for x in gone])
        if trace.formulas[layer].reach is not None:
            last = torch.minimum(last, trace.formulas[layer].last_rows(self._pos).int())
        at = self._rows[:, None].expand(-1, len(key), -1)
        first = self._pos.expand_as(last)
        storage = stored_piece(self._records[0].storage)
        if storage is None:
            keys, values = tables
            return _Layer(keys, values, at, at, self._pos, first, last)
        if isinstance(storage, Merger):
            return self._merged(storage, tables, gone[0], last[0])
        return self._rounded(layer, tables, last, first, at)

    def _merged(self, merger: Merger, tables: list[Tensor], gone: Tensor, end: Tensor) -> _Layer:
        """A candidate for each entry of a single record, and one for each time that others merge.

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
        keys, values = (torch.cat(part, dim=1) for part in parts)
        of_head = torch.arange(last.shape[1], device=at.device).expand_as(last)[None]
        begins = torch.cat(first, dim=1)[None]
        return _Layer(keys, values, of_head, of_head, torch.cat(pos), begins, last[None])

    def _rounded(
        self, layer: int, tables: list[Tensor], last: Tensor, first: Tensor, at: Tensor
    ) -> _Layer:
        """Four candidates for each entry: its key, and its value, exact and rounded."""
        stored: list[list[Stored]] = []
        for record, gone, mine in zip(self._records, last, self._rows, strict=True):
            exact = [table[:, mine] for table in tables]
            if layer in record.layers:
                storage, begin = stored_piece(record.storage), first_row(record, self._trace) - 1
                stored.append(rounded(storage, self._trace, layer, gone, begin, exact))
            else:  # such as one whose window bounds its cache
                stored.append([Stored.as_recorded(x) for x in exact])
        places, n = [], len(self._pos)
        after = [torch.stack([x.after for x in each]) for each in zip(*stored, strict=True)]
        copies = torch.arange(len(self._records), device=at.device)[:, None, None] * n
        for which, exact_ones in enumerate(tables):
            tables[which] = torch.cat([exact_ones, *(x[which].rounded for x in stored)], dim=1)
            places.append((at, (exact_ones.shape[1] + copies + self._pos).expand_as(at)))
        until = [torch.minimum(x, last) for x in after]
        since = [torch.maximum(first, x.long() + 1) for x in after]
        both = torch.minimum(*until), torch.maximum(*since)
        # exact and exact; rounded key; rounded value; both rounded
        begins = (first, since[0], since[1], both[1])
        ends = (both[0], until[1], until[0], last)
        keys, values = places
        return _Layer(
            tables[0],
            tables[1],
            torch.cat([keys[i] for i in (0, 1, 0, 1)], dim=-1),
            torch.cat([values[i] for i in (0, 0, 1, 1)], dim=-1),
            self._pos.repeat(4),
            torch.cat(begins, dim=-1),
            torch.cat(ends, dim=-1),
        )

    def _attended(
        self, layer: int, of: _Layer, rows: slice, q: Tensor, attention: Attention
    ) -> Tensor:
        """Attention output [B, w, qhead, d] of queries [B, qhead, w, d] of some rows."""
        heads, group = len(of.keys), of.last.shape[1] // len(of.keys)
        some = (of.last >= rows.start) & (of.first < rows.stop) & (of.last >= of.first)
        some = some.unflatten(1, (heads, group)).any(2)  # [B, H, M]
        slot, counts = some.cumsum(-1) - 1, some.sum(-1, keepdim=True)
        widths = counts.flatten(1).amax(-1).tolist()
        index = slot.new_zeros(*slot.shape[:-1], max(widths) + 1)
        candidates = torch.arange(slot.shape[-1], device=slot.device)
        index.scatter_(-1, slot.where(some, max(widths)), candidates.expand_as(slot))
        parts = []
        for number, m in enumerate(widths):  # a pad to the widest would change sums by rounding
            chosen = index[number, :, :m], candidates[:m] < counts[number], q[number]
            keys, values, seen, weights = self._seen(layer, of, rows, number, *chosen)
            one = q[number : number + 1]
            mask = kernel_mask(seen[None], one, added=self._added, weights=weights)
            parts.append(attention(one, keys[None], values[None], mask))
        return torch.cat(parts)

    def _seen(
        self,
        layer: int,
        of: _Layer,
        rows: slice,
        number: int,
        index: Tensor,
        valid: Tensor,
        q: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Keys and values [H, m, d] of candidates, and which rows see them [qhead, w, m].

        Last the logarithms of their weights, None without weights. index: the candidates [H, m] of
        a record, of which those that are `valid` count; q [qhead, w, d] of the rows.
        """
        heads, group, qheads = len(of.keys), of.last.shape[1] // len(of.keys), len(q)
        base = torch.arange(heads, device=index.device)[:, None] * of.keys.shape[1]
        keys, values = (
            table.flatten(0, 1)[at[number].gather(-1, index) + base]
            for table, at in ((of.keys, of.key_at), (of.values, of.value_at))
        )
        wide = index.repeat_interleave(group, 0)
        first, last = (x[number].gather(-1, wide)[:, None] for x in (of.first, of.last))
        row = torch.arange(rows.start, rows.stop, device=index.device)[:, None]
        seen = (first <= row) & (last >= row) & valid.repeat_interleave(group, 0)[:, None]
        seen = seen.repeat_interleave(qheads // len(seen), 0)
        if (reads := of.reads[number]) is None:
            return keys, values, seen, None
        gone = self._gone(layer, self._records[number], heads)
        read = reads.entries(0, rows, gone)
        place = of.pos[index].repeat_interleave(qheads // heads, 0)[:, None].expand_as(seen)
        seen &= read.repeat_interleave(qheads // len(read), 0).gather(-1, place)
        k = of.keys[:, self._rows[number, : rows.stop]]  # exact ones come first
        own = (computable(x) for x in (q.unflatten(0, (heads, -1)), k))
        weights = log_weights(reads, 0, rows, gone, *own)
        return keys, values, seen, None if weights is None else weights.gather(-1, place)[None]

    def _read(self, layer: int, of: _Layer, number: int, q: Tensor) -> Reads | None:
        """The pages that rows of a record choose to read in a layer; q [qhead, w, d] of its rows.

        By the queries and keys of this pass, as in a live run. Its first row is the first that
        reads, because nothing leaves before.
        """
        record, trace = self._records[number], ended(self._trace, self._start)
        if record.reads is None or layer not in record.layers:
            return None
        reader, gone = stored_piece(record.reads.reader), self._gone(layer, record, len(of.keys))
        bits = account(trace, reader, [layer], DEFAULT_MEMORY)
        if not reads_all(trace, reader, layer):
            mine = self._rows[number]  # exact ones come first
            qkv = map(computable, (q, of.keys[:, mine], of.values[:, mine]))
            for row, chosen in chosen_pages(trace, layer, reader, gone, record.budget, qkv):
                note(bits[0], chosen, row - self._start)
        return replace(record.reads, bits=bits, first=self._start)
