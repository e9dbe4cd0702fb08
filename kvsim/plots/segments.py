"""Figures of segments: how attention mass cuts the cache, and what each piece may keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from kvsim.analysis.kept.segmentation import Segmented, segmented
from kvsim.analysis.output.error import check_record
from kvsim.analysis.table import fidelity
from kvsim.core.record import Record
from kvsim.core.trace import Trace
from kvsim.errors import PolicyError
from kvsim.plots.style import COLOURS, caption, plain

_LINE, _QUOTA, _ROOM, _KEPT, _CUT = COLOURS[0], COLOURS[4], "#e9e5dc", "black", "#777777"


def mass_curve(
    trace: Trace,
    record: Record,
    *,
    layer: int = 0,
    head: int = 0,
    events: Sequence[int] | None = None,
) -> Figure:
    """Attention mass added up over the cache at some events, cut into segments with their quotas.

    AMS (arXiv 2605.23200), Fig. 3. Above, the cumulative mass of the live entries over their
    positions, a vertical line where a segment begins. Below, a bar for each segment: pale its
    entries, full the quota that it may keep. Ticks between them are the entries that stay.

    Args:
        trace: of the record.
        record: of a policy around `ams`, replayed with `internals=True`.
        layer: index in the trace.
        head: KV head, the same that the record counts.
        events: rows of the events, a column each; the first and the last that act by default.

    Raises:
        TraceError: the record is of another trace.
        PolicyError: the record has no segments of the layer, or none at one of the events.
    """
    check_record(trace, record)
    known = {one.row: one for one in segmented(record, layer, head)}
    rows = list(known)
    wanted = list(dict.fromkeys([rows[0], rows[-1]])) if events is None else list(events)
    missing = [row for row in wanted if row not in known]
    if missing:
        raise PolicyError(
            f"no event after row {missing[0]} acts on layer {layer}, head {head}; events are after "
            f"rows {', '.join(map(str, rows))}"
        )
    figure = Figure(figsize=(max(6.4, 4.6 * len(wanted) + 0.6), 5.0), dpi=150)
    grid = figure.subplots(
        2, len(wanted), squeeze=False, sharex="col", sharey="row", height_ratios=[3, 2]
    )
    for (upper, lower), row in zip(grid.T, wanted, strict=True):
        _mass(upper, known[row])
        _quotas(lower, known[row])
        upper.set_title(f"event after row {row}: {len(known[row].quota)} segments", fontsize=9)
        lower.set_xlabel("position", fontsize=8)
    grid[0, 0].set_ylabel("cumulative attention mass (share)", fontsize=8)
    grid[1, 0].set_ylabel("entries of the segment", fontsize=8)
    where = f"layer {trace.layer_ids[layer]}, KV head {head}, budget {record.budget}"
    caption(
        figure,
        f"{trace.name}: {record.policy}, {where}",
        {fidelity(trace, record, "sets", layer)},
    )
    figure.legend(
        handles=[
            Line2D([], [], color=_CUT, lw=0.9, ls="--", label="a segment begins"),
            Patch(color=_ROOM, label="entries"),
            Patch(color=_QUOTA, label="quota"),
            Line2D([], [], color=_KEPT, marker="|", ls="", ms=7, label="an entry stays"),
        ],
        loc="lower center",
        ncols=4,
        fontsize=7.5,
        frameon=False,
    )
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    return figure


def _mass(axis: Axes, one: Segmented) -> None:
    """The cumulative mass, where segments begin, and the entries that stay."""
    for start in one.boundaries:
        axis.axvline(start, color=_CUT, lw=0.6, ls="--")
    axis.plot(one.pos, one.mass.cumsum(), color=_LINE, lw=1.4, drawstyle="steps-post")
    stay = one.pos[one.kept]
    axis.plot(stay, np.full(len(stay), -0.045), "|", color=_KEPT, ms=6, mew=0.6)
    axis.set_ylim(-0.09, 1.03)
    plain(axis)


def _quotas(axis: Axes, one: Segmented) -> None:
    """A bar for each segment from its first position to the next one's: entries and quota."""
    starts = one.starts
    widths = np.diff(np.append(starts, one.pos[-1] + 1))
    edge: dict[str, Any] = {"align": "edge", "edgecolor": "white", "linewidth": 0.6}
    axis.bar(starts, one.counts(), widths, color=_ROOM, **edge)
    axis.bar(starts, one.quota, widths, color=_QUOTA, **edge)
    plain(axis)
