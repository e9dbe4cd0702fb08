"""Segments into which events of AMS cut a head's cache (arXiv 2605.23200, Fig. 3), as noted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from kvsim.analysis.arrays import Bools, Floats, Ints
from kvsim.analysis.axes import record_head, record_layer
from kvsim.core.record import Record
from kvsim.errors import PolicyError
from kvsim.schema import NEVER
from kvsim.studies.segments.segments import ams_segments, noted


@dataclass(frozen=True)
class Segmented:
    """One head at one event, in order of position.

    [n] of the live entries: pos; observed, the share of the attention mass that the window gives;
    credit, what is remembered of it and of earlier events, not normalised; mass, the mixture of
    both that is cut; protected; kept, still there after the event; segment, which
    one it belongs to. quota [S]: entries that each segment may keep.
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

    @property
    def starts(self) -> Ints:
        """The first position of each segment, ascending; [S]."""
        return self.pos[np.unique(self.segment, return_index=True)[1]]

    @property
    def boundaries(self) -> Ints:
        """`starts` without the first, which is no decision; [S - 1]."""
        return self.starts[1:]

    def curve(self, name: str, most: int) -> tuple[Ints, Floats]:
        """Positions and the mass of that name added up to each, at most so many, the last included.

        name: "observed", "mass", or "credit", the sum of which is brought to 1 as the masses' is.
        """
        sums = getattr(self, name).cumsum()
        places = np.unique(np.linspace(0, len(sums) - 1, min(most, len(sums))).astype(np.int64))
        return self.pos[places], sums[places] / (sums[-1] or 1.0)

    def counts(self, chosen: Bools | None = None) -> Ints:
        """Entries of each segment, all of them or those chosen [n]; [S]."""
        segments = self.segment if chosen is None else self.segment[chosen]
        return np.bincount(segments, minlength=len(self.quota))

    def spread(self, positions: Ints) -> Ints:
        """How many of any positions lie where each segment does, up to the next's first; [S]."""
        edges = np.concatenate([[0], self.boundaries, [self.row + 1]])
        return np.histogram(positions[positions <= self.row], edges)[0]

    def moves(self, before: Segmented) -> Ints:
        """The nearest boundary of an earlier event and this one's, for each that it could have had.

        [m, 2]. Boundaries behind the earlier event have no place in it; the mean distance is the
        metric `boundary_shift`. The lower one of two at one distance.
        """
        old, new = before.boundaries, self.boundaries
        new = new[new <= before.row]
        if not len(old):
            return np.zeros((0, 2), np.int64)
        nearest = np.abs(new[:, None] - old).argmin(1)
        return np.stack([old[nearest], new], axis=1)

    def table(self) -> pl.DataFrame:
        """A row for each segment: where it lies, its share of the masses, quota and entries."""
        size = len(self.quota)
        columns = {
            "event": np.full(size, self.row),
            "segment": np.arange(size),
            "first": self.starts,
            "last": np.append(self.boundaries, self.row + 1) - 1,
            "entries": self.counts(),
        }
        for name in ("observed", "credit", "mass"):
            columns[name] = np.bincount(self.segment, getattr(self, name), size)
        columns["quota"] = self.quota
        columns |= {name: self.counts(getattr(self, name)) for name in ("kept", "protected")}
        return pl.DataFrame(columns)


def cut_table(record: Record, layer: int, head: int) -> pl.DataFrame:
    """Return a row for each event at which AMS cut a head's cache (see `segmented`).

    event: its row; segments: how many; length: their mean length in entries; shift: distance of the
    boundaries from those of the event before (`boundary_shift`), null at the first event; credit:
    the sum of the credit that entries carry; suffix: the share of the mass on the window's rows.
    """
    head = record_head(record, head)
    events = segmented(record, layer, head)
    segments, suffix = ams_segments(record, layer), noted(record, layer, "suffix_mass")
    if segments is None or segments.shift is None or suffix is None:
        raise PolicyError(f"the record of {record.policy} notes no segments of layer {layer}")
    index = np.searchsorted(segments.rows, [x.row for x in events])
    return pl.DataFrame(
        {
            "event": [x.row for x in events],
            "segments": segments.count[head, index],
            "length": segments.length[head, index],
            # nothing is before the first event
            "shift": np.append(np.nan, segments.shift[head])[index],
            "credit": [float(x.credit.sum()) for x in events],
            "suffix": suffix.by_event[head, index],
        }
    ).with_columns(pl.col("shift").fill_nan(None))


def thinned(positions: Ints, total: int, most: int) -> Ints:
    """The first of ascending positions in each of at most `most` equal cells of 0 to `total`."""
    return positions[np.unique(positions // -(-total // most), return_index=True)[1]]


def segmented(record: Record, layer: int, head: int) -> list[Segmented]:
    """Return the events at which a head was cut into segments of attention mass, ascending.

    record: of `ams`, replayed with `internals=True`. layer: index in the trace. head: KV head.
    Raises PolicyError where the record has no masses of the layer, because it is not of `ams`,
    because `replay` was not asked for internals, or because no event acted there, and for a layer
    or a head that is not there.
    """
    head = record_head(record, head)
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
        events.append(Segmented(row=plans.row, quota=quota, **by_entry))
    if events:
        return events
    why = "the record has no decisions; replay it with internals=True"
    if record.internals:
        why = "it does not cut by attention mass; expected ams, alone or around another policy"
    if (gone == NEVER).all():
        why = (
            f"nothing is evicted there at budget {record.budget}; give a smaller budget, or an "
            "interval that fits the trace"
        )
    raise PolicyError(
        f"the record of {record.policy} has no segments of layer {layer}, head {head}: {why}"
    )
