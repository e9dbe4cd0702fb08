"""Statistics of policies: which could be the best, bounds on differences, prompts needed.

X [prompt, policy] are means of a metric within a prompt, none missing. Prompts are the only unit;
with a task of each prompt [prompt] the mean is that over tasks, with equal weights.

If two policies were equally good, each prompt could as well have shown the opposite difference
(Fisher 1935, The Design of Experiments, 21). So differences are compared with their distribution
under sign flips, which assumes only symmetry; with very skewed values it is less reliable.
"""

from __future__ import annotations

import numpy as np
import scipy

from kvsim.analysis.arrays import Bools, Floats, Ints, Strings

#: Chance of a false exclusion from a set, a false bound or a false sentence.
ALPHA = 0.05
#: The part of `ALPHA` spent on the screen of clearly worse policies.
SCREEN = 0.01
#: Chance that `needed` prompts show a difference as large as the measured one.
POWER = 0.8
#: With fewer prompts there is no interval and no decision: their flips have no p-value of `ALPHA`.
FEWEST = 6
#: Fewest prompts of rank intervals, advised for every verdict.
ENOUGH = 12
#: Larger numbers of prompts are not reported.
MOST = 10_000

# Sign flips of a set, differences of no size, and of no order.
_SETS, _SAME, _TIE = 4096, 1e-12, 1e-9


def sign_flip(gaps: Floats) -> Floats:
    """Two-sided p-values of mean differences [pair] under sign flips; gaps [pair, prompt]."""
    sums = np.abs(gaps @ signs(gaps.shape[1]))
    return np.asarray((sums >= sums[:, :1] - _SAME * np.abs(gaps).sum(1, keepdims=True)).mean(1))


def holm(p: Floats) -> Floats:
    """Holm's corrected p-values, for the family-wise error rate (1979, Scand. J. Statist. 6:65)."""
    order = np.argsort(p)
    steps = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    corrected = np.empty(len(p))
    corrected[order] = np.minimum(steps, 1)
    return corrected


def signs(prompts: int) -> Floats:
    """Sign flips [prompt, flip], the identity first: up to 12 prompts all, else 4,096 random."""
    if 2**prompts <= _SETS:
        return np.asarray(1 - 2.0 * (np.arange(2**prompts) >> np.arange(prompts)[:, None] & 1))
    drawn = np.random.default_rng(0).integers(0, 2, (prompts, _SETS)).astype(np.float64) * 2 - 1
    drawn[:, 0] = 1
    return drawn


def weights(prompts: int, tasks: Strings | None = None) -> Floats:
    """The weight of each prompt [prompt] in a mean over prompts, or over tasks [prompt]."""
    if tasks is None:
        return np.full(prompts, 1.0 / prompts, np.float64)
    _, which, count = np.unique(tasks, return_inverse=True, return_counts=True)
    return np.asarray(1 / (len(count) * count[which]))


def _norms(y: Floats) -> Floats:
    """Roots of sums of squared differences [policy, policy]; 0 for two that are identical."""
    size = np.sqrt((y**2).sum(0))
    norms = np.sqrt(((y[:, :, None] - y[:, None, :]) ** 2).sum(0))
    return np.where(norms > _SAME * (size[:, None] + size), norms, 0)


def identical(x: Floats) -> Bools:
    """Which policies [policy, policy] no prompt distinguishes."""
    return np.asarray(_norms(x) == 0)


def _peaks(y: Floats, rivals: Bools) -> Floats:
    """The largest self-normalised sum of differences to a rival, under each flip [policy, flip].

    It grows with the paired t. rivals [policy]: neither the policy itself nor identical ones.
    """
    norms, sums = _norms(y), y.T @ signs(len(y))
    peaks = np.full(sums.shape, -np.inf)
    for i, of in enumerate(norms):
        j = np.flatnonzero(rivals & (of > 0))
        peaks[i] = ((sums[i] - sums[j]) / of[j, None]).max(0, initial=-np.inf)
    return peaks


def _share(peaks: Floats) -> Floats:
    """P-values [row] of the first of the flips [row, flip]; 1 without a rival."""
    return np.asarray((peaks >= peaks[:, :1] - _TIE).mean(1))


def best_set(x: Floats, tasks: Strings | None = None) -> tuple[Floats, Bools]:
    """P-values of "is a best policy" [policy], and the set [policy] that holds one with 95 %.

    Hsu's comparison with the best (1984, Ann. Stat. 12:1136), with the maximum under flips of signs
    in place of quantiles, against policies that are not clearly worse than the one of the lowest
    mean: this screen costs `SCREEN`.
    """
    y, n = x * weights(len(x), tasks)[:, None], len(x)
    behind = y - y[:, [y.sum(0).argmin()]]
    with np.errstate(divide="ignore", invalid="ignore"):
        t = behind.mean(0) / (behind.std(0, ddof=1) / np.sqrt(n))  # NaN: identical to that one
    near = ~(t > scipy.special.stdtrit(n - 1, 1 - SCREEN / 2))
    p = _share(_peaks(y, near))
    return p, p > ALPHA - SCREEN


def one_best(x: Floats, tasks: Strings) -> Floats:
    """P-values of "is the best in every task" [policy]; all up to `ALPHA`: no policy is.

    The smallest p-value over tasks, under the same flips in each.
    """
    every = np.ones(x.shape[1], bool)
    peaks = [_peaks(x * (tasks == task)[:, None], every).round(9) for task in np.unique(tasks)]
    ranks = (scipy.stats.rankdata(each, "min", axis=1) for each in peaks)
    return _share(np.maximum.reduce([*ranks]))


