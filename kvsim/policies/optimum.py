"""The kept sets that retain the most attention mass, event by event, with a proof.

Entries of one pool (a head, or all heads of a layer that share its budget) compete at each event m
= 0..M-1 for capacity[m] places. Eviction is final, so a kept set is a stop for each entry: the
event that evicts it, M if none does. Entry p competes from event first[p] on, the first event after
its row at which it is not protected. If it is kept at event m, its value is mass[p, m], the full
attention that it receives from rows between this event and the next. With W_p(s) the sum of mass[p,
m] over m < s, the optimum is

    max  sum_p W_p(s_p)   such that at most capacity[m] entries have first[p] <= m < s_p

Dual variables prove it. For any price[m] >= 0 of a place at event m, no kept sets retain more than

    bound = sum_m capacity[m] price[m] + sum_p max_s (W_p(s) - sum of price[m], first[p] <= m < s)

The problem is a minimum-cost flow of places through time, so integers attain the bound. The flow is
found by successive shortest paths (Ahuja, Magnanti, Orlin, "Network Flows", 1993, section 9.7) on a
graph of the M + 1 stops: an arc from stop i to stop j is the best move of any entry from one to the
other. The initial prices solve the problem for every fourth entry at a fourth of the capacity, so
that few paths remain. Sums of mass are rounded to multiples of a power of two, so that all
differences are exact.

Shape letters: P pools solved together, E entries, M events.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Initial prices come from every fourth entry, down to this capacity.
_SAMPLE, _LEAST = 4, 16

# Sums of mass are rounded to this many of float64's 53 bits; sums of several use the rest.
_BITS = 49


@dataclass(frozen=True)
class Optimum:
    """Optimal kept sets, and the prices that prove it.

    stop: event that evicts each entry, M if none does, int [P, E]. price: of a place at each event,
    [P, M]. Mass of competing entries, [P]: retained by these kept sets; bound, an upper bound for
    all kept sets; chance, the mean over random kept sets.
    """

    stop: Ints
    price: Floats
    retained: Floats
    bound: Floats
    chance: Floats

    @classmethod
    def concatenated(cls, parts: Sequence[Optimum]) -> Optimum:
        """Concatenate over the pools, or the layers, of all parts."""
        names = [field.name for field in fields(cls)]
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def solve(mass: Floats, first: Ints, capacity: Ints) -> Optimum:
    """Return the optimum of each pool.

    mass [P, E, M] >= 0, read from event first[p] on; first [E] from 0 to M, M for an entry that
    never competes; capacity [P, M] >= 0.
    """
    pools, entries, events = mass.shape
    total = np.zeros((pools, entries, events + 1))
    earned = np.where(np.arange(events) < first[:, None], 0.0, mass)
    np.cumsum(earned, axis=2, out=total[..., 1:])
    largest = total[..., -1].sum(1).max(initial=np.finfo(float).tiny)
    unit = 2.0 ** (np.ceil(np.log2(largest)) - _BITS)
    total = np.rint(total / unit)
    total[:, np.arange(events + 1) < first[:, None]] = -np.inf  # no stop before it competes
    flow = _flow(total, first, capacity)
    price = np.diff(flow.cost, axis=1)
    paid = flow.cost[:, None] - flow.cost[:, first, None]
    _fill(flow.stop, first, capacity)
    return Optimum(
        stop=flow.stop,
        price=price * unit,
        retained=np.take_along_axis(total, flow.stop[..., None], 2).sum((1, 2)) * unit,
        bound=((capacity * price).sum(1) + (total - paid).max(2).sum(1)) * unit,
        chance=_random(mass, first, capacity),
    )


def _fill(stop: Ints, first: Ints, capacity: Ints) -> None:
    """Fill idle places with entries that receive no mass, in order."""
    for event in range(capacity.shape[1]):
        room = capacity[:, event] - ((first <= event) & (stop > event)).sum(1)
        if room.any():
            leaving = stop == event
            stop += leaving & (leaving.cumsum(1) <= room[:, None])


def _random(mass: Floats, first: Ints, capacity: Ints) -> Floats:
    """Mean mass [P] of [P, E, M] that uniformly random kept sets retain."""
    retained, alive = np.zeros(len(mass)), np.zeros(len(mass))
    chance = np.ones(mass.shape[:2])
    for event in range(mass.shape[2]):
        alive += (first == event).sum()
        share = np.minimum(capacity[:, event], alive) / np.maximum(alive, 1)
        alive = np.minimum(capacity[:, event], alive)
        chance *= np.where(first <= event, share[:, None], 1.0)
        retained += np.where(first <= event, chance * mass[..., event], 0.0).sum(1)
    return retained


def _flow(total: Floats, first: Ints, capacity: Ints) -> _Flow:
    """The optimal flow; total [P, E, M + 1] is the mass up to each stop, -inf for invalid stops."""
    if capacity.max(initial=0) > _LEAST:
        sample = slice(None, None, _SAMPLE)
        cost = _flow(total[:, sample], first[sample], -(-capacity // _SAMPLE)).cost
    else:  # prices above the value of any entry
        earned = np.where(np.isfinite(total), total, 0.0)
        cost = np.diff(earned, axis=2, prepend=0.0).max(1, initial=0.0).cumsum(1)
    flow = _Flow(total, first, capacity, cost)
    flow.run()
    return flow


class _Flow:
    """Stops optimal for the current use of places, moved step by step to the capacity.

    cost [P, M + 1]: sum of the prices up to each stop. Invariant: no move of an entry from stop i
    to stop j gains more than cost[j] - cost[i].
    """

    def __init__(self, total: Floats, first: Ints, capacity: Ints, cost: Floats) -> None:
        self.total, self.cost = total, cost
        self.by_stop = np.ascontiguousarray(total.transpose(0, 2, 1))
        self.stop = np.stack(
            [(of - price).argmax(1) for of, price in zip(total, cost, strict=True)]
        )
        pools, self.stops = cost.shape
        free = capacity - self._used(first)
        # unused places, where their price is 0
        self.idle = np.where(np.diff(cost, axis=1) == 0, free.clip(min=0), 0)
        missing = free - self.idle
        # where missing places begin (> 0) and end
        self.excess = np.diff(missing, axis=1, prepend=0, append=0)
        pool, stop = np.divmod(np.arange(pools * self.stops), self.stops)
        self.gain = np.empty((pools, self.stops, self.stops))
        self._refresh(pool, stop)

    def _used(self, first: Ints) -> Ints:
        begun = np.bincount(first, minlength=self.stops).cumsum()
        ended = [np.bincount(of, minlength=self.stops).cumsum() for of in self.stop]
        used: Ints = (begun - np.stack(ended))[:, :-1]
        return used

    def _refresh(self, pool: Ints, stop: Ints) -> None:
        """Compute the arcs from these stops: the best move of any entry to each other stop.

        A place may also become idle up to the next stop, or used again.
        """
        gain = np.full((len(pool), self.stops), -np.inf)
        at, entry = np.nonzero(self.stop[pool] == stop[:, None])
        if len(at):
            moves = self.total[pool[at], entry]
            moves -= np.take_along_axis(moves, stop[at, None], 1)
            rows, begins = np.unique(at, return_index=True)
            gain[rows] = np.maximum.reduceat(moves, begins)
        ahead = np.flatnonzero(stop < self.stops - 1)
        back = np.flatnonzero(stop > 0)
        back = back[self.idle[pool[back], stop[back] - 1] > 0]
        for at, to in ((ahead, stop[ahead] + 1), (back, stop[back] - 1)):
            gain[at, to] = gain[at, to].clip(min=0.0)
        self.gain[pool, stop] = gain

    def run(self) -> None:
        while True:
            pool = np.flatnonzero((self.excess > 0).any(1))
            if not len(pool):
                return
            self._send(pool, *self._search(pool))

    def _search(self, pool: Ints) -> tuple[Ints, Ints]:
        """The nearest stop with a surplus place [P], and the predecessor of each stop [P, M + 1].

        Dijkstra's algorithm from all stops with a missing place. Distances, at most 0, are gains
        less costs of moves. Lowers the costs by them, so that the path has no loss.
        """
        here, cost, excess = np.arange(len(pool)), self.cost[pool], self.excess[pool]
        near = np.where(excess > 0, 0.0, -np.inf)
        waiting, before = near.copy(), np.full(near.shape, -1)
        end = np.full(len(pool), -1)
        while True:
            now = waiting.argmax(1)
            ends = (end < 0) & (excess[here, now] < 0)
            end[ends] = now[ends]
            if (end >= 0).all():
                break
            waiting[here, now] = -np.inf
            via = self.gain[pool, now]
            via -= cost
            via += (near[here, now] + cost[here, now])[:, None]
            nearer = via > near  # never at a visited stop
            np.copyto(near, via, where=nearer)
            np.copyto(waiting, via, where=nearer)
            np.copyto(before, now[:, None], where=nearer)
        self.cost[pool] += np.maximum(near, near[here, end, None])
        return end, before

    def _send(self, pool: Ints, end: Ints, before: Ints) -> None:
        self.excess[pool, end] += 1
        moves: list[tuple[Ints, ...]] = []
        changed: list[Ints] = [end[:0]]
        active, at = np.arange(len(pool)), end.copy()
        while True:
            active = active[before[active, at[active]] >= 0]
            if not len(active):
                break
            new, which = at[active], pool[active]
            old = before[active, new]
            with np.errstate(invalid="ignore"):  # entries that do not compete yet at either stop
                gains = self.by_stop[which, new]
                gains -= self.by_stop[which, old]
            gains[self.stop[which] != old[:, None]] = -np.inf
            entry, low = gains.argmax(1), np.minimum(old, new)
            idle = (new == old + 1) | ((new == old - 1) & (self.idle[which, low] > 0))
            idle &= gains[np.arange(len(entry)), entry] < 0
            self.idle[which[idle], low[idle]] += (new - old)[idle]
            moves.append((which[~idle], entry[~idle], new[~idle]))
            changed += [which * self.stops + stop for stop in (old, new)]
            at[active] = old
        self.excess[pool, at] -= 1
        for which, entry, new in moves:
            self.stop[which, entry] = new
        self._refresh(*np.divmod(np.unique(np.concatenate(changed)), self.stops))
