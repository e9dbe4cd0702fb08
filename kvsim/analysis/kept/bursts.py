"""Bursts: runs of positions that are evicted together (AMS, Fig. 2).

One layer's `evicted_at` [H, T] answers for all heads and events at once. What is evicted stays so,
and runs only grow together: a maximal run is a node of the Cartesian tree of eviction times, so
there are no more of them than entries, whatever the number of events. Time T log(T)^2.
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

    "" is the mean length of a run of evicted entries, NaN without one; "longest" the longest run, 0
    without one; "length=n" the share of the evicted entries that lie in runs of at least n. Chance
    is the expected value of random sets of the same size.
    """
    rows = event_rows(evicted_at)
    shape = len(evicted_at), len(rows) + 1
    died = np.searchsorted(rows, evicted_at)
    gone = histogram(died, shape)[:, :-1].cumsum(-1)
    head, length, start, stop = _maximal_runs(died, len(rows))

    def alive(weight: Ints) -> Ints:
        """Sum of the weights [n] of the runs that each event sees; [H, E]."""
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
        # what is evicted stays so
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
    """Every run that is maximal at some event, from the events [H, T] at which entries leave.

    Head, length, and the events start <= j < stop that see it [n] each. The run of the entry that
    leaves last in it reaches to the nearest entries that leave later, and is maximal until one of
    these leaves.
    """
    heads, width = len(died), died.shape[1] + 1
    # heads in one line, an entry that never leaves before, between and behind them
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
    """The largest of each 1, 2, 4, ... consecutive values of a line [n]: [k][i] of 2**k from i.

    Up to `longest`: every so many values one is above every bound.
    """
    levels = [line.astype(np.int32)]  # numbers of events
    while len(levels[-1]) > 1 << (len(levels) - 1) < longest:
        half = 1 << (len(levels) - 1)
        levels.append(np.maximum(levels[-1][:-half], levels[-1][half:]))
    return levels


def above(highest: Sequence[NDArray[np.int32]], at: Ints, bound: Ints, step: int) -> Ints:
    """From each place `at` [m] the nearest one behind (step 1) or before it (-1) above `bound` [m].

    highest: the `tops` of the line. Where there is none, the place after or before the line. Time
    m log(n).
    """
    here = at  # nothing from `at` up to and with `here` is above the bound, `at` itself left aside
    for level, top in reversed(list(enumerate(highest))):
        first = here + 1 if step > 0 else here - (1 << level)
        inside = (first >= 0) & (first < len(top))
        low = inside & (top[np.clip(first, 0, len(top) - 1)] <= bound)
        here = np.where(low, here + (step << level), here)
    return here + step
