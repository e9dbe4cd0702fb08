"""What stays and what is wiped out: reductions of `evicted_at`, nothing recomputed.

Region wipe-out rate and retained-set IoU, by absolute position (docs/metrics.md).
Every function takes one layer's `evicted_at` [H, T] and answers for all heads and events at once,
in time linear in H x T.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvsim.schema import NEVER

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

#: First and last positions left out of every region, the same for all policies.
SINK, RECENT = 4, 32


def event_rows(evicted_at: NDArray[np.int32]) -> Ints:
    """Rows after which at least one entry of the layer left, ascending; [E]."""
    rows: Ints = np.unique(evicted_at[evicted_at != NEVER]).astype(np.int64)
    return rows


@dataclass(frozen=True)
class Wipeout:
    """Regions of one layer at each event. rows [E]; counts int [H, E] (`regions` int [E]).

    regions: complete regions inside [sink, N - recent), N = row + 1. wiped: those of which no more
    than `threshold` is left. alive: those above it just before the event; now: those it wiped out.
    """

    rows: Ints
    regions: Ints
    wiped: Ints
    alive: Ints
    now: Ints

    @property
    def cumulative(self) -> Floats:
        """Share of the regions wiped out so far, NaN without one; [H, E]."""
        return _share(self.wiped, np.broadcast_to(self.regions, self.wiped.shape))

    @property
    def hazard(self) -> Floats:
        """Share of the regions alive before the event that it wiped out; [H, E]."""
        return _share(self.now, self.alive)


def wipeout(
    evicted_at: NDArray[np.int32],
    length: int = 32,
    threshold: float = 0.0,
    sink: int = SINK,
    recent: int = RECENT,
) -> Wipeout:
    """Region wipe-out of a layer: regions of `length` positions, `threshold` in [0, 1).

    A region [k length, (k+1) length) dies with the eviction that leaves it floor(threshold length)
    entries, so one sort within regions gives the row of its death.
    """
    heads, total = evicted_at.shape
    rows = event_rows(evicted_at)
    n_events, first = len(rows), -(-sink // length)
    n_regions = max(0, total // length - first)
    spans = evicted_at[:, first * length : (first + n_regions) * length]
    ordered = np.sort(spans.reshape(heads, n_regions, length), axis=-1)
    # the small term keeps 0.1 * 30 = 3.0000000000000004 and its like on the right side
    left = int(np.floor(threshold * length + 1e-9))
    death = ordered[..., length - left - 1].astype(np.int64)  # [H, regions]
    ends = (np.arange(first, first + n_regions) + 1) * length
    seen_from = np.searchsorted(rows + 1 - recent, ends)  # event at which the region first counts
    died = np.searchsorted(rows, death)  # n_events for NEVER
    counts = (died.shape[0], n_events + 1)
    seen_at = np.broadcast_to(seen_from, died.shape)
    entered = _histogram(seen_at, counts)
    wiped = _histogram(np.maximum(seen_at, died), counts).cumsum(-1)[:, :-1]
    # counted and not dead before event j: entered by j and not wiped by j - 1
    before = np.concatenate([np.zeros((heads, 1), np.int64), wiped[:, :-1]], axis=1)
    late = _histogram(np.where(died < seen_at, seen_at, n_events), counts)[:, :-1]
    regions = entered.cumsum(-1)[:, :-1]
    alive = regions - before - late
    now = _histogram(np.where(died >= seen_at, died, n_events), counts)[:, :-1]
    return Wipeout(rows, regions[0] if heads else np.zeros(n_events, np.int64), wiped, alive, now)


@dataclass(frozen=True)
class RetainedIoU:
    """Consecutive retained sets of one layer; rows [E - 1] are those of the first event of a pair.

    iou, survival, chance [H, E - 1]: |K and K'| / |K or K'|; |K and K'| / |K|; the IoU of a random
    choice of the same size that shares as many entries as expected from K and the entries that came
    since.
    """

    rows: Ints
    iou: Floats
    survival: Floats
    chance: Floats


def retained_iou(evicted_at: NDArray[np.int32]) -> RetainedIoU:
    """How much of each retained set is still there after the next event that acts."""
    heads, _ = evicted_at.shape
    rows = event_rows(evicted_at)
    n_events = len(rows)
    if n_events < 2:
        none = np.zeros((heads, 0))
        return RetainedIoU(rows[:0], none, none, none)
    head, pos = np.nonzero(evicted_at != NEVER)
    event = np.searchsorted(rows, evicted_at[head, pos])
    left = np.zeros((heads, n_events), np.int64)
    np.add.at(left, (head, event), 1)
    held = rows + 1 - left.cumsum(-1)  # |K_j|
    # of what left at event j, the entries that were already in K_{j-1}
    old = (event > 0) & (pos <= rows[np.maximum(event - 1, 0)])
    lost = np.zeros((heads, n_events), np.int64)
    np.add.at(lost, (head[old], event[old]), 1)
    first, second = held[:, :-1], held[:, 1:]
    both = first - lost[:, 1:]
    pool = first + np.diff(rows)
    expected = first * second / pool
    return RetainedIoU(
        rows[:-1],
        _share(both, first + second - both),
        _share(both, first),
        _share(expected, first + second - expected),
    )


def entries_seen(evicted_at: NDArray[np.int32], prompt_len: int) -> Floats:
    """Entries that a row after the prompt sees, mean over those rows; [H], NaN without rows."""
    heads, total = evicted_at.shape
    rows = total - prompt_len
    if not rows:
        return np.full(heads, np.nan)
    first = np.maximum(np.arange(total), prompt_len)
    last = np.minimum(evicted_at, total - 1).astype(np.int64)
    seen: Floats = np.maximum(last - first + 1, 0).sum(-1) / rows
    return seen


def _histogram(index: Ints, shape: tuple[int, int]) -> Ints:
    """Counts [H, shape[1]] of index [H, m]."""
    out = np.zeros(shape, np.int64)
    np.add.at(out, (np.arange(shape[0])[:, None], index), 1)
    return out


def _share(part: Ints | Floats, whole: Ints | Floats) -> Floats:
    out = np.full(part.shape, np.nan)
    np.divide(part, whole, out=out, where=whole != 0)
    return out
