"""Page *Trace*: what was recorded, and what its attention looks at."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st

from kvsim import Trace
from kvsim.analysis.kept.states import spaced
from kvsim.analysis.results import csv_text
from kvsim.plots.text import styled_html
from kvsim.schema import plural

from .. import cache, controls, elements, readings
from ..replays import WINDOW


def page() -> None:
    """Show the attention of a query head, the heads of the layer, and the text."""
    trace = controls.trace()
    elements.title(
        "Trace",
        "Attention between the tokens of one sequence. Each row of the map is a query, its columns "
        "are the positions that it attends to; the bluer, the more attention. Narrow the windows "
        "on the left to see single tokens.",
    )
    positions = _attention(trace)
    _heads(trace)
    st.subheader("Text", anchor=False)
    if trace.token_text is None:
        st.info("This trace has no text of its tokens; record it with a tokenizer.")
    else:
        _text(trace, trace.token_text, *positions)


def _attention(trace: Trace) -> tuple[int, int]:
    """Show the map of one query head; return the first position shown and the one behind it."""
    group = range(controls.head() * trace.group, (controls.head() + 1) * trace.group)
    side = st.sidebar
    qhead = controls.choose("Query head", "qhead", group)
    whole = (0, trace.n_pos)
    rows = side.slider("Rows", *whole, whole, key="rows", bind="query-params", help="queries")
    positions = side.slider(
        "Positions", *whole, whole, key="positions", bind="query-params", help="keys"
    )
    if rows[0] == rows[1] or positions[0] == positions[1]:
        st.warning("A window is empty; move one of its ends.")
        st.stop()
    tile = cache.attention(
        controls.source(), controls.layer(), qhead, range(*rows), range(*positions)
    )
    texts = None if trace.token_text is None else spaced(trace.token_text)
    elements.heat_map(tile, texts, key="attention")
    elements.reading(readings.attention(tile, texts))
    pooled = " A cell shows the largest weight of its rows and positions." * tile.pooled
    st.caption(
        f"{trace.n_pos:,} tokens, {trace.prompt_len:,} of them prompt; "
        f"{plural(trace.n_layers, 'layer')}, {plural(trace.n_qheads, 'query head')}, "
        f"{plural(trace.n_heads, 'KV head')}.{pooled}"
    )
    elements.fidelity(["exact"])
    return positions


def _heads(trace: Trace) -> None:
    st.subheader("Heads of this layer", anchor=False)
    st.markdown(
        "Means over the rows of the response: attention on the first 4 positions (*sink*), on the "
        "32 most recent ones (*local*), entropy in nats, and the share of positions that get less "
        "than 1 % of the row's largest weight (*sparsity*)."
    )
    layer = controls.layer()
    heads = cache.heads(controls.source(), layer)
    heads = heads.rename({"qhead": "query head", "head": "KV head"})
    st.dataframe(heads, hide_index=True)
    st.download_button(
        "Download as CSV",
        lambda: csv_text(heads),
        f"{trace.name}-layer-{layer}-heads.csv",
        "text/csv",
    )


def _text(trace: Trace, texts: Sequence[str], first: int, stop: int) -> None:
    """Show the tokens of some positions; their text is untrusted."""
    stop = min(stop, first + WINDOW)
    css = "border-left:1px solid #8888;padding:0 1px"
    bold = [";font-weight:600" * (position >= trace.prompt_len) for position in range(first, stop)]
    st.caption(f"Positions {first} to {stop - 1}; the response is bold. Hover shows the position.")
    styles = [(str(position), css + more) for position, more in enumerate(bold, start=first)]
    st.html(styled_html(texts[first:stop], styles))
