"""How the events of AMS cut the cache of a head: its entries in order, and what each segment keeps.

What figures and the dashboard show of "Adaptive Mass-Segmented KV Compression for Long-Form
Reasoning" (arXiv 2605.23200, Fig. 3). The numbers are those that the events noted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from kvsim.analysis.arrays import Bools, EvictedAt, Floats, Ints
from kvsim.analysis.kept.segments import ams_segments, noted
from kvsim.core.record import Plans, Record
from kvsim.errors import PolicyError
from kvsim.schema import NEVER


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
        _, first = np.unique(self.segment, return_index=True)
        out: Ints = self.pos[first]
        return out

    @property
    def boundaries(self) -> Ints:
        """Where a segment begins but the first, whose begin is no decision; [S - 1]."""
        return self.starts[1:]

    def curve(self, name: str, most: int) -> tuple[Ints, Floats]:
        """Positions and the mass of that name added up to each, at most so many, the last included.

        name: "observed", "mass", or "credit", the sum of which is brought to 1 as the masses' is.
        """
        sums = getattr(self, name).cumsum()
        at = np.unique(np.linspace(0, len(sums) - 1, min(most, len(sums))).astype(np.int64))
        return self.pos[at], sums[at] / (sums[-1] or 1.0)

    def counts(self, chosen: Bools | None = None) -> Ints:
        """Entries of each segment, all of them or those chosen [n]; [S]."""
        of = self.segment if chosen is None else self.segment[chosen]
        return np.bincount(of, minlength=len(self.quota))

    def spread(self, positions: Ints) -> Ints:
        """How many of any positions lie where each segment does; [S].

        A segment reaches from its first position to that of the next one: so what another policy
        holds can be counted by the same parts of the text.
        """
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
        starts = self.starts
        last = np.append(starts[1:], self.row + 1) - 1
        size = len(self.quota)
        masses = {
            name: np.bincount(self.segment, getattr(self, name), size)
            for name in ("observed", "credit", "mass")
        }
        return pl.DataFrame(
            {
                "event": np.full(size, self.row),
                "segment": np.arange(size),
                "first": starts,
                "last": last,
                "entries": self.counts(),
                **masses,
                "quota": self.quota,
                "kept": self.counts(self.kept),
                "protected": self.counts(self.protected),
            }
        )


def cut_table(record: Record, layer: int, head: int) -> pl.DataFrame:
    """A row for each event at which AMS cut a head's cache: segments, boundaries, masses.

    event: its row; segments: how many; length: their mean length in entries; shift, f1: distance of
    the boundaries from those of the event before, and how many of them it had (`boundary_shift`,
    `boundary_f1`), null at the first event; credit: the sum of the credit that entries carry;
    suffix: the share of the mass on the window's own rows.

    Args:
        record: of `ams`, replayed with `internals=True`.
        layer: index in the trace.
        head: KV head.
    """
    events = segmented(record, layer, head)
    segments, suffix = ams_segments(record, layer), noted(record, layer, "suffix_mass")
    if segments is None or suffix is None:
        raise PolicyError(f"the record of {record.policy} notes no segments of layer {layer}")
    at = np.searchsorted(segments.rows, [one.row for one in events])
    none = np.full(1, np.nan)  # nothing is before the first event
    return pl.DataFrame(
        {
            "event": [one.row for one in events],
            "segments": segments.count[head, at],
            "length": segments.length[head, at],
            "shift": np.concatenate([none, segments.shift[head]])[at],
            "f1": np.concatenate([none, segments.f1[head]])[at],
            "credit": [float(one.credit.sum()) for one in events],
            "suffix": suffix.by_event[head, at],
        }
    ).with_columns(pl.col("shift", "f1").fill_nan(None))


def thinned(positions: Ints, total: int, most: int) -> Ints:
    """The first of ascending positions in each of at most `most` equal cells of 0 to `total`."""
    _, first = np.unique(positions // -(-total // most), return_index=True)
    out: Ints = positions[first]
    return out


def segmented(record: Record, layer: int, head: int) -> list[Segmented]:
    """The events at which a head of a layer was cut into segments of attention mass, ascending.

    Args:
        record: of `ams`, replayed with `internals=True`.
        layer: index in the trace.
        head: KV head.

    Raises:
        PolicyError: the record has no masses of the layer, because it is not of `ams`, because
            `replay` was not asked for internals, or because no event acted there.
    """
    gone = record.evicted_at[record.layers.index(layer), head]
    found = []
    for plans in sorted(record.internals, key=lambda one: one.row):
        if layer not in plans.layers or "mass" not in plans.notes:
            continue
        at = plans.layers.index(layer), head
        live = plans.pos[at] >= 0
        pos = plans.pos[at][live]
        if not (gone == plans.row).any():
            continue
        quotas, groups = _segments(plans)
        segment = groups[at][live]
        quota = quotas[at][: segment.max() + 1]  # other heads may have more segments
        by_entry = {
            name: plans.notes[name][at][live]
            for name in ("observed", "credit", "mass", "protected")
        }
        kept = gone[pos] > plans.row
        found.append(
            Segmented(row=plans.row, pos=pos, kept=kept, segment=segment, quota=quota, **by_entry)
        )
    if not found:
        raise PolicyError(
            f"the record of {record.policy} has no segments of layer {layer}, head {head}: "
            f"{_why_none(record, gone)}"
        )
    return found


def _why_none(record: Record, gone: EvictedAt) -> str:
    """Why a head was never cut into segments, and what to do; gone [T]: its `evicted_at`."""
    if (gone == NEVER).all():
        return (
            f"nothing is evicted there at budget {record.budget}; give a smaller budget, or an "
            "interval that fits the trace"
        )
    if record.internals:
        return "it does not cut by attention mass; expected ams, alone or around another policy"
    return "what was decided was not kept; replay it with internals=True"


def _segments(plans: Plans) -> tuple[Ints, Ints]:
    """Quotas [L, H, S], and the segment of each entry [L, H, n].

    The release's way of choosing leaves them among the notes, since its last cut is by head.
    """
    if plans.groups is None:
        return plans.notes["quota"], plans.notes["segment"]
    return plans.quotas, plans.groups
