"""Figures of dropped bursts: what policies hold after an event, and the long runs they dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from numpy.typing import NDArray

from kvsim.analysis.kept.retention import event_rows
from kvsim.analysis.output.error import check_record
from kvsim.analysis.table import fidelity
from kvsim.core.record import Record
from kvsim.core.trace import Trace
from kvsim.errors import PolicyError
from kvsim.plots.prompts import Shown
from kvsim.plots.style import caption, legend_of, short_text

Ints = NDArray[np.int64]

#: What a position can be after an event; the order of the codes of `Strip.codes`.
STATES: Final = ("kept", "dropped before", "dropped at the event")

# Dark, pale, between: they differ in print too.
_COLOURS = ("#0b4f7d", "#efebe3", "#e8a33d")
#: Columns of a strip; more positions are averaged.
_PIXELS = 1200
#: Positions of a closer look, and up to which each has its token below it.
_WORDS = 64
# Half the height of a strip, and where the bracket of a burst lies above its middle.
_HALF, _ABOVE = 0.27, 0.38


@dataclass(frozen=True)
class Strip:
    """One head of a record after an event.

    codes [N]: places in `STATES` of the positions so far, the event being the last that dropped
    anything. runs [n, 2]: first and last position of
    every maximal run of dropped ones, ascending.
    """

    name: str
    codes: Ints
    runs: Ints

    @property
    def lengths(self) -> Ints:
        """Positions of each run; [n]."""
        out: Ints = self.runs[:, 1] - self.runs[:, 0] + 1
        return out


def strips_after(
    trace: Trace,
    records: Sequence[Record],
    *,
    layer: int = 0,
    head: int = 0,
    row: int | None = None,
) -> tuple[int, list[Strip]]:
    """The row of the event, and what a head of a layer holds after it, for each record.

    row: by default the last event of the layer, of records with different ones the earliest of
    these, so that all have evicted by then. Of a record per query head, the first query head of the
    group.

    Raises:
        TraceError: a record is of another trace.
        PolicyError: nothing left the layer in any record.
        IndexError: the row is not in the trace.
    """
    shown = Shown(layer, head)
    gone = []
    for record in records:
        check_record(trace, record)
        gone.append(shown.gone(trace, record)[0][0])
    if row is None:
        last = [rows[-1] for rows in map(event_rows, (one[None] for one in gone)) if len(rows)]
        if not last:
            raise PolicyError("nothing left the cache, so there is nothing to show; lower --budget")
        row = int(min(last))
    if not 0 <= row < trace.n_pos:
        raise IndexError(f"row is {row}; expected 0..{trace.n_pos - 1}")
    several = len({(one.share or str(one.budget)) for one in records}) > 1
    return row, [
        _strip(
            f"{record.policy}, {record.share or record.budget}" if several else record.policy,
            one[: row + 1],
            row,
        )
        for record, one in zip(records, gone, strict=True)
    ]


def bursts(
    trace: Trace,
    records: Sequence[Record],
    *,
    layer: int = 0,
    head: int = 0,
    row: int | None = None,
    zoom: tuple[int, int] | None = None,
    least: int = 32,
) -> Figure:
    """What each policy holds after an event, a strip over positions each, and its dropped bursts.

    AMS (arXiv 2605.23200), Fig. 2. Above, all positions so far; below, a part of them. A bracket
    over a strip is a burst: a maximal run of dropped positions that is long enough, with its
    length. Colours tell what the event itself dropped from what was gone before. Of more positions
    than fit, neighbours are averaged.

    Args:
        trace: of which the records are, of one layer and head.
        records: a strip each; policies, budgets or both.
        layer: index in the trace.
        head: KV head.
        row: of the event; see `strips_after`.
        zoom: first and last position of the part below; by default the longest run of dropped
            positions of any record and what is around it, or of a run of more than 64 positions
            those 64 of which the other records keep most.
        least: positions from which a run is a burst.

    Raises:
        TraceError: a record is of another trace.
        PolicyError: nothing left the layer in any record, or positions that are not there.
        IndexError: the row is not in the trace.
    """
    row, found = strips_after(trace, records, layer=layer, head=head, row=row)
    first, last = _stretch(found) if zoom is None else zoom
    if not 0 <= first < last <= row:
        raise PolicyError(
            f"zoom is {first}-{last}; expected two positions of 0 to {row}, the smaller one first"
        )
    high = 0.42 * len(found) + 0.45
    figure = Figure(figsize=(9.0, 2 * high + 1.5), dpi=150, layout="constrained")
    whole, part = figure.subplots(2, 1)
    for axis, start, stop in ((whole, 0, row), (part, first, last)):
        _draw(axis, found, start, stop, least)
        if start < trace.prompt_len - 0.5 < stop:
            axis.axvline(trace.prompt_len - 0.5, color="black", lw=0.9, ls=":")
    whole.set_xlabel("position", fontsize=8)
    for end in (first - 0.5, last + 0.5):
        whole.axvline(end, color="black", lw=0.9, ls="--")
    for at, one in enumerate(found):
        whole.text(
            1.01,
            at,
            _said(one, least),
            transform=whole.get_yaxis_transform(),
            fontsize=6.5,
            va="center",
        )
    _name_positions(part, trace, first, last)
    where = f"layer {trace.layer_ids[layer]}, KV head {head}"
    what = f"{trace.name}: {where}, after row {row}; dotted: end of the prompt"
    labels = {fidelity(trace, one, "sets", layer) for one in records}
    caption(figure, f"{what}\ndashed: the part below, positions {first} to {last}", labels)
    handles = [Patch(color=colour) for colour in _COLOURS]
    bracket = Line2D([], [], color="black", marker="|", ms=5, lw=1.2)
    names = [*STATES, f"a burst: {least} or more dropped in a row"]
    legend_of(figure, [*handles, bracket], names, columns=4, loc="outside lower center")
    return figure


def _strip(name: str, gone: NDArray[np.int32], row: int) -> Strip:
    """Of the rows [N] after which positions are gone."""
    dropped = gone <= row
    last = gone[dropped].max(initial=-1)
    codes = np.where(dropped, np.where(gone == last, 2, 1), 0)
    edges = np.flatnonzero(np.diff(dropped.astype(np.int8), prepend=0, append=0))
    runs = np.stack([edges[::2], edges[1::2] - 1], axis=1)
    return Strip(name, codes, runs)


def _stretch(found: Sequence[Strip]) -> tuple[int, int]:
    """First and last position of what is worth a closer look; see `bursts`."""
    runs = np.concatenate([one.runs for one in found])
    if not len(runs):
        raise PolicyError("nothing is dropped after this row; take a later one")
    first, last = runs[(runs[:, 1] - runs[:, 0]).argmax()].tolist()
    length = last - first + 1
    if length <= _WORDS:
        more = max(4, (_WORDS - length) // 2)
        return max(0, first - more), min(len(found[0].codes) - 1, last + more)
    kept = np.sum([one.codes[first : last + 1] == 0 for one in found], axis=0)
    total = np.concatenate([[0], kept.cumsum()])
    first += int((total[_WORDS:] - total[:-_WORDS]).argmax())
    return first, first + _WORDS - 1


def _draw(axis: Axes, found: Sequence[Strip], start: int, stop: int, least: int) -> None:
    """Strips from one position to another, with brackets over the bursts among them."""
    for at, one in enumerate(found):
        axis.imshow(
            _pixels(one.codes[start : stop + 1])[None],
            aspect="auto",
            interpolation="nearest",
            extent=(start - 0.5, stop + 0.5, at + _HALF, at - _HALF),
        )
        for (first, last), length in zip(one.runs, one.lengths, strict=True):
            if length < least or last < start or first > stop:
                continue
            ends = max(first, start), min(last, stop)
            axis.plot(ends, [at - _ABOVE] * 2, "-", color="black", lw=1.0)
            inside = [end for end in (first, last) if start <= end <= stop]
            axis.plot(inside, [at - _ABOVE] * len(inside), "|", color="black", ms=4)
            axis.text(
                sum(ends) / 2,
                at - _ABOVE,
                str(length),
                fontsize=5.5,
                ha="center",
                va="center",
                bbox={"fc": "white", "ec": "none", "pad": 0.6},
            )
    axis.set_xlim(start - 0.5, stop + 0.5)
    axis.set_ylim(len(found) - 0.6, -0.65)
    axis.set_yticks(
        range(len(found)), [short_text(one.name, 40) for one in found], parse_math=False
    )
    axis.tick_params(labelsize=7)
    axis.tick_params(axis="y", length=0)
    axis.spines[["left", "right", "top"]].set_visible(False)


def _pixels(codes: Ints) -> NDArray[np.float64]:
    """Colours of the positions, averaged to at most _PIXELS; [n, 3]."""
    colours = np.array([to_rgb(colour) for colour in _COLOURS])[codes]
    factor = -(-len(codes) // _PIXELS)
    edges = np.arange(0, len(codes), factor)
    width = np.diff(np.append(edges, len(codes)))
    out: NDArray[np.float64] = np.add.reduceat(colours, edges) / width[:, None]
    return out


def _said(one: Strip, least: int) -> str:
    """What a strip has, in numbers."""
    count, longest = int((one.lengths >= least).sum()), int(one.lengths.max(initial=0))
    kept = int((one.codes == 0).sum())
    return f"{kept} kept, {count} burst{'s' * (count != 1)}\nlongest run dropped: {longest}"


def _name_positions(axis: Axes, trace: Trace, first: int, last: int) -> None:
    """The tokens of few positions, else their numbers."""
    if trace.token_text is None or last - first > _WORDS + 8:
        axis.set_xlabel("position", fontsize=8)
        return
    texts = trace.token_text[first : last + 1]
    names = [short_text(text, 12) for text in texts]
    axis.set_xticks(
        range(first, last + 1),
        names,
        rotation=90,
        family="monospace",
        fontsize=5.5,
        parse_math=False,
    )
    axis.set_xlabel(f"token, positions {first} to {last}", fontsize=8)
