"""Kept entries and wiped-out regions, as reductions of `evicted_at`.

Region wipe-out rate, retained-set IoU and sizes, by absolute position (docs/metrics.md). Every
function takes one layer's `evicted_at` [H, T] and computes all heads and events at once, in time
linear in H x T except for sorting.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvsim.analysis.arrays import (
    Bools,
    EvictedAt,
    Floats,
    Ints,
    Variants,
    event_rows,
    histogram,
    share,
)
from kvsim.analysis.kept import chance
from kvsim.errors import PositionError
from kvsim.schema import NEVER

#: First and last positions left out of every region, the same for all policies.
SINK, RECENT = 4, 32

#: Regions of the wipe-out rate: lengths in tokens and survival thresholds.
LENGTHS = (16, 32, 64, 128)
THRESHOLDS = (0.0, 0.1)


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


def wipeouts(
    evicted_at: EvictedAt,
    lengths: Sequence[int] = LENGTHS,
    thresholds: Sequence[float] = THRESHOLDS,
    sink: int = SINK,
    recent: int = RECENT,
) -> Variants:
    """Share of the regions of which at most `threshold` is left after each event.

    Regions are complete ones inside [sink, N - recent), N = row + 1; NaN without a region. Chance
    is the expected share of a random set of the size at the first event of a head; NaN at later
    events, which depend on earlier choices.

    A region is wiped out by the eviction that leaves it floor(threshold x its length) entries, so
    one sort within regions finds that event.
    """
    variants: dict[str, tuple[Floats, Floats | None]] = {}
    rows, total = event_rows(evicted_at), evicted_at.shape[1]
    shape = len(evicted_at), len(rows) + 1
    died = np.searchsorted(rows, evicted_at)
    evicted = histogram(died, shape)[:, :-1]
    live = rows + 1 - evicted.cumsum(-1) + evicted
    first: Bools = evicted.cumsum(-1) == evicted  # no entry had left the head before
    here = np.nonzero(first & (evicted > 0))
    for length in lengths:
        places = np.arange(-(-sink // length), total // length)
        part = died[:, : total // length * length].reshape(len(died), -1, length)
        ordered = np.sort(part[:, -(-sink // length) :], axis=-1)
        # event at which each region first counts
        seen_from = np.searchsorted(rows + 1 - recent, (places + 1) * length)
        regions = np.bincount(seen_from, minlength=shape[1]).cumsum()[:-1]
        for threshold in thresholds:
            # the small term keeps 0.1 * 30 = 3.0000000000000004 and its like on the right side
            most = int(threshold * length + 1e-9)
            death = np.maximum(seen_from, ordered[..., length - most - 1])
            wiped = histogram(death, shape).cumsum(-1)[:, :-1]
            likely, held = np.zeros(first.shape), live[here]  # larger regions do not exist yet
            likely[here] = regions[here[1]] * chance.at_most(
                most, np.minimum(length, held), held, held - evicted[here]
            )
            expected = np.where(first, share(likely, regions), np.nan)
            variants[f"length={length},threshold={threshold:g}"] = share(wiped, regions), expected
    return rows, variants


def retained_iou(evicted_at: EvictedAt) -> Variants:
    """IoU of each retained set K with K', the set after the next event that evicts.

    After the first event of each pair |K and K'| / |K or K'| [H, E - 1]. Chance is the mean IoU of
    K with a random choice of as many entries as K' from K and the entries that came since.
    """
    heads, total = evicted_at.shape
    rows = event_rows(evicted_at)
    shape = heads, len(rows) + 1
    died = np.searchsorted(rows, evicted_at)
    sizes = rows + 1 - histogram(died, shape)[:, :-1].cumsum(-1)  # |K_j|
    since = np.searchsorted(rows, np.arange(total))
    # of the entries present at event j, those that leave at event j + 1
    lost = histogram(np.where(since < died, died, len(rows)), shape)[:, 1:-1]
    first, second = sizes[:, :-1], sizes[:, 1:]
    both = first - lost
    iou, pool = share(both, first + second - both), first + np.diff(rows)
    return rows[:-1], {"": (iou, chance.iou(first, second, pool))}


def rows_that_see(evicted_at: EvictedAt, prompt_len: int) -> Ints:
    """Count of rows after the prompt that see each entry; like evicted_at [..., T]."""
    total = evicted_at.shape[-1]
    last = np.minimum(evicted_at, total - 1).astype(np.int64)
    rows: Ints = np.maximum(last + 1 - np.maximum(np.arange(total), prompt_len), 0)
    return rows


def entries_seen(evicted_at: EvictedAt, prompt_len: int) -> Floats:
    """Mean number of visible entries of a row after the prompt; [H], NaN without rows."""
    rows = np.array(evicted_at.shape[-1] - prompt_len)
    return share(rows_that_see(evicted_at, prompt_len).sum(-1), rows)


def retention_ratio(evicted_at: EvictedAt, prompt_len: int) -> tuple[Floats, Floats]:
    """Shares of the full cache that a layer uses; [H] each. G-KV, arXiv 2512.00504, Fig. 6.

    Visible entries of a row, over those with the full cache, mean over the rows after the prompt,
    NaN without such rows; and entries held after the last row, over all positions.
    """
    total = evicted_at.shape[-1]
    # an entry counts 1 / (row + 1) for every row that sees it
    reciprocals = np.concatenate([[0.0], 1.0 / np.arange(1, total + 1)]).cumsum()
    start = np.maximum(np.arange(total), prompt_len)
    stop = np.maximum(np.minimum(evicted_at, total - 1) + 1, start)
    seen = (reciprocals[stop] - reciprocals[start]).sum(-1)
    return share(seen, np.array(total - prompt_len)), (evicted_at >= total).mean(-1)
