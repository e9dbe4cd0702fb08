"""Figures of kept sets: their positions in the sequence, and how much of them stays."""

from __future__ import annotations

from collections.abc import Sequence

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
    caption,
    legend_below,
    plain,
    series,
    short_text,
)

Floats = NDArray[np.float64]

_POSITION = "relative position (0: first, 1: at the event)"
_SHADE = "#f2efe9"


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

    Args:
        traces: of which the records are.
        records: policies and budgets.
        layer: index in the trace, all by default.
        head: KV head, all by default.
        bins: parts of equal width.

    Raises:
        TraceError: a record of another trace.
        PolicyError: nothing left in any record.
    """

    def curves(gone: list[Ints]) -> Floats | None:
        found = [kept_coverage(one, bins) for one in gone]
        known = [one for one in found if len(one.rows)]
        if not known:
            return None
        lines = [mean_known(one.curve).mean(0) for one in known]
        flat = np.array([one.overall.mean() for one in known])
        return np.stack([mean_known(np.stack(lines, axis=-1)), np.full(bins, flat.mean())])

    shown = Shown(layer, head)
    found = Prompts.of(traces, records, shown, curves)
    figure, axes = _panels(found)
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
        axis.set_xlim(0, 1)
        axis.set_ylim(bottom=0)
        axis.set_xlabel(_POSITION, fontsize=8)
        plain(axis)
    axes[0].set_ylabel("share of the positions kept", fontsize=8)
    what = f"Where kept entries lie: {shown.text(traces[0])}, mean over {found.counted}"
    _finish(figure, axes, f"{what}\nshaded: middle third; dotted: no position preferred", found)
    return figure


def iou_by(table: pl.DataFrame, by: str = "stage") -> Figure:
    """Retained-set IoU of each policy by stage of the model or a label; a panel per budget.

    AMS (arXiv 2605.23200), Fig. 5 and Table 14. Mean over prompts with the 95 % interval; a short
    black line across each bar is chance, the IoU of sets of the same sizes without memory.

    Args:
        table: with the metric `retained_iou`.
        by: a column of it: domain, task, level, layer, or the stage that
            `kvsim.analysis.summaries.stages` adds; without that column the stages are those of
            the layers in the table.

    Raises:
        PolicyError: the table has no such column, or no IoU with a value in it.
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
    figure = Figure(figsize=(max(5.6, width * len(budgets)), 3.6), dpi=150)
    axes = list(figure.subplots(1, len(budgets), squeeze=False, sharey=True)[0])
    bar = 0.8 / len(styles)
    for axis, asked in zip(axes, budgets, strict=True):
        for place, (policy, style) in enumerate(styles.items()):
            part = found.filter(policy=policy, asked=asked)
            at = np.array([groups.index(group) for group in part[by]], dtype=np.float64)
            at += (place - (len(styles) - 1) / 2) * bar
            mean = part["mean"].to_numpy()
            ends = np.abs(part.select("low", "high").cast(pl.Float64).to_numpy().T - mean)
            axis.bar(at, mean, 0.9 * bar, color=style["color"], label=policy, zorder=2)
            whisker = {"fmt": "none", "ecolor": "black", "elinewidth": 0.8, "capsize": 1.5}
            axis.errorbar(at, mean, ends, zorder=3, **whisker)  # not drawn where it is null
            chance = part["chance"].cast(pl.Float64).to_numpy()
            axis.hlines(chance, at - 0.45 * bar, at + 0.45 * bar, color="black", lw=1.2, zorder=4)
        axis.set_title(f"budget {asked}", fontsize=9)
        names = [short_text(str(group), 16) for group in groups]
        axis.set_xticks(range(len(groups)), names, parse_math=False)
        axis.set_xlabel(by, fontsize=8)
        plain(axis)
        axis.set_ylim(0, 1)
    axes[0].set_ylabel("IoU of consecutive kept sets", fontsize=8)
    what = f"Retained-set IoU by {by}, mean over {counted(found['n'])}"
    caption(figure, f"{what}\nacross bars: chance", found["fidelity"])
    height = legend_below(figure, axes[0], columns=5)
    figure.tight_layout(rect=(0, height, 1, 1))
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

    Args:
        traces: of which the records are.
        records: policies and budgets.
        layer: index in the trace, all by default.
        head: KV head, all by default.
        bins: of equal width.

    Raises:
        TraceError: a record of another trace.
        PolicyError: nothing left in any record.
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
    figure, axes = _panels(found)
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
        axis.set_xlim(0, 1)
        axis.set_ylim(bottom=0)
        axis.set_xlabel(_POSITION, fontsize=8)
        plain(axis)
    axes[0].set_ylabel("density of kept entries (area 1)", fontsize=8)
    what = f"What the last event keeps: {shown.text(traces[0])}, mean over {found.counted}"
    _finish(figure, axes, f"{what}\nvertical: mean; dotted: uniform", found)
    return figure


def _panels(found: Prompts) -> tuple[Figure, list[Axes]]:
    """Build a panel per budget, side by side."""
    budgets = found.budgets
    figure = Figure(figsize=(max(5.6, 3.4 * len(budgets) + 0.4), 3.6), dpi=150)
    axes = list(figure.subplots(1, len(budgets), squeeze=False, sharey=True)[0])
    for axis, asked in zip(axes, budgets, strict=True):
        axis.set_title(f"budget {asked}", fontsize=9)
    return figure, axes


def _finish(figure: Figure, axes: Sequence[Axes], what: str, found: Prompts) -> None:
    """Draw caption and legend, and make room for both."""
    caption(figure, what, found.fidelities)
    height = legend_below(figure, axes[0], columns=5)
    figure.tight_layout(rect=(0, height, 1, 1))
