"""Charts of events, drawn by plotly: retention of a head, and the segments of an event."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray
from plotly.colors import hex_to_rgb
from plotly.subplots import make_subplots

from kvsim.plots.style import COLOURS, KEPT, MISSED
from kvsim.studies.segments.segments import Segmented

from . import elements
from .cuts import curve, moves, spread, thinned
from .tiles import READ_STATES, SIDE, STATES, Tile

Ints = NDArray[np.int64]

#: Visible on white and on black.
GREY = "#888888"
PALE = "rgba(128,128,128,0.22)"

#: Kept entries are blue in three shades, curves have other colours.
PROTECTED, ALONE = COLOURS[0], COLOURS[5]
MASS, CREDIT, QUOTA = COLOURS[2], COLOURS[3], COLOURS[4]


def _legend(names: Sequence[str], colours: Sequence[str]) -> str:
    return "&ensp; ".join(
        f'<span style="border-left:1em solid {colour};padding-left:.4em">{name}</span>'
        for name, colour in zip(names, colours, strict=True)
    )


# Colour of each of tiles.STATES: they differ in lightness too.
_STATES = ("rgba(0,0,0,0)", KEPT, PALE, MISSED)
#: The colours of `retention` in words.
LEGEND = _legend(STATES[1:], _STATES[1:])
# Colour of each of tiles.READ_STATES; a lighter blue on white, and a darker one on black.
_READ_STATES = ("rgba(0,0,0,0)", PALE, f"rgba{(*hex_to_rgb(KEPT), 0.4)}", KEPT)
#: The colours of `reading` in words.
READ_LEGEND = _legend(READ_STATES[:0:-1], _READ_STATES[:0:-1])
# Cells up to which the state is shown in words under the pointer.
_WORDS = 20_000
# Segments up to which bars are labelled.
_LABELLED = 24


def retention(tile: Tile, texts: Sequence[str] | None, row: int, height: int) -> go.Figure:
    """Draw a line of cells for each event, and a frame around one event."""
    positions = elements.token_names(texts, tile.positions)
    events = [f"row {event}" for event in tile.rows]
    figure = _map(tile, positions, events, _STATES, STATES, "after %{y}")
    figure.update_traces(ygap=1 if len(events) <= 100 else 0)
    _frame(figure, int(np.searchsorted(tile.rows, row, side="right")) - 1)
    elements.axes(figure, positions, tile.positions, "event", height)
    return figure


def reading(tile: Tile, texts: Sequence[str] | None, row: int, height: int) -> go.Figure:
    """Draw what rows read of every position, and a frame around one row; tile: `reading_tile`."""
    positions = elements.token_names(texts, tile.positions)
    rows = elements.token_names(None, tile.rows)
    figure = _map(tile, positions, rows, _READ_STATES, READ_STATES, "row %{y}")
    _frame(figure, int(np.searchsorted(tile.rows[:-1], row, side="right")) - 1)
    elements.axes(figure, positions, tile.positions, "row", height)
    return figure


def _map(
    tile: Tile,
    positions: Sequence[str],
    rows: Sequence[str],
    colours: Sequence[str],
    words: Sequence[str],
    label: str,
) -> go.Figure:
    """Draw the state of each cell, by colours and words; label: of a row under the pointer."""
    shown = tile.values.size <= _WORDS
    edges = np.linspace(0, 1, len(colours) + 1).repeat(2)[1:-1]
    return go.Figure(
        go.Heatmap(
            z=tile.values,
            x=positions,
            y=rows,
            zmin=-0.5,
            zmax=len(colours) - 0.5,
            colorscale=list(zip(edges, np.repeat(colours, 2), strict=True)),
            showscale=False,
            text=np.array(words)[tile.values] if shown else None,
            hovertemplate=f"{label}<br>position %{{x}}"
            + ("<br>%{text}" if shown else "")
            + "<extra></extra>",
        )
    )


def _frame(figure: go.Figure, place: int) -> None:
    if place >= 0:
        ends, line = {"y0": place - 0.5, "y1": place + 0.5}, {"color": GREY, "width": 2}
        figure.add_shape(type="rect", xref="paper", x0=0, x1=1, **ends, line=line)


def segments(
    event: Segmented,
    before: Segmented | None,
    alone: Ints,
    names: tuple[str, str],
    texts: Sequence[str] | None,
) -> go.Figure:
    """Draw how an event cuts a head's cache, in four parts over the positions.

    Cumulative masses with boundaries; boundaries of the event before; entries, quota and kept
    entries of each segment; positions that stay, also with only the scorer.

    before: the event before, None at the first event. alone: positions held by only the scorer.
    names: of the policy and of the scorer.
    """
    figure = make_subplots(
        rows=4, cols=1, shared_xaxes=True, row_heights=[0.42, 0.12, 0.29, 0.17],
        vertical_spacing=0.035,
    )  # fmt: skip
    _masses(figure, event, before, texts)
    _moves(figure, event, before)
    _bars(figure, event, alone, names[1])
    _ticks(figure, event, alone, names, texts)
    figure.update_layout(
        height=760,
        margin={"l": 10, "r": 10, "t": 10, "b": 10},
        barmode="overlay",
        legend={"orientation": "h", "y": 1.01, "yanchor": "bottom", "x": 0},
        hovermode="closest",
    )
    figure.update_xaxes(range=[-0.01 * event.row, 1.01 * event.row], zeroline=False, showgrid=False)
    figure.update_xaxes(title="position", row=4)
    return figure


def _masses(
    figure: go.Figure, event: Segmented, before: Segmented | None, texts: Sequence[str] | None
) -> None:
    if before is not None:
        _uprights(figure, before.boundaries, GREY, "dot", "boundaries of the event before", 0.6)
    _uprights(figure, event.boundaries, GREY, "solid", "boundaries", 1.0)
    curves = (
        ("observed", "observed by the window", GREY, "dot", 1.5),
        ("credit", "credit", CREDIT, "dash", 2.0),
        ("mass", "mass that is cut", MASS, "solid", 2.5),
    )
    for name, label, colour, dash, width in curves:
        pos, share = curve(event, name, SIDE)
        figure.add_scatter(
            x=pos,
            y=share.astype(np.float32),
            mode="lines",
            line={"color": colour, "dash": dash, "width": width, "shape": "hv"},
            name=label,
            customdata=_tokens(pos, texts),
            hovertemplate=f"{label}: %{{y:.3f}}<br>%{{customdata}}<extra></extra>",
            row=1,
            col=1,
        )
    figure.update_yaxes(title="share, added up", range=[0, 1.02], row=1)


def _uprights(
    figure: go.Figure, at: Ints, colour: str, dash: str, label: str, opacity: float
) -> None:
    gap = np.full(len(at), np.nan)
    figure.add_scatter(
        x=np.stack([at, at, gap], axis=1).ravel(),
        y=np.tile([0.0, 1.02, np.nan], len(at)),
        mode="lines",
        line={"color": colour, "dash": dash, "width": 1},
        opacity=opacity,
        name=label,
        hoverinfo="skip",
        row=1,
        col=1,
    )


def _moves(figure: go.Figure, event: Segmented, before: Segmented | None) -> None:
    """A line from the nearest boundary before to each boundary that the event before could have."""
    if before is not None:
        pairs = moves(event, before)
        gap = np.full(len(pairs), np.nan)
        figure.add_scatter(
            x=np.concatenate([pairs, gap[:, None]], axis=1).ravel(),
            y=np.tile([0.0, 1.0, np.nan], len(pairs)),
            mode="lines",
            line={"color": MASS, "width": 1.5},
            showlegend=False,
            hoverinfo="skip",
            row=2,
            col=1,
        )
        _points(figure, before.boundaries, 0.0, "circle-open", GREY, "before")
    _points(figure, event.boundaries, 1.0, "circle", MASS, "now")
    figure.update_yaxes(
        tickvals=[0, 1], ticktext=["before", "now"], range=[-0.35, 1.35], showgrid=False, row=2
    )


def _points(
    figure: go.Figure, at: Ints, height: float, symbol: str, colour: str, label: str
) -> None:
    figure.add_scatter(
        x=at,
        y=np.full(len(at), height),
        mode="markers",
        marker={"symbol": symbol, "color": colour, "size": 7},
        showlegend=False,
        hovertemplate=f"boundary {label}: %{{x}}<extra></extra>",
        row=2,
        col=1,
    )


def _bars(figure: go.Figure, event: Segmented, alone: Ints, scorer: str) -> None:
    """Bars of entries and kept entries; marks at the quota and at entries of only the scorer."""
    starts, stops = event.starts, np.append(event.boundaries, event.row + 1)
    middle = (starts + stops) / 2
    spans = np.array([f"{a} to {b - 1}" for a, b in zip(starts, stops, strict=True)])
    bars = (("entries", event.counts(), PALE), ("kept", event.counts(event.kept), KEPT))
    for label, heights, colour in bars:
        figure.add_bar(
            x=middle,
            y=heights,
            width=stops - starts,
            marker={"color": colour, "line": {"width": 0.5, "color": GREY}},
            name=label,
            customdata=spans,
            hovertemplate=f"{label}: %{{y}}<br>%{{customdata}}<extra></extra>",
            text=heights if label == "kept" and len(heights) <= _LABELLED else None,
            textposition="outside",
            cliponaxis=False,
            row=3,
            col=1,
        )
    quota = {"symbol": "line-ew", "size": 12, "line": {"width": 3, "color": QUOTA}}
    quota["color"] = QUOTA
    holds = {"symbol": "diamond", "size": 9, "color": ALONE, "line": {"width": 1}}
    marks = (("quota", event.quota, quota), (f"{scorer} alone holds", spread(event, alone), holds))
    for label, heights, marker in marks:
        figure.add_scatter(
            x=middle,
            y=heights,
            mode="markers",
            marker=marker,
            name=label,
            customdata=spans,
            hovertemplate=f"{label}: %{{y}}<br>%{{customdata}}<extra></extra>",
            row=3,
            col=1,
        )
    figure.update_yaxes(title="entries", row=3)


def _ticks(
    figure: go.Figure,
    event: Segmented,
    alone: Ints,
    names: tuple[str, str],
    texts: Sequence[str] | None,
) -> None:
    """A tick for each position that stays; taller ticks are protected."""
    protected = event.pos[event.kept & event.protected]
    chosen = event.pos[event.kept & ~event.protected]
    for at, height, colour, size, label in (
        (chosen, 1.0, KEPT, 9, "stays"),
        (protected, 1.0, PROTECTED, 16, "protected"),
        (alone, 0.0, ALONE, 9, "stays with the scorer alone"),
    ):
        pos = thinned(at, event.row + 1, SIDE)
        figure.add_scatter(
            x=pos,
            y=np.full(len(pos), height),
            mode="markers",
            marker={
                "symbol": "line-ns",
                "size": size,
                "line": {"width": 1.5, "color": colour},
                "color": colour,
            },
            name=label,
            showlegend=label == "protected",  # the axis names the others
            customdata=_tokens(pos, texts),
            hovertemplate=f"{label}: %{{customdata}}<extra></extra>",
            row=4,
            col=1,
        )
    figure.update_yaxes(
        tickvals=[0, 1],
        ticktext=[names[1], names[0]],
        range=[-0.7, 1.7],
        showgrid=False,
        zeroline=False,
        row=4,
    )


def _tokens(pos: Ints, texts: Sequence[str] | None) -> list[str]:
    """Text of positions under the pointer, escaped."""
    return [f"{at}" if texts is None else f"{at} {elements.shortened(texts[at])}" for at in pos]
