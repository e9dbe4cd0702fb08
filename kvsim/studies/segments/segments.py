"""Segments of the cache: how many, how long, and how far their boundaries move from event to event.

After AMS, arXiv 2605.23200, Table 14, Fig. 5 and section 3; docs/metrics.md defines the metrics.
Two kinds, which are never compared: "ams", the segments that the policy noted at an event, and
"proxy_run", maximal runs of consecutive positions that are still there after it.

An allocator is measured if `Allocator.notes` names what its plans note: `segment_length` [L, H, S],
entries of the segments that follow each other in the live ones, 0 for none; `quota_by_mass`,
`quota_minimum` (shares of the budget), `infeasible` and `suffix_mass` [L, H].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.analysis.arrays import EvictedAt, Floats, Ints, present, share
from kvsim.analysis.axes import record_layer
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

    def chance(self, form: Callable[[Ints, Ints], Floats]) -> Floats | None:
        """Of random sets of the same size, by a form of `kept.chance`; [H, E]."""
        drawn = self.positions
        return None if drawn is None else form(drawn, drawn - self.entries)


def noted(record: Record, layer: int, name: str) -> dict[int, NDArray[Any]]:
    """Return the notes called `name` of the events of a layer (index in the trace), by row.

    Nothing where the policy notes no such thing, nothing left the layer, or the record has no
    internals (`replay(..., internals=True)`).
    """
    rows = event_rows(record.evicted_at[record_layer(record, layer)])
    return {
        plans.row: plans.notes[name][plans.layers.index(layer)]
        for plans in sorted(record.internals, key=lambda plans: plans.row)
        if layer in plans.layers and plans.row in rows and name in plans.notes
    }


def ams_segments(record: Record, layer: int) -> Segments | None:
    """The segments that a policy made in a layer, None where it noted none (see `noted`)."""
    notes = noted(record, layer, "segment_length")
    if not notes:
        return None
    evicted_at = record.evicted_at[record_layer(record, layer)]
    lengths = [np.asarray(x, np.int64) for x in notes.values()]  # [H, S] of each event
    count = np.stack([(x > 0).sum(-1) for x in lengths], axis=-1)
    entries = np.stack([x.sum(-1) for x in lengths], axis=-1)
    cuts = [
        [_boundaries(*head, row) for head in zip(evicted_at, length, strict=True)]
        for row, length in zip(notes, lengths, strict=True)
    ]
    rows = np.array([*notes], np.int64)
    return Segments(rows, count, entries, _shift(cuts, rows))


def _boundaries(evicted_at: EvictedAt, length: Ints, row: int) -> Ints:
    """First positions of all segments but the first, of one head; evicted_at [T], length [S].

    Segments follow each other in the entries live before the event, which the Record has.
    """
    live = np.flatnonzero(evicted_at[: row + 1] >= row)
    starts: Ints = live[length[length > 0].cumsum()[:-1]]
    return starts


def _shift(cuts: list[list[Ints]], rows: Ints) -> Floats:
    """Return `Segments.shift` from the boundaries of each event and head."""
    shift = np.full((len(cuts[0]), len(rows) - 1), np.nan)
    for event, (before, after) in enumerate(pairwise(cuts)):
        for head, (old, new) in enumerate(zip(before, after, strict=True)):
            kept = new[new <= rows[event]]
            if len(old) and len(kept):
                shift[head, event] = np.abs(kept[:, None] - old).min(1).mean()
    return shift


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
