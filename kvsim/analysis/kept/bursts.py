"""Bursts: runs of positions that are dropped together (AMS, Fig. 2).

One layer's `evicted_at` [H, T] answers for all heads and events at once. What is dropped stays so,
and runs only grow together: a maximal run is a node of the Cartesian tree of eviction times, so
there are no more of them than entries, whatever the number of events. Time T log(T)^2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvsim.analysis.kept import chance
from kvsim.analysis.kept.nearest import above, tops
from kvsim.analysis.kept.retention import event_rows, histogram, share

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

#: Lengths from which a run counts as a burst.
LENGTHS = (16, 32, 64, 128)


@dataclass(frozen=True)
class Bursts:
    """Runs of dropped entries of one layer at each event. rows [E]; int [H, E] unless said.

    total: the entries among which runs are looked for; dropped: how many of them are dropped; runs:
    maximal runs of them. longest, p95: the longest run, and the least length that 95% of the runs
    do not exceed, 0 without a run. inside [lengths, H, E]: dropped entries in runs of at least
    `lengths`.
    """

    rows: Ints
    lengths: tuple[int, ...]
    total: Ints
    dropped: Ints
    runs: Ints
    longest: Ints
    p95: Ints
    inside: Ints

    @property
    def mean(self) -> Floats:
        """Mean length of a run, NaN without one; [H, E]."""
        return share(self.dropped, self.runs)

    @property
    def per_1000(self) -> Floats:
        """Runs per 1,000 entries; [H, E]."""
        return 1000.0 * self.runs / self.total

    @property
    def shares(self) -> Floats:
        """Share of the dropped entries in runs of at least `lengths`; [lengths, H, E]."""
        return share(self.inside, self.dropped)

    @property
    def mean_chance(self) -> Floats:
        """Expected `mean` of random sets of the same size; [H, E]."""
        return chance.mean_run(self.total, self.total - self.dropped)

    @property
    def per_1000_chance(self) -> Floats:
        """Expected `per_1000` of random sets of the same size; [H, E]."""
        return 1000.0 * chance.n_runs(self.total, self.total - self.dropped) / self.total

    @property
    def shares_chance(self) -> Floats:
        """Expected `shares` of random sets of the same size; [lengths, H, E]."""
        kept = self.total - self.dropped
        found = [chance.share_in_runs(length, self.total, kept) for length in self.lengths]
        return np.stack(found) if found else np.zeros(self.inside.shape)


@dataclass(frozen=True)
class _Runs:
    """Maximal runs [n] of all heads: length, and the events start <= j < stop that see them."""

    head: Ints
    length: Ints
    start: Ints
    stop: Ints


def dropped_bursts(
    evicted_at: NDArray[np.int32],
    kind: Literal["cumulative", "round"] = "cumulative",
    lengths: Sequence[int] = LENGTHS,
) -> Bursts:
    """Runs of dropped entries: how many, how long, and how much of what is dropped is in long ones.

    kind: "cumulative" takes all positions that are gone after an event, in the order of the text;
    "round" what the event itself drops, in the order of the entries live before it: entries that
    left earlier lie between nothing.
    """
    rows = event_rows(evicted_at)
    shape = len(evicted_at), len(rows) + 1
    died = np.searchsorted(rows, evicted_at)
    now = histogram(died, shape)[:, :-1]
    gone = now.cumsum(-1)
    everything = np.broadcast_to(rows + 1, gone.shape)
    if kind == "cumulative":
        total, dropped = everything, gone
    else:
        total, dropped = everything - gone + now, now
    runs = _maximal_runs(died, len(rows), by_round=kind == "round")
    inside = [_alive(runs, shape, runs.length * (runs.length >= least)) for least in lengths]
    count = _alive(runs, shape, np.ones_like(runs.length))
    return Bursts(
        rows,
        tuple(lengths),
        total,
        dropped,
        count,
        _ranked(runs, count),
        _ranked(runs, -(-19 * count // 20)),
        np.stack(inside) if inside else np.zeros((0, *count.shape), np.int64),
    )


def _maximal_runs(died: Ints, n_events: int, *, by_round: bool) -> _Runs:
    """Every run that is maximal at some event, from the events [H, T] at which entries leave.

    The run of the entry that leaves last in it reaches to the nearest entries that leave later, and
    is maximal until one of these leaves. by_round: its length counts the entries that leave last.
    """
    heads, width = len(died), died.shape[1] + 1
    # heads in one line, an entry that never leaves before, between and behind them
    line = np.full(heads * width + 1, n_events)
    line[1:].reshape(heads, width)[:, :-1] = died
    at = np.flatnonzero(line < n_events)
    own = line[at]
    highest = tops(line)
    left, right = above(highest, at, own, -1) + 1, above(highest, at, own, 1) - 1
    _, first, members = np.unique(
        left * (n_events + 1) + own, return_index=True, return_counts=True
    )
    left, right, own = left[first], right[first], own[first]
    length = members if by_round else right - left + 1
    stop = own + 1 if by_round else np.minimum(line[left - 1], line[right + 1])
    return _Runs((left - 1) // width, length, own, stop)


def _alive(runs: _Runs, shape: tuple[int, int], weight: Ints) -> Ints:
    """Sum of the weights [n] of the runs that each event sees; [H, E]; shape is (H, E + 1)."""
    size = shape[0] * shape[1]
    out = np.zeros(size, np.int64)
    for event, sign in ((runs.start, 1), (runs.stop, -1)):
        out += sign * np.bincount(runs.head * shape[1] + event, weight, size).astype(np.int64)
    return out.reshape(shape).cumsum(-1)[:, :-1]


def _ranked(runs: _Runs, rank: Ints) -> Ints:
    """Length of the `rank`-th shortest run at each event, from 1, 0 for rank 0; [H, E].

    From the highest bit of the length to the lowest, all heads and events at once: of the runs
    whose higher bits are those found so far, count the ones whose next bit is 0.
    """
    heads, n_events = rank.shape
    bits = int(runs.length.max(initial=0)).bit_length()
    rest, found = rank.copy(), np.zeros_like(rank)
    head, event = np.arange(heads)[:, None], np.arange(n_events)
    for bit in reversed(range(bits)):
        group = (runs.head << bits) + (runs.length >> bit)
        wanted = ((head << bits) + (found >> bit)) * (n_events + 1)
        seen = np.zeros_like(rank)
        for edge, sign in ((runs.start, 1), (runs.stop, -1)):
            keys = np.sort(group * (n_events + 1) + edge)
            reached = np.searchsorted(keys, wanted + event, side="right")
            seen += sign * (reached - np.searchsorted(keys, wanted))
        more = rest > seen
        rest -= np.where(more, seen, 0)
        found += np.where(more, 1 << bit, 0)
    return np.where(rank > 0, found, 0)


def dense_share(evicted_at: NDArray[np.int32], window: int = 64, density: float = 0.95) -> Floats:
    """Share of the positions that lie in a dense window, at each event; [H, E].

    Windows are all `window` consecutive positions of the N there at the event; one is dense from
    the event on that leaves at least `density` of it dropped.
    """
    heads, total = evicted_at.shape
    rows = event_rows(evicted_at)
    n_events = len(rows)
    if total < window:
        return np.zeros((heads, n_events))
    died = np.searchsorted(rows, evicted_at).astype(np.int32)
    there = np.searchsorted(rows, np.arange(window - 1, total)).astype(np.int32)
    # the event that drops the window's last entry but spare - 1: the spare-th latest of its events
    spare = window - int(np.ceil(density * window - 1e-9)) + 1
    since = np.maximum(_latest(died, window, spare), there)
    never = np.full((heads, window - 1), n_events, np.int32)
    around = np.concatenate([never, since, never], axis=1)
    covered = -_latest(-around, window, 1)  # the first of the windows around a position
    shape = heads, n_events + 1
    counts: Ints = histogram(covered.astype(np.int64), shape).cumsum(-1)[:, :-1]
    return counts / (rows + 1)


def _latest(values: NDArray[np.int32], window: int, nth: int) -> NDArray[np.int32]:
    """The nth largest of each `window` consecutive values [H, T]; [H, T - window + 1].

    The nth largest of a window come from those of two parts; the parts double in length.
    """
    tops: dict[int, NDArray[np.int32]] = {1: values[..., None]}
    wide = 1
    while 2 * wide <= window:
        tops[2 * wide] = _merge(tops[wide], tops[wide], wide, nth)
        wide *= 2
    # the binary digits of the window, from the longest part on
    found, done = tops[wide], wide
    for part in sorted(tops, reverse=True)[1:]:
        if window & part:
            found = _merge(found, tops[part], done, nth)
            done += part
    return found[:, :, -nth]


def _merge(
    first: NDArray[np.int32], second: NDArray[np.int32], offset: int, nth: int
) -> NDArray[np.int32]:
    """The nth largest, ascending, of windows [H, m, k] and of those `offset` behind them."""
    behind = second[:, offset:]
    joined = np.concatenate([first[:, : behind.shape[1]], behind], axis=-1)
    return np.sort(joined, axis=-1)[..., -nth:]
