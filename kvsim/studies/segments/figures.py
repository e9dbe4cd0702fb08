"""The figure of segments and their quotas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from kvsim.analysis.axes import trace_head, trace_layer
from kvsim.analysis.output.error import check_record
from kvsim.analysis.table import fidelity
from kvsim.core.record import Record
from kvsim.errors import PolicyError
from kvsim.plots.registry import figure
from kvsim.plots.style import COLOURS, caption, legend_of, name_axes, plain
from kvsim.store.opening import TraceLike, as_trace
from kvsim.studies.segments.segments import Segmented, segmented

_LINE, _QUOTA, _ROOM, _KEPT, _CUT = COLOURS[0], COLOURS[4], "#e9e5dc", "black", "#777777"


@figure(inputs=("trace", "plans"), source="AMS, Fig. 3", requires="`ams` around any scorer")
def mass_curve(
    trace: TraceLike,
    record: Record,
    *,
    layer: int = 0,
    head: int = 0,
    events: Sequence[int] | None = None,
) -> Figure:
    """Cumulative attention mass of the cache at some events, cut into segments with quotas.

    AMS (arXiv 2605.23200), Fig. 3. Above, the mass of the live entries over their positions, with a
    vertical line where a segment begins. Below, a bar for each segment: its entries (pale) and its
    quota. Ticks are entries that stay.

    Args:
        trace: the trace that was replayed.
        record: of a policy with `ams`, replayed with `internals=True`.
        layer: index in the trace.
        head: KV head.
        events: rows, a column each; by default the first and the last event that evicted.

    Returns a Figure. Raises PolicyError if the record has no segments there.
    """
    trace = as_trace(trace).part()
    check_record(trace, record)
    layer, head = trace_layer(trace, layer), trace_head(trace, head)
    by_row = {event.row: event for event in segmented(record, layer, head)}
    rows = list(by_row)
    wanted = sorted({rows[0], rows[-1]}) if events is None else list(events)
    missing = [row for row in wanted if row not in by_row]
    if missing:
        raise PolicyError(
            f"no event after row {missing[0]} acts on layer {layer}, head {head}; events are after "
            f"rows {', '.join(map(str, rows))}"
        )
    size = max(6.4, 4.6 * len(wanted) + 0.6), 5.0
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    grid = figure.subplots(
        2, len(wanted), squeeze=False, sharex="col", sharey="row", height_ratios=[3, 2]
    )
    for (upper, lower), row in zip(grid.T, wanted, strict=True):
        _draw_event(upper, lower, by_row[row])
        plain(upper, title=f"event after row {row}: {len(by_row[row].quota)} segments")
        plain(lower, "position")
    name_axes(grid[0, 0], y="cumulative attention mass (share)")
    name_axes(grid[1, 0], y="entries of the segment")
    where = f"layer {trace.layer_ids[layer]}, KV head {head}, budget {record.budget}"
    labels = {fidelity(trace, record, "sets", layer)}
    caption(figure, f"{trace.name}: {record.policy}, {where}", labels)
    handles = {
        "a segment begins": Line2D([], [], color=_CUT, lw=0.9, ls="--"),
        "entries": Patch(color=_ROOM),
        "quota": Patch(color=_QUOTA),
        "an entry stays": Line2D([], [], color=_KEPT, marker="|", ls="", ms=7),
    }
    legend_of(figure, handles, columns=4)
    return figure


def _draw_event(upper: Axes, lower: Axes, event: Segmented) -> None:
    """Draw cumulative mass, and entries and quota of each segment, up to the next one's start."""
    for start in event.boundaries:
        upper.axvline(start, color=_CUT, lw=0.6, ls="--")
    upper.plot(event.pos, event.mass.cumsum(), color=_LINE, lw=1.4, drawstyle="steps-post")
    stay = event.pos[event.kept]
    upper.plot(stay, np.full(len(stay), -0.045), "|", color=_KEPT, ms=6, mew=0.6)
    upper.set_ylim(-0.09, 1.03)
    widths = np.diff(np.append(event.starts, event.pos[-1] + 1))
    edge: dict[str, Any] = {"align": "edge", "edgecolor": "white", "linewidth": 0.6}
    lower.bar(event.starts, event.counts(), widths, color=_ROOM, **edge)
    lower.bar(event.starts, event.quota, widths, color=_QUOTA, **edge)
