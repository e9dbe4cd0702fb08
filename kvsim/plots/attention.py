"""Figures of attention: overlap of top keys, sparsity, expected against observed attention."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
import polars as pl
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from kvsim.analysis.arrays import Floats
from kvsim.analysis.attention.windows import default_window, window_overlap
from kvsim.analysis.folder import Tabular, as_table
from kvsim.analysis.results import labelled
from kvsim.core.trace import Trace
from kvsim.errors import PolicyError
from kvsim.plots.registry import figure
from kvsim.plots.style import (
    CELLS,
    cell_means,
    colour_bar,
    counted,
    finish,
    mean_line,
    means_of,
    name_axes,
    plain,
    series,
    trace_label,
    whole_ticks,
)
from kvsim.store.opening import Traces, as_traces

#: Shares of the keys that count as top.
_TOPS = tuple(place / 20 for place in range(1, 21))
_BLOCKS = ("oldest window", "second window", "third window", "union of the three", "equal budget")
_MAXIMA = {"sequence": "all keys", "behind_sink": "all keys but the sink"}
#: Most layers that have an entry in the legend.
_NAMED = 9


@figure(source="G-KV, Fig. 1")
def overlap_curves(traces: Traces, *, layers: Sequence[int] | None = None) -> Figure:
    """Share of the last window's top keys that earlier windows had, over the share that is top.

    G-KV (arXiv 2512.00504), Fig. 1. Four windows of rows lie at the end of each trace. *Equal
    budget* has as many keys as one top set, by the largest of the three earlier scores. Dotted is
    chance, for one set and for a union of three.

    Args:
        traces: of equally many layers; the mean is over them, with the 95 % interval.
        layers: a panel each; by default one panel of the mean over all without a window.

    Returns a Figure. Raises TraceError if a trace is too short for four windows.
    """
    found = [trace.part() for trace in as_traces(traces)]
    every = [layer for layer in found[0].readable if layer not in found[0].windowed]
    panels = [every] if layers is None else [[layer] for layer in layers]
    shares, styles = np.array(_TOPS), series(_BLOCKS)
    figure = Figure((max(5.6, 3.4 * len(panels) + 0.4), 4.0), dpi=150, layout="constrained")
    axes = list(figure.subplots(1, len(panels), squeeze=False, sharey=True)[0])
    for axis, shown in zip(axes, panels, strict=True):
        values = np.stack([_overlaps(trace, shown) for trace in found])
        for place, (name, style) in enumerate(styles.items()):
            mean_line(axis, shares, list(values[:, place]), label=name, lw=1.3, ms=3, **style)
        chance, three = values[:, 5:].mean(0)
        axis.plot(shares, chance, ":", color="black", lw=1.2, label="chance, one set")
        union = styles[_BLOCKS[3]]["color"]
        axis.plot(shares, three, ":", color=union, lw=1.2, label="chance, union")
        ids = found[0].layer_ids
        whole = "all layers" if len(every) == len(ids) else "layers without a window"
        title = whole if layers is None else f"layer {ids[shown[0]]}"
        plain(axis, "share of keys that count as top", title=title)
        axis.set(xlim=(0, 1), ylim=(0, 1.02))
    name_axes(axes[0], y="share of the last window's top keys")
    rows = "/".join(map(str, sorted({default_window(trace.n_pos) for trace in found})))
    subject = f"Top keys again: windows of {rows} rows\nmean over heads, {counted([len(found)])}"
    finish(figure, axes[0], subject, ["exact"], columns=4)
    return figure


def _overlaps(trace: Trace, layers: Sequence[int]) -> Floats:
    """Mean over layers of `_BLOCKS`, then chance for a set and for the union; [7, share]."""
    found = (window_overlap(trace, layer, shares=_TOPS) for layer in layers)
    pairs = [list(zip(*overlap.values(), strict=True)) for overlap in found]
    rows = [(*values, chance[0], chance[3]) for values, chance in pairs]  # of a block, the union
    mean: Floats = np.mean(rows, axis=0)
    return mean


@figure(source="G-KV, Fig. 9")
def sparsity_curves(table: Tabular, *, layers: Sequence[int] | None = None) -> Figure:
    """Share of the keys that score below p times the maximum, over p; full and compressed caches.

    G-KV (arXiv 2512.00504), Fig. 9. A line per layer, black their mean with the 95 % interval over
    prompts. The right column leaves out the sink, whose maximum makes any cache look sparse.

    Args:
        table: with the metrics `sparsity` and, for compressed caches, `sparsity_compressed`.
        layers: all by default.

    Returns a Figure. Raises PolicyError if the table has neither metric in these layers.
    """
    table = labelled(as_table(table))
    table = table.filter(pl.col("metric").is_in(["sparsity", "sparsity_compressed"]))
    if layers is not None:
        table = table.filter(pl.col("layer").is_in(list(layers)))
    by_layer, means = (_sparsity_means(table, by) for by in (["layer"], []))
    caches = by_layer["cache"].unique(maintain_order=True).to_list()
    shown = sorted(by_layer["layer"].unique())
    colours = mpl.colormaps["viridis"](np.linspace(0, 0.9, len(shown)))
    shades, named = dict(zip(shown, colours, strict=True)), shown[:: -(-len(shown) // _NAMED)]
    figure = Figure(figsize=(7.6, 1.9 * len(caches) + 1.2), dpi=150, layout="constrained")
    grid = figure.subplots(len(caches), 2, squeeze=False, sharex=True, sharey=True)
    for row, cache in zip(grid, caches, strict=True):
        for axis, (peak, keys) in zip(row, _MAXIMA.items(), strict=True):
            lines = by_layer.filter(cache=cache, peak=peak).sort("p")
            for (layer,), line in lines.group_by("layer", maintain_order=True):
                colour, name = shades[layer], f"layer {layer}" if layer in named else None
                axis.plot(line["p"], line["mean"], ".-", label=name, color=colour, lw=1.0, ms=3)
            mean = means.filter(cache=cache, peak=peak).sort("p")
            if len(shown) > 1:
                axis.plot(mean["p"], mean["mean"], "--", color="black", lw=1.4, label="mean")
            low, high = mean.select("low", "high").to_numpy().astype(np.float64).T
            axis.fill_between(mean["p"].to_numpy(), low, high, color="black", alpha=0.15, lw=0)
            axis.set(xscale="log", ylim=(0, 1.02))
            axis.set_title(f"{cache}: {keys}", fontsize=8)
            plain(axis)
        name_axes(row[0], y="share of keys")
    for axis in grid[-1]:
        name_axes(axis, "p, share of the maximum")
    subject = "Keys of the last rows that score below p x maximum"
    text = f"{subject}\nmean over heads and {counted(means['n'])}"
    finish(figure, grid[0, 0], text, means["fidelity"], columns=5)
    return figure


def _sparsity_means(table: pl.DataFrame, by: Sequence[str]) -> pl.DataFrame:
    """Averages with columns p, peak (the keys of the maximum) and cache (full, or a policy)."""
    means = means_of(table, by, needs="sparsity or sparsity_compressed of these layers")
    budgets = means["requested"].drop_nulls().n_unique()
    policy = pl.format("{}, budget {}", "policy", "requested") if budgets > 1 else pl.col("policy")
    return means.with_columns(
        p=pl.col("variant").str.extract(r"p=([^,]+)").cast(pl.Float64),
        peak=pl.col("variant").str.extract(r"max=(\w+)"),
        cache=pl.coalesce(policy, pl.lit("full cache")),
    )


_MAP = mpl.colormaps["viridis"].with_extremes(bad="white")


@figure(inputs=("evictions",), source="Expected Attention, Fig. 6")
def reconstruction_error(table: pl.DataFrame) -> Figure:
    """The output error of a layer against the share evicted: means, and each policy by layer.

    Expected Attention (arXiv 2510.00636), Fig. 6. Left a line per policy, mean over layers, then
    over traces with the 95 % interval; right a map per policy, of the same colours. Errors are
    relative to the full output.

    Args:
        table: of `kvsim.analysis.output.reconstruction`.

    Returns a Figure. Raises PolicyError if no policy changed any output.
    """
    value = "relative_head_error"
    table = labelled(table)
    positive = table.filter(pl.col(value) > 0)[value]
    if positive.is_empty():
        raise PolicyError("no policy moved any output, so there is nothing to show; evict more")
    ratios, layers = sorted(table["ratio"].unique()), sorted(table["layer"].unique())
    names = table["policy"].unique(maintain_order=True).to_list()
    unit = "relative to the full output"
    across = 2 if len(names) == 4 else min(3, len(names))
    down = -(-len(names) // across)
    height = max(3.9, 0.9 + down * max(1.45, 0.6 + 0.1 * len(layers)))
    figure = Figure(figsize=(4.6 + 1.8 * across, height), dpi=150, layout="constrained")
    whole = figure.add_gridspec(1, 2, width_ratios=(3.8, 0.8 + 1.8 * across))
    axis = figure.add_subplot(whole[0])
    maps = whole[1].subgridspec(down, across).subplots(squeeze=False, sharex=True, sharey=True)
    scale = LogNorm(float(positive.min()), float(positive.max()))  # type: ignore[arg-type]  # numbers
    for axis_of, (name, style) in zip(maps.flat, series(names).items(), strict=False):
        part = table.filter(policy=name)
        lines = cell_means(part, ["trace"], "ratio", ratios, value)
        mean_line(axis, np.array(ratios), list(lines), label=name, lw=1.3, ms=4, **style)
        cells = cell_means(part.sort("layer"), ["layer"], "ratio", ratios, value)
        axis_of.imshow(np.ma.masked_less_equal(cells, 0), cmap=_MAP, norm=scale, **CELLS)
        axis_of.set_title(name, fontsize=7.5)
        axis_of.tick_params(labelsize=7)
    for axis_of in maps.flat[len(names) :]:
        axis_of.set_axis_off()
    places = np.unique(np.linspace(0, len(ratios) - 1, 5).round().astype(int))
    for axis_of in maps.flat[: len(names)][-across:]:
        axis_of.set_xticks(places, [f"{ratios[place]:g}" for place in places])
        name_axes(axis_of, "share evicted")
        axis_of.tick_params(labelbottom=True)
    for axis_of in maps[:, 0]:
        whole_ticks(axis_of.yaxis)
        name_axes(axis_of, y="layer")
    image = ScalarMappable(scale, _MAP)
    colour_bar(figure, image, list(maps.flat), f"error ({unit})", pad=0.02, aspect=30)

    axis.set_yscale("log")
    axis.set_title("mean over layers", fontsize=8)
    plain(axis, "share of the entries evicted", f"error of the layer's output ({unit})")
    least, most = min(table["rows"]), max(table["rows"])
    rows = least if least == most else f"{least} to {most}"
    text = f"{trace_label(table['trace'])}: output of all heads where a policy evicts once, then "
    finish(figure, axis, f"{text}{rows} rows", table["fidelity"], columns=6)
    return figure
