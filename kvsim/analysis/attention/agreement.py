"""How well one score of some entries stands in for another: ranks, the best few, what is lost.

Scores are [..., n], one number per entry; of equal ones the lower position comes first, as where a
policy chooses.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


def pearson(a: Floats, b: Floats) -> Floats:
    """Correlation over the last axis; NaN where one of the two does not vary."""
    x, y = (one - one.mean(-1, keepdims=True) for one in (a, b))
    size = np.sqrt((x**2).sum(-1) * (y**2).sum(-1))
    # a constant may differ from its own mean by rounding
    varied = (np.ptp(a, axis=-1) > 0) & (np.ptp(b, axis=-1) > 0)
    out = np.full(size.shape, np.nan)
    np.divide((x * y).sum(-1), size, out=out, where=varied & (size > 0))
    return out


def spearman(a: Floats, b: Floats) -> Floats:
    """Rank correlation over the last axis; NaN where one of the two does not vary."""
    return pearson(mean_ranks(a), mean_ranks(b))


def mean_ranks(scores: Floats) -> Floats:
    """Rank of each number, 1 the smallest; equal ones share the mean of theirs."""
    n = scores.shape[-1]
    order = scores.argsort(-1)
    ascending = np.take_along_axis(scores, order, -1)
    at = np.arange(n)
    new = np.ones(scores.shape, bool)  # starts a run of equal numbers
    new[..., 1:] = ascending[..., 1:] != ascending[..., :-1]
    ends = np.ones(scores.shape, bool)
    ends[..., :-1] = new[..., 1:]
    first = np.maximum.accumulate(np.where(new, at, 0), -1)
    last = np.minimum.accumulate(np.where(ends, at, n - 1)[..., ::-1], -1)[..., ::-1]
    out = np.empty(scores.shape)
    np.put_along_axis(out, order, 1 + (first + last) / 2, -1)
    return out


def best(scores: Floats, k: int) -> Bools:
    """The k entries of the highest scores; [..., n]."""
    order = np.argsort(-scores, axis=-1, kind="stable")
    out = np.zeros(scores.shape, bool)
    np.put_along_axis(out, order[..., :k], values=True, axis=-1)
    return out


def recall(found: Floats, wanted: Floats, k: int) -> Floats:
    """Share of the k best by `wanted` among the k best by `found`; k / n by chance."""
    share: Floats = (best(found, k) & best(wanted, k)).sum(-1) / k
    return share


def lost(scores: Floats, mass: Floats, removed: Ints) -> Floats:
    """Share of the mass that goes with the `removed` entries of the lowest scores.

    mass [..., n], removed [p], numbers of entries; [..., p].
    """
    order = np.argsort(-scores, axis=-1, kind="stable")
    ordered = np.take_along_axis(np.broadcast_to(mass, scores.shape), order, -1)[..., ::-1]
    gone = np.zeros((*scores.shape[:-1], scores.shape[-1] + 1))
    ordered.cumsum(-1, out=gone[..., 1:])
    out: Floats = gone[..., removed] / gone[..., -1:]
    return out
