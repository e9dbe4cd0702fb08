"""Figures of a whole Table: policies compared over budgets, with their intervals."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvsim.analysis.fronts import against_entries
from kvsim.analysis.registry import METRICS, metric
from kvsim.analysis.summaries import averages
from kvsim.errors import PolicyError
from kvsim.plots.style import asked_order, counted, finish, plain, series

#: Metrics of `over_budgets` by default.
SHOWN = ("output_error", "retained_mass", "wipeout")


def over_budgets(table: pl.DataFrame, metrics: Sequence[str] = SHOWN) -> Figure:
    """Each metric against the budget, a line per policy: mean over prompts and 95 % interval.

    metrics: a panel each, their main variants; those that the table lacks are left out, PolicyError
    if it has none.
    """
    means = _means(table, metrics)
    shown = [name for name in metrics if name in set(means["metric"])]
    budgets = asked_order(means["asked"].to_list())
    styles = series(means["policy"].unique(maintain_order=True))
    figure, axes = _panels(len(shown), (3.3, 2.9), len(styles))
    for axis, name in zip(axes, shown, strict=True):
        of_metric = means.filter(metric=name)
        for policy, style in styles.items():
            part = of_metric.filter(policy=policy)
            at = np.array([budgets.index(asked) for asked in part["asked"]])
            low, mean, high = (part[end].to_numpy() for end in ("low", "mean", "high"))
            axis.fill_between(at, low, high, color=style["color"], alpha=0.15, lw=0)
            axis.plot(at, mean, label=policy, lw=1.3, ms=4, **style)
        axis.set_xticks(range(len(budgets)), budgets)
        plain(axis, _budget_label(budgets), metric_label(name))
    finish(figure, axes[0], f"Mean over {counted(means['n'])}", means["fidelity"], columns=6)
    return figure


def pareto(table: pl.DataFrame, metrics: Sequence[str] = ("output_error", "wipeout")) -> Figure:
    """Each metric against the entries that rows really saw; policies on the front are filled.

    A policy at a budget is on the front if no other result is better with as few entries. A metric
    without a better direction has no front. Budgets bind policies differently, so the axis is
    `entries_seen` instead of the requested budget.

    metrics: as in `over_budgets`; the table needs `entries_seen` too.
    """
    means = _means(table, [*metrics, "entries_seen"])
    measured = set(means["metric"])
    shown = [name for name in metrics if name in measured]
    if not shown or "entries_seen" not in measured:
        raise PolicyError(
            f"a Pareto figure needs entries_seen and one of {', '.join(metrics)}; the table has "
            f"{', '.join(sorted(measured))}"
        )
    styles = series(means["policy"].unique(maintain_order=True))
    figure, axes = _panels(len(shown), (4.2, 3.1), len(styles))
    for axis, name in zip(axes, shown, strict=True):
        points = against_entries(means, name)
        for policy, style in styles.items():
            part = points.filter(policy=policy).sort("seen")
            at, mean = part["seen"].to_numpy(), part["mean"].to_numpy()
            ends = np.abs(part.select("low", "high").to_numpy().T - mean)
            whisker = {"fmt": "none", "ecolor": style["color"], "elinewidth": 0.7}
            axis.errorbar(at, mean, np.nan_to_num(ends), **whisker)
            axis.plot(at, mean, lw=0.8, ms=4, mfc="white", label=policy, **style)
            on = part["best"].to_numpy()
            axis.plot(at[on], mean[on], ms=7, **{**style, "linestyle": "none"})
        plain(axis, "entries that a row sees, mean", metric_label(name))
    neutral = any(METRICS[name].better is None for name in shown)
    marked = "on the front" + ", where one direction is better" * neutral
    what = f"Mean over {counted(means['n'])}; filled: {marked}"
    finish(figure, axes[0], what, means["fidelity"], columns=6)
    return figure


def _means(table: pl.DataFrame, metrics: Sequence[str]) -> pl.DataFrame:
    """Averages of the main variants of what belongs to a policy."""
    wanted = [
        (pl.col("metric") == name) & (pl.col("variant") == metric(name).main) for name in metrics
    ]
    means = averages(table.filter(pl.col("policy").is_not_null() & pl.any_horizontal(wanted)))
    means = means.filter(pl.col("mean").is_not_null())
    if not means.height:
        measured = ", ".join(table["metric"].unique(maintain_order=True)) or "none"
        raise PolicyError(f"the table has no value of {', '.join(metrics)}; it has {measured}")
    return means


def _panels(count: int, size: tuple[float, float], lines: int) -> tuple[Figure, list[Axes]]:
    """Build `count` panels of a size in inches, at most three in a row; lines in the legend."""
    across = min(3, count)
    rows = -(-count // across)
    shape = (max(5.6, size[0] * across + 0.4), size[1] * rows + 0.7 + 0.05 * lines)
    figure = Figure(figsize=shape, dpi=150)
    grid = figure.subplots(rows, across, squeeze=False)
    for axis in grid.flat[count:]:
        axis.remove()
    return figure, list(grid.flat[:count])


def metric_label(name: str) -> str:
    """Return a metric's name with its unit and its better direction, for an axis."""
    entry = METRICS[name]
    better = f", {entry.better} is better" if entry.better else ""
    return f"{name.replace('_', ' ')} ({entry.unit}{better})"


def _budget_label(budgets: Sequence[str]) -> str:
    shares = [size.endswith("%") for size in budgets]
    unit = "entries or share of the trace" if any(shares) else "entries"
    return f"budget per KV head ({'share of the trace' if all(shares) else unit})"
