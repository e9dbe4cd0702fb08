"""Pareto fronts: results that no other result beats at as few entries seen."""

from __future__ import annotations

import polars as pl

from kvsim.analysis.registry import METRICS

#: Columns of `kvsim.analysis.averages` that identify a result.
_RESULT = ("policy", "params", "asked", "interval", "prefill")


def against_entries(means: pl.DataFrame, name: str) -> pl.DataFrame:
    """Return the means of one metric with the entries that their rows see, and their front.

    Args:
        means: of `kvsim.analysis.averages`, with the metric and with `entries_seen`.
        name: of the metric.

    Returns:
        The rows of the metric that have an `entries_seen`, with `seen`, its mean, and `best`,
        whether the result is on the front; never of a metric without a better direction.
    """
    keys = [key for key in _RESULT if key in means.columns]
    sizes = means.filter(metric="entries_seen").select(*keys, seen="mean")
    points = means.filter(metric=name).join(sizes, on=keys, nulls_equal=True, maintain_order="left")
    better = METRICS[name].better
    best = front(points, higher=better == "higher") & (better is not None)
    return points.with_columns(best=best)


def front(points: pl.DataFrame, *, higher: bool = False) -> pl.Series:
    """Which points (`seen`, `mean`) no other point beats in one and matches in the other; bool.

    higher: a larger mean is better.
    """
    seen = points["seen"].to_numpy()
    loss = points["mean"].to_numpy() * (-1 if higher else 1)
    as_good = (seen[:, None] <= seen) & (loss[:, None] <= loss)
    better = (seen[:, None] < seen) | (loss[:, None] < loss)
    return pl.Series(~(as_good & better).any(0))
