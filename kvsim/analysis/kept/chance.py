"""Exact expectations for random kept sets of the same size.

`kept` of `total` entries are drawn without replacement. Every function broadcasts its arguments.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import scipy

from kvsim.analysis.arrays import Floats


def at_most(most: Any, marked: Any, total: Any, kept: Any) -> Floats:
    """Probability that no more than `most` of `marked` entries are kept (hypergeometric)."""
    given = np.broadcast_arrays(most, marked, total, kept)
    # heads and events repeat few cases
    shape = [1 + int(x.max(initial=0)) for x in given]
    different, at = np.unique(np.ravel_multi_index(given, shape), return_inverse=True)
    cases = np.unravel_index(different, shape)
    if len(different) <= _FEW:
        single = (_at_most(*case) for case in zip(*(x.tolist() for x in cases), strict=True))
        return np.fromiter(single, np.float64, len(different))[at]
    most, marked, total, kept = cases
    probability: Floats = scipy.stats.hypergeom.cdf(most, total, marked, kept)
    return probability[at]


#: Up to so many cases are looked up first: the first events of records of a trace share them.
_FEW = 16


@lru_cache(1 << 16)
def _at_most(most: int, marked: int, total: int, kept: int) -> float:
    return float(scipy.stats.hypergeom.cdf(most, total, marked, kept))


def n_runs(total: Any, kept: Any) -> Floats:
    """Expected number of runs of evicted entries: a run begins at 0 or after a kept entry."""
    total, kept = (np.asarray(x, np.float64) for x in (total, kept))
    out: Floats = (total - kept) * (kept + 1) / total
    return out


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
