"""Whether two rankings of policies agree: Spearman's correlation and its interval."""

from __future__ import annotations

import numpy as np

from kvsim.analysis.arrays import Floats
from kvsim.analysis.significance import ENOUGH


def rank_correlation(
    x: Floats, y: Floats, draws: int = 10_000, *, same: bool = True
) -> tuple[float, float, float]:
    """Spearman correlation of two rankings by means [prompt, policy], and its 95 % interval.

    Policies and prompts, the same of both unless `same` is False, are drawn with replacement; the
    interval is shifted by what noise takes from the correlation. It is NaN for fewer than 8
    policies or 12 prompts, and where the `reliability` of a ranking is below 0.8, of more than 12
    policies 0.95: there it missed the correlation too often in simulations.
    """
    rng, k, both = np.random.default_rng(0), x.shape[1], (x, y)
    means = float(_spearman(x.mean(0), y.mean(0)))
    least = 0.8 if k <= 12 else 0.95
    if k < 8 or min(map(len, both)) < ENOUGH or min(map(reliability, both)) < least:
        return means, np.nan, np.nan
    shares = [rng.multinomial(n, np.full(n, 1 / n), draws) / n for n in (len(x), len(y))[same:]]
    at, drawn = rng.integers(0, k, (draws, k)), (shares[0] @ x, shares[-1] @ y)
    resampled = _atanh(_spearman(*(np.take_along_axis(each, at, 1) for each in drawn)))
    shift = _atanh(np.array(means)) - np.nanmedian(_atanh(_spearman(*drawn)))
    low, high = np.tanh(np.nanquantile(resampled, [0.025, 0.975]) + shift)
    return means, min(float(low), means), max(float(high), means)


def _spearman(a: Floats, b: Floats) -> Floats:
    """Rank correlations over the last axis; NaN where all are equal."""
    ranks = []  # twice the distance of mid-ranks from their mean
    for x in (a[..., None], b[..., None]):
        below = x > np.swapaxes(x, -1, -2)
        ranks.append(below.sum(-1) - below.sum(-2))
    a, b = ranks
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray((a * b).sum(-1) / np.sqrt((a**2).sum(-1) * (b**2).sum(-1)))


def _atanh(correlation: Floats) -> Floats:
    return np.asarray(np.arctanh(np.clip(correlation, -0.999, 0.999)))


def reliability(x: Floats) -> float:
    """The share of the variance between means of policies [prompt, policy] that is not noise."""
    noise = (x - x.mean(1, keepdims=True)).var(0, ddof=1).mean() / len(x)
    spread = x.mean(0).var(ddof=1)
    return float(1 - noise / spread) if spread > 0 else 0.0
