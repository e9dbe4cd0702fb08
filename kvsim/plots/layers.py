"""Figures of layers: how they rank the tokens of a prompt, and where ASL selects.

All numbers come from `kvsim.analysis` and are `exact`: full attention over recorded queries and
keys, as if no layer had selected.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from kvsim.analysis.prompt.ranking import Grid, window_attention
from kvsim.analysis.prompt.tables import Diagnosis
from kvsim.core.trace import Trace
from kvsim.plots.panels import known
from kvsim.plots.style import COLOURS, caption, legend_of, palette, plain, series, short_text

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LINE, OTHER, SELECTED, NEVER = "#33608c", "#9aa5b1", "#c8102e", "#e4e1da"

_PLAIN = FuncFormatter(lambda value, _: f"{value:g}")

#: Traces with a line and a name of their own; more are drawn alike.
_NAMED = len(COLOURS)
#: Columns of a picture; more tokens are pooled.
_PIXELS = 1024
#: Attention below this share is drawn as if it were this much.
_FAINT = 1e-5


def variance_curves(diagnoses: Sequence[Diagnosis]) -> Figure:
    """Relative rank variance by layer, tau, and a marker at the selection layer of each line.

    A line per trace and budget. It goes on behind the selection layer: what the layers would rank
    if none had selected.
    """
    figure, axis = _one(7.2, 3.7 + 0.17 * len(diagnoses) * (len(diagnoses) <= _NAMED))
    taus = sorted({one.curve.rule.tau for one in diagnoses})
    named = len(diagnoses) <= _NAMED
    alike: dict[str, Any] = {"color": OTHER, "marker": ".", "lw": 0.8}
    for one, style in zip(diagnoses, _lines(len(diagnoses)), strict=True):
        curve, at = one.curve, one.layer
        layers = np.arange(curve.first_layer, curve.n_layers)
        end = f"selects after layer {at}" if at is not None else "never selects"
        label = f"{_label(one, diagnoses)}: {'fits the budget' if curve.fits else end}"
        axis.plot(layers, curve.relative[layers], label=label, **(style if named else alike))
        if at is not None:
            marked = style["color"] if named else SELECTED
            axis.plot(at, curve.relative[at], "o", ms=9, mfc="none", mec=marked, mew=1.8)
    for tau in taus:
        axis.axhline(tau, color=SELECTED, lw=1, ls="--")
        axis.annotate(
            f"tau {tau:g}",
            (1, tau),
            xycoords=("axes fraction", "data"),
            xytext=(-4, 3),
            textcoords="offset points",
            ha="right",
            fontsize=8,
            color=SELECTED,
        )
    _layers(axis, max(one.curve.n_layers for one in diagnoses))
    axis.set_ylim(bottom=0)
    axis.set_ylabel("rank variance / that of the first tested layer", fontsize=8)
    if named:
        _legend(figure, axis)
    what = known(one.trace for one in diagnoses)
    _caption(figure, f"{what}: do ranks settle? circle: selection layer", _rule(diagnoses))
    return figure


def selection_grid(trace: str, grid: Grid) -> Figure:
    """The selection layer over first layer and look-back; grey where no layer is selected.

    Hatched: there are fewer layers than the look-back asks for, and all there are were used.
    """
    rows, columns = grid.layers.shape
    figure, axis = _one(max(3.8, 0.42 * columns + 2.2), max(2.6, 0.3 * rows + 1.6))
    shown = np.ma.masked_less(grid.layers, 0)
    colours = mpl.colormaps["viridis"].with_extremes(bad=NEVER)
    last = max(1, grid.n_layers - 1)
    axis.imshow(shown, cmap=colours, vmin=0, vmax=last, aspect="auto", origin="lower")
    for (row, column), layer in np.ndenumerate(grid.layers):
        light = layer < 0 or layer > 0.6 * last
        axis.text(
            column,
            row,
            "never" if layer < 0 else str(layer),
            ha="center",
            va="center",
            fontsize=6 if layer < 0 else 8,
            color="black" if light else "white",
        )
        if grid.used[row, column] < grid.look_backs[column]:
            cell = (column - 0.5, row - 0.5)
            axis.add_patch(Rectangle(cell, 1, 1, fill=False, hatch="////", ec="#00000030", lw=0))
    axis.set_xticks(range(columns), [str(back) for back in grid.look_backs])
    axis.set_yticks(range(rows), [str(first) for first in grid.first_layers])
    axis.set_xlabel("look-back, layers (hatched: as many as there are)", fontsize=8)
    axis.set_ylabel("first tested layer", fontsize=8)
    axis.tick_params(labelsize=7)
    _caption(
        figure,
        f"{trace}: selection layer",
        f"budget {grid.budget} (k = {grid.k}), tau {grid.tau:g}",
    )
    return figure


def rank_pattern(one: Diagnosis) -> Figure:
    """Rank of tokens in every layer, the tokens in the order of the last layer.

    The tokens are those that are among the first k in one of the last look-back layers.
    """
    curve, ranking = one.curve, one.ranking
    back = curve.look_back
    tokens = ranking.members(curve.n_layers - 1, back, curve.k)
    tokens = tokens[np.argsort(ranking.ranks[-1, tokens].numpy(), kind="stable")]
    image = ranking.ranks[:, tokens].numpy().astype(np.float64)
    figure, axis = _one(8, max(2.6, 0.14 * curve.n_layers + 1.9))
    factor = max(1, -(-len(tokens) // _PIXELS))
    pooled = _log_means(image, factor) if len(tokens) else np.full((curve.n_layers, 1), np.nan)
    drawn = axis.imshow(
        pooled,
        cmap="viridis_r",
        norm=LogNorm(1, max(2, ranking.ranked)),
        aspect="auto",
        interpolation="nearest",
        extent=(0.5, pooled.shape[1] * factor + 0.5, curve.n_layers - 0.5, -0.5),
    )
    axis.set_xlim(0.5, max(1, len(tokens)) + 0.5)
    if one.layer is not None:
        axis.axhline(one.layer + 0.5, color=SELECTED, lw=1.2)
    if curve.k < image.shape[1]:
        axis.axvline(curve.k + 0.5, color="white", lw=1.2, ls=":")
    axis.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axis.set_ylabel("layer", fontsize=8)
    axis.set_xlabel(f"{len(tokens)} tokens, by rank in the last layer (dotted: k)", fontsize=8)
    axis.tick_params(labelsize=7)
    bar = figure.colorbar(drawn, ax=axis, pad=0.015)
    bar.set_label(f"rank, of {ranking.ranked}", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    bar.ax.yaxis.set_major_formatter(_PLAIN)
    bar.ax.invert_yaxis()
    tail = f"; each column is the geometric mean of {factor}" if factor > 1 else ""
    line = "" if one.layer is None else "; red: selected after"
    behind = "the last layer" if back == 1 else f"the last {back} layers"
    _caption(
        figure,
        f"{one.trace}: ranks of what is among the first k in {behind}{tail}",
        f"budget {curve.budget} (k = {curve.k}){line}",
    )
    return figure


def rank_bumps(one: Diagnosis, trace: Trace | None = None, *, tokens: int = 30) -> Figure:
    """The way of the best tokens of the last layer through the ranks; gold tokens are red.

    The others are the darker, the better the last layer ranks them. trace: for the tokens' texts.
    """
    curve, ranking = one.curve, one.ranking
    best = ranking.ranks[-1].argsort()[:tokens].numpy()
    paths = ranking.ranks[:, best].numpy()
    gold = set() if one.gold is None else set(one.gold.tolist())
    layers = np.arange(curve.n_layers)
    figure, axis = _one(7.6, 5.6)
    shades = mpl.colormaps["viridis"](np.linspace(0, 0.9, len(best)))
    texts = None if trace is None else trace.token_text
    heights = np.linspace(0.985, 0.015, max(2, len(best)))
    for path, position, shade, height in zip(
        paths.T, best.tolist(), shades, heights[: len(best)], strict=True
    ):
        marked = position in gold
        axis.plot(
            layers,
            path,
            ".-" if len(layers) < 12 else "-",
            color=SELECTED if marked else shade,
            lw=1.8 if marked else 0.9,
            zorder=3 if marked else 2,
        )
        name = f"{position}" if texts is None else f"{position} {short_text(texts[position], 12)}"
        axis.annotate(
            name,
            (layers[-1], path[-1]),
            xytext=(1.04, height),
            textcoords="axes fraction",
            fontsize=6,
            va="center",
            color=SELECTED if marked else "black",
            parse_math=False,
            arrowprops={"arrowstyle": "-", "lw": 0.4, "color": OTHER, "relpos": (0, 0.5)},
            annotation_clip=False,
        )
    axis.set_yscale("log")
    axis.set_ylim(max(2, curve.k, int(paths.max(initial=2))) * 1.1, 0.9)
    axis.yaxis.set_major_formatter(_PLAIN)
    _layers(axis, curve.n_layers)
    rank = f"rank, of {ranking.ranked}"
    if curve.k > 0:
        axis.axhline(curve.k + 0.5, color="black", lw=0.8, ls=":")
        rank += f" (dotted: k = {curve.k})"
    axis.set_ylabel(rank, fontsize=8)
    if one.layer is not None:
        axis.axvline(one.layer, color=SELECTED, lw=1, ls="--")
        axis.set_xlabel("layer (dashed: selection layer)", fontsize=8)
    marks = "; red: gold" if gold.intersection(best.tolist()) else ""
    labels = "position" if texts is None else "position and text"
    _caption(
        figure,
        f"{one.trace}: the {len(best)} tokens that the last layer ranks best",
        f"dark to light: ranks 1 to {len(best)} there{marks}; labels: {labels}",
    )
    return figure


def layer_attention(
    trace: Trace, window: int = 32, *, selected: int | None = None, device: str = "cpu"
) -> Figure:
    """What the last rows of the prompt attend to in every layer, mean over query heads."""
    maps = window_attention(trace, window, columns=_PIXELS, device=device)
    layers = len(maps)
    columns = max(1, min(4, math.ceil(layers / 3)))
    rows = math.ceil(layers / columns)
    size = (max(6.4, 3.0 * columns + 0.9), 0.95 * rows + 1.25)
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    colours = mpl.colormaps["magma"].with_extremes(bad="white", under="black")
    n, height = trace.prompt_len, maps.shape[1]
    scale = LogNorm(_FAINT, 1)
    extent = (-0.5, n - 0.5, n - 0.5, n - height - 0.5)
    factor = -(-n // _PIXELS)
    starts = np.arange(maps.shape[-1]) * factor
    unseen = starts[None, :] > np.arange(n - height, n)[:, None]
    for axis in axes.flat[layers:]:
        axis.set_axis_off()
    for layer, (axis, values) in enumerate(zip(axes.flat, maps, strict=False)):
        axis.imshow(
            np.ma.array(np.maximum(values, _FAINT), mask=unseen),
            cmap=colours,
            norm=scale,
            aspect="auto",
            interpolation="nearest",
            extent=(-0.5, maps.shape[-1] * factor - 0.5, extent[2], extent[3]),
        )
        axis.set_xlim(-0.5, n - 0.5)
        chosen = layer == selected
        name = f"layer {layer}" + (", selection layer" if chosen else "")
        axis.set_title(name, fontsize=7, pad=2, color=SELECTED if chosen else "black")
        axis.tick_params(labelsize=6)
    for axis in axes[:, 0]:
        axis.set_ylabel("row", fontsize=7)
    for axis in _bottom(axes, layers):
        axis.set_xlabel("position", fontsize=7)
        axis.tick_params(labelbottom=True)
    pooled = f", maximum of {factor} positions" if factor > 1 else ""
    _caption(
        figure,
        f"{trace.name}: attention of the prompt's last {height} rows",
        f"mean over {trace.n_qheads} query heads{pooled}",
    )
    bar = figure.colorbar(ScalarMappable(scale, colours), ax=axes, pad=0.01, aspect=40)
    bar.set_label("share of a row's attention (black: 1e-5 or less)", fontsize=7)
    bar.ax.tick_params(labelsize=6)
    return figure


def selection_histogram(distribution: pl.DataFrame, n_layers: int) -> Figure:
    """How many traces select at each layer, a panel per task; of `kvsim.analysis.distribution`."""
    budgets = list(dict.fromkeys(distribution["budget"]))
    tasks = list(dict.fromkeys(distribution["task"]))
    figure = Figure(figsize=(7.2, 1.7 * len(tasks) + 0.9), dpi=150)
    axes = figure.subplots(len(tasks), 1, squeeze=False, sharex=True)[:, 0]
    colours = palette(len(budgets))
    width = 0.8 / len(budgets)
    for axis, task in zip(axes, tasks, strict=True):
        for place, (budget, colour) in enumerate(zip(budgets, colours, strict=True)):
            part = distribution.filter((pl.col("task") == task) & (pl.col("budget") == budget))
            if not part.height:
                continue
            at = part["layer"].fill_null(n_layers).to_numpy()  # never: behind the last layer
            shift = (place - (len(budgets) - 1) / 2) * width
            mean = part["mean_layer"][0]
            where = "never" if mean is None else f"mean {mean:.1f}"
            axis.bar(
                at + shift,
                part["traces"].to_numpy(),
                width,
                color=colour,
                label=f"budget {budget}: {where}",
            )
            if mean is not None:
                axis.axvline(mean, color=colour, lw=1, ls="--")
        total = int(distribution.filter(pl.col("task") == task)["of"].max() or 0)  # type: ignore[arg-type]
        title = f"{short_text(task, 60)}, {total} {'trace' if total == 1 else 'traces'}"
        axis.set_title(title, fontsize=8, parse_math=False)
        axis.set_ylabel("traces", fontsize=8)
        axis.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axis.tick_params(labelsize=7)
        axis.legend(fontsize=7, frameon=False)
        axis.margins(y=0.25)
        axis.grid(alpha=0.25, axis="y")
    step = max(1, n_layers // 12)
    ticks = [*range(0, n_layers - step // 2, step), n_layers]
    axes[-1].set_xticks(ticks, [*map(str, ticks[:-1]), "never"])
    axes[-1].set_xlim(-0.7, n_layers + 0.7)
    axes[-1].set_xlabel("selection layer (dashed: mean of those that select)", fontsize=8)
    caption(figure, "Selection layers of ASL", ["exact"])
    figure.tight_layout()
    return figure


def gold_recall(diagnoses: Sequence[Diagnosis]) -> Figure:
    """Share of the gold tokens in each layer's set, with the selection layer of each line.

    A line per trace and budget. A set is what goes on if this layer selects: the first k tokens and
    the window. Traces without gold are left out.
    """
    found = [one for one in diagnoses if one.recall is not None]
    named = 0 < len(found) <= _NAMED
    figure, axis = _one(7.2, 3.6 + 0.17 * len(found) * named)
    for one, style in zip(found, _lines(len(found)), strict=True):
        if one.recall is None:
            continue
        at, full, late = one.layer, one.first_full_recall, one.layer_regret
        where = [
            "complete in no layer" if full is None else f"first complete in layer {full}",
            "never selects" if at is None else f"selects after {at} with {one.recall[at]:.0%}",
            "" if late is None else f"regret {late:+d}",
        ]
        label = f"{_label(one, found)}: {', '.join(filter(None, where))}"
        axis.plot(np.arange(one.curve.n_layers), one.recall, label=label, **style)
        if at is not None:
            axis.plot(at, one.recall[at], "o", ms=9, mfc="none", mec=style["color"], mew=1.8)
    _layers(axis, max((one.curve.n_layers for one in found), default=1))
    axis.set_ylim(-0.03, 1.05)
    axis.set_ylabel("share of gold tokens in top k + window", fontsize=8)
    if named:
        _legend(figure, axis)
    what = known(one.trace for one in found)
    sizes = sorted({0 if one.gold is None else len(one.gold) for one in found})
    tokens = f"{'/'.join(map(str, sizes))} gold tokens"
    _caption(figure, f"{what}: recall of {tokens}; circle: selection layer", _rule(found))
    return figure


def layer_overlap(diagnoses: Sequence[Diagnosis]) -> Figure:
    """Above, overlap of each layer's first k tokens with the layer before; below, entropy.

    Of one trace; a line per budget above, since the scores and their entropy have none.
    """
    figure = Figure(figsize=(7.2, 5.0), dpi=150)
    upper, lower = figure.subplots(2, 1, sharex=True)
    for one, style in zip(diagnoses, _lines(len(diagnoses)), strict=True):
        layers = np.arange(1, one.curve.n_layers)
        name = f"budget {one.asked} (k = {one.curve.k})"
        upper.plot(layers, one.jaccard[1:], label=name, **style)
        upper.axhline(one.jaccard_chance, color=style["color"], lw=0.9, ls=":")
        if one.layer is not None:
            for axis in (upper, lower):
                axis.axvline(one.layer, color=style["color"], lw=1, ls="--")
    one = diagnoses[0]
    upper.set_ylim(-0.03, 1.05)
    upper.set_ylabel("Jaccard with the layer before", fontsize=8)
    upper.legend(fontsize=7.5, frameon=False)
    m = one.ranking.ranked
    uniform = math.log(m)
    lower.plot(one.entropy, ".-", ms=4, lw=1.6, color=LINE, label="entropy of the scores")
    lower.axhline(uniform, color=LINE, lw=0.9, ls=":", label=f"equal scores: log {m}")
    lower.set_ylim(0, 1.08 * uniform)
    lower.set_ylabel("entropy, nats", fontsize=8)
    lower.legend(fontsize=7.5, frameon=False, loc="lower right")
    _layers(lower, one.curve.n_layers)
    plain(upper)
    _caption(
        figure,
        f"{one.trace}: top-k sets of consecutive layers, and how even their scores are",
        "dotted: by chance, and for equal scores; dashed: selection layer",
    )
    figure.tight_layout()
    return figure


def _one(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    return figure, figure.subplots()


def _layers(axis: Axes, n_layers: int) -> None:
    axis.set_xlabel("layer", fontsize=8)
    axis.set_xlim(-0.5, n_layers - 0.5)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    plain(axis)


def _lines(count: int) -> list[Mapping[str, Any]]:
    """How so many lines look: of different colours and markers."""
    return [{**style, "lw": 1.4, "ms": 3} for style in series(map(str, range(count))).values()]


def _legend(figure: Figure, axis: Axes) -> None:
    """A line of the legend for each line, below the axes, where it hides none."""
    handles, names = axis.get_legend_handles_labels()
    legend_of(figure, handles, names, columns=1, loc="outside lower center")


def _caption(figure: Figure, what: str, how: str) -> None:
    caption(figure, f"{what}\n{how}", ["exact"])


def _rule(diagnoses: Sequence[Diagnosis]) -> str:
    """The parameters that all of them share."""
    curves = [one.curve for one in diagnoses]

    def shared(name: str, values: Iterable[object]) -> str:
        found = set(values)
        return f"{name} {found.pop()}" if len(found) == 1 else ""

    parts = (
        shared("budget", (one.asked for one in diagnoses)),
        shared("window", (one.rule.window for one in curves)),
        shared("first tested layer", (one.first_layer for one in curves)),
        shared("look-back", (one.look_back for one in curves)),
    )
    return ", ".join(part for part in parts if part)


def _label(one: Diagnosis, among: Sequence[Diagnosis]) -> str:
    """What tells a line from the others."""
    traces, budgets = {d.trace for d in among}, {d.asked for d in among}
    size = f"budget {one.asked}"
    if len(traces) == 1:
        return size
    return one.trace if len(budgets) == 1 else f"{one.trace}, {size}"


def _log_means(image: Floats, factor: int) -> Floats:
    """Geometric means of `factor` neighbouring columns, of [L, m]."""
    if factor == 1:
        return image
    edges = np.arange(0, image.shape[1], factor)
    width = np.diff(np.append(edges, image.shape[1]))
    means: Floats = np.exp(np.add.reduceat(np.log(image), edges, axis=1) / width)
    return means


def _bottom(axes: NDArray[np.object_], count: int) -> list[Axes]:
    """The lowest axis of each column that shows something."""
    columns = axes.shape[1]
    shown: list[Axes] = axes.flat[:count].tolist()
    return shown[-columns:]
