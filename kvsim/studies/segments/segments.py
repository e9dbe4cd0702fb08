"""Segments of the cache: how many, how long, and how far their boundaries move from event to event.

After AMS, arXiv 2605.23200, Table 14, Fig. 5 and section 3; docs/metrics.md defines the metrics.
Two kinds, which are never compared: "ams", the segments that the policy noted at an event, and
"proxy_run", maximal runs of consecutive positions that are still there after it.

An allocator is measured if `Allocator.notes` names what its plans note: `segment_length` [L, H, S],
entries of the segments that follow each other in the live ones, 0 for none; `quota_by_mass`,
`quota_minimum` (shares of the budget), `infeasible` and `suffix_mass` [L, H].
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvsim.analysis.arrays import EvictedAt, Floats, Ints, present, share
from kvsim.analysis.axes import record_layer
from kvsim.analysis.kept import chance
from kvsim.analysis.kept.retention import event_rows
from kvsim.core.record import Record

AMS, PROXY = "ams", "proxy_run"


@dataclass(frozen=True)
class Segments:
    """Segments of one layer at its events; rows [E] of the events.

    count, entries int [H, E]: segments, and what they hold together. shift [H, E - 1]: of the
    boundaries of an event, at positions that the event before had, the mean distance from the
    nearest of that event; NaN where one has none, None of runs. positions [E]: from which sets of
    so many entries are drawn by chance, None where segments are no runs of what stays.
    """

    rows: Ints
    count: Ints
    entries: Ints
    shift: Floats | None = None
    positions: Ints | None = None

    @property
    def length(self) -> Floats:
        """Mean length of a segment at each event, NaN without one; [H, E]."""
        return share(self.entries, self.count)

    @property
    def pooled_length(self) -> Floats:
        """Mean length of all segments of all events; [H]. By Jensen no more than mean `length`."""
        return share(self.entries.sum(-1), self.count.sum(-1))

    @property
    def count_chance(self) -> Floats | None:
        """Expected `count` of random sets of the same size; [H, E]."""
        if self.positions is None:
            return None
        return chance.n_runs(self.positions, self.positions - self.entries)

    @property
    def length_chance(self) -> Floats | None:
        """Expected `length` of random sets of the same size; [H, E]."""
        if self.positions is None:
            return None
        return chance.mean_run(self.positions, self.positions - self.entries)


@dataclass(frozen=True)
class Noted:
    """Notes of a name at events on a layer: rows [E]; values, for each event [H] or [H, S]."""

    rows: Ints
    values: list[NDArray[np.generic]]

    @property
    def by_event(self) -> Floats:
        """Numbers of heads; [H, E]."""
        return np.stack(self.values, axis=-1).astype(np.float64)


def noted(record: Record, layer: int, name: str) -> Noted | None:
    """Return the notes called `name` of the events of a layer (index in the trace), by row.

    None where nothing is: the policy notes no such thing, nothing left the layer, or the record
    has no internals (`replay(..., internals=True)`).
    """
    rows = event_rows(record.evicted_at[record_layer(record, layer)])
    values = {
        plans.row: plans.notes[name][plans.layers.index(layer)]
        for plans in sorted(record.internals, key=lambda plans: plans.row)
        if layer in plans.layers and plans.row in rows and name in plans.notes
    }
    return Noted(np.array([*values], np.int64), [*values.values()]) if values else None


def ams_segments(record: Record, layer: int) -> Segments | None:
    """The segments that a policy made in a layer, None where it noted none (see `noted`)."""
    notes = noted(record, layer, "segment_length")
    if notes is None:
        return None
    evicted_at = record.evicted_at[record_layer(record, layer)]
    lengths = [np.asarray(x, np.int64) for x in notes.values]  # [H, S] of each event
    count = np.stack([(x > 0).sum(-1) for x in lengths], axis=-1)
    entries = np.stack([x.sum(-1) for x in lengths], axis=-1)
    events = zip(notes.rows.tolist(), lengths, strict=True)
    cuts = [_boundaries(evicted_at, row, length) for row, length in events]
    return Segments(notes.rows, count, entries, _shift(cuts, notes.rows, evicted_at.shape))


def _boundaries(evicted_at: EvictedAt, row: int, length: Ints) -> tuple[Ints, Ints]:
    """(head, position) [n] of the boundaries after row `row` of segments of `length` [H, S].

    Segments follow each other in the entries live before the event, which the Record has.
    """
    _, pos = np.nonzero(evicted_at[:, : row + 1] >= row)
    before = length.cumsum(-1) - length
    head, segment = np.nonzero((length > 0) & (before > 0))
    first = length.sum(-1).cumsum() - length.sum(-1)  # of each head among the live entries
    return head, pos[first[head] + before[head, segment]]


def _shift(cuts: list[tuple[Ints, Ints]], rows: Ints, shape: tuple[int, ...]) -> Floats:
    """Return `Segments.shift` from (head, position) of the boundaries at each event."""
    heads, total = shape
    size = heads * (len(rows) - 1)
    # one line for all pairs of events and heads, so far apart that none is near another
    apart = 2 * total

    def line(events: list[tuple[Ints, Ints]]) -> Ints:
        places = [
            (pair * heads + head[pos <= row]) * apart + pos[pos <= row]
            for pair, ((head, pos), row) in enumerate(zip(events, rows[:-1], strict=True))
        ]
        return np.concatenate([np.zeros(0, np.int64), *places])

    def sums(positions: Ints, weight: Ints | None = None) -> Floats:
        counted: Floats = np.bincount(positions // apart, weight, size).astype(np.float64)
        return counted.reshape(-1, heads).T

    first, second = line(cuts[:-1]), line(cuts[1:])
    if not len(first):
        return np.full((heads, len(rows) - 1), np.nan)
    place = np.searchsorted(first, second)
    before, behind = first[np.maximum(place - 1, 0)], first[np.minimum(place, len(first) - 1)]
    nearest = np.minimum(np.abs(second - before), np.abs(behind - second))
    return share(np.where(sums(first) > 0, sums(second, nearest), np.nan), sums(second))


def proxy_segments(evicted_at: EvictedAt) -> Segments:
    """Maximal runs of consecutive positions of a layer, `evicted_at` [H, T], that events leave.

    Each position starts a run from one event until another, once: from when it is there and the
    one before it is gone, until it is gone.
    """
    heads, total = evicted_at.shape
    rows = event_rows(evicted_at)
    shape = heads, len(rows) + 1
    died = np.searchsorted(rows, evicted_at).astype(np.int64)
    there = np.broadcast_to(np.searchsorted(rows, np.arange(total)), died.shape)
    behind = np.concatenate([np.zeros((heads, 1), np.int64), died], axis=1)[:, :total]
    count = present(np.minimum(np.maximum(there, behind), len(rows)), died, shape)
    return Segments(rows, count, present(there, died, shape), positions=rows + 1)
