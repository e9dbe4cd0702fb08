"""Figures of kept sets: their positions in the sequence, and how much of them stays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from kvsim.analysis.definition import mean_known
from kvsim.analysis.kept.coverage import BINS, MIDDLE, kept_coverage, retained_positions
from kvsim.analysis.output.error import check_record
from kvsim.analysis.summaries import averages, stages
from kvsim.analysis.table import fidelity
from kvsim.core.record import Record
from kvsim.core.trace import Trace
from kvsim.errors import PolicyError, TraceError, suggest
from kvsim.plots.style import (
    asked_order,
    bare_series,
    counted,
    finish,
    mean_line,
    name_axes,
    plain,
    series,
    short_text,
)

Floats = NDArray[np.float64]
_Ints = NDArray[np.int32]
#: Draws arrays of each prompt, by policy, in a panel; with the names of all policies.
Draw = Callable[[Axes, Mapping[str, Sequence[Floats]], Sequence[str]], None]

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

    layer, head: all by default. bins: parts of equal width.
    """

    def curves(gone: list[_Ints]) -> Floats | None:
        every = (kept_coverage(one, bins) for one in gone)
        coverages = [coverage for coverage in every if len(coverage.rows)]
        if not coverages:
            return None
        lines = [mean_known(one.curve).mean(0) for one in coverages]
        flat = [one.overall.mean() for one in coverages]
        return np.stack([mean_known(np.stack(lines, axis=-1)), np.full(bins, np.mean(flat))])

    centres = (np.arange(bins) + 0.5) / bins

    def draw(axis: Axes, values: Mapping[str, Sequence[Floats]], policies: Sequence[str]) -> None:
        axis.axvspan(*map(float, MIDDLE), color=_SHADE, zorder=0)
        for policy, style in series(policies).items():
            if policy in values:
                lines, flat = zip(*values[policy], strict=True)
                mean_line(axis, centres, lines, label=policy, lw=1.3, ms=3, **style)
                axis.plot(centres, np.mean(flat, 0), ":", lw=1, color=style["color"])

    label, what = "share of the positions kept", "Where kept entries lie"
    note = "shaded: middle third; dotted: no position preferred"
    return _per_budget(traces, records, (layer, head), curves, draw, (label, what, note))


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

    def density(gone: list[_Ints]) -> Floats | None:
        layers = filter(None, map(retained_positions, gone))
        relative = np.concatenate([np.zeros(0), *(one.relative for one in layers)])
        if not len(relative):
            return None
        heights, _ = np.histogram(relative, bins, (0, 1), density=True)
        return np.append(heights, relative.mean())

    def draw(axis: Axes, values: Mapping[str, Sequence[Floats]], policies: Sequence[str]) -> None:
        axis.axhline(1.0, color="black", lw=0.9, ls=":")
        axis.axvline(0.5, color="black", lw=0.9, ls=":")
        for policy, style in bare_series(policies).items():
            if policy in values:
                heights = [np.append(one[:bins], one[bins - 1]) for one in values[policy]]
                steps = {**style, "label": policy, "drawstyle": "steps-post"}
                mean_line(axis, np.arange(bins + 1) / bins, heights, lw=1.3, **steps)
                mean = float(np.mean([one[bins] for one in values[policy]]))
                axis.axvline(mean, color=style["color"], lw=1, ls=style["linestyle"])

    label, what = "density of kept entries (area 1)", "What the last event keeps"
    note = "vertical: mean; dotted: uniform"
    return _per_budget(traces, records, (layer, head), density, draw, (label, what, note))


def _per_budget(
    traces: Sequence[Trace],
    records: Sequence[Record],
    place: tuple[int | None, int | None],
    value: Callable[[list[_Ints]], Floats | None],
    draw: Draw,
    texts: tuple[str, str, str],
) -> Figure:
    """Draw a number of every record over relative positions, a panel per budget.

    place: the layer and the KV head shown, None for all. value: of the rows after which entries
    are gone, [H, T] of each layer shown; None leaves a record out. texts: what the vertical axis,
    the title and the line below it say.
    """
    layer, head = place
    by_name = {trace.name: trace for trace in traces}
    values: dict[tuple[str, str], list[Floats]] = {}
    fidelities: set[str] = set()
    for record in records:
        if record.trace not in by_name:
            raise TraceError(
                f"a record of {record.trace!r}, but the traces are {', '.join(by_name)}; give "
                "the traces that were replayed"
            )
        trace = by_name[record.trace]
        check_record(trace, record)
        heads = slice(None)
        if head is not None:  # of a record per query head, the query heads of the KV head
            size = trace.group if record.per_query_head else 1
            heads = slice(head * size, (head + 1) * size)
        pairs = zip(record.layers, record.gone_after, strict=True)
        gone = {at: rows[heads] for at, rows in pairs if layer in (None, at)}
        array = value(list(gone.values()))
        if array is not None:
            budget = record.share or str(record.budget)
            values.setdefault((record.policy, budget), []).append(array)
            fidelities |= {fidelity(trace, record, "sets", at) for at in gone}
    if not values:
        raise PolicyError("nothing left the cache, so there is nothing to show; lower --budget")
    policies = list(dict.fromkeys(policy for policy, _ in values))
    budgets = asked_order([budget for _, budget in values])
    figure, axes = _panels(budgets)
    for axis, budget in zip(axes, budgets, strict=True):
        of_budget = {policy: values[policy, at] for policy, at in values if at == budget}
        draw(axis, of_budget, policies)
        axis.set_xlim(0, 1)
        plain(axis, "relative position (0: first, 1: at the event)", title=f"budget {budget}")
    label, what, note = texts
    name_axes(axes[0], y=label)
    axes[0].set_ylim(bottom=0)  # of all panels, once the highest is drawn
    where = "all layers" if layer is None else f"layer {traces[0].layer_ids[layer]}"
    where += ", all KV heads" if head is None else f", KV head {head}"
    prompts = counted(len(arrays) for arrays in values.values())
    text = f"{what}: {where}, mean over {prompts}\n{note}"
    finish(figure, axes[0], text, fidelities, columns=5)
    return figure


def _panels(
    budgets: Sequence[str], width: float = 3.4, room: float = 0.4
) -> tuple[Figure, list[Axes]]:
    """Build a panel per budget, side by side; width: of one, inches."""
    figure = Figure(figsize=(max(5.6, width * len(budgets) + room), 3.6), dpi=150)
    return figure, list(figure.subplots(1, len(budgets), squeeze=False, sharey=True)[0])
