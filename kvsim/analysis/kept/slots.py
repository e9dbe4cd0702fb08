"""Regions wiped out in the cache itself: consecutive slots instead of positions of the text.

A slot is the place of an entry among those of its head that are live before an event. An event that
keeps something of every stretch of the cache may still wipe out much of the text, and the other way
round. All slots are alive before an event: there is a hazard and no cumulative rate.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvsim.analysis.arrays import Floats, Ints, share
from kvsim.analysis.kept import chance
from kvsim.analysis.kept.retention import RECENT, SINK, Leaving


@dataclass(frozen=True)
class SlotWipeout:
    """Regions of slots of one layer at each event. rows [E]; int [H, E] unless said.

    regions: complete regions inside [sink, n - recent), n live entries before the event. wiped:
    those of which the event leaves no more than `threshold`. likely [H, E]: the probability of that
    for a region, had the event kept as many entries at random.
    """

    rows: Ints
    regions: Ints
    wiped: Ints
    likely: Floats

    @property
    def hazard(self) -> Floats:
        """Share of the regions that the event wipes out, NaN without one; [H, E]."""
        return share(self.wiped, self.regions)

    @property
    def hazard_chance(self) -> Floats:
        """Expected `hazard` of an event that keeps as many entries at random; [H, E]."""
        return np.where(self.regions > 0, self.likely, np.nan)


@dataclass(frozen=True)
class LeavingSlots:
    """The entries that leave one layer, by slot: head, event, slot [n] of each."""

    leaving: Leaving
    head: Ints
    event: Ints
    slot: Ints

    @classmethod
    def of(cls, leaving: Leaving) -> LeavingSlots:
        """Return the slots of entries that leave. Time H T log(T) log(E)."""
        died = leaving.died
        head, pos = np.nonzero(died < len(leaving.rows))
        slot = pos - _sooner(died)[head, pos]
        return cls(leaving, head, died[head, pos], slot)

    def wipeout(
        self, length: int = 32, threshold: float = 0.0, sink: int = SINK, recent: int = RECENT
    ) -> SlotWipeout:
        """Regions [k length, (k + 1) length) of slots; see `kvsim.analysis.kept.retention`."""
        live, evicted, first = self.leaving.live, self.leaving.evicted, -(-sink // length)
        stop = np.maximum((live - recent) // length, first)
        region = self.slot // length
        widest = int(stop.max(initial=0)) + 1
        event = self.head * live.shape[1] + self.event
        counted = (region >= first) & (region < stop[self.head, self.event])
        # by region: the event above, the region below
        touched, lost = np.unique(event[counted] * widest + region[counted], return_counts=True)
        remaining = int(np.floor(threshold * length + 1e-9))
        gone = touched[lost >= length - remaining] // widest
        wiped = np.bincount(gone, minlength=stop.size).reshape(stop.shape)
        likely = chance.at_most(remaining, length, live, live - evicted)
        return SlotWipeout(self.leaving.rows, stop - first, wiped, likely)


def _sooner(died: Ints) -> Ints:
    """For each entry how many before it, of its head, leave at an earlier event; [H, T].

    From the highest bit of the event to the lowest: among entries alike in the higher bits, those
    before with a 0 leave sooner than one with a 1.
    """
    counts = np.zeros_like(died)
    order = np.broadcast_to(np.arange(died.shape[1]), died.shape)
    for bit in reversed(range(int(died.max(initial=0)).bit_length())):
        value = np.take_along_axis(died, order, axis=-1) >> bit
        alike, zero = value >> 1, 1 - (value & 1)
        zeros = zero.cumsum(-1) - zero  # in front
        begins = np.diff(alike, axis=-1, prepend=-1) > 0
        start = np.maximum.accumulate(np.where(begins, zeros, 0), axis=-1)
        more = np.where(zero, 0, zeros - start)
        np.put_along_axis(counts, order, np.take_along_axis(counts, order, axis=-1) + more, axis=-1)
        order = np.take_along_axis(order, np.argsort(value, axis=-1, kind="stable"), axis=-1)
    return counts
