"""Elements of pages: titles, notes of fidelity, tables of events, labels of tokens."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NoReturn

import numpy as np
import plotly.graph_objects as go
import polars as pl
import streamlit as st
from numpy.typing import NDArray

from kvsim.analysis.significance import FEWEST
from kvsim.schema import FIDELITY_MEANING, plural, visible


def title(name: str, how: str) -> None:
    """Show the page's name, and how to read it."""
    st.header(name, anchor=False)
    st.markdown(how)


def stop(what: str, error: Exception, advice: str = "") -> NoReturn:
    """Show an error, its reason and a remedy; end the page."""
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
    """Show the number of prompts of the means."""
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
    """Show the fidelity of the numbers above."""
    for level in sorted(set(levels)):
        st.caption(f":material/verified: fidelity **{level}**: {FIDELITY_MEANING[level]}.")


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
        range=[-0.5, len(names) - 0.5],  # markers would take space next to the cells
    )
    figure.update_yaxes(
        title=what, type="category", autorange="reversed", nticks=24, showgrid=False
    )
