"""What random kept sets of the same size would give, exactly.

`kept` of `total` entries are drawn without replacement; every function broadcasts its arguments.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def log_choose(n: Any, k: Any) -> Floats:
    """Logarithm of the number of ways to choose k of n; -inf where there is none."""
    n, k = np.broadcast_arrays(np.asarray(n, np.int64), np.asarray(k, np.int64))
    possible = (k >= 0) & (k <= n)
    factorial = _log_factorials(int(n.max(initial=0)).bit_length())
    n, k = np.where(possible, n, 0), np.where(possible, k, 0)
    ways = factorial[n] - factorial[k] - factorial[n - k]
    out: Floats = np.where(possible, ways, -np.inf)
    return out


@lru_cache(maxsize=4)
def _log_factorials(bits: int) -> Floats:
    """Logarithms of the factorials of the numbers of so many bits."""
    table: Floats = torch.lgamma(torch.arange(1 << bits, dtype=torch.float64) + 1).numpy()
    return table


def at_most(most: int, marked: Any, total: Any, kept: Any) -> Floats:
    """Probability that no more than `most` of `marked` entries are kept (hypergeometric)."""
    ways = log_choose(total, kept)
    marked, total, kept = (np.asarray(x, np.int64) for x in (marked, total, kept))
    out = np.zeros(ways.shape)
    for count in range(most + 1):
        of_others = log_choose(total - marked, kept - count)
        out += np.exp(log_choose(marked, count) + of_others - ways)
    return np.minimum(out, 1.0)


def n_runs(total: Any, kept: Any) -> Floats:
    """Expected number of runs of dropped entries: a run begins at 0 or behind a kept entry."""
    total, kept = (np.asarray(x, np.float64) for x in (total, kept))
    out: Floats = (total - kept) * (kept + 1) / total
    return out


def mean_run(total: Any, kept: Any) -> Floats:
    """Expected mean run of dropped entries, (total + 1) / (kept + 1) - 1 / C(total, kept).

    The number of runs is hypergeometric, and d E[1 / runs] = sum over r > 0 of
    C(d, r) C(kept + 1, r) / C(total, kept) with d = total - kept, which Vandermonde's identity
    sums. NaN where nothing is dropped.
    """
    total, kept = (np.asarray(x, np.int64) for x in (total, kept))
    mean: Floats = (total + 1.0) / (kept + 1.0) - np.exp(-log_choose(total, kept))
    return np.where(total > kept, mean, np.nan)


def share_in_runs(length: int, total: Any, kept: Any) -> Floats:
    """Expected share of the dropped entries that lie in runs of at least `length`.

    A gap between kept entries is at least l long with probability P(l) = C(total - l, kept) /
    C(total, kept), and the sum of l over l >= length is P(length) (1 + kept length / dropped) of
    the dropped entries. NaN where nothing is dropped.
    """
    total, kept = (np.asarray(x, np.int64) for x in (total, kept))
    dropped = total - kept
    long = np.exp(log_choose(total - length, kept) - log_choose(total, kept))
    out = np.full(long.shape, np.nan)
    np.divide(kept * length, dropped, out=out, where=dropped > 0)
    return long * (1.0 + out)
