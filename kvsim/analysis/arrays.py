"""Types of arrays, and reductions shared by the packages of `kvsim.analysis`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvsim.schema import NEVER

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Strings = NDArray[np.str_]
#: Rows [H, T] after which the entries of a layer are gone, as `Record.gone_after` has them.
EvictedAt = NDArray[np.int32]
#: Rows [E] of events, None for the last event only; values by variant, [H, E] or [H]; and the
#: values that chance would give.
Variants = tuple[Ints | None, dict[str, tuple[Floats, Floats | None]]]


def event_rows(evicted_at: EvictedAt) -> Ints:
    """Rows after which at least one entry of the layer left, ascending; [E]."""
    return np.unique(evicted_at[evicted_at != NEVER]).astype(np.int64)


def histogram(index: Ints, shape: tuple[int, int]) -> Ints:
    """Counts [H, n] of index [H, m]; shape is (H, n)."""
    flat = index + np.arange(shape[0])[:, None] * shape[1]
    counts: Ints = np.bincount(flat.ravel(), minlength=shape[0] * shape[1])
    return counts.reshape(shape)


def present(start: Ints, stop: Ints, shape: tuple[int, int]) -> Ints:
    """Count of entries [H, m] present from event `start` until `stop`, at each event; [H, E].

    shape is (H, E + 1); E marks entries that no event evicts.
    """
    counts: Ints = histogram(start, shape) - histogram(np.maximum(start, stop), shape)
    return counts.cumsum(-1)[:, :-1]


def share(part: Ints | Floats, whole: Ints | Floats) -> Floats:
    """Ratio of part and whole, broadcast; NaN where whole is 0."""
    shares = np.full(np.broadcast_shapes(part.shape, whole.shape), np.nan)
    np.divide(part, whole, out=shares, where=whole != 0)
    return shares


def mean_known(values: Floats) -> Floats:
    """Mean over the last axis without NaN; NaN where all values are NaN."""
    present = ~np.isnan(values)
    return share(np.where(present, values, 0.0).sum(-1), present.sum(-1))
