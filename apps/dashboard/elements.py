"""Elements of pages: titles, notes of fidelity, tables of events, labels of tokens, heat maps."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NoReturn

import numpy as np
import plotly.graph_objects as go
import polars as pl
import streamlit as st
from numpy.typing import NDArray
from plotly.colors import hex_to_rgb

from kvsim.analysis.kept.states import REGION
from kvsim.analysis.significance import FEWEST
from kvsim.plots.style import COLOURS
from kvsim.schema import FIDELITY_MEANING, plural, visible

from .tiles import Tile

#: Cells up to which weights are sent in float32; beyond, in so many parts of 1.
_FINE, _PARTS = 300 * 300, 10_000


def title(name: str, how: str) -> None:
    """Show the page's name, and how to read it."""
    st.header(name, anchor=False)
    st.markdown(how)


def stop(what: str, error: Exception, advice: str = "") -> NoReturn:
    """Show what cannot be done, why, and what to do; end the page."""
    st.error(what, icon=":material/error:")
    st.text(str(error))
    if advice:
        st.caption(advice)
    st.stop()


def chart(figure: go.Figure, key: str) -> None:
    """Show a figure of plotly over the whole width."""
    st.plotly_chart(figure, key=key, config={"displaylogo": False})


def reading(sentence: str) -> None:
    """Show a chart in a sentence; names in it may be untrusted."""
    st.text(visible(sentence))


def prompts(means: pl.DataFrame) -> None:
    """Show how many prompts are behind means."""
    fewest, most = (int(means["n"].sort()[end]) for end in (0, -1))
    if most < FEWEST:
        st.caption(f"{plural(most, 'prompt').capitalize()}: no interval and no bar below {FEWEST}.")
    elif fewest == most:
        st.caption(f"Means over {most} prompts; bars are 95 % intervals.")
    else:
        st.caption(
            f"Means over {fewest} to {most} prompts; a point of fewer than {FEWEST} has no bar."
        )


def fidelity(levels: Iterable[str]) -> None:
    """Show how far the numbers above can be trusted."""
    for level in sorted(set(levels)):
        st.caption(f":material/verified: fidelity **{level}**: {FIDELITY_MEANING[level]}.")


def numbers(courses: Mapping[str, pl.DataFrame]) -> None:
    """Show what an event leaves of a head, by policy; courses: `head_course`, one row or no row."""
    events = pl.concat(course.with_columns(policy=pl.lit(name)) for name, course in courses.items())
    rows = pl.DataFrame({"policy": list(courses)}).join(
        events, on="policy", how="left", maintain_order="left"
    )
    form = st.column_config.NumberColumn
    st.dataframe(
        rows,
        hide_index=True,
        column_config={
            "event": form("after row"),
            "share": form("share kept", format="percent", help="of all positions there"),
            "wipeout": form(
                "wiped out",
                format="percent",
                help=f"regions of {REGION} positions of which nothing is left",
            ),
            "longest": form("longest gap", help="longest run of positions that are evicted"),
            "middle": form("middle kept", format="percent", help="of the text's middle third"),
        },
    )


def token_names(texts: Sequence[str] | None, edges: NDArray[np.int64]) -> list[str]:
    """Return a distinct label for each cell between edges: position and token, escaped."""
    names = []
    for low, high in pairwise(edges):
        text = "" if texts is None else f" {shortened(texts[low])}"
        last = f"-{high - 1}" if high - low > 1 else ""
        names.append(f"{low}{last}{text}{' ...' if texts is not None and last else ''}")
    return names


def excerpt(text: str, most: int = 16) -> str:
    """Return a text as one printable line of at most `most` characters."""
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[: most + 1])
    return line if len(line) <= most else line[: most - 1] + "\u2026"


def shortened(text: str, most: int = 16) -> str:
    """Return a token as a label: an excerpt, escaped, because plotly reads some HTML."""
    return html.escape(excerpt(text, most), quote=False)  # plotly shows &quot; as it is


def heat_map(tile: Tile, texts: Sequence[str] | None, *, key: str, height: int = 560) -> None:
    """Show attention: bluer is more, on a square-root scale; with row, position, weight on hover.

    Weights of a large picture are sent as integers in ten-thousandths, which halves the bytes.
    """
    fine = tile.values.size <= _FINE
    z = tile.values if fine else np.rint(tile.values * _PARTS).astype(np.uint16)
    rows, positions = (token_names(texts, edges) for edges in (tile.rows, tile.positions))
    shades = np.linspace(0, 1, 17)
    # none is transparent, so that a dark page stays dark
    blue = hex_to_rgb(COLOURS[5 if st.context.theme.type == "dark" else 0])
    colours = [f"rgba{(*blue, round(float(shade), 3))}" for shade in shades]
    top = float(z.max()) or 1.0
    unit = 1 if fine else _PARTS
    ticks = [share**2 * top for share in (0.1, 0.25, 0.5, 0.75, 1.0)]
    figure = go.Figure(
        go.Heatmap(
            z=z,
            x=positions,
            y=rows,
            zmin=0,
            zmax=top,
            colorscale=list(zip(shades**2, colours, strict=True)),
            hovertemplate="row %{y}<br>position %{x}<br>weight "
            + ("%{z:.3g}" if fine else f"%{{z}} / {_PARTS:,}")
            + "<extra></extra>",
            colorbar={
                "title": {"text": "weight"},
                "tickvals": ticks,
                "ticktext": [f"{tick / unit:.2g}" for tick in ticks],
            },
        )
    )
    axes(figure, positions, tile.positions, "row", height)
    chart(figure, key)


def axes(
    figure: go.Figure, names: Sequence[str], edges: NDArray[np.int64], what: str, height: int
) -> None:
    """Set the axes of a map: a few positions, and no tokens, which would be rotated."""
    step = max(1, len(names) // 8)
    figure.update_layout(height=height, margin={"l": 10, "r": 10, "t": 10, "b": 10})
    figure.update_xaxes(
        title="position",
        type="category",
        tickvals=names[::step],
        ticktext=[str(first) for first in edges[:-1:step]],
        tickangle=0,
        showgrid=False,
        range=[-0.5, len(names) - 0.5],  # markers would make room beside the cells
    )
    figure.update_yaxes(
        title=what, type="category", autorange="reversed", nticks=24, showgrid=False
    )