def interaction(x: Floats, tasks: Strings) -> float:
    """P-value of "ratios between policies are the same in all tasks", of values of at least 0.

    Logarithms, centred within prompts and scaled by policy; tasks are permuted 999 times.
    """
    logs = np.log(np.maximum(x, min(x[x > 0], default=1.0)))
    logs = logs - logs.mean(1, keepdims=True)
    logs = (logs - logs.mean(0)) / np.where(logs.std(0) > _SAME, logs.std(0), 1)
    rng, which = np.random.default_rng(0), np.unique(tasks, return_inverse=True)[1]
    labels = np.stack([which, *(rng.permutation(which) for _ in range(999))])
    member = (labels[:, None] == np.arange(which.max() + 1)[:, None]).astype(float)
    between = ((member @ logs) ** 2 / member.sum(2)[:, :, None]).sum((1, 2))
    return float((between >= between[0] - _TIE).mean())


def excess(x: Floats, tasks: Strings | None = None, *, higher: bool = False) -> Floats:
    """The most by which the mean of policy i exceeds that of j [i, j], as a share; inf: no bound.

    Of values above 0. Each bound is 95 % on its own (Fieller 1954, J. R. Stat. Soc. B 16:175).
    higher: is better; then by how much i falls short of j.
    """
    mean, covariance, reach = _means(x, tasks)
    variance = np.diag(covariance)
    a, b = mean**2 - reach**2 * variance, np.outer(mean, mean) - reach**2 * covariance
    root = np.sqrt(np.maximum(b**2 - a * a[:, None], 0))
    with np.errstate(divide="ignore", invalid="ignore"):
        over = 1 - np.maximum(b - root, 0) / a if higher else (b + root) / a - 1
    over = np.where(a > 0, np.maximum(over, 0), np.inf)
    np.fill_diagonal(over, 0)
    return np.where(identical(x), 0, over)


def behind(x: Floats, tasks: Strings | None = None) -> Floats:
    """The most by which the mean of policy i exceeds that of j [i, j], in the unit of the values.

    Each 95 % on its own (paired t); for values of any sign.
    """
    mean, covariance, reach = _means(x, tasks)
    variance = np.diag(covariance)
    spread = np.sqrt(np.maximum(variance + variance[:, None] - 2 * covariance, 0))
    return np.where(identical(x), 0, np.maximum(mean[:, None] - mean + reach * spread, 0))


def _means(x: Floats, tasks: Strings | None) -> tuple[Floats, Floats, float]:
    """Means [policy] over prompts or tasks, their covariance, and the quantile of t."""
    parts = [x] if tasks is None else [x[tasks == task] for task in np.unique(tasks)]
    count, k = len(parts), x.shape[1]
    mean = np.sum([part.mean(0) for part in parts], axis=0) / count
    of_parts = [np.cov(part.T).reshape(k, k) / len(part) for part in parts]
    reach = scipy.special.stdtrit(len(x) - count, 1 - ALPHA)
    return mean, np.sum(of_parts, axis=0) / count**2, float(reach)


def rank_intervals(x: Floats, tasks: Strings | None = None) -> tuple[Ints, Ints]:
    """First and last possible rank [policy], jointly right with 95 % (step-down max |t|)."""
    y = x * weights(len(x), tasks)[:, None]
    norms, sums = _norms(y), y.T @ signs(len(y))
    i, j = np.nonzero(np.triu(norms > 0))
    of_pair = (sums[i] - sums[j]) / norms[i, j, None]
    open_, size = np.ones(len(i), bool), np.abs(of_pair)
    while open_.any():
        cut = np.quantile(size[open_].max(0), 1 - ALPHA, method="higher")
        beyond = open_ & (size[:, 0] > cut + _TIE)
        if not beyond.any():
            break
        open_ &= ~beyond
    worse = np.zeros(norms.shape, np.int64)
    more = of_pair[:, 0] > 0
    worse[np.where(more, i, j), np.where(more, j, i)] = ~open_
    return 1 + worse.sum(1), len(norms) - worse.sum(0)


def needed(x: Floats, y: Floats, rivals: int = 1) -> tuple[float, float, float]:
    """Prompts that show x [prompt] better than y with power `POWER`, and an 80 % interval.

    inf: no number would. rivals: other members of the set of the best.
    """
    gap, level = y - x, -scipy.special.ndtri((ALPHA - SCREEN) / rivals)
    spread = gap.std(ddof=1)
    effect = gap.mean() / spread if spread > 0 else np.copysign(np.inf, gap.mean() or -1)
    at_power, reach = scipy.special.ndtri([POWER, 0.9])
    half = reach * np.sqrt(1 / len(gap) + effect**2 / (2 * len(gap))) if spread > 0 else 0.0

    def count(effect: float) -> float:
        if effect <= 0:
            return np.inf
        return float(max(FEWEST, ((level + at_power) / effect) ** 2 + level**2 / 2))

    return count(effect), count(effect + half), count(effect - half)


def at_least(gaps: Floats, cells: int) -> float:
    """P-value of "better in at least so many cells"; gaps [prompt, cell], positive where better.

    One p-value for the sentence: cells are budgets, layers or tasks, all of the same prompts.
    """
    norms = np.sqrt((gaps**2).sum(0))
    sums = (gaps.T @ signs(len(gaps))) / np.where(norms > 0, norms, 1)[:, None]
    ranks = scipy.stats.rankdata(sums.round(9), "min", axis=1)  # of p-values, largest first
    weakest = ranks[:, 0].argsort(kind="stable")[: gaps.shape[1] - cells + 1]
    return float(_share(ranks[weakest].max(0, keepdims=True))[0])
