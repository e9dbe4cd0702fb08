"""Figures of records: retained, evicted and missed positions, and output error by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray
from scipy.ndimage import maximum_filter

from kvsim.analysis.output.error import output_error
from kvsim.analysis.table import fidelity
from kvsim.core.record import Record
from kvsim.core.trace import Trace
from kvsim.plots.style import caption, finish, legend_of, name_axes, plain, series

Floats = NDArray[np.float64]

KEPT, GONE, MISSED = "#7a9cc6", "#f0ede6", "#c8102e"

#: Attention of a row on one entry from which losing the entry is drawn as a miss.
NEEDED = 0.05

# Pixels per side of a map; longer traces are pooled.
_PIXELS = 640


def retention_map(
    trace: Trace, records: Sequence[Record], *, layer: int = 0, head: int = 0
) -> Figure:
    """Positions that each row sees, and evicted ones that it would attend to; a panel per record.

    Rows of panels are budgets and columns are policies. Blue is seen, pale is evicted, red is
    evicted although the row's full attention on it, for some query head of the group, is at least
    5 % (drawn larger than it is). The number is the mean retained mass of rows after the prompt.
    """
    heads = slice(head * trace.group, (head + 1) * trace.group)
    attention = trace.attention(layer, slice(0, trace.n_pos))[heads].amax(0)
    needed = (attention >= NEEDED).cpu().numpy()
    budgets = sorted({record.budget for record in records})
    names = list(dict.fromkeys(record.policy for record in records))
    figure = Figure(figsize=(max(6.0, 2.6 * len(names) + 0.6), 2.75 * len(budgets) + 0.9), dpi=150)
    axes = figure.subplots(len(budgets), len(names), squeeze=False, sharex=True, sharey=True)
    for axis in axes.flat:
        axis.set_axis_off()
    colours = ListedColormap(["white", KEPT, GONE, MISSED])
    for record, result in zip(records, output_error(trace, records), strict=True):
        axis = axes[budgets.index(record.budget)][names.index(record.policy)]
        axis.set_axis_on()
        at = record.layers.index(layer)
        last = record.evicted_at[at, heads.start if record.per_query_head else head]
        extent = (0, record.n_pos, record.n_pos, 0)
        image: dict[str, Any] = {"vmin": 0, "vmax": 3, "interpolation": "nearest"}
        axis.imshow(_cells(last, needed), cmap=colours, extent=extent, **image)
        axis.set_xlim(-0.02 * record.n_pos, record.n_pos)  # the frame would hide the first token
        axis.axhline(record.prompt_len, color="black", linewidth=0.6, linestyle=":")
        mass = result.mass[at, heads, trace.prompt_len :]
        if mass.size:
            look: dict[str, Any] = {"ha": "right", "fontsize": 8, "transform": axis.transAxes}
            axis.text(0.96, 0.9, f"mass kept {mass.mean():.2f}", **look)
        axis.tick_params(labelsize=7)
    for axis, name in zip(axes[0], names, strict=True):
        axis.set_title(name, fontsize=9)
    for row, budget in zip(axes, budgets, strict=True):
        name_axes(row[0], y=f"budget {budget}\nrow")
    for axis in axes[-1]:
        name_axes(axis, "position")
    states = {"seen": KEPT, "evicted": GONE}
    states[f"evicted, but the row would attend >= {NEEDED:.0%} to it"] = MISSED
    handles = {state: Patch(color=colour) for state, colour in states.items()}
    legend_of(figure, handles, columns=3)
    labels = {
        fidelity(trace, record, kind, layer) for record in records for kind in ("sets", "rows")
    }
    where = f"layer {trace.layer_ids[layer]}, KV head {head}"
    caption(figure, f"{trace.name}: {where}; dotted: end of the prompt", labels)
    figure.tight_layout(rect=(0, 0.35 / figure.get_figheight(), 1, 1))
    return figure


def error_over_rows(trace: Trace, records: Sequence[Record], *, smooth: int = 16) -> Figure:
    """Output error of every row after the prompt, mean over layers and heads; a panel per budget.

    smooth: rows of the running mean.
    """
    budgets = sorted({record.budget for record in records})
    figure = Figure(figsize=(8.5, 2.6 * len(budgets) + 0.6), dpi=150)
    axes = figure.subplots(len(budgets), 1, squeeze=False, sharex=True, sharey=True)[:, 0]
    names = list(dict.fromkeys(record.policy for record in records))
    styles = series(names)
    for record, result in zip(records, output_error(trace, records), strict=True):
        error = result.error.mean((0, 1), dtype=np.float64)[trace.prompt_len :]
        rows = np.arange(trace.prompt_len, trace.n_pos)
        axis = axes[budgets.index(record.budget)]
        step = max(1, len(rows) // 12)  # markers of different lines at different rows
        marked = (names.index(record.policy) * step // len(names), step)
        look: dict[str, Any] = {"lw": 1.2, "ms": 4, "markevery": marked, **styles[record.policy]}
        axis.plot(rows, _running_mean(error, smooth), label=record.policy, **look)
    labels = {
        fidelity(trace, record, "rows", layer) for record in records for layer in record.layers
    }
    for axis, budget in zip(axes, budgets, strict=True):
        plain(axis, y="relative output error", title=f"budget {budget}")
        axis.set_ylim(bottom=0)
    name_axes(axes[-1], "row")
    what = f"{trace.name}: |o_full - o_seen| / |o_full|, running mean of {smooth} rows"
    finish(figure, axes[0], f"{what}\nmean over layers and query heads", labels, columns=6)
    return figure


def _cells(last: NDArray[np.int32], needed: NDArray[np.bool_]) -> NDArray[np.int64]:
    """0 future, 1 seen, 2 evicted, 3 evicted and needed; [row, pos], pooled to _PIXELS.

    Rows that were not propagated to the layer are 0 throughout.
    """
    total = len(last)
    row, pos = np.arange(total)[:, None], np.arange(total)[None, :]
    past, gone = pos <= row, (pos <= row) & (row > last)
    cells = past.astype(np.int64) + gone
    # a single cell would vanish on the page
    grown = maximum_filter(gone & needed, 2 * max(1, total // 300) + 1, mode="constant")
    cells[grown & past] = 3
    cells[last < np.arange(total)] = 0
    factor = -(-total // _PIXELS)
    if factor == 1:
        return cells
    short = total // factor * factor
    blocks = cells[:short, :short].reshape(short // factor, factor, short // factor, factor)
    pooled: NDArray[np.int64] = blocks.max((1, 3))
    return pooled


def _running_mean(values: Floats, width: int) -> Floats:
    """Mean of up to `width` values ending at each index; the same length."""
    total = np.concatenate([[0.0], values.cumsum()])
    end = np.arange(1, len(values) + 1)
    start = np.maximum(end - width, 0)
    out: Floats = (total[end] - total[start]) / (end - start)
    return out
