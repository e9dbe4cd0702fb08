"""Figures of ranks: how the layers rank the tokens of a prompt, and what its last rows attend to.

All numbers come from `kvsim.analysis` and are `exact`: full attention over recorded queries and
keys, as if no layer had selected.
"""

from __future__ import annotations

import math
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from kvsim.analysis.prompt.layers import rank_pattern as pooled_ranks
from kvsim.analysis.prompt.ranking import window_attention
from kvsim.analysis.prompt.tables import Diagnosis
from kvsim.core.trace import Trace
from kvsim.plots.panels import layer_axis, single_panel
from kvsim.plots.style import (
    CELLS,
    NEUTRAL,
    SELECTED,
    caption,
    colour_bar,
    name_axes,
    short_text,
    whole_ticks,
)

_PLAIN = FuncFormatter(lambda value, _: f"{value:g}")

#: Columns of a picture; more tokens are pooled.
_PIXELS = 1024
#: Attention below this share is drawn as this share.
_FAINT = 1e-5


def rank_pattern(diagnosis: Diagnosis) -> Figure:
    """Rank of tokens in every layer, the tokens in the order of the last layer.

    ASL (arXiv 2601.07667), Fig. 4. The tokens are those that are among the first k in one of the
    last look-back layers.
    """
    curve, ranking = diagnosis.curve, diagnosis.ranking
    back, n_layers = curve.look_back, curve.n_layers
    pattern = pooled_ranks(ranking, back, curve.k, columns=_PIXELS)
    count = len(pattern.tokens)
    pooling = max(1, -(-count // _PIXELS))
    ranks = pattern.ranks if count else np.full((n_layers, 1), np.nan)
    figure, axis = single_panel(8, max(2.6, 0.14 * n_layers + 1.9))
    scale = LogNorm(1, max(2, ranking.ranked))
    extent = 0.5, ranks.shape[1] * pooling + 0.5, n_layers - 0.5, -0.5
    image = axis.imshow(ranks, cmap="viridis_r", norm=scale, extent=extent, **CELLS)
    axis.set_xlim(0.5, max(1, count) + 0.5)
    if diagnosis.layer is not None:
        axis.axhline(diagnosis.layer + 0.5, color=SELECTED, lw=1.2)
    if curve.k < ranking.ranks.shape[1]:
        axis.axvline(curve.k + 0.5, color="white", lw=1.2, ls=":")
    whole_ticks(axis.yaxis)
    name_axes(axis, f"{count} tokens, by rank in the last layer (dotted: k)", "layer")
    bar = colour_bar(figure, image, axis, f"rank, of {ranking.ranked}", pad=0.015)
    bar.yaxis.set_major_formatter(_PLAIN)
    bar.invert_yaxis()
    tail = f"; each column is the geometric mean of {pooling}" if pooling > 1 else ""
    line = "" if diagnosis.layer is None else "; red: selected after"
    last = "the last layer" if back == 1 else f"the last {back} layers"
    what = f"{diagnosis.trace}: ranks of what is among the first k in {last}{tail}"
    caption(figure, f"{what}\nbudget {curve.budget} (k = {curve.k}){line}", ["exact"])
    return figure


def rank_bumps(diagnosis: Diagnosis, trace: Trace | None = None, *, tokens: int = 30) -> Figure:
    """Ranks in every layer of the best tokens of the last layer; gold tokens are red.

    After ASL (arXiv 2601.07667), Fig. 4. The better the last layer ranks a token, the darker its
    line. A trace gives the texts of the tokens.
    """
    curve, ranking = diagnosis.curve, diagnosis.ranking
    best = ranking.ranks[-1].argsort()[:tokens].numpy()
    paths = ranking.ranks[:, best].numpy()
    gold = set() if diagnosis.gold is None else set(diagnosis.gold.tolist())
    layers = np.arange(curve.n_layers)
    figure, axis = single_panel(7.6, 5.6)
    shades = mpl.colormaps["viridis"](np.linspace(0, 0.9, len(best)))
    texts = None if trace is None else trace.token_text
    heights = np.linspace(0.985, 0.015, max(2, len(best)))[: len(best)]
    label: dict[str, Any] = {"fontsize": 6, "va": "center", "parse_math": False}
    label |= {"textcoords": "axes fraction", "annotation_clip": False}
    label["arrowprops"] = {"arrowstyle": "-", "lw": 0.4, "color": NEUTRAL, "relpos": (0, 0.5)}
    for path, position, shade, height in zip(paths.T, best.tolist(), shades, heights, strict=True):
        is_gold = position in gold
        width, depth, colour = (1.8, 3, SELECTED) if is_gold else (0.9, 2, shade)
        form = ".-" if len(layers) < 12 else "-"
        axis.plot(layers, path, form, color=colour, lw=width, zorder=depth)
        name = f"{position}" if texts is None else f"{position} {short_text(texts[position], 12)}"
        ink, end = SELECTED if is_gold else "black", (layers[-1], path[-1])
        axis.annotate(name, end, xytext=(1.04, height), color=ink, **label)
    axis.set_yscale("log")
    axis.set_ylim(max(2, curve.k, int(paths.max(initial=2))) * 1.1, 0.9)
    axis.yaxis.set_major_formatter(_PLAIN)
    layer_axis(axis, curve.n_layers)
    rank = f"rank, of {ranking.ranked}"
    if curve.k > 0:
        axis.axhline(curve.k + 0.5, color="black", lw=0.8, ls=":")
        rank += f" (dotted: k = {curve.k})"
    name_axes(axis, y=rank)
    if diagnosis.layer is not None:
        axis.axvline(diagnosis.layer, color=SELECTED, lw=1, ls="--")
        name_axes(axis, "layer (dashed: selection layer)")
    marks = "; red: gold" if gold.intersection(best.tolist()) else ""
    labels = "position" if texts is None else "position and text"
    what = f"{diagnosis.trace}: the {len(best)} tokens that the last layer ranks best"
    order = f"dark to light: ranks 1 to {len(best)} there{marks}; labels: {labels}"
    caption(figure, f"{what}\n{order}", ["exact"])
    return figure


def layer_attention(
    trace: Trace, window: int = 32, *, selected: int | None = None, device: str = "cpu"
) -> Figure:
    """Attention of the last rows of the prompt in every layer, mean over query heads.

    ASL (arXiv 2601.07667), Fig. 3.
    """
    maps = window_attention(trace, window, columns=_PIXELS, device=device)
    layers = len(maps)
    columns = min(4, math.ceil(layers / 3))
    rows = math.ceil(layers / columns)
    size = max(6.4, 3.0 * columns + 0.9), 0.95 * rows + 1.25
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    colours = mpl.colormaps["magma"].with_extremes(bad="white", under="black")
    n, height = trace.prompt_len, maps.shape[1]
    scale = LogNorm(_FAINT, 1)
    pooling = -(-n // _PIXELS)
    future = np.arange(maps.shape[-1]) * pooling > np.arange(n - height, n)[:, None]
    extent = -0.5, maps.shape[-1] * pooling - 0.5, n - 0.5, n - height - 0.5
    for axis in axes.flat[layers:]:
        axis.set_axis_off()
    for layer, (axis, values) in enumerate(zip(axes.flat, maps, strict=False)):
        shown = np.ma.array(np.maximum(values, _FAINT), mask=future)
        axis.imshow(shown, cmap=colours, norm=scale, extent=extent, **CELLS)
        axis.set_xlim(-0.5, n - 0.5)
        is_selected = layer == selected
        name = f"layer {layer}" + (", selection layer" if is_selected else "")
        axis.set_title(name, fontsize=7, pad=2, color=SELECTED if is_selected else "black")
        axis.tick_params(labelsize=6)
    for axis in axes[:, 0]:
        axis.set_ylabel("row", fontsize=7)
    for axis in axes.flat[:layers][-columns:]:  # the lowest of each column that shows something
        axis.set_xlabel("position", fontsize=7)
        axis.tick_params(labelbottom=True)
    pooled = f", maximum of {pooling} positions" if pooling > 1 else ""
    what = f"{trace.name}: attention of the prompt's last {height} rows"
    caption(figure, f"{what}\nmean over {trace.n_qheads} query heads{pooled}", ["exact"])
    label, image = (
        "share of a row's attention (black: 1e-5 or less)",
        ScalarMappable(scale, colours),
    )
    colour_bar(figure, image, list(axes.flat), label, pad=0.01, aspect=40)
    return figure
