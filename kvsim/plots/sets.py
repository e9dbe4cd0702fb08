"""Figures of kept sets: their positions in the sequence, and how much of them stays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from kvsim.analysis.definition import mean_known
from kvsim.analysis.kept.coverage import BINS, MIDDLE, kept_coverage, retained_positions
from kvsim.analysis.summaries import averages, stages
from kvsim.core.record import Record
from kvsim.core.trace import Trace
from kvsim.errors import PolicyError, suggest
from kvsim.plots.prompts import Ints, Prompts, Shown, counted, mean_line
from kvsim.plots.style import (
    asked_order,
    bare_series,
    finish,
    name_axes,
    plain,
    series,
    short_text,
)

Floats = NDArray[np.float64]

_SHADE = "#f2efe9"
_Panels = tuple[Figure, list[Axes]]


def middle_coverage(
    traces: Sequence[Trace],
    records: Sequence[Record],
    *,
    layer: int | None = None,
    head: int | None = None,
    bins: int = BINS,
) -> Figure:
    """Share kept of each part of the sequence, a line per policy; a panel per budget.

    AMS (arXiv 2605.23200), Fig. 4 (a). Mean over events, heads and layers, then over prompts with
    the 95 % interval. Dotted, in the policy's colour: a set of its size that prefers no
    position. The middle third is shaded.

    layer, head: all by default. bins: parts of equal width.
    """

    def curves(gone: list[Ints]) -> Floats | None:
        every = (kept_coverage(one, bins) for one in gone)
        coverages = [coverage for coverage in every if len(coverage.rows)]
        if not coverages:
            return None
        lines = [mean_known(one.curve).mean(0) for one in coverages]
        flat = [one.overall.mean() for one in coverages]
        return np.stack([mean_known(np.stack(lines, axis=-1)), np.full(bins, np.mean(flat))])

    shown = Shown(layer, head)
    found = Prompts.of(traces, records, shown, curves)
    figure, axes = _panels(found.budgets)
    styles = series(found.policies)
    centres = (np.arange(bins) + 0.5) / bins
    first, last = map(float, MIDDLE)
    for axis, asked in zip(axes, found.budgets, strict=True):
        axis.axvspan(first, last, color=_SHADE, zorder=0)
        for policy in found.policies:
            values = found.values.get((policy, asked))
            if values is None:
                continue
            lines, flat = zip(*values, strict=True)
            mean_line(axis, centres, lines, label=policy, lw=1.3, ms=3, **styles[policy])
            axis.plot(centres, np.mean(flat, 0), ":", lw=1, color=styles[policy]["color"])
    what = f"Where kept entries lie: {shown.text(traces[0])}, mean over {found.counted}"
    what += "\nshaded: middle third; dotted: no position preferred"
    return _finished(figure, axes, "share of the positions kept", what, found)


def iou_by(table: pl.DataFrame, by: str = "stage") -> Figure:
    """Retained-set IoU of each policy by stage of the model or a label; a panel per budget.

    AMS (arXiv 2605.23200), Fig. 5 and Table 14. Mean over prompts with the 95 % interval; a short
    black line across each bar is chance, the IoU of sets of the same sizes without memory.

    table: with the metric `retained_iou`. by: a column of it: domain, task, level, layer, or the
    stage that `kvsim.analysis.summaries.stages` adds; without that column the stages are those of
    the layers in the table. PolicyError if there is no such column, or no IoU with a value in it.
    """
    if by == "stage" and by not in table.columns:
        table = stages(table)
    if by not in table.columns:
        raise PolicyError(f"the table has no column {by!r}{suggest(by, table.columns)}")
    wanted = (pl.col("metric") == "retained_iou") & (pl.col("variant") == "")
    found = averages(table.filter(wanted & pl.col(by).is_not_null()), [by])
    found = found.filter(pl.col("mean").is_not_null())
    if not found.height:
        raise PolicyError(
            f"the table has no retained_iou by {by}; it takes two events of a policy, and "
            f"traces with a {by}"
        )
    groups = found[by].unique().sort().to_list()
    budgets = asked_order(found["asked"].to_list())
    styles = series(found["policy"].unique(maintain_order=True))
    width = max(3.4, 0.16 * len(groups) * (len(styles) + 1) + 0.8)
    figure, axes = _panels(budgets, width, 0)
    bar = 0.8 / len(styles)
    for axis, asked in zip(axes, budgets, strict=True):
        for place, (policy, style) in enumerate(styles.items()):
            part = found.filter(policy=policy, asked=asked)
            at = np.array([groups.index(group) for group in part[by]], dtype=np.float64)
            at += (place - (len(styles) - 1) / 2) * bar
            mean = part["mean"].to_numpy()
            ends = np.abs(part.select("low", "high").cast(pl.Float64).to_numpy().T - mean)
            axis.bar(at, mean, 0.9 * bar, color=style["color"], label=policy, zorder=2)
            look: dict[str, Any] = {"ecolor": "black", "elinewidth": 0.8, "capsize": 1.5}
            axis.errorbar(at, mean, ends, fmt="none", zorder=3, **look)  # not drawn where null
            chance = part["chance"].cast(pl.Float64).to_numpy()
            axis.hlines(chance, at - 0.45 * bar, at + 0.45 * bar, color="black", lw=1.2, zorder=4)
        names = [short_text(str(group), 16) for group in groups]
        axis.set_xticks(range(len(groups)), names, parse_math=False)
        plain(axis, by, title=f"budget {asked}")
        axis.set_ylim(0, 1)
    name_axes(axes[0], y="IoU of consecutive kept sets")
    what = f"Retained-set IoU by {by}, mean over {counted(found['n'])}\nacross bars: chance"
    finish(figure, axes[0], what, found["fidelity"], columns=5)
    return figure


def position_density(
    traces: Sequence[Trace],
    records: Sequence[Record],
    *,
    layer: int | None = None,
    head: int | None = None,
    bins: int = BINS,
) -> Figure:
    """Density of the positions that the last event keeps, a line per policy; a panel per budget.

    G-KV (arXiv 2512.00504), Fig. 7, which smooths; here a histogram with area 1, which is 0 where
    no entry is. Entries of all layers and heads together; every prompt has the same weight. The
    vertical line is the mean of the policy; dotted is a uniform set, density 1 with mean 1/2.

    layer, head: all by default. bins: of equal width.
    """

    def density(gone: list[Ints]) -> Floats | None:
        found = [retained_positions(one) for one in gone]
        relative = np.concatenate([np.zeros(0), *(one.relative for one in found if one)])
        if not len(relative):
            return None
        heights, _ = np.histogram(relative, bins, (0, 1), density=True)
        return np.append(heights, relative.mean())

    shown = Shown(layer, head)
    found = Prompts.of(traces, records, shown, density)
    figure, axes = _panels(found.budgets)
    styles = bare_series(found.policies)
    for axis, asked in zip(axes, found.budgets, strict=True):
        axis.axhline(1.0, color="black", lw=0.9, ls=":")
        axis.axvline(0.5, color="black", lw=0.9, ls=":")
        for policy in found.policies:
            values = found.values.get((policy, asked))
            if values is None:
                continue
            heights = [np.append(one[:bins], one[bins - 1]) for one in values]
            style = {**styles[policy], "drawstyle": "steps-post"}
            mean_line(axis, np.arange(bins + 1) / bins, heights, label=policy, lw=1.3, **style)
            mean = float(np.mean([one[bins] for one in values]))
            axis.axvline(mean, color=styles[policy]["color"], lw=1, ls=styles[policy]["linestyle"])
    what = f"What the last event keeps: {shown.text(traces[0])}, mean over {found.counted}"
    what += "\nvertical: mean; dotted: uniform"
    return _finished(figure, axes, "density of kept entries (area 1)", what, found)


def _panels(budgets: Sequence[str], width: float = 3.4, room: float = 0.4) -> _Panels:
    """Build a panel per budget, side by side; width: of one, inches."""
    figure = Figure(figsize=(max(5.6, width * len(budgets) + room), 3.6), dpi=150)
    return figure, list(figure.subplots(1, len(budgets), squeeze=False, sharey=True)[0])


def _finished(
    figure: Figure, axes: Sequence[Axes], label: str, what: str, found: Prompts
) -> Figure:
    """Name the axes of panels over relative positions, and draw caption and legend."""
    for axis, asked in zip(axes, found.budgets, strict=True):
        axis.set_xlim(0, 1)
        axis.set_ylim(bottom=0)
        plain(axis, "relative position (0: first, 1: at the event)", title=f"budget {asked}")
    name_axes(axes[0], y=label)
    finish(figure, axes[0], what, found.fidelities, columns=5)
    return figure
