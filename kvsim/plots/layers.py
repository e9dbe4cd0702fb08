"""Figures of layers: where ASL selects, and curves by layer that explain it.

All numbers come from `kvsim.analysis` and are `exact`: full attention over recorded queries and
keys, as if no layer had selected.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import matplotlib as mpl
import numpy as np
import polars as pl
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from kvsim.analysis.prompt.ranking import Grid
from kvsim.analysis.prompt.tables import Diagnosis
from kvsim.plots.panels import layer_axis, legend_outside, single_panel, trace_label
from kvsim.plots.style import (
    COLOURS,
    NEUTRAL,
    SELECTED,
    caption,
    name_axes,
    palette,
    plain,
    series,
    short_text,
    whole_ticks,
)
from kvsim.schema import plural

LINE, NEVER = "#33608c", "#e4e1da"

#: Traces whose lines have a colour and a name each; of more traces all lines look alike.
_NAMED = len(COLOURS)
#: The marker of a selection layer.
_CIRCLE: Final[dict[str, Any]] = {"marker": "o", "ms": 9, "mfc": "none", "mew": 1.8, "ls": "none"}


def variance_curves(diagnoses: Sequence[Diagnosis]) -> Figure:
    """Relative rank variance by layer, tau, and a marker at the selection layer of each line.

    ASL (arXiv 2601.07667), Fig. 6. A line per trace and budget. Behind the selection layer a line
    shows how the layers would rank if no layer had selected.
    """
    named = len(diagnoses) <= _NAMED
    figure, axis = single_panel(7.2, 3.7 + 0.17 * len(diagnoses) * named)
    alike: dict[str, Any] = {"color": NEUTRAL, "marker": ".", "lw": 0.8}
    for diagnosis, style in zip(diagnoses, _lines(len(diagnoses)), strict=True):
        curve, at = diagnosis.curve, diagnosis.layer
        layers = np.arange(curve.first_layer, curve.n_layers)
        end = f"selects after layer {at}" if at is not None else "never selects"
        label = f"{_label(diagnosis, diagnoses)}: {'fits the budget' if curve.fits else end}"
        axis.plot(layers, curve.relative[layers], label=label, **(style if named else alike))
        if at is not None:
            colour = style["color"] if named else SELECTED
            axis.plot(at, curve.relative[at], mec=colour, **_CIRCLE)
    right: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "ha": "right", "fontsize": 8}
    right |= {"xytext": (-4, 3), "textcoords": "offset points", "color": SELECTED}
    for tau in sorted({diagnosis.curve.rule.tau for diagnosis in diagnoses}):
        axis.axhline(tau, color=SELECTED, lw=1, ls="--")
        axis.annotate(f"tau {tau:g}", (1, tau), **right)
    layer_axis(axis, max(diagnosis.curve.n_layers for diagnosis in diagnoses))
    axis.set_ylim(bottom=0)
    name_axes(axis, y="rank variance / that of the first tested layer")
    if named:
        legend_outside(figure, axis, columns=1)
    what = trace_label(diagnosis.trace for diagnosis in diagnoses)
    what += ": do ranks settle? circle: selection layer"
    caption(figure, f"{what}\n{_rule(diagnoses)}", ["exact"])
    return figure


def selection_grid(trace: str, grid: Grid) -> Figure:
    """The selection layer over first layer and look-back; grey where no layer is selected.

    ASL (arXiv 2601.07667), Fig. 8. Hatched: the look-back is longer than there are layers, and all
    layers were used.
    """
    rows, columns = grid.layers.shape
    figure, axis = single_panel(max(3.8, 0.42 * columns + 2.2), max(2.6, 0.3 * rows + 1.6))
    shown = np.ma.masked_less(grid.layers, 0)
    colours = mpl.colormaps["viridis"].with_extremes(bad=NEVER)
    last = max(1, grid.n_layers - 1)
    axis.imshow(shown, cmap=colours, vmin=0, vmax=last, aspect="auto", origin="lower")
    for (row, column), layer in np.ndenumerate(grid.layers):
        name, size = ("never", 6) if layer < 0 else (str(layer), 8)
        ink = "black" if layer < 0 or layer > 0.6 * last else "white"
        axis.text(column, row, name, ha="center", va="center", fontsize=size, color=ink)
        if grid.used[row, column] < grid.look_backs[column]:
            cell = (column - 0.5, row - 0.5)
            axis.add_patch(Rectangle(cell, 1, 1, fill=False, hatch="////", ec="#00000030", lw=0))
    axis.set_xticks(range(columns), [str(back) for back in grid.look_backs])
    axis.set_yticks(range(rows), [str(first) for first in grid.first_layers])
    name_axes(axis, "look-back, layers (hatched: as many as there are)", "first tested layer")
    terms = f"budget {grid.budget} (k = {grid.k}), tau {grid.tau:g}"
    caption(figure, f"{trace}: selection layer\n{terms}", ["exact"])
    return figure


def selection_histogram(distribution: pl.DataFrame, n_layers: int) -> Figure:
    """Number of traces that select at each layer, a panel per task.

    ASL (arXiv 2601.07667), Figs. 9 and 10. distribution: of `kvsim.analysis.distribution`;
    n_layers: of the deepest trace.
    """
    budgets = list(dict.fromkeys(distribution["budget"]))
    tasks = list(dict.fromkeys(distribution["task"]))
    figure = Figure(figsize=(7.2, 1.7 * len(tasks) + 0.9), dpi=150)
    axes = figure.subplots(len(tasks), 1, squeeze=False, sharex=True)[:, 0]
    colours = palette(len(budgets))
    width = 0.8 / len(budgets)
    for axis, task in zip(axes, tasks, strict=True):
        of_task = distribution.filter(task=task)
        for place, (budget, colour) in enumerate(zip(budgets, colours, strict=True)):
            part = of_task.filter(budget=budget)
            if not part.height:
                continue
            at = part["layer"].fill_null(n_layers).to_numpy()  # never: behind the last layer
            shift = (place - (len(budgets) - 1) / 2) * width
            mean = part["mean_layer"][0]
            label = f"budget {budget}: {'never' if mean is None else f'mean {mean:.1f}'}"
            axis.bar(at + shift, part["traces"].to_numpy(), width, color=colour, label=label)
            if mean is not None:
                axis.axvline(mean, color=colour, lw=1, ls="--")
        title = f"{short_text(task, 60)}, {plural(max(of_task['of']), 'trace')}"
        axis.set_title(title, fontsize=8, parse_math=False)
        name_axes(axis, y="traces")
        whole_ticks(axis.yaxis)
        axis.legend(fontsize=7, frameon=False)
        axis.margins(y=0.25)
        axis.grid(alpha=0.25, axis="y")
    step = max(1, n_layers // 12)
    ticks = [*range(0, n_layers - step // 2, step), n_layers]
    axes[-1].set_xticks(ticks, [*map(str, ticks[:-1]), "never"])
    axes[-1].set_xlim(-0.7, n_layers + 0.7)
    name_axes(axes[-1], "selection layer (dashed: mean of those that select)")
    caption(figure, "Selection layers of ASL", ["exact"])
    figure.tight_layout()
    return figure


def gold_recall(diagnoses: Sequence[Diagnosis]) -> Figure:
    """Share of the gold tokens in each layer's set, with the selection layer of each line.

    A line per trace and budget. A layer's set is what it would propagate if it selected: the first
    k tokens and the window. Traces without gold tokens are left out.
    """
    with_gold = [diagnosis for diagnosis in diagnoses if diagnosis.recall is not None]
    named = 0 < len(with_gold) <= _NAMED
    figure, axis = single_panel(7.2, 3.6 + 0.17 * len(with_gold) * named)
    for diagnosis, style in zip(with_gold, _lines(len(with_gold)), strict=True):
        if diagnosis.recall is None:
            continue
        at, full, late = diagnosis.layer, diagnosis.first_full_recall, diagnosis.layer_regret
        where = "complete in no layer" if full is None else f"first complete in layer {full}"
        selects = "never selects"
        if at is not None:
            selects = f"selects after {at} with {diagnosis.recall[at]:.0%}"
        regret = "" if late is None else f", regret {late:+d}"
        label = f"{_label(diagnosis, with_gold)}: {where}, {selects}{regret}"
        axis.plot(np.arange(diagnosis.curve.n_layers), diagnosis.recall, label=label, **style)
        if at is not None:
            axis.plot(at, diagnosis.recall[at], mec=style["color"], **_CIRCLE)
    layer_axis(axis, max((diagnosis.curve.n_layers for diagnosis in with_gold), default=1))
    axis.set_ylim(-0.03, 1.05)
    name_axes(axis, y="share of gold tokens in top k + window")
    if named:
        legend_outside(figure, axis, columns=1)
    sizes = sorted({0 if each.gold is None else len(each.gold) for each in with_gold})
    what = trace_label(diagnosis.trace for diagnosis in with_gold)
    what += f": recall of {'/'.join(map(str, sizes))} gold tokens; circle: selection layer"
    caption(figure, f"{what}\n{_rule(with_gold)}", ["exact"])
    return figure


def layer_overlap(diagnoses: Sequence[Diagnosis]) -> Figure:
    """Above, overlap of each layer's first k tokens with the layer before; below, entropy.

    Of one trace; a line per budget above, since the scores and their entropy have none.
    """
    figure = Figure(figsize=(7.2, 5.0), dpi=150)
    upper, lower = figure.subplots(2, 1, sharex=True)
    for diagnosis, style in zip(diagnoses, _lines(len(diagnoses)), strict=True):
        layers = np.arange(1, diagnosis.curve.n_layers)
        name = f"budget {diagnosis.asked} (k = {diagnosis.curve.k})"
        upper.plot(layers, diagnosis.jaccard[1:], label=name, **style)
        upper.axhline(diagnosis.jaccard_chance, color=style["color"], lw=0.9, ls=":")
        if diagnosis.layer is not None:
            for axis in (upper, lower):
                axis.axvline(diagnosis.layer, color=style["color"], lw=1, ls="--")
    diagnosis = diagnoses[0]
    plain(upper, y="Jaccard with the layer before")
    upper.set_ylim(-0.03, 1.05)
    upper.legend(fontsize=7.5, frameon=False)
    m = diagnosis.ranking.ranked
    uniform = math.log(m)
    lower.plot(diagnosis.entropy, ".-", ms=4, lw=1.6, color=LINE, label="entropy of the scores")
    lower.axhline(uniform, color=LINE, lw=0.9, ls=":", label=f"equal scores: log {m}")
    lower.set_ylim(0, 1.08 * uniform)
    name_axes(lower, y="entropy, nats")
    lower.legend(fontsize=7.5, frameon=False, loc="lower right")
    layer_axis(lower, diagnosis.curve.n_layers)
    what = f"{diagnosis.trace}: top-k sets of consecutive layers, and how even their scores are"
    legend = "dotted: by chance, and for equal scores; dashed: selection layer"
    caption(figure, f"{what}\n{legend}", ["exact"])
    figure.tight_layout()
    return figure


def _lines(count: int) -> list[Mapping[str, Any]]:
    """Styles of `count` lines, different in colour and marker."""
    return [{**style, "lw": 1.4, "ms": 3} for style in series(map(str, range(count))).values()]


def _rule(diagnoses: Sequence[Diagnosis]) -> str:
    """The parameters that all of them share."""
    values: dict[str, set[Any]] = {
        "budget": {diagnosis.asked for diagnosis in diagnoses},
        "window": {diagnosis.curve.rule.window for diagnosis in diagnoses},
        "first tested layer": {diagnosis.curve.first_layer for diagnosis in diagnoses},
        "look-back": {diagnosis.curve.look_back for diagnosis in diagnoses},
    }
    return ", ".join(f"{name} {each.pop()}" for name, each in values.items() if len(each) == 1)


def _label(diagnosis: Diagnosis, among: Sequence[Diagnosis]) -> str:
    """The trace or the budget, whichever distinguishes a line from the others."""
    traces, budgets = {d.trace for d in among}, {d.asked for d in among}
    size = f"budget {diagnosis.asked}"
    if len(traces) == 1:
        return size
    return diagnosis.trace if len(budgets) == 1 else f"{diagnosis.trace}, {size}"
