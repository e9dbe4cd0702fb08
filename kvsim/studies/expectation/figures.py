"""Figures of expected attention and of how normal queries are. All numbers are `exact`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import polars as pl
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from kvsim.analysis.arrays import Floats, mean_known
from kvsim.analysis.axes import checked_index
from kvsim.analysis.folder import Tabular, as_table
from kvsim.errors import PolicyError
from kvsim.plots.style import (
    CELLS,
    COLOURS,
    Panels,
    caption,
    cell_means,
    colour_bar,
    finish,
    mean_line,
    name_axes,
    series,
    single_panel,
    trace_label,
    whole_ticks,
)
from kvsim.studies.expectation.expectation import ORDERS, STEPS, Expectation, Projections
from kvsim.studies.expectation.normality import Normality, ks_by_chance

#: Attention below this is drawn as this value: logits of some heads are hundreds below the others.
FLOOR: Final = 1e-12

_STEP_NAMES = ("ratio\nof means", "normal", "mean\nrotation", "past")
_ORDER_NAMES = {"past": "past (Expected Attention)", "random": "chance"}
# Cells of a map that have room for a number.
_WRITTEN = 256
_GAP_BINS = 60


def expected_observed(
    expectation: Expectation, *, layers: Sequence[int] | None = None, qhead: int | None = None
) -> Figure:
    """Expected against observed attention on each key of a query head, by layer and step.

    arXiv 2510.00636, Fig. 10. Rows are layers, columns are steps. Dotted is where the two agree:
    expected attention sums to 1 over the keys, observed attention to the share that they get.

    layers: all by default. qhead: by default the head of each layer with the median Spearman
    correlation of the last step, the lower one of two.
    """
    count, heads, keys = expectation.observed.shape
    every, owner = range(count), expectation.trace
    shown = [
        checked_index("layer", at, count, owner) for at in (every if layers is None else layers)
    ]
    if qhead is not None:
        qhead = checked_index("query head", qhead, heads, owner)
    grid = Panels(len(shown) * len(STEPS), columns=len(STEPS), size=(2.1, 2.0), share="row")
    at = np.arange(expectation.sink, expectation.cut)
    scale = Normalize(expectation.sink, expectation.cut - 1)
    lowest = 1.0
    for place, axis in enumerate(grid.axes):
        row, step = divmod(place, len(STEPS))
        layer = shown[row]
        head = _middle(expectation.spearman[-1, layer]) if qhead is None else qhead
        observed = np.exp(expectation.observed[layer, head])
        expected = np.exp(expectation.expected[:, layer, head])
        look: dict[str, Any] = {"s": 7, "lw": 0, "cmap": "viridis", "norm": scale, "zorder": 3}
        axis.scatter(observed.clip(FLOOR), expected[step].clip(FLOOR), c=at, **look)
        ends = np.array([FLOOR, 1.0])
        axis.plot(ends, ends / observed.sum(), ":", color="black", lw=0.8)
        axis.set(xscale="log", yscale="log", xlim=_around(observed), ylim=_around(expected))
        axis.tick_params(which="minor", labelsize=5)  # labelled where there is less than a decade
        lowest = min(lowest, observed.min(), expected.min())
        rank = expectation.spearman[step, layer, head]
        logs = expectation.log_pearson[step, layer, head]
        name = f"{STEPS[step].replace('_', ' ')}\n" if row == 0 else ""
        axis.set_title(f"{name}Spearman {rank:.2f}, log-Pearson {logs:.2f}", fontsize=7)
        if step == 0:
            text = f"layer {layer}, head {head}"
            axis.text(0.03, 0.97, text, transform=axis.transAxes, fontsize=7, va="top")
    grid.label("observed attention (share)", "expected (share of the keys)")
    layout = {"pad": 0.01, "aspect": 40, "shrink": 0.9}
    image = ScalarMappable(scale, "viridis")
    colour_bar(grid.figure, image, grid.axes, "position of the key", **layout)
    edge = f"; at the edge: {FLOOR:g} or less" if lowest <= FLOOR else ""
    what = f"{expectation.trace}: {keys} keys before position {expectation.cut}, mean over "
    what += f"{expectation.rows} later rows\ndotted: equal shares{edge}"
    caption(grid.figure, what, ["exact"])
    return grid.figure


def agreement_steps(table: Tabular, *, layers: Sequence[int] | None = None) -> Figure:
    """Agreement of expected and observed attention after each step, a panel per layer.

    A point and a thin line per trace and query head, black their mean.

    table: with the metric `expectation_steps`. layers: all by default.
    """
    table = as_table(table)
    table = table.filter(metric="expectation_steps")
    panels, shown = _by_layer(table, layers)
    at = np.arange(len(STEPS))
    for axis, layer in zip(panels.axes, shown, strict=True):
        values = cell_means(
            table.filter(layer=layer), ["trace", "qhead"], "variant", STEPS, "value"
        )
        # next to each other, so that equal values are visible
        places = at[:, None] + np.linspace(-0.16, 0.16, len(values) + 2)[1:-1]
        axis.plot(places, values.T, "o-", color=COLOURS[0], lw=0.4, ms=3, mew=0, alpha=0.6)
        look: dict[str, Any] = {"color": "black", "ms": 4.5, "lw": 1.4, "mfc": "white"}
        axis.plot(at, mean_known(values.T), "D-", label="mean", **look)
        axis.set_title(f"layer {layer}", fontsize=8)
        axis.set_xticks(at, _STEP_NAMES)
        axis.set_xlim(-0.4, len(STEPS) - 0.6)
        axis.axhline(0, color="black", lw=0.7, ls=":")
    panels.label("step (the last: Expected Attention)", "rank correlation with observed")
    what = f"{trace_label(table['trace'])}: agreement of expected and observed attention"
    what += "\nblue: query heads; black: their mean"
    caption(panels.figure, what, table["fidelity"])
    return panels.figure


def attention_loss(table: Tabular, *, layers: Sequence[int] | None = None) -> Figure:
    """Share of observed attention lost against the share of keys removed, a line per order.

    A panel of the mean over layers and one per layer; means over query heads, then over traces with
    the 95 % interval. No order is below the oracle; chance is the diagonal.

    table: with the metric `attention_loss`. layers: all by default.
    """
    table = as_table(table)
    table = table.filter(metric="attention_loss").with_columns(
        order=pl.col("variant").str.extract(r"^(\w+),"),
        removed=pl.col("variant").str.extract(r"removed=(.+)$").cast(pl.Float64),
    )
    panels, shown = _by_layer(table, layers, more=1)
    part = table.filter(pl.col("layer").is_in(shown))
    removed = sorted(part["removed"].unique())
    styles: dict[str, Mapping[str, Any]] = {
        **series((*STEPS, "key_norm")),
        "random": {"color": "#777777", "linestyle": ":", "marker": ""},
        "oracle": {"color": "black", "linestyle": "-", "marker": ""},  # a bound, as chance
    }
    views = {"mean over layers": part}
    views |= {f"layer {layer}": part.filter(layer=layer) for layer in shown}
    for axis, (name, view) in zip(panels.axes, views.items(), strict=True):
        for place, order in enumerate(ORDERS):
            values = cell_means(view.filter(order=order), ["trace"], "removed", removed, "value")
            look: dict[str, Any] = {"ms": 3, "lw": 1.2, **styles[order]}
            look["markevery"] = (place % 3, 3)  # at other shares than those of the line before
            look["label"] = _ORDER_NAMES.get(order, order.replace("_", " "))
            mean_line(axis, np.array(removed), list(values), **look)
        axis.set_title(name, fontsize=8)
        axis.set(xlim=(0, 1), ylim=(0, 1.02))
    panels.label("share of the keys removed", "share of attention lost")
    what = f"{trace_label(part['trace'])}: observed attention lost with keys removed in the order "
    text = f"{what}of a score\nmean over query heads"
    finish(panels.figure, panels.axes[0], text, part["fidelity"], columns=4)
    return panels.figure


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


def _by_layer(
    table: pl.DataFrame, layers: Sequence[int] | None, *, more: int = 0
) -> tuple[Panels, list[int]]:
    """Build a panel for each layer and `more` others; return them and the layers."""
    present = sorted(table["layer"].unique())
    shown = present if layers is None else list(layers)
    if not shown or not set(shown) <= set(present):
        raise PolicyError(f"layers {shown} were requested; the table has {present}")
    return Panels(len(shown) + more), shown


def _around(values: Floats) -> tuple[float, float]:
    """Limits with room for the values, from the floor to 1."""
    return 0.5 * max(float(values.min()), FLOOR), min(2.0, 2 * max(float(values.max()), FLOOR))


def _middle(values: Floats) -> int:
    """Return the index of the median, the lower one of two; NaN counts as highest."""
    count = int((~np.isnan(values)).sum())
    return int(values.argsort(kind="stable")[max(0, count - 1) // 2])
