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

from kvsim.analysis.arrays import Bools, EvictedAt, Floats, Ints, present, share
from kvsim.analysis.axes import record_layer
from kvsim.analysis.kept import chance
from kvsim.analysis.kept.bursts import above, tops
from kvsim.analysis.kept.retention import event_rows
from kvsim.core.record import Record

AMS, PROXY = "ams", "proxy_run"

#: A boundary is found again where the other event has one no farther than this.
NEAR = 8


@dataclass(frozen=True)
class Segments:
    """Segments of one layer at its events, int; rows [E] of the events.

    count, entries [H, E]: segments, and what they hold together. positions [E]: those from which
    random sets of so many entries are drawn, None where segments are no runs of what stays.

    [H, E - 1], for the pairs of consecutive events: later, earlier are the boundaries compared, of
    the second and of the first event; distance from those of the second to the nearest of the
    first, summed, 0 without one; later_near, earlier_near those with one of the other event within
    `NEAR` positions.
    """

    rows: Ints
    count: Ints
    entries: Ints
    later: Ints
    earlier: Ints
    distance: Ints
    later_near: Ints
    earlier_near: Ints
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
    def shift(self) -> Floats:
        """Mean distance [H, E - 1] of boundaries from the nearest before; NaN without any."""
        return share(np.where(self.earlier > 0, self.distance, np.nan), self.later)

    @property
    def f1(self) -> Floats:
        """Harmonic mean of precision and recall of boundaries within `NEAR` positions; [H, E - 1].

        Precision is of the second event's boundaries, recall of the first's. NaN where neither
        event has any, 0 where one has none.
        """
        precision = np.nan_to_num(share(self.later_near, self.later))
        recall = np.nan_to_num(share(self.earlier_near, self.earlier))
        mean = np.nan_to_num(share(2 * precision * recall, precision + recall))
        return np.where(self.later + self.earlier > 0, mean, np.nan)

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
    return Segments(notes.rows, count, entries, *_moves(cuts, notes.rows, evicted_at.shape))


def _boundaries(evicted_at: EvictedAt, row: int, length: Ints) -> tuple[Ints, Ints]:
    """(head, position) [n] of the boundaries after row `row` of segments of `length` [H, S].

    Segments follow each other in the entries live before the event, which the Record has.
    """
    _, pos = np.nonzero(evicted_at[:, : row + 1] >= row)
    before = length.cumsum(-1) - length
    head, segment = np.nonzero((length > 0) & (before > 0))
    first = length.sum(-1).cumsum() - length.sum(-1)  # of each head among the live entries
    return head, pos[first[head] + before[head, segment]]


