"""Figures of how normal queries and projections are (arXiv 2510.00636, Fig. 7 to 9); `exact`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from kvsim.analysis.arrays import mean_known
from kvsim.plots.style import (
    CELLS,
    COLOURS,
    Panels,
    caption,
    colour_bar,
    finish,
    name_axes,
    single_panel,
    whole_ticks,
)
from kvsim.studies.expectation.expectation import Projections
from kvsim.studies.expectation.normality import Normality, ks_by_chance

# Cells of a map that have room for a number.
_WRITTEN = 256
_GAP_BINS = 60


def normal_distance(normality: Normality) -> Figure:
    """Kolmogorov-Smirnov distance of heads, mean over dimensions; marked: of normal samples."""
    values = mean_known(normality.distance)
    layers, heads = values.shape
    figure, axis = single_panel(max(5.2, 0.42 * heads + 1.9), max(2.4, 0.28 * layers + 1.5))
    image = axis.imshow(values, cmap="viridis", vmin=0, **CELLS)
    middle = 0.6 * np.nanmax(values, initial=0)
    look: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 6.5}
    for (layer, head), value in np.ndenumerate(values):
        if values.size <= _WRITTEN:
            ink = "black" if value > middle else "white"
            axis.text(head, layer, f"{value:.3f}".removeprefix("0"), color=ink, **look)
    name_axes(axis, "query head", "layer")
    whole_ticks(axis.xaxis, axis.yaxis)
    chance = ks_by_chance(normality.samples)
    label = f"KS distance\n(normal samples: {chance:.3f})"
    colour_bar(figure, image, axis, label, pad=0.02).axhline(chance, color="white", lw=1.2)
    rows, dimensions = normality.samples, normality.distance.shape[-1]
    subject = f"{normality.trace}: queries before RoPE, distance from normal over {rows} rows"
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
    stage = "before RoPE, keys rotated by the mean rotation"
    subject = f"{projected.trace}: projections of {projected.samples} queries {stage}"
    text = f"{subject}\n{heads} query heads, {keys} keys; ends: all beyond"
    finish(grid.figure, grid.axes[0], text, ["exact"], columns=2)
    return grid.figure
