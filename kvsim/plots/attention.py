"""Figures of attention itself: whether it comes back to its keys, and how sparse it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from kvsim.analysis.attention.overlap import default_window, window_overlap
from kvsim.analysis.summaries import averages
from kvsim.core.trace import Trace
from kvsim.errors import PolicyError
from kvsim.plots.prompts import counted, mean_line
from kvsim.plots.style import LINES, asked_order, caption, legend_below, plain, series

Floats = NDArray[np.float64]

#: Shares of top keys at which overlap is shown.
TOPS = tuple(place / 20 for place in range(1, 21))

_BLOCKS = ("oldest window", "second window", "third window", "union of the three", "equal budget")
_MAXIMA = {"sequence": "over all keys before the window", "behind_sink": "behind the sink"}


def overlap_curves(
    traces: Sequence[Trace],
    *,
    layers: Sequence[int] | None = None,
    window: int | None = None,
    tops: Sequence[float] = TOPS,
) -> Figure:
    """Share of the last window's top keys that earlier windows had, against the share that is top.

    G-KV (arXiv 2512.00504), Fig. 1: four windows of rows at the end of each trace. Each of the
    three earlier windows alone, their union, and as many keys as one top set has by the largest of
    their scores, which a policy of that budget could keep. Dotted is chance, for a set of that size
    and for the union of three.

    Args:
        traces: the mean is over them, with the 95 % interval; of equally many layers.
        layers: indices in the trace, a panel each; one panel of the mean over all by default.
        window: rows of a window, by default 128 or an eighth of a shorter trace.
        tops: shares of the keys, in (0, 1].

    Raises:
        TraceError: a trace is too short for four windows.
    """
    panels = [range(traces[0].n_layers)] if layers is None else [[layer] for layer in layers]
    at, styles = np.asarray(tops, dtype=np.float64), series(_BLOCKS)
    figure = Figure(figsize=(max(5.6, 3.4 * len(panels) + 0.4), 4.0), dpi=150)
    axes = list(figure.subplots(1, len(panels), squeeze=False, sharey=True)[0])
    for axis, shown in zip(axes, panels, strict=True):
        values = np.stack([_overlaps(trace, shown, window, tops) for trace in traces])
        for place, (name, style) in enumerate(styles.items()):
            mean_line(axis, at, list(values[:, place]), label=name, lw=1.3, ms=3, **style)
        one, three = values[:, 5:].mean(0)
        axis.plot(at, one, ":", color="black", lw=1.2, label="chance, one set")
        axis.plot(at, three, ":", color=styles[_BLOCKS[3]]["color"], lw=1.2, label="chance, union")
        ids = traces[0].layer_ids
        axis.set_title("all layers" if layers is None else f"layer {ids[shown[0]]}", fontsize=9)
        axis.set_xlabel("share of keys that count as top", fontsize=8)
        axis.set_xlim(0, 1)
        axis.set_ylim(0, 1.02)
        plain(axis)
    axes[0].set_ylabel("share of the last window's top keys", fontsize=8)
    widths = sorted({default_window(trace.n_pos) if window is None else window for trace in traces})
    rows = "/".join(map(str, widths))
    what = f"Top keys again: windows of {rows} rows\nmean over heads, {counted([len(traces)])}"
    caption(figure, what, ["exact"])
    height = legend_below(figure, axes[0], columns=4)
    figure.tight_layout(rect=(0, height, 1, 1))
    return figure


def _overlaps(
    trace: Trace, layers: Sequence[int], window: int | None, tops: Sequence[float]
) -> Floats:
    """As `_BLOCKS`, then chance for a set and for the union; [7, share], mean over the layers."""
    found = [window_overlap(trace, layer, window=window, shares=tops) for layer in layers]
    each = [
        np.stack([*one.before, one.union, one.equal_budget, one.chance, one.chance_union])
        for one in found
    ]
    out: Floats = np.mean(each, axis=0)
    return out


def _by_policy(found: pl.DataFrame) -> dict[str, Mapping[str, Any]]:
    """A colour and a marker for each policy, a line for each of its budgets; by label."""
    known = found.filter(pl.col("policy").is_not_null()).select("policy", "asked", "label")
    colours = series(known["policy"].unique(maintain_order=True))
    budgets = asked_order(known["asked"].to_list())
    return {
        label: {**colours[policy], "linestyle": LINES[budgets.index(asked) % len(LINES)]}
        for policy, asked, label in known.unique(maintain_order=True).iter_rows()
    }


def sparsity_by_layer(table: pl.DataFrame, shares: Sequence[float] = (0.01, 0.05)) -> Figure:
    """Share of the keys below p times the maximum by layer, of the full and of compressed caches.

    G-KV (arXiv 2512.00504), Fig. 9. Mean over heads and prompts with the 95 % interval; a row of
    panels per p, a column for the keys of which the maximum is taken, because a sink that holds the
    maximum makes any cache look sparse.

    Args:
        table: with the metrics `sparsity` and, for compressed caches, `sparsity_compressed`.
        shares: p, those of which the table has values.

    Raises:
        PolicyError: the table has neither metric at these shares.
    """
    names = {f"p={p:g},max={peak}": (p, peak) for p in shares for peak in _MAXIMA}
    wanted = pl.col("metric").str.starts_with("sparsity") & pl.col("variant").is_in(list(names))
    found = averages(table.filter(wanted), ["layer"]).filter(pl.col("mean").is_not_null())
    if not found.height:
        raise PolicyError(
            f"the table has no sparsity at p of {', '.join(f'{p:g}' for p in shares)}; measure "
            "sparsity and sparsity_compressed"
        )
    budgets = found["asked"].drop_nulls().n_unique()
    asked = pl.format("{}, budget {}", "policy", "asked") if budgets > 1 else pl.col("policy")
    found = found.with_columns(label=asked)
    styles = _by_policy(found)
    full = {"color": "black", "linestyle": "-", "marker": "."}
    figure = Figure(figsize=(7.6, 2.5 * len(shares) + 0.9), dpi=150)
    grid = figure.subplots(len(shares), 2, squeeze=False, sharex=True, sharey=True)
    for (variant, (p, peak)), axis in zip(names.items(), grid.flat, strict=True):
        of_panel = found.filter(variant=variant)
        for label, style in [(None, full), *styles.items()]:
            part = of_panel.filter(pl.col("label").eq_missing(label)).sort("layer")
            low, mean, high = part.select("low", "mean", "high").to_numpy().astype(np.float64).T
            at = part["layer"].to_numpy()
            axis.plot(at, mean, label=label or "full cache", lw=1.3, ms=4, **style)
            axis.fill_between(at, low, high, color=style["color"], alpha=0.15, lw=0)
        axis.set_title(f"p = {p:g}, maximum {_MAXIMA[peak]}", fontsize=8)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        plain(axis)
        axis.set_ylim(0, 1.02)
    for axis in grid[:, 0]:
        axis.set_ylabel("share of keys below p x maximum", fontsize=8)
    for axis in grid[-1]:
        axis.set_xlabel("layer", fontsize=8)
    what = f"How sparse the last rows' attention is, mean over {counted(found['n'])}"
    caption(figure, what, found["fidelity"])
    height = legend_below(figure, grid[0, 0], columns=5)
    figure.tight_layout(rect=(0, height, 1, 1))
    return figure
