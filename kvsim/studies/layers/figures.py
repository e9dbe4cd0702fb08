"""Figures of layers: where ASL selects and how layers rank a prompt's tokens; all is `exact`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from statistics import fmean
from typing import Any, Final

import matplotlib as mpl
import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter

from kvsim.plots.style import (
    CELLS,
    SELECTED,
    caption,
    colour_bar,
    finish,
    name_axes,
    plain,
    series,
    short_text,
    single_panel,
    trace_label,
    whole_ticks,
)
from kvsim.schema import plural
from kvsim.store.opening import TraceLike, as_trace
from kvsim.studies.layers.ranking import Curve, Ranking, window_attention

NEVER = "#e4e1da"

#: The marker of a selection layer.
_CIRCLE: Final[dict[str, Any]] = {"marker": "o", "ms": 9, "mfc": "none", "mew": 1.8, "ls": "none"}
_PLAIN = FuncFormatter(lambda value, _: f"{value:g}")

#: Columns of a picture; more tokens are pooled.
_PIXELS = 1024
#: Attention below this share is drawn as this share.
_FAINT = 1e-5


def variance_curves(curves: Sequence[Curve]) -> Figure:
    """Relative rank variance by layer, tau, and a marker at the selection layer of each line.

    ASL (arXiv 2601.07667), Fig. 6. A line per trace and budget. After the selection layer a line
    shows the ranks as if no layer had selected.
    """
    figure, axis = single_panel(7.2, 3.7 + 0.17 * len(curves))
    styles = series(map(str, range(len(curves)))).values()
    for curve, style in zip(curves, styles, strict=True):
        selected = curve.selected()
        layers = np.arange(curve.first_layer, curve.n_layers)
        end = f"selects after layer {selected}" if selected is not None else "never selects"
        end = "fits the budget" if curve.fits else end
        label = f"{curve.trace}, budget {curve.budget}: {end}"
        axis.plot(layers, curve.relative[layers], **style, lw=1.4, ms=3, label=label)
        if selected is not None:
            axis.plot(selected, curve.relative[selected], mec=style["color"], **_CIRCLE)
    right: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "ha": "right", "fontsize": 8}
    right |= {"xytext": (-4, 3), "textcoords": "offset points", "color": SELECTED}
    for tau in sorted({curve.rule.tau for curve in curves}):
        axis.axhline(tau, color=SELECTED, lw=1, ls="--")
        axis.annotate(f"tau {tau:g}", (1, tau), **right)
    axis.set_yscale("log")
    name_axes(axis, y="rank variance / its value in the first tested layer")
    plain(axis, "layer")
    axis.set_xlim(-0.5, max(curve.n_layers for curve in curves) - 0.5)
    whole_ticks(axis.xaxis)
    terms = {(x.rule.window, x.first_layer, x.look_back) for x in curves}
    shared = "\nwindow {}, first tested layer {}, look-back {}".format(*terms.pop())
    text = f"{trace_label(x.trace for x in curves)}: do ranks settle? circle: selection layer"
    finish(figure, axis, text + ("" if terms else shared), ["exact"], columns=1)
    return figure


def selection_grid(
    ranking: Ranking,
    budget: int,
    first_layers: Sequence[int] | None = None,
    look_backs: Sequence[int] | None = None,
) -> Figure:
    """The selection layer over first layer and look-back, ASL (arXiv 2601.07667), Fig. 8.

    Grey where no layer is selected. Hatched: the look-back is longer than there are layers, and all
    layers were used. By default from layer 1 to the last but one, which drops nothing, and from 2
    to 16 layers: a single layer has no variance.
    """
    total = ranking.n_layers
    firsts = tuple(first_layers or range(1, total - 1) or range(total))
    backs = tuple(look_backs or range(2, min(16, total) + 1) or (1,))
    figure, axis = single_panel(
        max(3.8, 0.42 * len(backs) + 2.2), max(2.6, 0.3 * len(firsts) + 1.6)
    )
    layers, last = np.full((len(firsts), len(backs)), np.nan), max(1, total - 1)
    for (row, first), (column, back) in product(enumerate(firsts), enumerate(backs)):
        rule = replace(ranking.rule, first_layer=first, look_back=back)
        curve = ranking.curve(budget, rule)
        name, ink = "never", "black"
        if (layer := curve.selected()) is not None:
            layers[row, column] = layer
            name, ink = str(layer), "black" if layer > 0.6 * last else "white"
        axis.text(column, row, name, ha="center", va="center", fontsize=8, color=ink)
        if curve.look_back < back:
            cell = (column - 0.5, row - 0.5)
            axis.add_patch(Rectangle(cell, 1, 1, fill=False, hatch="////", ec="#00000030", lw=0))
    colours = mpl.colormaps["viridis"].with_extremes(bad=NEVER)
    axis.imshow(layers, cmap=colours, vmin=0, vmax=last, aspect="auto", origin="lower")
    axis.set_xticks(range(len(backs)), [*map(str, backs)])
    axis.set_yticks(range(len(firsts)), [*map(str, firsts)])
    name_axes(axis, "look-back, layers (hatched: as many as there are)", "first tested layer")
    terms = f"budget {budget} (k = {curve.k}), tau {curve.rule.tau:g}"
    caption(figure, f"{ranking.trace}: selection layer\n{terms}", ["exact"])
    return figure


def selection_histogram(curves: Sequence[Curve]) -> Figure:
    """Number of traces that select at each layer, a panel per task.

    ASL (arXiv 2601.07667), Figs. 9 and 10.
    """
    budgets = list(dict.fromkeys(curve.budget for curve in curves))
    styles = series(map(str, budgets)).values()
    tasks = sorted({curve.ranking.task for curve in curves})
    n_layers = max(curve.n_layers for curve in curves)
    figure = Figure(figsize=(7.2, 1.7 * len(tasks) + 0.9), dpi=150, layout="constrained")
    axes = figure.subplots(len(tasks), 1, squeeze=False, sharex=True)[:, 0]
    width = 0.8 / len(budgets)
    for axis, task in zip(axes, tasks, strict=True):
        of_task = [curve for curve in curves if curve.ranking.task == task]
        for place, (budget, style) in enumerate(zip(budgets, styles, strict=True)):
            selected = [each.selected() for each in of_task if each.budget == budget]
            if not selected:
                continue
            layers = [layer for layer in selected if layer is not None]
            counts = Counter(n_layers if layer is None else layer for layer in selected)
            places = np.array([*counts]) + (place - (len(budgets) - 1) / 2) * width
            label = f"budget {budget}: {f'mean {fmean(layers):.1f}' if layers else 'never'}"
            axis.bar(places, [*counts.values()], width, color=style["color"], label=label)
            if layers:
                axis.axvline(fmean(layers), color=style["color"], lw=1, ls="--")
        title = f"{short_text(task, 60)}, {plural(len({x.trace for x in of_task}), 'trace')}"
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
    name_axes(axes[-1], "selection layer (dashed: mean over traces that select)")
    caption(figure, "Selection layers of ASL", ["exact"])
    return figure


def rank_pattern(curve: Curve) -> Figure:
    """Rank of tokens in every layer, the tokens in the order of the last layer.

    ASL (arXiv 2601.07667), Fig. 4. The tokens are those that are among the first k in one of the
    last look-back layers.
    """
    ranks, selected, back = curve.ranking.ranks.numpy(), curve.selected(), curve.look_back
    tokens = np.flatnonzero((ranks[-back:] <= curve.k).any(0))
    tokens = tokens[np.argsort(ranks[-1, tokens], kind="stable")]
    count, total = len(tokens), curve.n_layers
    figure, axis = single_panel(8, max(2.6, 0.14 * total + 1.9))
    shown = ranks[:, tokens] if count else np.full((total, 1), np.nan)
    extent = 0.5, max(1, count) + 0.5, total - 0.5, -0.5
    scale = LogNorm(1, max(2, curve.ranking.ranked))
    image = axis.imshow(shown, cmap="viridis_r", norm=scale, extent=extent, **CELLS)
    if selected is not None:
        axis.axhline(selected + 0.5, color=SELECTED, lw=1.2)
    if curve.k < count:
        axis.axvline(curve.k + 0.5, color="white", lw=1.2, ls=":")
    whole_ticks(axis.yaxis)
    name_axes(axis, f"{count} tokens, by rank in the last layer (dotted: k)", "layer")
    bar = colour_bar(figure, image, axis, f"rank, of {curve.ranking.ranked}", pad=0.015)
    bar.yaxis.set_major_formatter(_PLAIN)
    bar.invert_yaxis()
    line = "" if selected is None else "; red: selected after"
    subject = f"{curve.trace}: ranks of tokens among the first k in one of the last {back} layers"
    caption(figure, f"{subject}\nbudget {curve.budget} (k = {curve.k}){line}", ["exact"])
    return figure


def layer_attention(trace: TraceLike, window: int = 32) -> Figure:
    """Mean attention of the prompt's last rows in every layer; ASL (arXiv 2601.07667), Fig. 3."""
    trace = as_trace(trace)
    maps = window_attention(trace, window, columns=_PIXELS)
    (layers, height, columns), n = maps.shape, trace.prompt_len
    pooling = -(-n // _PIXELS)
    future = np.arange(columns) * pooling > np.arange(n - height, n)[:, None]
    shown = np.ma.array(np.maximum(maps, _FAINT), mask=np.broadcast_to(future, maps.shape))
    figure, axis = single_panel(8, max(2.6, 0.3 * layers + 1.6))
    colours = mpl.colormaps["magma"].with_extremes(bad="white", under="black")
    extent = -0.5, columns * pooling - 0.5, layers - 0.5, -0.5
    stacked = shown.reshape(layers * height, columns)
    image = axis.imshow(stacked, cmap=colours, norm=LogNorm(_FAINT, 1), extent=extent, **CELLS)
    axis.set_xlim(-0.5, n - 0.5)
    for layer in range(1, layers):
        axis.axhline(layer - 0.5, color="white", lw=0.8)
    whole_ticks(axis.yaxis)
    name_axes(axis, "position", f"layer, {height} rows each")
    pooled = f", maximum of {pooling} positions" if pooling > 1 else ""
    subject = f"{trace.name}: attention of the prompt's last {height} rows"
    caption(figure, f"{subject}\nmean over {trace.n_qheads} query heads{pooled}", ["exact"])
    colour_bar(figure, image, axis, "share of attention", pad=0.015)
    return figure
