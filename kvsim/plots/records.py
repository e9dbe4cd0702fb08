"""Figures of records of one trace: positions retained and missed, lifts of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import polars as pl
import scipy
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from kvsim.analysis.axes import record_layer, trace_head, trace_layer
from kvsim.analysis.kept.retention import RECENT, SINK
from kvsim.analysis.kept.states import has_reads, read_entries
from kvsim.analysis.kept.text import retention_lift
from kvsim.analysis.output.error import check_record, output_error
from kvsim.analysis.table import fidelity
from kvsim.core.arguments import listed
from kvsim.core.record import Record
from kvsim.errors import PolicyError
from kvsim.plots.registry import figure
from kvsim.plots.style import (
    COLOURS,
    GONE,
    GRID,
    KEPT,
    MISSED,
    UNREAD,
    caption,
    legend_of,
    name_axes,
    record_labels,
    short_text,
    single_panel,
)
from kvsim.store.opening import TraceLike, as_trace

#: Attention of a row on one entry from which losing the entry is drawn as a miss.
NEEDED = 0.05

# Strings at each end of `lift_bars`.
_TOKENS = 12

# Pixels per side of a map; longer traces are pooled.
_PIXELS = 640


@figure()
def retention_map(
    trace: TraceLike, records: Record | Sequence[Record], *, layer: int = 0, head: int = 0
) -> Figure:
    """Positions that each row sees, and evicted ones that it would attend to; a panel per record.

    Blue is seen, light blue is held but not read, pale is evicted. Red entries are not seen,
    although the row's full attention on them is at least 5 % in some query head of the group. The
    number is the mean retained mass of rows after the prompt. A bar marks the needle of the prompt.

    Args:
        trace: the trace that was replayed.
        records: rows of panels are budgets, columns are policies.
        layer: index in the trace.
        head: KV head.

    Returns a Figure. Raises PolicyError for a layer or head that is not there.
    """
    trace, records = as_trace(trace).part(), listed(records)
    layer, head = trace_layer(trace, layer), trace_head(trace, head)
    heads = slice(head * trace.group, (head + 1) * trace.group)
    attention = trace.attention(layer, slice(0, trace.n_pos))[heads].amax(0)
    needed = (attention >= NEEDED).cpu().numpy()
    needles = trace.header.spans.get("needle", ())
    budgets = sorted({record.budget for record in records})
    labels = record_labels(records)
    names = list(dict.fromkeys(labels))
    size = max(6.0, 2.6 * len(names) + 0.6), 2.75 * len(budgets) + 0.9
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    axes = figure.subplots(len(budgets), len(names), squeeze=False, sharex=True, sharey=True)
    for axis in axes.flat:
        axis.set_axis_off()
    colours = ListedColormap(["white", KEPT, UNREAD, GONE, MISSED])
    errors = output_error(trace, records, prompt=False)
    for record, name, result in zip(records, labels, errors, strict=True):
        axis = axes[budgets.index(record.budget)][names.index(name)]
        axis.set_axis_on()
        index = record_layer(record, layer)
        last = record.evicted_at[index, heads.start if record.per_query_head else head]
        extent = (0, record.n_pos, record.n_pos, 0)
        image: dict[str, Any] = {"vmin": 0, "vmax": 4, "interpolation": "nearest"}
        whole = slice(0, record.n_pos)
        read = read_entries(record, index, whole)[head] if has_reads(record, index) else None
        axis.imshow(_cells(last, needed, read), cmap=colours, extent=extent, **image)
        axis.set_xlim(-0.02 * record.n_pos, record.n_pos)  # the frame would hide the first token
        axis.axhline(record.prompt_len, color="black", linewidth=0.6, linestyle=":")
        for start, end in needles:
            axis.axvspan(start, end, 0.97, 1.0, color="black", linewidth=0)
        mass = result.mass[index, heads]
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
    unread = {"held, not read": UNREAD} if any(record.reads for record in records) else {}
    states = {"seen": KEPT, **unread, "evicted": GONE}
    missed = "not seen" if unread else "evicted"
    states[f"{missed}, but the row would attend >= {NEEDED:.0%} to it"] = MISSED
    handles = {state: Patch(color=colour) for state, colour in states.items()}
    if needles:
        handles["needle"] = Patch(color="black")
    legend_of(figure, handles, columns=4)
    levels = {
        fidelity(trace, record, kind, layer) for record in records for kind in ("sets", "rows")
    }
    where = f"layer {trace.layer_ids[layer]}, KV head {head}"
    caption(figure, f"{trace.name}: {where}; dotted: end of the prompt", levels)
    return figure


def _cells(
    last: NDArray[np.int32], needed: NDArray[np.bool_], read: NDArray[np.bool_] | None = None
) -> NDArray[np.int64]:
    """0 future, 1 seen, 2 not read, 3 evicted, 4 missed; [row, pos], pooled to _PIXELS."""
    total = len(last)
    row, pos = np.arange(total)[:, None], np.arange(total)[None, :]
    past, gone = pos <= row, (pos <= row) & (row > last)
    cells = past.astype(np.int64) + 2 * gone
    if read is not None:
        cells += past & ~gone & ~read
        gone = gone | (past & ~read)
    # a single cell would vanish on the page
    grown = scipy.ndimage.maximum_filter(
        gone & needed, 2 * max(1, total // 300) + 1, mode="constant"
    )
    cells[grown & past] = 4
    cells[last < np.arange(total)] = 0
    factor = -(-total // _PIXELS)
    if factor == 1:
        return cells
    short = total // factor * factor
    blocks = cells[:short, :short].reshape(short // factor, factor, short // factor, factor)
    pooled: NDArray[np.int64] = blocks.max((1, 3))
    return pooled


@figure(source="G-KV, App. I", requires="text of tokens")
def lift_bars(
    trace: TraceLike,
    record: Record,
    *,
    layer: int = -1,
    least: int = 3,
) -> Figure:
    """Share kept of a token string over the share kept of all tokens, with its interval.

    G-KV (arXiv 2512.00504), App. I. The 12 largest and the 12 smallest lifts after the layer's last
    event, with Wilson's 95 % interval, which takes positions as independent. The first 4 and the
    last 32 positions are left out, because many policies protect them.

    Args:
        trace: with the text of its tokens.
        record: its replay.
        layer: over all its heads.
        least: positions that a string must hold.

    Returns a Figure. Raises NeedsError without the text of tokens.
    """
    trace = as_trace(trace).part()
    check_record(trace, record)
    layer = trace_layer(trace, layer)
    subject = (
        f"{trace.name}: {record.policy}, budget {record.budget}\n"
        f"layer {trace.layer_ids[layer]}, all heads, with 95 % interval"
    )
    table = retention_lift(trace, record, layer, sink=SINK, recent=RECENT)
    return _draw_lifts(table, least, subject, {fidelity(trace, record, "sets", layer)})


def _draw_lifts(table: pl.DataFrame, least: int, subject: str, levels: Iterable[str]) -> Figure:
    table = table.filter((table["count"] >= least) & table["lift"].is_not_null())
    if not table.height:
        raise PolicyError(
            f"no token is on {least} positions of which any is kept ({subject.splitlines()[0]}); "
            "take a longer trace, a larger budget, or fewer positions"
        )
    if table.height > 2 * _TOKENS:
        table = pl.concat([table.head(_TOKENS), table.tail(_TOKENS)])
    low, rate, high, mean = (table[name].to_numpy() for name in ("low", "rate", "high", "mean"))
    places = np.arange(table.height)
    figure, axis = single_panel(6.4, 0.19 * table.height + 1.5)
    axis.barh(places, rate / mean, 0.75, color=COLOURS[5])
    ends = np.stack([rate - low, high - rate]).clip(0) / mean
    axis.errorbar(rate / mean, places, xerr=ends, fmt="none", ecolor="black", elinewidth=0.8)
    axis.axvline(1.0, color="black", lw=1, ls=":")
    pairs = table.select("token", "count").rows()
    names = [f"{short_text(token, 24)}  ({count})" for token, count in pairs]
    axis.set_yticks(places, names, family="monospace", parse_math=False)
    axis.margins(y=0.01)
    axis.invert_yaxis()
    axis.set_xlim(left=0)
    axis.grid(axis="x", color=GRID, linewidth=0.5)
    axis.set_axisbelow(True)
    ratio = "share of the token kept / share of all kept (dotted: as all)"
    name_axes(axis, ratio, "token (positions)")
    caption(figure, subject, levels)
    return figure
