"""Bursts: runs of positions that are evicted together (AMS, Fig. 2).

Computed from one layer's `evicted_at` [H, T] for all heads and events at once. Evicted entries stay
evicted, so runs only merge: a maximal run is a node of the Cartesian tree of eviction times, and
there are at most as many as entries, for any number of events. Time T log(T)^2.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvsim.analysis.arrays import EvictedAt, Ints, Variants, event_rows, histogram, share
from kvsim.analysis.kept import chance
from kvsim.analysis.kept.retention import LENGTHS


def burst_variants(evicted_at: EvictedAt, lengths: Sequence[int] = LENGTHS) -> Variants:
    """Runs of evicted entries after each event.

    "" is their mean length, NaN without a run; "longest" the longest, 0 without a run; "length=n"
    the share of the evicted entries that lie in runs of at least n. Chance is the expected value of
    random sets of the same size.
    """
    rows = event_rows(evicted_at)
    shape = len(evicted_at), len(rows) + 1
    died = np.searchsorted(rows, evicted_at)
    gone = histogram(died, shape)[:, :-1].cumsum(-1)
    head, length, start, stop = _maximal_runs(died, len(rows))

    def alive(weight: Ints) -> Ints:
        """Sum of the weights [n] of the runs that exist at each event; [H, E]."""
        changes = np.zeros(shape[0] * shape[1], np.int64)
        for event, sign in ((start, 1), (stop, -1)):
            sums = np.bincount(head * shape[1] + event, weight, changes.size)
            changes += sign * sums.astype(np.int64)
        return changes.reshape(shape).cumsum(-1)[:, :-1]

    longest = np.zeros(shape)
    np.maximum.at(longest, (head, start), length)
    total = np.broadcast_to(rows + 1, gone.shape)
    kept = total - gone
    return rows, {
        "": (share(gone, alive(np.ones_like(length))), chance.mean_run(total, kept)),
        # evicted entries stay evicted
        "longest": (np.maximum.accumulate(longest[:, :-1], -1), None),
        **{
            f"length={least}": (
                share(alive(length * (length >= least)), gone),
                chance.share_in_runs(least, total, kept),
            )
            for least in lengths
        },
    }


def _maximal_runs(died: Ints, n_events: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Runs that are maximal at some event, from the events [H, T] at which entries leave.

    Returns head, length, and the events start <= j < stop at which it is maximal, [n] each. The run
    of the entry that leaves last in it extends to the nearest entries that leave later.
    """
    heads, width = len(died), died.shape[1] + 1
    # heads in one line, separated by entries that never leave
    line = np.full(heads * width + 1, n_events)
    line[1:].reshape(heads, width)[:, :-1] = died
    places = np.flatnonzero(line < n_events)
    level = line[places]
    highest = tops(line, width)
    left, right = above(highest, places, level, -1) + 1, above(highest, places, level, 1) - 1
    _, indices = np.unique(left * (n_events + 1) + level, return_index=True)
    left, right, level = left[indices], right[indices], level[indices]
    stop = np.minimum(line[left - 1], line[right + 1])
    return (left - 1) // width, right - left + 1, level, stop


# ------------------------------------------- the nearest place on a line with a value above a bound


def tops(line: Ints, longest: int) -> list[NDArray[np.int32]]:
    """Largest of each 1, 2, 4, ... consecutive values of a line [n]: [k][i] of 2**k from i.

    Up to `longest`: a run of that many values has one above every bound.
    """
    levels = [line.astype(np.int32)]  # numbers of events
    while len(levels[-1]) > 1 << (len(levels) - 1) < longest:
        half = 1 << (len(levels) - 1)
        levels.append(np.maximum(levels[-1][:-half], levels[-1][half:]))
    return levels


def above(highest: Sequence[NDArray[np.int32]], at: Ints, bound: Ints, step: int) -> Ints:
    """Find, from each place `at` [m], the nearest after (step 1) or before (-1) above `bound` [m].

    highest: the `tops` of the line. Without such a place, the one after or before the line. Time m
    log(n).
    """
    here = at  # no value after `at`, up to `here`, is above the bound
    for level, top in reversed(list(enumerate(highest))):
        first = here + 1 if step > 0 else here - (1 << level)
        inside = (first >= 0) & (first < len(top))
        low = inside & (top[np.clip(first, 0, len(top) - 1)] <= bound)
        here = np.where(low, here + (step << level), here)
    return here + step
