"""Pareto fronts: results that no other one beats at the cost of its cache."""

from __future__ import annotations

import polars as pl

from kvsim.analysis.registry import METRICS
from kvsim.analysis.summaries import KEYS, ROUNDING

#: Metrics of the cost of a cache, and the words of an axis.
COSTS = {
    "entries_seen": "entries that a row sees, mean",
    "bytes_held": "bytes of the cache, mean over rows",
    "bytes_read": "bytes of the cache that a row reads, mean",
}


def against_entries(means: pl.DataFrame, name: str, cost: str = "entries_seen") -> pl.DataFrame:
    """Return the means of one metric with what their cache costs, and their front.

    Args:
        means: of `averages`, with the metric and with the cost.
        name: of the metric.
        cost: one of `COSTS`; by default the entries that rows see.

    Returns:
        The rows of the metric that have the cost, with `seen`, its mean, and `best`, whether the
        result is on the front; never of a metric without a better direction.
    """
    keys = [key for key in KEYS[:5] if key in means.columns]  # columns of the result
    sizes = means.filter(metric=cost).select(*keys, seen="mean")
    points = means.filter(metric=name).join(sizes, on=keys, nulls_equal=True, maintain_order="left")
    better = METRICS[name].better
    best = front(points, higher=better == "higher") & (better is not None)
    return points.with_columns(best=best)


def front(points: pl.DataFrame, *, higher: bool = False) -> pl.Series:
    """Return which points (`seen`, `mean`) no other point beats in one and matches in the other.

    higher: a larger mean is better. Means that differ by no more than rounding are equal.
    """
    seen = points["seen"].to_numpy()
    loss = points["mean"].to_numpy() * (-1 if higher else 1)
    rounding = ROUNDING * abs(loss)
    as_good = (seen[:, None] <= seen) & (loss[:, None] <= loss + rounding)
    better = (seen[:, None] < seen) | (loss[:, None] < loss - rounding)
    return pl.Series(~(as_good & better).any(0))
