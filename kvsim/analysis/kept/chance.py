"""Exact expectations for random kept sets of the same size.

`kept` of `total` entries are drawn without replacement. Every function broadcasts its arguments.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy

from kvsim.analysis.arrays import Floats, Ints, share


def at_most(most: Any, marked: Any, total: Any, kept: Any) -> Floats:
    """Probability that no more than `most` of `marked` entries are kept (hypergeometric)."""
    given = np.broadcast_arrays(most, marked, total, kept)
    # the same cases recur over heads and events
    shape = [1 + int(x.max(initial=0)) for x in given]
    different, inverse = np.unique(np.ravel_multi_index(given, shape), return_inverse=True)
    most, marked, total, kept = np.unravel_index(different, shape)
    probability: Floats = scipy.stats.hypergeom.cdf(most, total, marked, kept)
    return probability[inverse]


def iou(first: Any, second: Any, total: Any) -> Floats:
    """Expected intersection over union of two sets of sizes `first` and `second`; NaN if empty."""
    given = np.stack(np.broadcast_arrays(first, second, total)).astype(np.int64)
    cases, inverse = np.unique(given.reshape(3, -1), axis=1, return_inverse=True)
    parts = range(0, max(1, cases.shape[1]), _CASES)
    means = np.concatenate([_iou(*cases[:, i : i + _CASES, None]) for i in parts])
    return means[inverse.ravel()].reshape(given.shape[1:])


#: Cases whose terms are in memory together.
_CASES = 1 << 13


def _iou(a: Ints, b: Ints, n: Ints) -> Floats:
    """Return the mean over the sizes of the intersection, which is hypergeometric; [cases, 1].

    Sizes farther from their mean than 8 standard deviations and 30 are left out: by Bernstein's
    inequality their probability is below 1e-18.
    """
    mean = a * b / n
    spread = 8 * np.sqrt(mean * (n - a) / n * (n - b) / np.maximum(n - 1, 1)) + 30
    low = np.maximum(np.maximum(0, a + b - n), np.ceil(mean - spread)).astype(np.int64)
    high = np.minimum(np.minimum(a, b), mean + spread).astype(np.int64)
    both = low + np.arange(int((high - low).max(initial=0)) + 1)
    inside = both <= high
    both = np.where(inside, both, low)
    logs = scipy.special.gammaln(np.arange(n.max(initial=0) + 1) + 1.0)
    terms = logs[both] + logs[a - both] + logs[b - both] + logs[n - a - b + both]
    weight = np.where(inside, np.exp(terms.min(-1, keepdims=True) - terms), 0.0)
    shares = share(both, a + b - both)
    out: Floats = (weight * shares).sum(-1) / weight.sum(-1)
    return out


def n_runs(total: Any, kept: Any) -> Floats:
    """Expected number of runs of evicted entries: a run begins at 0 or after a kept entry."""
    total, kept = (np.asarray(x, np.float64) for x in (total, kept))
    runs: Floats = (total - kept) * (kept + 1) / total
    return runs


def mean_run(total: Any, kept: Any) -> Floats:
    """Expected mean run of evicted entries, (total + 1) / (kept + 1) - 1 / C(total, kept).

    The number of runs is hypergeometric, and d E[1 / runs] = sum over r > 0 of
    C(d, r) C(kept + 1, r) / C(total, kept) with d = total - kept, which Vandermonde's identity
    sums. NaN where nothing is evicted.
    """
    total, kept = (np.asarray(x, np.float64) for x in (total, kept))
    mean: Floats = (total + 1) / (kept + 1) - 1 / scipy.special.binom(total, kept)
    return np.where(total > kept, mean, np.nan)


def share_in_runs(length: int, total: Any, kept: Any) -> Floats:
    """Expected share of the evicted entries that lie in runs of at least `length`.

    The gap before a kept entry is at least l long with probability P(l) = C(total - l, kept) /
    C(total, kept), and the sum of l over l >= length is P(length) (1 + kept length / evicted) of
    the evicted entries. NaN where nothing is evicted.
    """
    total, kept = (np.asarray(x, np.int64) for x in (total, kept))
    evicted = total - kept
    possible = evicted >= length
    long = np.where(
        possible, scipy.stats.hypergeom.pmf(0, total, np.where(possible, length, 0), kept), 0.0
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        long = long * (1.0 + kept * length / evicted)
    return np.where(evicted > 0, long, np.nan)
