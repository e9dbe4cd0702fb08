"""Attention of later rows to each entry, and the kept sets that retain most of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvsim.core.lazy import Tensor, torch
from kvsim.core.view import Source
from kvsim.errors import MemoryLimitError
from kvsim.policies.optimum import Ints, Optimum, solve

# Rows per attention product.
_ROWS = 64

#: Bytes of mass of the layers solved together.
MASS_BYTES = 128 << 20

# Bytes that a layer may take by default.
_MEMORY = 2 << 30


def best(
    source: Source,
    events: Sequence[int],
    places: Ints,
    *,
    start: int,
    protect: tuple[int, int] = (0, 0),
    memory: int | None = None,
) -> Optimum:
    """Return the kept sets that retain the most full attention of rows `start` and later.

    Returns stop [L, H, T], price [L, S, M], and mass [L, S], summed over the query heads of the
    group. events: rows after which events fire, ascending. places [L, S, M]: capacity at each
    event, protected entries included, for each head, or S = 1 for all heads of a layer together.
    protect: numbers of protected first and most recent positions. memory: bytes, 2 GiB by default;
    MemoryLimitError where a layer needs more.
    """
    layers, heads, rows = source.keys.shape[:3]
    pools = places.shape[1]
    _check_memory(heads * rows, pools, len(events), memory or _MEMORY)
    at, fixed = np.asarray(events), protect[0]
    position = np.arange(rows)
    # the first event after its row at which an entry is not protected
    first = np.searchsorted(at, position + protect[1])
    first[:fixed] = len(events)
    competing = np.bincount(first, minlength=len(events) + 1).cumsum()[:-1]
    protected = (at + 1 - competing) * (heads // pools)
    first = np.tile(first, heads // pools)
    each = max(1, MASS_BYTES // (8 * heads * rows * max(1, len(events))))
    parts = []
    for begin in range(0, layers, each):
        part = slice(begin, begin + each)
        capacity = (places[part] - protected).clip(min=0)
        capacity = capacity.reshape(capacity.shape[0] * pools, len(events))
        mass = future_mass(source, events, start, (begin, min(begin + each, layers)))
        masses = mass.cpu().numpy().reshape(len(capacity), len(first), len(events))
        parts.append(solve(masses, first, capacity))
    of_pools = Optimum.concatenated(parts)
    sums = (of_pools.retained, of_pools.bound, of_pools.chance)
    return Optimum(
        of_pools.stop.reshape(layers, heads, rows),
        of_pools.price.reshape(places.shape),
        *(x.reshape(layers, pools) for x in sums),
    )


def _check_memory(entries: int, pools: int, events: int, memory: int) -> None:
    # the mass, its sums, and the costs of each pool; moves between stops
    need = 8 * (3 * entries * (events + 1) + pools * (events + 1) ** 2)
    if need > memory:
        raise MemoryLimitError(
            f"the optimum of one layer needs {need / 2**20:.0f} MiB for {events} events, the "
            f"memory budget is {memory / 2**20:.0f} MiB; give at least --set memory="
            f"{-(-need // 2**20)}MiB, or a longer interval"
        )


def future_mass(
    source: Source,
    events: Sequence[int],
    start: int,
    layers: tuple[int, int] | None = None,
    weigh: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """Full attention to an entry between an event and the next; float64 [L, H, T, M].

    Summed over rows from `start` on and the query heads of the group; 0 at events before the
    entry's row. Replays of a trace share it.

    layers: (start, stop), all by default. weigh: returns the numbers to sum instead, from a layer's
    attention [H, G * w, n], the output of the rows, and the values of the entries.
    """
    begin, end = layers or (0, len(source.keys))
    start = max(start, events[0] + 1 if events else 0)

    def compute() -> Tensor:
        keys = source.keys[begin:end]
        mass = keys.new_zeros(*keys.shape[:3], len(events), dtype=torch.float64)
        for event, row in enumerate(events):
            stop = events[event + 1] + 1 if event + 1 < len(events) else source.n_rows
            for low in range(max(row + 1, start), stop, _ROWS):
                _add(mass[:, :, : row + 1, event], low, min(low + _ROWS, stop))
        return mass

    def _add(mass: Tensor, low: int, high: int) -> None:
        q = source.queries(low, high)[begin:end].flatten(2, 3) * source.formula.scale
        output, lse = (x[begin:end] for x in source.full(low, high))
        n = mass.shape[-1]
        for layer, visible in enumerate(source.keys[begin:end, :, :n].mT):  # one stays in the cache
            z = source.formula.capped(q[layer] @ visible)  # [H, G * w, n]
            weights = z.sub_(lse[layer].flatten(1).unsqueeze(-1)).exp_()
            if weigh is not None:
                values = source.values[begin + layer, :, :n]
                weights = weigh(weights, output[layer].flatten(1, 2), values)
            mass[layer] += weights.sum(1)

    key = "future", tuple(events), start, begin, end, weigh
    return source.memo(key, compute, shared=True)
