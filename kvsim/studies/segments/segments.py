"""Segments of the cache: their number, length, and shifts of their boundaries between events.

After AMS, arXiv 2605.23200, Table 14, Fig. 5 and section 3; docs/metrics.md defines the metrics.
Two kinds, which are never compared: "ams", the segments that the policy noted at an event, and
"proxy_run", maximal runs of consecutive positions that remain after it.

An allocator is measured if its plans note `segment_length` [L, H, S], the lengths of consecutive
segments of the live entries, 0 for none; `quota_by_mass`, `quota_minimum` (shares of the budget),
`infeasible` and `suffix_mass` [L, H].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.analysis.arrays import Bools, EvictedAt, Floats, Ints, event_rows, present, share
from kvsim.analysis.axes import checked_index, record_layer
from kvsim.core.record import Record
from kvsim.errors import PolicyError

AMS, PROXY = "ams", "proxy_run"


@dataclass(frozen=True)
class Segments:
    """Segments of one layer at its events; rows [E] of the events.

    count, entries int [H, E]: segments, and their entries together. shift [H, E - 1]: of the
    boundaries of an event, at positions that the event before had, the mean distance from the
    nearest of that event; NaN where one has none, None of runs. positions [E]: from which sets of
    so many entries are drawn by chance, None where segments are no runs of kept entries.
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
        """Return the value of random sets of the same size, by a form of `kept.chance`; [H, E]."""
        drawn = self.positions
        return None if drawn is None else form(drawn, drawn - self.entries)


def noted(record: Record, layer: int, name: str) -> dict[int, NDArray[Any]]:
    """Return the notes called `name` of the events of a layer (index in the trace), by row.

    Empty without such notes, without evictions in the layer, or without internals in the record
    (`replay(..., internals=True)`).
    """
    rows = event_rows(record.evicted_at[record_layer(record, layer)])
    return {
        plans.row: plans.notes[name][plans.layers.index(layer)]
        for plans in sorted(record.internals, key=lambda plans: plans.row)
        if layer in plans.layers and plans.row in rows and name in plans.notes
    }


def ams_segments(record: Record, layer: int) -> Segments | None:
    """The segments of a policy in a layer, None without notes (see `noted`)."""
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
    shift = np.full((len(cuts[0]), len(rows) - 1), np.nan)
    for event, (before, after) in enumerate(pairwise(cuts)):
        for head, (old, new) in enumerate(zip(before, after, strict=True)):
            kept = new[new <= rows[event]]
            if len(old) and len(kept):
                shift[head, event] = np.abs(kept[:, None] - old).min(1).mean()
    return shift


def proxy_segments(evicted_at: EvictedAt) -> Segments:
    """Maximal runs of consecutive positions of a layer, `evicted_at` [H, T], that events leave.

    Each position starts a run once, from the eviction of the one before it until its own.
    """
    heads, total = evicted_at.shape
    rows = event_rows(evicted_at)
    shape = heads, len(rows) + 1
    died = np.searchsorted(rows, evicted_at).astype(np.int64)
    there = np.broadcast_to(np.searchsorted(rows, np.arange(total)), died.shape)
    behind = np.concatenate([np.zeros((heads, 1), np.int64), died], axis=1)[:, :total]
    count = present(np.minimum(np.maximum(there, behind), len(rows)), died, shape)
    return Segments(rows, count, present(there, died, shape), positions=rows + 1)


@dataclass(frozen=True)
class Segmented:
    """One head at one event, in order of position.

    [n] of the live entries: pos; observed, the share of the attention mass that the window gives;
    credit, the memory of it and of earlier events, not normalised; mass, the mixture of both that
    is cut; protected; kept, still there after the event; segment, which one it belongs to. quota
    [S]: entries that each segment may keep. suffix: the share of the mass that lies on the rows of
    the window.
    """

    row: int
    pos: Ints
    observed: Floats
    credit: Floats
    mass: Floats
    protected: Bools
    kept: Bools
    segment: Ints
    quota: Ints
    suffix: float

    @property
    def starts(self) -> Ints:
        """The first position of each segment, ascending; [S]."""
        return self.pos[np.unique(self.segment, return_index=True)[1]]

    @property
    def boundaries(self) -> Ints:
        """`starts` without the first, which is no decision; [S - 1]."""
        return self.starts[1:]

    def counts(self, chosen: Bools | None = None) -> Ints:
        """Entries of each segment, all of them or those chosen [n]; [S]."""
        segments = self.segment if chosen is None else self.segment[chosen]
        return np.bincount(segments, minlength=len(self.quota))


def segmented(record: Record, layer: int, head: int) -> list[Segmented]:
    """Return the events at which a head was cut into segments of attention mass, ascending.

    record: of `ams`, replayed with `internals=True`. layer: index in the trace. head: KV head.
    Raises PolicyError for a record without masses there, and a layer or head that is not there.
    """
    owner = f"the record of {record.policy} on {record.trace}"
    head = checked_index("head", head, record.evicted_at.shape[1], owner)
    gone = record.evicted_at[record_layer(record, layer), head]
    events = []
    for plans in sorted(record.internals, key=lambda plans: plans.row):
        if layer not in plans.layers or "mass" not in plans.notes or plans.row not in gone:
            continue
        place = plans.layers.index(layer), head
        live = plans.pos[place] >= 0
        pos = plans.pos[place][live]
        # the release's way of choosing notes its segments, since its last cut is by head
        quotas, groups = plans.quotas, plans.groups
        if groups is None:
            quotas, groups = plans.notes["quota"], plans.notes["segment"]
        segment = groups[place][live]
        quota = quotas[place][: segment.max() + 1]  # other heads may have more segments
        names = ("observed", "credit", "mass", "protected")
        by_entry = {name: plans.notes[name][place][live] for name in names}
        by_entry |= {"pos": pos, "kept": gone[pos] > plans.row, "segment": segment}
        suffix = float(plans.notes["suffix_mass"][place])
        events.append(Segmented(row=plans.row, quota=quota, suffix=suffix, **by_entry))
    if not events:
        raise PolicyError(
            f"the record of {record.policy} has no segments of layer {layer}, head {head}; "
            "expected `ams`, replayed with internals=True at a budget that evicts there"
        )
    return events
