"""Segments into which events of AMS cut a head's cache (arXiv 2605.23200, Fig. 3), as noted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvsim.analysis.arrays import Bools, Floats, Ints
from kvsim.analysis.axes import record_head, record_layer
from kvsim.core.record import Record
from kvsim.errors import PolicyError
from kvsim.schema import NEVER


@dataclass(frozen=True)
class Segmented:
    """One head at one event, in order of position.

    [n] of the live entries: pos; observed, the share of the attention mass that the window gives;
    credit, what is remembered of it and of earlier events, not normalised; mass, the mixture of
    both that is cut; protected; kept, still there after the event; segment, which
    one it belongs to. quota [S]: entries that each segment may keep. suffix: the share of the mass
    that lies on the rows of the window.
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
        suffix = float(plans.notes["suffix_mass"][place])
        events.append(Segmented(row=plans.row, quota=quota, suffix=suffix, **by_entry))
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