def _moves(
    cuts: list[tuple[Ints, Ints]], rows: Ints, shape: tuple[int, ...]
) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """`later` to `earlier_near` of Segments, [H, E - 1], from (head, position) at each event."""
    heads, total = shape
    size = heads * (len(rows) - 1)
    # one line for all pairs of events and heads, so far apart that none is near another
    apart = 2 * total + NEAR

    def line(events: list[tuple[Ints, Ints]]) -> Ints:
        places = [
            (pair * heads + head[pos <= row]) * apart + pos[pos <= row]
            for pair, ((head, pos), row) in enumerate(zip(events, rows[:-1], strict=True))
        ]
        return np.concatenate([np.zeros(0, np.int64), *places])

    first, second = line(cuts[:-1]), line(cuts[1:])
    to_first, to_second = _distance(second, first), _distance(first, second)

    def sums(positions: Ints, weight: Ints | Bools) -> Ints:
        counts = np.bincount(positions // apart, weight, size).astype(np.int64)
        return counts.reshape(-1, heads).T

    earlier = sums(first, np.ones_like(first))
    return (
        sums(second, np.ones_like(second)),
        earlier,
        sums(second, to_first) * (earlier > 0),
        sums(second, to_first <= NEAR),
        sums(first, to_second <= NEAR),
    )


def _distance(these: Ints, those: Ints) -> Ints:
    """Distances from each of these to the nearest of those, both ascending; far without any."""
    if not len(those):
        return np.full(len(these), NEAR + 1)
    place = np.searchsorted(those, these)
    before, behind = those[np.maximum(place - 1, 0)], those[np.minimum(place, len(those) - 1)]
    nearest: Ints = np.minimum(np.abs(these - before), np.abs(behind - these))
    return nearest


def proxy_segments(evicted_at: EvictedAt) -> Segments:
    """Maximal runs of consecutive positions of a layer, `evicted_at` [H, T], that events leave.

    Each position is a boundary from one event until another, once: from when it is there and the
    one before it is gone, until it is gone or all before it are. So only the boundaries that come
    or go at an event have to be matched, whatever the number of events. Time H T log(T).
    """
    heads, total = evicted_at.shape
    rows = event_rows(evicted_at)
    n_events = len(rows)
    shape = heads, n_events + 1
    died = np.searchsorted(rows, evicted_at).astype(np.int64)
    there = np.broadcast_to(np.searchsorted(rows, np.arange(total)), died.shape)
    behind = np.concatenate([np.zeros((heads, 1), np.int64), died], axis=1)[:, :total]
    since = np.maximum(there, behind)  # the first event after which a run starts here

    def alive(start: Ints, stop: Ints) -> Ints:
        return present(np.minimum(start, n_events), stop, shape)

    entries = alive(there, died)
    count = alive(since, died)
    before = np.maximum.accumulate(behind, axis=1)
    until = np.minimum(died, before)
    pairs = slice(0, max(0, n_events - 1))
    earlier = alive(since, until)[:, pairs]
    later = alive(np.maximum(since, there + 1), until)[:, 1:]
    runs = _Runs(died, before, n_events)
    moved: list[Ints] = []
    far: list[Ints] = []
    for changes, event, other in (
        ((since < until) & (since > there), since, -1),  # comes: matched with those before
        ((since < until) & (until < n_events), until, 0),  # goes: matched with those after
    ):
        head, pos = np.nonzero(changes)
        leaving = event[head, pos]
        away = runs.distance(head, pos, leaving + other, rows[leaving - 1])
        for values, weight in ((moved, away), (far, away > NEAR)):
            sums = np.bincount(head * shape[1] + leaving - 1, weight, heads * shape[1])
            values.append(sums.astype(np.int64).reshape(shape)[:, pairs])
    near = later - far[0], earlier - far[1]
    distance = moved[0] * (earlier > 0)
    return Segments(rows, count, entries, later, earlier, distance, *near, positions=rows + 1)


class _Runs:
    """The nearest boundaries of positions that are none at an event.

    died [H, T]: events at which entries leave; before [H, T]: the last one of all before an entry.
    """

    def __init__(self, died: Ints, before: Ints, n_events: int) -> None:
        self.before = before
        self.width = died.shape[1] + 1
        # heads in one line, apart by what is above every bound
        wall = np.full((len(died), 1), n_events + 1)
        self.kept = tops(np.concatenate([died, wall], axis=1).ravel(), self.width)
        self.gone = tops(np.concatenate([-died, wall], axis=1).ravel(), self.width)

    def distance(self, head: Ints, pos: Ints, event: Ints, row: Ints) -> Ints:
        """From each position to the nearest boundary after `event`, up to position `row`; [n].

        More than `NEAR` where there is none.
        """
        offset = head * self.width
        at = offset + pos
        # in front: where the run of the nearest entry that stays starts
        stays = above(self.kept, at, event, -1)
        start = above(self.gone, stays, -event - 1, -1) + 1
        # behind: the next run, or where all before is gone, the one behind the first
        stay = self.kept[0][at] > event
        alone = ~stay & (stays < offset)
        at = np.where(alone, above(self.kept, at, event, 1), at)
        end = np.where(stay | alone, above(self.gone, at, -event - 1, 1), at)
        following = above(self.kept, end, event, 1)
        away = np.full(len(at), self.width + NEAR)
        for there, nearest in (
            (stays >= offset, start - offset),
            (end < offset + self.width - 1, following - offset),
        ):
            place = np.where(there & (nearest <= row), nearest, 0)
            # position 0 is no boundary, nor does the first run of all begin with one
            present = self.before[head, place] > event
            away = np.where(present, np.minimum(away, np.abs(place - pos)), away)
        return away
