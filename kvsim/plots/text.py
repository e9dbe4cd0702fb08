"""The text of a trace: tokens by their state in a cache, or by the KL that a policy costs there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from kvsim.analysis.arrays import Floats, Ints
from kvsim.analysis.axes import trace_head, trace_layer
from kvsim.analysis.kept.states import token_states
from kvsim.analysis.kept.text import text_of
from kvsim.analysis.live.metrics import KL_TOKENS
from kvsim.analysis.live.table import kl_by_token
from kvsim.analysis.table import fidelity
from kvsim.core.record import Record
from kvsim.plots.registry import figure
from kvsim.plots.style import (
    COLOURS,
    MISSED,
    caption,
    legend_of,
    short_text,
)
from kvsim.store.opening import TraceLike, as_trace

# Colour and weight of each state: they differ in print, and for readers without red or green.
_STYLE: tuple[Mapping[str, Any], ...] = (
    {"color": "#8a8a8a"},
    {"color": COLOURS[0], "fontweight": "bold"},
    {"color": COLOURS[2], "fontstyle": "italic"},
    {"color": MISSED, "fontweight": "bold"},
    {"color": COLOURS[5]},
)
#: Ends of the classes of KL in nats, half a decade apart.
_ENDS = (0.03, 0.1, 0.3, 1.0, 3.0)
#: One hue, in even steps of lightness on a white page; names of the classes.
KL_COLOURS = tuple(f"{COLOURS[1]}{alpha:02x}" for alpha in (0, 38, 80, 127, 184, 255))
KL_NAMES = ("up to 0.03", *(f"> {end:g}" for end in _ENDS[:-1]), f"> {_ENDS[-1]:g} nats")
#: Characters of a line, and lines of a figure.
COLUMNS, LINES = 100, 60
# Points of a character's height, and inches of its width in matplotlib's own monospaced font.
_SIZE = 8.0
_WIDTH = 0.602 * _SIZE / 72


@figure(source="G-KV, App. J", requires="text of tokens")
def token_text(
    trace: TraceLike,
    record: Record,
    *,
    layer: int = -1,
    head: int = 0,
    row: int | None = None,
    start: int = 0,
) -> Figure:
    """The text of a trace, with a style each for retained, evicted and not yet scored tokens.

    G-KV (arXiv 2512.00504), App. J. One head after an event; protected entries of the window count
    as retained. Under sparse attention, tokens that the next row does not read have a style too.

    Args:
        trace: with the text of its tokens.
        record: its replay.
        layer: index in the trace.
        head: KV head.
        row: of the event; the layer's last by default.
        start: first position shown, of as many as fit 60 lines.

    Returns a Figure. Raises NeedsError without the text of tokens, PolicyError for a row without
    event.
    """
    trace = as_trace(trace).part()
    layer, head = trace_layer(trace, layer), trace_head(trace, head)
    states = token_states(trace, record, layer=layer, head=head, row=row)
    placed = _placed(states.text[start:], LINES)
    last = start + len(placed)
    part = "" if (start, last) == (0, trace.n_pos) else f", positions {start} to {last - 1}"
    subject = (
        f"{trace.name}: {record.policy}, budget {record.budget}, layer {trace.layer_ids[layer]}, "
        f"KV head {head}\nafter row {states.row}{part}"
    )
    figure, axis = _page(_height(placed), subject, {fidelity(trace, record, "sets", layer)})
    for (line, column, shown), code in zip(placed, states.codes[start:], strict=False):
        _write(axis, line, column, shown, _STYLE[code])
    counts = zip(states.counts().items(), _STYLE, strict=True)
    handles = {
        f"{name} ({n})": Patch(color=style["color"])
        for (name, n), style in counts
        if name != "missed" and (n or name != "held, not read")
    }
    legend_of(figure, handles, columns=3)
    return figure


@figure(requires="text of tokens")
def kl_text(trace: TraceLike, table: pl.DataFrame) -> Figure:
    """The response, each token on a background by its KL; results one below the other.

    A frame marks the first token whose most likely prediction changed, a line below the later ones.
    Grey tokens have no value, because no event before them can reach them.

    Args:
        trace: with the text of its tokens.
        table: with `response_kl_tokens`, in nats, as of `kvsim.judge(..., tokens=True)`.

    Returns a Figure. Raises NeedsError without the text of tokens, PolicyError without such values.
    """
    trace = as_trace(trace).part()
    results, start = kl_by_token(table, trace), trace.prompt_len
    placed = _placed(text_of(trace)[start:], max(1, LINES // len(results)))
    high, response = _height(placed), trace.n_pos - start
    part = "" if len(placed) == response else f"\nthe first {len(placed)} of {response} tokens"
    subject = f"{trace.name}: KL(full || evicted) of each token of the response{part}"
    levels = set(table.filter(metric=KL_TOKENS, trace=trace.name)["fidelity"])
    figure, axis = _page(len(results) * (high + 2), subject, levels)
    for number, ((policy, budget), tokens) in enumerate(results.items()):
        top = number * (high + 2) + 1.3
        changed = tokens.filter(pl.col("changed") > 0)["position"].to_list()
        where = f", first at position {changed[0]}" if changed else ""
        mean = float(tokens["kl"].to_numpy().mean())
        heading = (
            f"{policy}, budget {budget}: {mean:.3g} nats a token, {len(changed)} of "
            f"{tokens.height} changed{where}"
        )
        _write(axis, top - 1, 0, short_text(heading, COLUMNS), {"fontweight": "bold"})
        codes = dict(zip(tokens["position"], kl_classes(tokens["kl"].to_numpy()), strict=True))
        for position, (line, column, shown) in enumerate(placed, start=start):
            style = {} if position in codes else _STYLE[0]
            box = (column, top + line), len(shown), 0.92
            if position in codes:
                axis.add_patch(Rectangle(*box, color=KL_COLOURS[codes[position]], lw=0))
            if position in changed[:1]:
                axis.add_patch(Rectangle(*box, fill=False, lw=1.4, zorder=3))
            elif position in changed:
                ends = [column, column + len(shown)]
                axis.plot(ends, [top + line + 0.9] * 2, color="black", lw=0.7)
            _write(axis, top + line, column, shown, style)
    pairs = list(zip(KL_NAMES, KL_COLOURS, strict=True))
    handles: dict[str, Artist] = {name: Patch(color=colour, lw=0) for name, colour in pairs[1:]}
    handles["most likely token changed"] = Line2D([], [], color="black", lw=0.7)
    handles["the first"] = Patch(fill=False, lw=1.4)
    legend_of(figure, handles, columns=len(handles))
    return figure


def kl_classes(kl: Floats) -> Ints:
    """Return the class of each KL in nats, by its place in the colours of a text."""
    return np.searchsorted(_ENDS, kl)


def _page(height: float, subject: str, levels: Iterable[str]) -> tuple[Figure, Axes]:
    """A figure with a caption above so many lines of characters, and room for a legend below."""
    figure = Figure(figsize=(COLUMNS * _WIDTH + 0.4, 1), dpi=150)
    caption(figure, subject, levels)
    across, high = COLUMNS * _WIDTH, 0.155 * height
    above = 0.15 + 0.17 * (1 + figure.get_suptitle().count("\n"))
    total = high + above + 0.45
    figure.set_figheight(total)
    wide = figure.get_figwidth()
    axis = figure.add_axes((0.2 / wide, 0.4 / total, across / wide, high / total))
    axis.set(xlim=(0, COLUMNS), ylim=(height, 0))
    axis.set_axis_off()
    return figure, axis


def _height(placed: Sequence[tuple[int, int, str]]) -> int:
    return 1 + max((line for line, _, _ in placed), default=0)


def _write(axis: Axes, line: float, column: int, shown: str, style: Mapping[str, Any]) -> None:
    look: dict[str, Any] = {**style, "family": "monospace", "fontsize": _SIZE}
    axis.text(column, line + 0.8, shown, parse_math=False, **look)


def _placed(text: Sequence[str], lines: int) -> list[tuple[int, int, str]]:
    """(line, column, characters) of each token until the lines are used up."""
    line, column, placed = 0, 0, []
    for token in text:
        shown = short_text(token, COLUMNS)
        if column + len(shown) > COLUMNS:
            line, column = line + 1, 0
        if line >= lines:
            break
        placed.append((line, column, shown))
        column += len(shown)
        if "\n" in token:
            line, column = line + 1, 0
    return placed
