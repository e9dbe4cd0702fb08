"""Whether mean differences between policies are beyond chance, and how many prompts tell.

If two policies were equally good, each prompt could as well have shown the opposite difference. So
a mean difference is compared with those under flips of signs (Fisher 1935, The Design of
Experiments, 21). This assumes no distribution, but no p-value is below 2^(1 - prompts).
"""

from __future__ import annotations

from math import ceil, log2

import numpy as np
import scipy

from kvsim.analysis.arrays import Floats
from kvsim.schema import plural

#: Chance that any difference of a comparison is called beyond chance although all are equal.
ALPHA = 0.05
#: Chance that `prompts_needed` show a difference as large as the measured one.
POWER = 0.8
#: Most prompts that `prompts_needed` asks for.
MOST = 10_000

# Sign flips of more prompts are drawn.
_FLIPS = 1 << 16
# Pairs and flips that are multiplied at once.
_PAIRS, _ROWS = 512, 1 << 14


def sign_flip(gaps: Floats) -> Floats:
    """Two-sided p-values of mean differences [pair] under flips of signs; gaps [pair, prompt].

    The share of flips whose mean is at least as far from 0. All of them up to 17 prompts, above
    that enough random ones, seed 0, that the smallest p-value survives the correction for the
    number of pairs; the measured signs count as one (Phipson and Smyth 2010, SAGMB 9:39).
    """
    pairs, prompts = gaps.shape
    exact, flips = _flips(prompts, pairs)
    if exact:
        signs = 1 - 2.0 * (np.arange(flips)[:, None] >> np.arange(prompts) & 1)
    else:
        signs = np.random.default_rng(0).integers(0, 2, (flips, prompts)) * 2.0 - 1
    p = np.empty(pairs)
    for start in range(0, pairs, _PAIRS):
        part = gaps[start : start + _PAIRS]
        least = np.abs(part.sum(1)) - 1e-12 * np.abs(part).sum(1)  # rounding decides no tie
        far = np.zeros(len(part), np.int64)
        for row in range(0, len(signs), _ROWS):
            far += (np.abs(signs[row : row + _ROWS] @ part.T) >= least).sum(0)
        p[start : start + _PAIRS] = far / len(signs) if exact else (far + 1) / (len(signs) + 1)
    return p


def _flips(prompts: int, pairs: int) -> tuple[bool, int]:
    """Return whether all flips of signs are tried, and how many are tried."""
    every = 1 << (prompts - 1)  # the opposite of a flip is as far from 0
    return (True, every) if every <= _FLIPS else (False, max(_FLIPS, ceil(4 * pairs / ALPHA)))


def least_p(prompts: int, pairs: int) -> float:
    """Return the smallest p-value that `sign_flip` can have."""
    exact, flips = _flips(prompts, pairs)
    return 1 / (flips if exact else flips + 1)


def holm(p: Floats) -> Floats:
    """P-values corrected for their number: the chance of any false one stays at the level.

    Holm 1979, Scand. J. Statist. 6:65.
    """
    order = np.argsort(p)
    steps = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    corrected = np.empty(len(p))
    corrected[order] = np.minimum(steps, 1)
    return corrected


def fewest(level: float) -> int:
    """Return the fewest prompts whose sign flips can have a p-value of at most `level`."""
    return 1 + ceil(log2(1 / level) - 1e-9)


#: Fewer prompts have no interval and decide nothing.
FEWEST = fewest(ALPHA)


def few(prompts: int) -> str:
    """Return why so few prompts have no 95 % interval; empty for one, and for enough.

    A value is above the median of all prompts half of the time, so all of them are above it, or
    all below, in 2^(1 - prompts) of cases; the range holds every bootstrap interval.
    """
    if not 1 < prompts < FEWEST:
        return ""
    return (
        f"{prompts} prompts have no 95 % interval: even the range of their values misses the "
        f"median of all prompts in {2.0 ** (1 - prompts):.0%} of cases; record at least {FEWEST}"
    )


def undecidable(prompts: int, comparisons: int) -> str:
    """Return why so few prompts decide nothing, and how many could; empty where they can."""
    if not comparisons:
        return ""
    least = fewest(ALPHA / comparisons)
    if prompts == 1:
        return (
            f"one prompt decides nothing; at least {least} can. Record more (kvsim capture --model "
            "MODEL --prompts FILE.jsonl --out traces/more), and replay the same policies and "
            "budgets on traces/more"
        )
    if prompts < least:
        return (
            f"with {prompts} prompts no difference can be beyond chance after correction for "
            f"{plural(comparisons, 'comparison')}; that takes at least {least} prompts, or fewer "
            "policies or budgets"
        )
    return ""


def prompts_needed(gap: Floats, level: float) -> int:
    """Return how many prompts show a difference at a level with the chance `POWER`.

    For the mean and deviation of differences [prompt] as they are. The sample size of a t test
    (Guenther 1981, Am. Stat. 35:243), and at least `fewest`; at most `MOST`.
    """
    effect = abs(gap.mean()) / gap.std(ddof=1) if gap.std() else np.inf
    at_level, at_power = -scipy.special.ndtri(np.array([level / 2, 1 - POWER]))
    needed = min(((at_level + at_power) / max(effect, 1e-9)) ** 2 + at_level**2 / 2, MOST)
    return max(ceil(float(needed)), fewest(level))
