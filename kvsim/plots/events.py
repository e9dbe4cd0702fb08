"""The figure of bursts: positions that policies keep after an event, and runs of evicted ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from kvsim.analysis.arrays import EvictedAt, Ints
from kvsim.analysis.axes import trace_head, trace_layer
from kvsim.analysis.kept.retention import last_event
from kvsim.analysis.kept.states import gone_of
from kvsim.analysis.output.error import check_record
from kvsim.analysis.table import fidelity
from kvsim.core.arguments import listed
from kvsim.core.record import Record
from kvsim.errors import PolicyError
from kvsim.plots.registry import figure
from kvsim.plots.style import (
    caption,
    legend_of,
    name_axes,
    record_labels,
    short_text,
    single_panel,
)
from kvsim.schema import plural
from kvsim.store.opening import TraceLike, as_trace

#: States of positions, and their colours: dark, pale, between, so that they differ in print too.
STATES = ("kept", "evicted before", "evicted at the event")
_COLOURS = ("#0b4f7d", "#efebe3", "#e8a33d")
# Half the height of a strip, and where the bracket of a burst lies above its middle.
_HALF, _ABOVE = 0.27, 0.38
#: Positions from which a run of evicted ones is a burst.
_LEAST = 32


@figure(source="AMS, Fig. 2")
def bursts(
    trace: TraceLike,
    records: Record | Sequence[Record],
    *,
    layer: int = 0,
    head: int = 0,
) -> Figure:
    """Positions that each policy keeps after an event, as a strip each, and its evicted bursts.

    AMS (arXiv 2605.23200), Fig. 2. A bracket marks a burst, a run of at least 32 evicted positions,
    and its length. Positions that the event itself evicted have their own colour. The event is the
    earliest of the records' last events in the layer.

    Args:
        trace: the trace that was replayed.
        records: a strip each.
        layer: index in the trace.
        head: KV head; of a record per query head, the first of its group.

    Returns a Figure. Raises PolicyError if nothing was evicted.
    """
    trace, records = as_trace(trace).part(), listed(records)
    layer, head = trace_layer(trace, layer), trace_head(trace, head)
    for record in records:
        check_record(trace, record)
    gone = [gone_of(trace, record, layer, head)[0] for record in records]
    row = min((last for x in gone if (last := last_event(x)) >= 0), default=None)
    if row is None:
        raise PolicyError("nothing left the cache, so there is nothing to show; lower --budget")
    figure, axis = single_panel(9.0, 0.42 * len(records) + 1.6)
    look: dict[str, Any] = {"fontsize": 6.5, "va": "center"}
    number: dict[str, Any] = {"fontsize": 5.5, "ha": "center", "va": "center"}
    number["bbox"] = {"fc": "white", "ec": "none", "pad": 0.6}
    for line, of_record in enumerate(gone):
        codes, runs = strip(of_record, row)
        extent = -0.5, row + 0.5, line + _HALF, line - _HALF
        pixels = np.array([to_rgb(colour) for colour in _COLOURS])[codes][None]
        axis.imshow(pixels, extent=extent, aspect="auto", interpolation="antialiased")
        lengths = runs[:, 1] - runs[:, 0] + 1
        long = lengths >= _LEAST
        for ends, length in zip(runs[long], lengths[long], strict=True):
            axis.plot(ends, [line - _ABOVE] * 2, "-|", color="black", lw=1.0, ms=4)
            axis.text(ends.mean(), line - _ABOVE, str(length), **number)
        text = f"{(codes == 0).sum()} kept, {plural(int(long.sum()), 'burst')}\n"
        text += f"longest run evicted: {lengths.max(initial=0)}"
        axis.text(1.01, line, text, transform=axis.get_yaxis_transform(), **look)
    if trace.prompt_len <= row:
        axis.axvline(trace.prompt_len - 0.5, color="black", lw=0.9, ls=":")
    axis.set(xlim=(-0.5, row + 0.5), ylim=(len(records) - 0.6, -0.65))
    budgets = [record.facts.share or str(record.budget) for record in records]
    several = len({*budgets}) > 1
    names = [
        short_text(f"{name}, {size}" if several else name, 40)
        for name, size in zip(record_labels(records), budgets, strict=True)
    ]
    axis.set_yticks(range(len(records)), names, parse_math=False)
    name_axes(axis, "position")
    axis.tick_params(axis="y", length=0)
    axis.spines[["left", "right", "top"]].set_visible(False)
    where = f"layer {trace.layer_ids[layer]}, KV head {head}"
    subject = f"{trace.name}: {where}, after row {row}; dotted: end of the prompt"
    caption(figure, subject, {fidelity(trace, record, "sets", layer) for record in records})
    pairs = zip(STATES, _COLOURS, strict=True)
    handles: dict[str, Artist] = {state: Patch(color=colour) for state, colour in pairs}
    bracket = Line2D([], [], color="black", marker="|", ms=5, lw=1.2)
    handles[f"a burst: {_LEAST} or more evicted in a row"] = bracket
    legend_of(figure, handles, columns=4)
    return figure


def strip(gone: EvictedAt, row: int) -> tuple[Ints, Ints]:
    """States of the positions of a head after a row [row + 1], as indices of `STATES`.

    And the first and last position of every maximal run of evicted ones [n, 2], ascending. gone
    [T]: the rows after which positions left.
    """
    gone = gone[: row + 1]
    evicted = gone <= row
    codes = np.where(evicted, np.where(gone == gone[evicted].max(initial=-1), 2, 1), 0)
    edges = np.flatnonzero(np.diff(evicted.astype(np.int8), prepend=0, append=0))
    return codes, np.stack([edges[::2], edges[1::2] - 1], axis=1)
