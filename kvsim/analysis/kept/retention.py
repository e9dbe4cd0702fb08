"""Kept entries and wiped-out regions: reductions of `evicted_at`, nothing recomputed.

Region wipe-out rate, retained-set IoU and sizes, by absolute position (docs/metrics.md).
Every function takes one layer's `evicted_at` [H, T] and answers for all heads and events at once,
in time linear in H x T but for sorting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kvsim.analysis.arrays import Bools, EvictedAt, Floats, Ints, histogram, share
from kvsim.analysis.kept import chance
from kvsim.errors import PositionError
from kvsim.schema import NEVER

#: First and last positions left out of every region, the same for all policies.
SINK, RECENT = 4, 32

#: Regions of the wipe-out rate: lengths in tokens and survival thresholds.
LENGTHS = (16, 32, 64, 128)
THRESHOLDS = (0.0, 0.1)


def event_rows(evicted_at: EvictedAt) -> Ints:
    """Rows after which at least one entry of the layer left, ascending; [E]."""
    return np.unique(evicted_at[evicted_at != NEVER]).astype(np.int64)


def last_event(evicted_at: EvictedAt) -> int:
    """Return the row of the layer's last event, -1 without one."""
    return int(evicted_at.max(initial=-1, where=evicted_at != NEVER))


def event_row(evicted_at: EvictedAt, row: int | None) -> int:
    """Return `row`, by default that of the layer's last event or, without an event, the last row.

    PositionError for a row that the trace does not have.
    """
    n = evicted_at.shape[-1]
    if row is None:
        row = last_event(evicted_at) % n
    if not 0 <= row < n:
        raise PositionError(f"row is {row}; expected 0..{n - 1}")
    return row


