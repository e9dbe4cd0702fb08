"""Figures of the distribution of queries, next to the normal distributions that fit them.

arXiv 2510.00636, Fig. 1 and 7 to 9. All numbers come from `kvsim.analysis` and are `exact`.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from matplotlib.figure import Figure

from kvsim.analysis.arrays import mean_known
from kvsim.analysis.axes import trace_layer
from kvsim.core.lazy import Tensor, torch
from kvsim.core.trace import Trace
from kvsim.plots.style import (
    CELLS,
    COLOURS,
    GRID,
    Panels,
    caption,
    colour_bar,
    finish,
    name_axes,
    single_panel,
    whole_ticks,
)
from kvsim.store.opening import TraceLike, as_trace
from kvsim.studies.expectation.expectation import Projections, check_rows
from kvsim.studies.expectation.fit import LEAST_SAMPLES, fit_normal, normal_ks
from kvsim.studies.expectation.normality import Normality, States, histogram, quantiles, states

#: Dimensions shown by default, as in the paper.
DIMENSIONS: Final = 32

_OF = {
    "query": "queries before RoPE",
    "rotated_query": "queries after RoPE",
    "residual": "input of the layer",
}
_FILL = "#b3d3ea"
# Height of the normal curve, in distances of two ridges.
_RIDGE = 0.9
_NORMAL_PEAK = 1 / math.sqrt(2 * math.pi)
# Cells of a map that have room for a number.
_WRITTEN = 256
_GAP_BINS = 60


def state_ridges(
    trace: TraceLike,
    layer: int = 0,
    of: States = "query",
    *,
    dimensions: int = DIMENSIONS,
    skip: int = 4,
    seed: int = 0,
) -> Figure:
    """Histograms of random dimensions of a layer, each next to the normal that fits it.

    In standard deviations from each dimension's mean, from the 0.1th to the 99.9th percentile, in
    50 bins. The names are query head and dimension, the numbers Kolmogorov-Smirnov distances.

    dimensions: how many, of all heads; constant dimensions have no ridge. skip: first rows left
    out, 4 for the sinks. seed: of the choice. Raises PolicyError if there are fewer than 4 rows,
    NeedsError if `of` is the residual stream and the trace has none.
    """
    trace = as_trace(trace)
    names, samples = _drawn(trace, layer, of, dimensions, skip, seed)
    fit, shape = fit_normal(samples), histogram(samples)
    deviation = np.where(fit.deviation > 0, fit.deviation, np.nan)[:, None]
    edges = (shape.edges - fit.mean.numpy()[:, None]) / deviation
    density = shape.density * deviation / _NORMAL_PEAK * _RIDGE
    columns = 2 if len(names) > 1 else 1
    rows = -(-len(names) // columns)
    bases = rows - 1 - np.arange(len(names)) % rows
    top = 0.15 + (bases + np.fmax(_RIDGE, density.max(1))).max()
    figure = Figure(figsize=(3.6 * columns, 0.3 * rows + 1.5), dpi=150, layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False, sharex=True)[0]
    x = np.linspace(-4, 4, 201)
    bell = np.exp(-(x**2) / 2) * _RIDGE
    for place, name in enumerate(names):
        axis, row = axes[place // rows], place % rows
        base, front = bases[place], 2 * row  # the lower ridge lies in front
        axis.plot(x, base + bell, color="black", lw=0.8, zorder=front + 1.5, label="fitted normal")
        ks = "constant"
        if np.isfinite(edges[place]).all():
            ks = f"{fit.ks[place]:.3f}"
            heights = base + density[place]
            look: dict[str, Any] = {"baseline": base, "zorder": front + 1, "lw": 0.4}
            axis.stairs(heights, edges[place], fill=True, fc=_FILL, label="samples", **look)
            axis.stairs(heights, edges[place], color=COLOURS[0], **look)
        axis.text(1.01, base, ks, transform=axis.get_yaxis_transform(), fontsize=6, va="bottom")
        axis.axhline(base, color=GRID, lw=0.5, zorder=0)
        if row == 0:
            axis.text(1.01, 1, "KS", transform=axis.transAxes, fontsize=6.5, va="bottom")
        axis.set_yticks([], [])
        axis.text(-4.1, base, name, fontsize=6, ha="right", va="bottom")
    for axis in axes:
        axis.set(xlim=(-4, 4), ylim=(-0.2, top))
        axis.spines[["left", "right", "top"]].set_visible(False)
        name_axes(axis, "standard deviations from the mean")
    title = _title(trace, layer, of, len(names), samples)
    finish(figure, axes[0], title, ["exact"], columns=2)
    return figure


def state_quantiles(
    trace: TraceLike,
    layer: int = 0,
    of: States = "query",
    *,
    dimensions: int = DIMENSIONS,
    skip: int = 4,
    seed: int = 0,
) -> Figure:
    """Quantiles of random dimensions of a layer against normal quantiles.

    The same dimensions as `state_ridges` shows; arguments and errors as there. Points of normal
    samples lie on the line. The number is the correlation of the points of all samples.
    """
    trace = as_trace(trace)
    names, samples = _drawn(trace, layer, of, dimensions, skip, seed)
    across, up = quantiles(samples)
    fit = fit_normal(samples)
    grid = Panels(len(names), columns=8, size=(1.1, 1.1))
    for axis, name, values, qq in zip(grid.axes, names, up, fit.qq.tolist(), strict=True):
        axis.plot(across[[0, -1]], across[[0, -1]], color="black", lw=0.7)
        axis.plot(across, values, ".", color=COLOURS[0], ms=2, mew=0)
        words: dict[str, Any] = {"transform": axis.transAxes, "fontsize": 6}
        axis.text(0.05, 0.95, name, va="top", **words)
        axis.text(0.95, 0.05, "constant" if np.isnan(qq) else f"{qq:.3f}", ha="right", **words)
    grid.axes[0].set_xticks([-2, 0, 2])
    grid.figure.supxlabel("normal quantile", fontsize=8)
    grid.figure.supylabel("sample, standard deviations from the mean", fontsize=8)
    caption(grid.figure, _title(trace, layer, of, len(names), samples), ["exact"])
    return grid.figure


def normal_distance(normality: Normality) -> Figure:
    """Kolmogorov-Smirnov distance of each head from normal, mean over its dimensions.

    The colour bar marks the distance of as many independent normal samples.
    """
    values = mean_known(normality.effects["ks"])
    layers, heads = values.shape
    figure, axis = single_panel(max(5.2, 0.42 * heads + 1.9), max(2.4, 0.28 * layers + 1.5))
    image = axis.imshow(values, cmap="viridis", vmin=0, **CELLS)
    middle = 0.6 * np.nanmax(values, initial=0)
    look: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 6.5}
    for (layer, head), value in np.ndenumerate(values):
        if values.size <= _WRITTEN:
            ink = "black" if value > middle else "white"
            axis.text(head, layer, f"{value:.3f}".removeprefix("0"), color=ink, **look)
    name_axes(axis, "" if normality.of == "residual" else "query head", "layer")
    whole_ticks(axis.xaxis, axis.yaxis)
    chance = normal_ks(normality.samples)
    label = f"KS distance\n(normal samples: {chance:.3f})"
    colour_bar(figure, image, axis, label, pad=0.02).axhline(chance, color="white", lw=1.2)
    rows, dimensions = normality.samples, normality.effects["ks"].shape[-1]
    subject = f"{normality.trace}: {_OF[normality.of]}, distance from normal over {rows} rows"
    caption(figure, f"{subject}\nmean over {dimensions} dimensions", ["exact"])
    return figure


def projection_gap(projected: Projections) -> Figure:
    """Mean exponential of projections against that of normal projections; a panel per layer.

    A histogram over query heads and keys of the gap, minus the gap of ideal normal samples: 0 for
    normal projections, positive for a heavier upper tail. Values beyond the ends, at most a tenth,
    are in the last bins. Above a variance of 2 log n, n samples show only a part of the upper
    tail.
    """
    excess = projected.gap - projected.normal_gap
    layers, heads, keys = excess.shape
    limit = 2 * math.log(projected.samples)
    low, high = np.percentile(excess, (5, 95))
    low, high = min(low, -1), max(high, 1)
    width = (high - low) / _GAP_BINS
    # 0 is the middle of a bin
    edges = (np.arange(math.floor(low / width), math.ceil(high / width) + 2) - 0.5) * width
    inside = excess.clip(edges[0], edges[-1])
    grid = Panels(layers)
    for layer, axis in enumerate(grid.axes):
        wide = projected.variance[layer] > limit
        parts = [inside[layer][~wide], inside[layer][wide]]
        weights = [np.full(len(part), 100 / (heads * keys)) for part in parts]
        look: dict[str, Any] = {"stacked": True, "color": [COLOURS[0], COLOURS[4]]}
        look["label"] = f"variance up to {limit:.1f}", f"variance above {limit:.1f} (2 log n)"
        axis.hist(parts, edges.tolist(), weights=weights, **look)
        axis.axvline(0, color="black", lw=0.8, ls=":")
        axis.set_title(f"layer {layer}", fontsize=8)
        near = (np.abs(excess[layer]) <= 1).mean()
        text = f"median {np.median(excess[layer]):.2f} nats\nwithin 1 nat: {near:.0%}"
        corner: dict[str, Any] = {"transform": axis.transAxes, "ha": "right", "va": "top"}
        axis.text(0.97, 0.95, text, fontsize=6.5, **corner)
    grid.label("gap above that of normal (nats)", "share of heads and keys (%)")
    stage = "after RoPE" if projected.rotated else "before RoPE, keys rotated by the mean rotation"
    subject = f"{projected.trace}: projections of {projected.samples} queries {stage}"
    text = f"{subject}\n{heads} query heads, {keys} keys; ends: all beyond"
    finish(grid.figure, grid.axes[0], text, ["exact"], columns=2)
    return grid.figure


def _drawn(
    trace: Trace, layer: int, of: States, dimensions: int, skip: int, seed: int
) -> tuple[list[str], Tensor]:
    """Names and samples [dimension, row] of random dimensions of a layer, in their order."""
    check_rows(trace, skip, trace.n_pos, LEAST_SAMPLES)
    samples = states(trace, layer, of, skip=skip)
    flat = samples.flatten(0, 1)
    count = min(dimensions, len(flat))
    drawn = np.sort(np.random.default_rng(seed).choice(len(flat), count, replace=False))
    pairs = (divmod(place, samples.shape[1]) for place in drawn.tolist())
    names = [f"{dim}" if of == "residual" else f"{head}.{dim}" for head, dim in pairs]
    return names, flat[torch.from_numpy(drawn)]


def _title(trace: Trace, layer: int, of: States, count: int, samples: Tensor) -> str:
    names = "dimension" if of == "residual" else "query head.dimension"
    return (
        f"{trace.name}, layer {trace_layer(trace, layer)}: {_OF[of]}, {samples.shape[-1]} rows\n"
        f"{count} random dimensions ({names})"
    )
