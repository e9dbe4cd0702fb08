"""Figures of attention: overlap of top keys, sparsity, expected against observed attention.

All numbers come from `kvsim.analysis`. Those of expected and observed attention are `exact`, the
error of a layer's output is open loop after the first layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import matplotlib as mpl
import numpy as np
import polars as pl
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, LogNorm, Normalize
from matplotlib.figure import Figure

from kvsim.analysis.arrays import Floats, mean_known
from kvsim.analysis.attention.expectation import ORDERS, STEPS, Expectation
from kvsim.analysis.attention.windows import TOPS, default_window, overlap_table
from kvsim.analysis.axes import checked_index
from kvsim.analysis.folder import Tabular, as_table
from kvsim.analysis.results import labelled
from kvsim.analysis.summaries import averages
from kvsim.core.trace import Trace
from kvsim.errors import PolicyError
from kvsim.plots.style import (
    CELLS,
    COLOURS,
    Panels,
    caption,
    colour_bar,
    counted,
    finish,
    mean_line,
    name_axes,
    plain,
    series,
    trace_label,
    whole_ticks,
)
from kvsim.store.opening import Traces, as_traces

_BLOCKS = ("oldest window", "second window", "third window", "union of the three", "equal budget")
_MAXIMA = {"sequence": "all keys", "behind_sink": "all keys but the sink"}
#: Layers up to which each has an entry in the legend.
_NAMED = 9


def overlap_curves(
    traces: Traces,
    *,
    layers: Sequence[int] | None = None,
    window: int | None = None,
    tops: Sequence[float] = TOPS,
) -> Figure:
    """Share of the last window's top keys that earlier windows had, over the share that is top.

    G-KV (arXiv 2512.00504), Fig. 1: four windows of rows at the end of each trace. Each of the
    three earlier windows alone; their union; and an equal budget, as many keys as one top set has
    by the largest of the three scores, which a policy could keep. Dotted is chance, for one set and
    for the union of three.

    traces: the mean is over them, with the 95 % interval; of equally many layers. layers: a panel
    each; one panel of the mean over all by default. window: rows of a window, by default 128 or an
    eighth of a shorter trace. tops: shares of the keys, in (0, 1].

    Raises TraceError if a trace is too short for four windows.
    """
    traces = as_traces(traces)
    panels = [range(traces[0].n_layers)] if layers is None else [[layer] for layer in layers]
    shares, styles = np.asarray(tops, dtype=np.float64), series(_BLOCKS)
    figure = Figure(figsize=(max(5.6, 3.4 * len(panels) + 0.4), 4.0), dpi=150)
    axes = list(figure.subplots(1, len(panels), squeeze=False, sharey=True)[0])
    for axis, shown in zip(axes, panels, strict=True):
        values = np.stack([_overlaps(trace, shown, window, tops) for trace in traces])
        for place, (name, style) in enumerate(styles.items()):
            mean_line(axis, shares, list(values[:, place]), label=name, lw=1.3, ms=3, **style)
        chance, three = values[:, 5:].mean(0)
        axis.plot(shares, chance, ":", color="black", lw=1.2, label="chance, one set")
        union = styles[_BLOCKS[3]]["color"]
        axis.plot(shares, three, ":", color=union, lw=1.2, label="chance, union")
        ids = traces[0].layer_ids
        title = "all layers" if layers is None else f"layer {ids[shown[0]]}"
        plain(axis, "share of keys that count as top", title=title)
        axis.set(xlim=(0, 1), ylim=(0, 1.02))
    name_axes(axes[0], y="share of the last window's top keys")
    widths = sorted({default_window(trace.n_pos) if window is None else window for trace in traces})
    rows = "/".join(map(str, widths))
    subject = f"Top keys again: windows of {rows} rows\nmean over heads, {counted([len(traces)])}"
    finish(figure, axes[0], subject, ["exact"], columns=4)
    return figure


def _overlaps(
    trace: Trace, layers: Sequence[int], window: int | None, tops: Sequence[float]
) -> Floats:
    """As `_BLOCKS`, then chance for a set and for the union; [7, share], mean over the layers."""
    tables = (overlap_table(trace, layer, window=window, shares=tops) for layer in layers)
    mean: Floats = np.mean([table.drop("share").to_numpy().T for table in tables], axis=0)
    return mean


def sparsity_curves(table: Tabular, *, layers: Sequence[int] | None = None) -> Figure:
    """Share of the keys that score below p times the maximum, over p; full and compressed caches.

    G-KV (arXiv 2512.00504), Fig. 9. A row of panels for the full cache and for each policy, a line
    per layer, black their mean with the 95 % interval over prompts. The two columns differ in the
    keys of which the maximum is taken: a sink that holds it makes any cache look sparse.

    table: with the metrics `sparsity` and, for compressed caches, `sparsity_compressed`.
    """
    table = as_table(table)
    table = table.filter(pl.col("metric").is_in(["sparsity", "sparsity_compressed"]))
    if layers is not None:
        table = table.filter(pl.col("layer").is_in(list(layers)))
    by_layer, means = (_sparsity_means(table, by) for by in (["layer"], []))
    if not by_layer.height:
        where = "" if layers is None else f" in layers {', '.join(map(str, layers))}"
        raise PolicyError(
            f"the table has no sparsity{where}; measure sparsity and sparsity_compressed"
        )
    caches = by_layer["cache"].unique(maintain_order=True).to_list()
    shown = sorted(by_layer["layer"].unique())
    colours = mpl.colormaps["viridis"](np.linspace(0, 0.9, len(shown)))
    shades = dict(zip(shown, colours, strict=True))
    figure = Figure(figsize=(7.6, 1.9 * len(caches) + 1.2), dpi=150, layout="constrained")
    grid = figure.subplots(len(caches), 2, squeeze=False, sharex=True, sharey=True)
    for row, cache in zip(grid, caches, strict=True):
        for axis, (peak, keys) in zip(row, _MAXIMA.items(), strict=True):
            lines = by_layer.filter(cache=cache, peak=peak).sort("p")
            for (layer,), line in lines.group_by("layer", maintain_order=True):
                colour, name = shades[layer], f"layer {layer}"
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
    if len(shown) <= _NAMED:
        finish(figure, grid[0, 0], text, means["fidelity"], columns=5)
    else:
        scale = ScalarMappable(Normalize(shown[0], shown[-1]), ListedColormap(colours))
        colour_bar(figure, scale, list(grid.flat), "layer (dashed: mean)", pad=0.01, aspect=40)
        caption(figure, text, means["fidelity"])
    return figure


def _sparsity_means(table: pl.DataFrame, by: Sequence[str]) -> pl.DataFrame:
    """Averages with columns p, peak (the keys of the maximum) and cache (full, or a policy)."""
    means = averages(table, by).filter(pl.col("mean").is_not_null())
    budgets = means["requested"].drop_nulls().n_unique()
    policy = pl.format("{}, budget {}", "policy", "requested") if budgets > 1 else pl.col("policy")
    return means.with_columns(
        p=pl.col("variant").str.extract(r"p=([^,]+)").cast(pl.Float64),
        peak=pl.col("variant").str.extract(r"max=(\w+)"),
        cache=pl.coalesce(policy, pl.lit("full cache")),
    )


#: Attention below this is drawn as this value: logits of some heads are hundreds below the others.
FLOOR: Final = 1e-12

_STEP_NAMES = ("ratio\nof means", "normal", "mean\nrotation", "past")
_ORDER_NAMES = {"past": "past (Expected Attention)", "random": "chance"}
_MAP = mpl.colormaps["viridis"].with_extremes(bad="white")
#: Quantities of the figure of steps: metric, suffix of its variants, label.
_MEASURES = {
    "spearman": ("expectation_steps", "", "rank correlation with observed"),
    "log_pearson": ("expectation_logs", "", "correlation of logarithms with observed"),
    "recall_10": ("expectation_recall", ",top=0.1", "share found of the top 10 % of keys"),
    "recall_25": ("expectation_recall", ",top=0.25", "share found of the top 25 % of keys"),
    "recall_50": ("expectation_recall", ",top=0.5", "share found of the top 50 % of keys"),
}


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
    subject = f"{expectation.trace}: {keys} keys before position {expectation.cut}, mean over "
    subject += f"{expectation.rows} later rows\ndotted: equal shares{edge}"
    caption(grid.figure, subject, ["exact"])
    return grid.figure


def agreement_steps(
    table: Tabular, *, measure: str = "spearman", layers: Sequence[int] | None = None
) -> Figure:
    """Agreement of expected and observed attention after each step, a panel per layer.

    A point and a thin line per trace and query head, black their mean.

    measure: spearman (needs the metric `expectation_steps`), log_pearson (`expectation_logs`), or
    recall_10, recall_25, recall_50 (`expectation_recall`). layers: all by default.
    """
    table = as_table(table)
    if measure not in _MEASURES:
        raise PolicyError(f"measure is {measure!r}; expected one of {', '.join(_MEASURES)}")
    metric, ending, label = _MEASURES[measure]
    variants = [f"{step}{ending}" for step in STEPS]
    table = table.filter(pl.col("variant").is_in(variants), metric=metric)
    panels, shown = _by_layer(table, layers)
    ticks = np.arange(len(STEPS))
    for axis, layer in zip(panels.axes, shown, strict=True):
        values = _cells(table.filter(layer=layer), ["trace", "qhead"], "variant", variants, "value")
        # next to each other, so that equal values are visible
        places = ticks[:, None] + np.linspace(-0.16, 0.16, len(values) + 2)[1:-1]
        axis.plot(places, values.T, "o-", color=COLOURS[0], lw=0.4, ms=3, mew=0, alpha=0.6)
        look: dict[str, Any] = {"color": "black", "ms": 4.5, "lw": 1.4, "mfc": "white"}
        axis.plot(ticks, mean_known(values.T), "D-", label="mean", **look)
        axis.set_title(f"layer {layer}", fontsize=8)
        axis.set_xticks(ticks, _STEP_NAMES)
        axis.set_xlim(-0.4, len(STEPS) - 0.6)
        if measure in ("spearman", "log_pearson"):
            axis.axhline(0, color="black", lw=0.7, ls=":")
    panels.label("step (the last: Expected Attention)", label)
    subject = f"{trace_label(table['trace'])}: agreement of expected and observed attention"
    subject += "\nblue: query heads; black: their mean"
    caption(panels.figure, subject, table["fidelity"])
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
            values = _cells(view.filter(order=order), ["trace"], "removed", removed, "value")
            look: dict[str, Any] = {"ms": 3, "lw": 1.2, **styles[order]}
            look["markevery"] = (place % 3, 3)  # at other shares than those of the line before
            look["label"] = _ORDER_NAMES.get(order, order.replace("_", " "))
            mean_line(axis, np.array(removed), list(values), **look)
        axis.set_title(name, fontsize=8)
        axis.set(xlim=(0, 1), ylim=(0, 1.02))
    panels.label("share of the keys removed", "share of attention lost")
    text = f"{trace_label(part['trace'])}: observed attention lost with keys removed in the order "
    text += "of a score\nmean over query heads"
    finish(panels.figure, panels.axes[0], text, part["fidelity"], columns=4)
    return panels.figure


def reconstruction_error(table: pl.DataFrame, *, relative: bool = True) -> Figure:
    """The output error of a layer against the share evicted: means, and each policy by layer.

    arXiv 2510.00636, Fig. 6. Left a line per policy, mean over layers, then over traces with the
    95 % interval; right a map per policy of layers and shares, of the same colours.

    table: of `kvsim.analysis.reconstruction_table`. relative: to the length of the full output;
    else in the trace's own units, which differ between layers.
    """
    value = "relative_head_error" if relative else "head_error"
    table = labelled(table.with_columns(interval=None, prefill=None))
    positive = table.filter(pl.col(value) > 0)[value]
    if positive.is_empty():
        raise PolicyError("no policy moved any output, so there is nothing to show; evict more")
    ratios, layers = sorted(table["ratio"].unique()), sorted(table["layer"].unique())
    names = table["policy"].unique(maintain_order=True).to_list()
    unit = "relative to the full output" if relative else "units of the trace"
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
        lines = _cells(part, ["trace"], "ratio", ratios, value)
        mean_line(axis, np.array(ratios), list(lines), label=name, lw=1.3, ms=4, **style)
        cells = _cells(part.sort("layer"), ["layer"], "ratio", ratios, value)
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


def _cells(
    table: pl.DataFrame, rows: Sequence[str], column: str, columns: Sequence[Any], value: str
) -> Floats:
    """Means of `value` by the columns `rows`, in their order, and by `column`; NaN if missing."""
    means = table.group_by(*rows, column, maintain_order=True).agg(pl.col(value).mean())
    names = {name: place for place, name in enumerate(dict.fromkeys(means.select(rows).rows()))}
    cells = np.full((len(names), len(columns)), np.nan)
    for *name, at, mean in means.drop_nulls(value).iter_rows():
        cells[names[tuple(name)], columns.index(at)] = mean
    return cells
