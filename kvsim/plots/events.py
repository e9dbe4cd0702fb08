"""Figures of events: positions that policies keep, and bursts of evicted ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from numpy.typing import NDArray

from kvsim.analysis.arrays import EvictedAt, Ints
from kvsim.analysis.axes import trace_head, trace_layer
from kvsim.analysis.kept.retention import last_event
from kvsim.analysis.kept.states import gone_of
from kvsim.analysis.output.error import check_record
from kvsim.analysis.table import fidelity
from kvsim.core.arguments import listed
from kvsim.core.record import Record
from kvsim.core.trace import Trace
from kvsim.errors import PolicyError
from kvsim.plots.registry import figure
from kvsim.plots.style import (
    CELLS,
    caption,
    legend_of,
    name_axes,
    short_text,
)
from kvsim.schema import plural
from kvsim.store.opening import TraceLike, as_trace

#: States of positions, and their colours: dark, pale, between, so that they differ in print too.
STATES = ("kept", "evicted before", "evicted at the event")
_COLOURS = ("#0b4f7d", "#efebe3", "#e8a33d")
#: Columns of a strip; more positions are averaged.
_PIXELS = 1200
#: Positions of a closer look, and the most that have their tokens below them.
_WORDS = 64
# Half the height of a strip, and where the bracket of a burst lies above its middle.
_HALF, _ABOVE = 0.27, 0.38
#: Positions from which a run of evicted ones is a burst.
_LEAST = 32


class Strip(NamedTuple):
    """One head of a record after an event.

    name: of the policy, with the budget where budgets differ. codes [N]: places in `STATES` of the
    positions so far, the event being the last that evicted anything. runs [n, 2]: first and last
    position of every maximal run of evicted positions, ascending.
    """

    name: str
    codes: Ints
    runs: Ints

    @property
    def lengths(self) -> Ints:
        """Positions of each run; [n]."""
        return self.runs[:, 1] - self.runs[:, 0] + 1


@figure(source="AMS, Fig. 2")
def bursts(
    trace: TraceLike,
    records: Record | Sequence[Record],
    *,
    layer: int = 0,
    head: int = 0,
) -> Figure:
    """Positions that each policy keeps after an event, as a strip each, and its evicted bursts.

    AMS (arXiv 2605.23200), Fig. 2. Above, all positions so far; below, a part of them. A bracket
    over a strip marks a burst, a maximal run of at least 32 evicted positions, and its length.
    Positions that the event itself evicted have their own colour. Where there are more positions
    than pixels, neighbours are averaged. The part below is the longest run of evicted positions of
    any record and what is around it, or of a run of more than 64 positions those 64 of which the
    other records keep most.

    records: a strip each; policies, budgets or both. The event is the earliest of the records' last
    events in the layer, so that all policies have evicted by then.
    """
    trace, records = as_trace(trace).part(), listed(records)
    layer, head = trace_layer(trace, layer), trace_head(trace, head)
    row, strips = strips_after(trace, records, layer=layer, head=head)
    first, last = _stretch(strips)
    figure = Figure(figsize=(9.0, 0.84 * len(strips) + 2.4), dpi=150, layout="constrained")
    whole, part = figure.subplots(2, 1)
    for axis, start, stop in ((whole, 0, row), (part, first, last)):
        _draw(axis, strips, start, stop)
        if start < trace.prompt_len - 0.5 < stop:
            axis.axvline(trace.prompt_len - 0.5, color="black", lw=0.9, ls=":")
    name_axes(whole, "position")
    for end in (first - 0.5, last + 0.5):
        whole.axvline(end, color="black", lw=0.9, ls="--")
    look: dict[str, Any] = {"fontsize": 6.5, "va": "center"}
    for line, strip in enumerate(strips):
        longest = strip.lengths.max(initial=0)
        bursts = plural(int((strip.lengths >= _LEAST).sum()), "burst")
        text = f"{(strip.codes == 0).sum()} kept, {bursts}\nlongest run evicted: {longest}"
        whole.text(1.01, line, text, transform=whole.get_yaxis_transform(), **look)
    _name_positions(part, trace, first, last)
    where = f"layer {trace.layer_ids[layer]}, KV head {head}"
    subject = f"{trace.name}: {where}, after row {row}; dotted: end of the prompt"
    labels = {fidelity(trace, record, "sets", layer) for record in records}
    caption(figure, f"{subject}\ndashed: the part below, positions {first} to {last}", labels)
    handles: dict[str, Artist] = {
        state: Patch(color=colour) for state, colour in zip(STATES, _COLOURS, strict=True)
    }
    bracket = Line2D([], [], color="black", marker="|", ms=5, lw=1.2)
    handles[f"a burst: {_LEAST} or more evicted in a row"] = bracket
    legend_of(figure, handles, columns=4)
    return figure


def strips_after(
    trace: Trace, records: Sequence[Record], *, layer: int = 0, head: int = 0
) -> tuple[int, list[Strip]]:
    """Return the row of an event (see `bursts`), and the states of a head after it by record.

    Of a record per query head, the first query head of the group. Raises TraceError where a record
    is of another trace, PolicyError where nothing left the layer or it is not there.
    """
    for record in records:
        check_record(trace, record)
    gone = [gone_of(trace, record, layer, head)[0] for record in records]
    row = min((last for x in gone if (last := last_event(x)) >= 0), default=None)
    if row is None:
        raise PolicyError("nothing left the cache, so there is nothing to show; lower --budget")
    budgets = [record.facts.share or str(record.budget) for record in records]
    several = len({*budgets}) > 1
    return row, [
        strip(f"{record.policy}, {size}" if several else record.policy, x[: row + 1], row)
        for record, size, x in zip(records, budgets, gone, strict=True)
    ]


def strip(name: str, gone: EvictedAt, row: int) -> Strip:
    """Return the strip of a head after a row; gone [N]: the rows after which positions left."""
    evicted = gone <= row
    last = gone[evicted].max(initial=-1)
    codes = np.where(evicted, np.where(gone == last, 2, 1), 0)
    edges = np.flatnonzero(np.diff(evicted.astype(np.int8), prepend=0, append=0))
    return Strip(name, codes, np.stack([edges[::2], edges[1::2] - 1], axis=1))


def _stretch(strips: Sequence[Strip]) -> tuple[int, int]:
    runs = np.concatenate([strip.runs for strip in strips])
    first, last = runs[(runs[:, 1] - runs[:, 0]).argmax()].tolist()
    length = last - first + 1
    if length <= _WORDS:
        more = max(4, (_WORDS - length) // 2)
        return max(0, first - more), min(len(strips[0].codes) - 1, last + more)
    kept = np.sum([strip.codes[first : last + 1] == 0 for strip in strips], axis=0)
    total = np.concatenate([[0], kept.cumsum()])
    first += int((total[_WORDS:] - total[:-_WORDS]).argmax())
    return first, first + _WORDS - 1


def _draw(axis: Axes, strips: Sequence[Strip], start: int, stop: int) -> None:
    number: dict[str, Any] = {"fontsize": 5.5, "ha": "center", "va": "center"}
    number["bbox"] = {"fc": "white", "ec": "none", "pad": 0.6}
    for line, strip in enumerate(strips):
        extent = start - 0.5, stop + 0.5, line + _HALF, line - _HALF
        axis.imshow(_pixels(strip.codes[start : stop + 1])[None], extent=extent, **CELLS)
        for (first, last), length in zip(strip.runs, strip.lengths, strict=True):
            if length < _LEAST or last < start or first > stop:
                continue
            ends = max(first, start), min(last, stop)
            axis.plot(ends, [line - _ABOVE] * 2, "-", color="black", lw=1.0)
            inside = [end for end in (first, last) if start <= end <= stop]
            axis.plot(inside, [line - _ABOVE] * len(inside), "|", color="black", ms=4)
            axis.text(sum(ends) / 2, line - _ABOVE, str(length), **number)
    axis.set_xlim(start - 0.5, stop + 0.5)
    axis.set_ylim(len(strips) - 0.6, -0.65)
    names = [short_text(strip.name, 40) for strip in strips]
    axis.set_yticks(range(len(strips)), names, parse_math=False)
    axis.tick_params(labelsize=7)
    axis.tick_params(axis="y", length=0)
    axis.spines[["left", "right", "top"]].set_visible(False)


def _pixels(codes: Ints) -> NDArray[np.float64]:
    """Colours of the positions, averaged to at most _PIXELS; [n, 3]."""
    colours = np.array([to_rgb(colour) for colour in _COLOURS])[codes]
    factor = -(-len(codes) // _PIXELS)
    edges = np.arange(0, len(codes), factor)
    width = np.diff(np.append(edges, len(codes)))
    means: NDArray[np.float64] = np.add.reduceat(colours, edges) / width[:, None]
    return means


def _name_positions(axis: Axes, trace: Trace, first: int, last: int) -> None:
    if trace.token_text is None or last - first > _WORDS + 8:
        name_axes(axis, "position")
        return
    name_axes(axis, f"token, positions {first} to {last}")
    names = [short_text(text, 12) for text in trace.token_text[first : last + 1]]
    look: dict[str, Any] = {"rotation": 90, "family": "monospace", "fontsize": 5.5}
    axis.set_xticks(range(first, last + 1), names, parse_math=False, **look)