@dataclass(frozen=True)
class Leaving:
    """The entries that leave one layer, by position.

    rows [E]; died int [H, T], the event at which each entry leaves, E for those that stay; live,
    evicted int [H, E]: entries before each event, and those of them that it evicts.
    """

    rows: Ints
    died: Ints
    live: Ints
    evicted: Ints

    @classmethod
    def of(cls, evicted_at: EvictedAt) -> Leaving:
        """Return the entries that leave at each event of `evicted_at` [H, T]."""
        rows = event_rows(evicted_at)
        died = np.searchsorted(rows, evicted_at)
        evicted = histogram(died, (len(died), len(rows) + 1))[:, :-1]
        return cls(rows, died, rows + 1 - evicted.cumsum(-1) + evicted, evicted)

    @cached_property
    def first(self) -> Bools:
        """Whether nothing had left the head before the event; [H, E]."""
        first: Bools = self.evicted.cumsum(-1) == self.evicted
        return first

    def wipeout(
        self,
        length: int = 32,
        threshold: float = 0.0,
        sink: int = SINK,
        recent: int = RECENT,
        regions: Ints | None = None,
    ) -> Wipeout:
        """Region wipe-out: regions of `length` positions, `threshold` in [0, 1).

        regions [R, 2]: start and stop of each region, ascending and apart, instead of those of
        `length` (`steps`). A region dies with the eviction that leaves it
        floor(threshold x its length) entries, so one sort within regions gives the event of its
        death.
        """
        if regions is None:
            starts = np.arange(self.died.shape[1] // length) * length
            regions = np.stack([starts, starts + length], axis=1)
        spans = np.asarray(regions, np.int64)
        spans = spans[spans[:, 0] >= sink]
        start, stop = spans.T
        rows, n_events = self.rows, len(self.rows)
        # the small term keeps 0.1 * 30 = 3.0000000000000004 and its like on the right side
        max_survivors = np.floor(threshold * (stop - start) + 1e-9).astype(np.int64)
        death = self._ordered(spans)[:, stop - max_survivors - 1]  # [H, R]
        # event at which the region first counts
        seen_from = np.searchsorted(rows + 1 - recent, stop)
        shape = len(self.died), n_events + 1
        seen_at = np.broadcast_to(seen_from, death.shape)
        counted = np.bincount(seen_from, minlength=shape[1]).cumsum()[:-1]
        wiped = histogram(np.maximum(seen_at, death), shape).cumsum(-1)[:, :-1]
        return Wipeout(rows, counted, wiped, self, spans, max_survivors, seen_from)

    def _ordered(self, spans: Ints) -> Ints:
        """Events at which entries leave, ascending within regions and between them; [H, T]."""
        key = spans.tobytes()
        if key not in self._orders:
            self._orders.clear()  # each threshold asks for the same regions, and then for others
            places = np.searchsorted(spans.ravel(), np.arange(self.died.shape[1]), side="right")
            part = places * (len(self.rows) + 1)
            self._orders[key] = np.sort(part + self.died, axis=-1) - part
        return self._orders[key]

    @cached_property
    def _orders(self) -> dict[bytes, Ints]:
        return {}

    def expected_first(self, spans: Ints, max_survivors: Ints, seen_from: Ints) -> Floats:
        """Regions that random sets of the same size wipe out at the first event of a head; [H, E].

        max_survivors, seen_from [R]: most entries of a region that is wiped out, and the event from
        which it counts. 0 at events before which something has left the head.
        """
        here = np.nonzero(self.first & (self.evicted > 0))
        out, live = np.zeros(self.first.shape), self.live[here]
        kinds = np.stack([max_survivors, spans[:, 1] - spans[:, 0]])
        kinds, kind = np.unique(kinds, axis=1, return_inverse=True)  # regions have few sizes
        counted = np.zeros((kinds.shape[1], len(self.rows) + 1), np.int64)
        np.add.at(counted, (kind.ravel(), seen_from), 1)
        most, size = kinds[..., None]
        # larger regions are not there yet
        likely = chance.at_most(most, np.minimum(size, live), live, live - self.evicted[here])
        for of_kind, regions in zip(likely, counted.cumsum(1)[:, here[1]], strict=True):
            out[here] += regions * of_kind
        return out


@dataclass(frozen=True)
class Wipeout:
    """Regions of one layer at each event. rows [E]; regions int [E], wiped int [H, E].

    regions: complete regions inside [sink, N - recent), N = row + 1. wiped: those of which no more
    than `threshold` is left. leaving: the entries that leave; spans [R, 2], max_survivors [R]: all
    regions, and the most entries of a region that is wiped out; seen_from [R]: the event from which
    it counts.
    """

    rows: Ints
    regions: Ints
    wiped: Ints
    leaving: Leaving
    spans: Ints
    max_survivors: Ints
    seen_from: Ints

    @property
    def cumulative(self) -> Floats:
        """Share of the regions wiped out so far, NaN without one; [H, E]."""
        return share(self.wiped, self.regions)

    @property
    def cumulative_chance(self) -> Floats:
        """Expected `cumulative` of a random set of the size at the first event of a head; [H, E].

        NaN at later ones, which depend on every choice until then.
        """
        expected = self.leaving.expected_first(self.spans, self.max_survivors, self.seen_from)
        return np.where(self.leaving.first, share(expected, self.regions), np.nan)


def wipeout(
    evicted_at: EvictedAt,
    length: int = 32,
    threshold: float = 0.0,
    sink: int = SINK,
    recent: int = RECENT,
    regions: Ints | None = None,
) -> Wipeout:
    """Region wipe-out of a layer's `evicted_at` [H, T], as `Leaving.wipeout` defines it."""
    return Leaving.of(evicted_at).wipeout(length, threshold, sink, recent, regions)


#: Ends of a sentence, as the last character of a token; also in full width, as in Chinese.
_ENDS = tuple(".;!?\u3002\uff1b\uff01\uff1f")


def steps(texts: Sequence[str], prompt_len: int, least: int = 8) -> Ints:
    """Return start and stop of the steps of a text from the `texts` of its tokens; [R, 2].

    A step ends after a token that holds a newline or, where the response holds none, after one that
    ends in . ; ! or ?. Steps of fewer than `least` tokens, such as blank lines and numbered points,
    are joined with what follows. What follows the last end is no step.
    """
    ends = ["\n" in text for text in texts]
    if not any(ends[prompt_len:]):
        ends = [text.rstrip().endswith(_ENDS) for text in texts]
    cuts = [0]
    for stop in np.flatnonzero(ends) + 1:
        if stop - cuts[-1] >= least:
            cuts.append(int(stop))
    return np.stack([cuts[:-1], cuts[1:]], axis=1).astype(np.int64)


@dataclass(frozen=True)
class RetainedIoU:
    """Consecutive retained sets K, K' of one layer; rows [E - 1]: the first event of each pair.

    [H, E - 1]: iou, |K and K'| / |K or K'|; chance, the mean IoU of K with a random choice of as
    many entries as K' from K and the entries that came since.
    """

    rows: Ints
    iou: Floats
    chance: Floats


def retained_iou(evicted_at: EvictedAt) -> RetainedIoU:
    """Return how much of each retained set is still there after the next event that acts."""
    heads, total = evicted_at.shape
    rows = event_rows(evicted_at)
    shape = heads, len(rows) + 1
    died = np.searchsorted(rows, evicted_at)
    sizes = rows + 1 - histogram(died, shape)[:, :-1].cumsum(-1)  # |K_j|
    lost = _left_of(died, np.searchsorted(rows, np.arange(total)), shape)
    first, second = sizes[:, :-1], sizes[:, 1:]
    both = first - lost
    iou, pool = share(both, first + second - both), first + np.diff(rows)
    return RetainedIoU(rows[:-1], iou, chance.iou(first, second, pool))


def _left_of(died: Ints, since: Ints, shape: tuple[int, int]) -> Ints:
    """Of what counts from event `since` [m], the entries that leave at event j + 1; [H, E - 1].

    Counted are those that counted at event j already.
    """
    counts = histogram(np.where(since < died, died, shape[1] - 1), shape)
    return counts[:, 1:-1]


def rows_that_see(evicted_at: EvictedAt, prompt_len: int) -> Ints:
    """Rows after the prompt that see each entry; like evicted_at [..., T]."""
    total = evicted_at.shape[-1]
    last = np.minimum(evicted_at, total - 1).astype(np.int64)
    rows: Ints = np.maximum(last + 1 - np.maximum(np.arange(total), prompt_len), 0)
    return rows


def entries_seen(evicted_at: EvictedAt, prompt_len: int) -> Floats:
    """Entries that a row after the prompt sees, mean over those rows; [H], NaN without rows."""
    rows = np.array(evicted_at.shape[-1] - prompt_len)
    return share(rows_that_see(evicted_at, prompt_len).sum(-1), rows)


@dataclass(frozen=True)
class RetentionRatio:
    """The share of a layer's entries that is still there; [H]. G-KV, arXiv 2512.00504, Fig. 6.

    final: entries held after the last row, of all positions. rows: entries that a row sees, of
    those before it and its own, mean over the rows after the prompt; NaN without such rows.
    """

    final: Floats
    rows: Floats


def retention_ratio(evicted_at: EvictedAt, prompt_len: int) -> RetentionRatio:
    """Return the share of the full cache that a layer uses in the end and on the way."""
    total = evicted_at.shape[-1]
    final = (evicted_at >= total).mean(-1)
    # an entry counts 1 / (row + 1) for every row that sees it
    reciprocals = np.concatenate([[0.0], 1.0 / np.arange(1, total + 1)]).cumsum()
    start = np.maximum(np.arange(total), prompt_len)
    stop = np.maximum(np.minimum(evicted_at, total - 1) + 1, start)
    seen = (reciprocals[stop] - reciprocals[start]).sum(-1)
    return RetentionRatio(final, share(seen, np.array(total - prompt_len)))
