"""The verdict's statistics, pair by pair and flip by flip: what their definitions say.

Values are arrays [prompt, policy], lower is better; all that follows is Python's floats.
"""

import itertools
import math
from statistics import fmean, stdev, variance

from scipy import stats


def flips_of(n):
    """Each choice of signs; the first flips nothing."""
    return list(itertools.product((1, -1), repeat=n))


def columns(x, tasks=None):
    """Values of each policy, times the weights of their prompts."""
    tasks = ["all"] * len(x) if tasks is None else list(tasks)
    weight = [1 / (len(set(tasks)) * tasks.count(task)) for task in tasks]
    return [[w * v for w, v in zip(weight, of, strict=True)] for of in x.T.tolist()]


def sum_of(a, b, flip):
    """The sum of flipped differences by the root of that of their squares; None: identical."""
    gaps = [v - w for v, w in zip(a, b, strict=True)]
    norm = math.sqrt(sum(gap**2 for gap in gaps))
    if norm <= 1e-12 * (math.hypot(*a) + math.hypot(*b)):
        return None
    return sum(s * gap for s, gap in zip(flip, gaps, strict=True)) / norm


def largest(ys, i, rivals, flip):
    """The largest such sum of a policy against rivals; None without any."""
    sums = [sum_of(ys[i], ys[j], flip) for j in rivals if j != i]
    return max((u for u in sums if u is not None), default=None)


def p_of_best(x, tasks=None):
    """P-values of "is the best", as the definition says."""
    ys, n = columns(x, tasks), len(x)
    lead = min(range(len(ys)), key=lambda i: math.fsum(ys[i]))
    near = []
    for j, y in enumerate(ys):
        gaps = [v - w for v, w in zip(y, ys[lead], strict=True)]
        if sum_of(y, ys[lead], [1] * n) is None:
            near.append(j)
        elif stdev(gaps) > 1e-15:
            t = fmean(gaps) / stdev(gaps) * math.sqrt(n)
            near += [j] if t <= stats.t.ppf(0.995, n - 1) else []
        elif fmean(gaps) <= 0:
            near.append(j)
    p = []
    for i in range(len(ys)):
        observed = largest(ys, i, near, [1] * n)
        reach = [largest(ys, i, near, flip) for flip in flips_of(n)] if observed is not None else []
        p.append(fmean(u >= observed - 1e-9 for u in reach) if reach else 1.0)
    return p


def ranks(x, tasks=None):
    """Step by step: pairs that at most 5 % of flips reach with their largest are decided."""
    ys, flips = columns(x, tasks), flips_of(len(x))
    sums = {
        pair: [sum_of(ys[pair[0]], ys[pair[1]], flip) for flip in flips]
        for pair in itertools.combinations(range(len(ys)), 2)
    }
    sums = {pair: each for pair, each in sums.items() if each[0] is not None}
    decided = set()
    while True:
        left = [pair for pair in sums if pair not in decided]
        tops = [max(abs(sums[pair][s]) for pair in left) for s in range(len(flips))] if left else []
        new = {
            pair
            for pair in left
            if sum(top >= abs(sums[pair][0]) - 1e-9 for top in tops) <= 0.05 * len(flips)
        }
        if not new:
            break
        decided |= new
    worse = [(i, j) if sums[i, j][0] > 0 else (j, i) for i, j in decided]
    first = [1 + sum(i == policy for i, _ in worse) for policy in range(len(ys))]
    last = [len(ys) - sum(j == policy for _, j in worse) for policy in range(len(ys))]
    return first, last


def p_of_one_best(x, tasks):
    """The smallest p-value over tasks, under each flip of all prompts."""
    flips = flips_of(len(x))
    smallest = [[1.0] * len(flips) for _ in x.T]
    for task in dict.fromkeys(tasks):
        ys = [[v * (t == task) for v, t in zip(of, tasks, strict=True)] for of in x.T.tolist()]
        for i in range(len(ys)):
            tops = [largest(ys, i, range(len(ys)), flip) for flip in flips]
            if tops[0] is None:
                continue
            tops = [round(top, 9) for top in tops]
            reach = {top: fmean(each >= top for each in tops) for top in set(tops)}
            smallest[i] = [min(p, reach[top]) for p, top in zip(smallest[i], tops, strict=True)]
    return [fmean(p <= each[0] + 1e-12 for p in each) for each in smallest]


def largest_ratio(x, y, tasks, *, higher=False):
    """The largest ratio of means that a one-sided t test at 5 % leaves, by bisection."""
    groups = [[p for p, of in enumerate(tasks) if of == task] for task in dict.fromkeys(tasks)]
    c = stats.t.ppf(0.95, len(x) - len(groups))

    def t(ratio):
        parts = [[x[p] - ratio * y[p] for p in group] for group in groups]
        mean = fmean(fmean(part) for part in parts)
        error = math.sqrt(sum(variance(part) / len(part) for part in parts)) / len(groups)
        return mean / error if error else math.inf * mean

    low, high = 0.0, 1e6
    if t(high) > -c:
        return math.inf
    for _ in range(60):
        middle = (low + high) / 2
        outside = t(middle) < c if higher else t(middle) < -c
        low, high = (low, middle) if outside else (middle, high)
    return max(1 - high if higher else high - 1, 0)
