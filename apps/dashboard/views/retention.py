"""Page *Retention*: what the events of a policy leave of every position, and what they wipe out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
import streamlit as st

import cached
import chosen
import drawn
import shown
from kvsim import Record
from kvsim.analysis.kept.course import REGION
from kvsim.analysis.table import fidelity
from kvsim.engine.source import check_unwindowed
from kvsim.errors import KvsimError
from kvsim.plots.text import STATES, token_html, token_states

#: Tokens of the text that are shown at once.
WINDOW = 4096


@dataclass(frozen=True)
class Replayed:
    """A policy's record; alone: the layer that was replayed by itself, None for all of them."""

    choice: cached.Choice
    alone: int | None
    record: Record

    @property
    def head(self) -> int:
        """The chosen KV head on the record's axis; of several query heads the first."""
        return head * trace.group if self.record.per_query_head else head

    @property
    def course(self) -> pl.DataFrame:
        """What the events leave of the head, in numbers."""
        return cached.course(source, self.choice, self.alone, layer, self.head)

    @property
    def picture(self) -> cached.Retained:
        """What the events leave of the head, by position."""
        return cached.retention(source, self.choice, self.alone, layer, self.head)


def replayed(name: str) -> Replayed | str:
    """A replay of the layer alone, of all where they share a budget; or why there is none."""
    try:
        check_unwindowed(trace, layer)
        params = chosen.settings(name, trace, typed)
        choice = cached.Choice.of(name, budget, interval, **params)
        alone = None if cached.together(choice) else layer
        if alone is None and not all_layers:
            return (
                f"{name}: the layers share one budget, so one of them cannot be replayed alone; "
                "switch on 'All layers' on the left to replay them together"
            )
        return Replayed(choice, alone, cached.record(source, choice, alone))
    except KvsimError as error:
        return str(error)


trace = chosen.trace()
source = chosen.source()
layer, head = chosen.layer(), chosen.head()
st.sidebar.divider()
asked = [
    chosen.policy("Policy", "policy", "tova"),
    chosen.policy("Beside it", "beside", "ams", optional=True),
]
names = [name for name in asked if name is not None]
budget, interval = chosen.budget(trace), chosen.interval(trace)
all_layers = st.sidebar.toggle(
    "All layers",
    key="all",
    bind="query-params",
    help="for policies whose layers share one budget: replay all of them, which takes longer",
)

try:
    typed = chosen.params(names)
except KvsimError as error:
    st.error("The parameters cannot be read.", icon=":material/error:")
    st.text(str(error))
    st.stop()

shown.title(
    "Retention",
    "What one KV head still holds of every position. Each line is the cache as an event leaves it: "
    "a column that turns grey has lost its token for good. Dark blue are regions of "
    f"{REGION} positions of which nothing is left; the bar is the longest run of neighbours that "
    "are gone. The frame is the event that the numbers and the text are of.",
)
results = [replayed(name) for name in names]
found = [one for one in results if isinstance(one, Replayed)]
rows = sorted({int(row) for one in found for row in one.picture.tile.rows})
row = chosen.event(rows) if rows else trace.n_pos - 1
height = 300 + min(320, 24 * max((len(one.picture.tile.rows) for one in found), default=0))


def show_map(number: int, one: Replayed) -> None:
    """The numbers of the event and the map of all of them."""
    if one.record.remark:
        st.text(one.record.remark)
    if not one.course.height:
        st.info(
            "Nothing is dropped in this layer. A smaller budget, or an interval that fits the "
            "trace, makes events act.",
            icon=":material/info:",
        )
        return
    st.plotly_chart(
        drawn.retention(one.picture, trace.token_text, row, height),
        key=f"map-{number}",
        config={"displaylogo": False},
    )
    if one.choice.params:
        st.text(", ".join(f"{key}={value}" for key, value in one.choice.params))
    with st.expander("Parameters and numbers of all events"):
        st.json(dict(one.record.params), expanded=False)
        st.dataframe(one.course, hide_index=True)
    st.download_button(
        "Download numbers of all events as CSV",
        one.course.write_csv(),
        f"{trace.name}-{one.choice.policy}-layer-{layer}-head-{head}.csv",
        "text/csv",
        key=f"numbers-{number}",
    )


def show_text(one: Replayed, start: int) -> None:
    """The text by what became of its tokens, as plots.text colours it."""
    acted = one.course.filter(pl.col("event") <= row)["event"]
    if not len(acted):
        st.caption("Nothing has been dropped by then.")
        return
    window = slice(start, start + WINDOW)
    options = {"layer": layer, "head": head, "row": int(acted[-1])}
    codes = token_states(trace, one.record, **options).codes[window]
    dropped, retained, later = np.bincount(codes, minlength=len(STATES))
    st.caption(
        f"**bold**: retained ({retained}); grey: dropped ({dropped}); *italic*: not yet scored "
        f"({later}). After row {acted[-1]}."
    )
    st.html(token_html(trace, one.record, **options, start=start, stop=start + WINDOW))


if rows:
    shown.numbers(
        {one.choice.policy: one.course.filter(pl.col("event") <= row).tail(1) for one in found}
    )
for number, (name, one, column) in enumerate(
    zip(names, results, st.columns(len(names), gap="large"), strict=True)
):
    with column:
        st.subheader(name, anchor=False)
        if isinstance(one, Replayed):
            show_map(number, one)
        else:
            st.warning("This policy cannot be replayed on these terms.", icon=":material/block:")
            st.text(one)
if found:
    shown.fidelity([fidelity(trace, one.record, "sets", layer) for one in found])

st.subheader("Text", anchor=False)
if trace.token_text is None:
    st.info("This trace has no text of its tokens; record it with a tokenizer.")
elif found:
    start = 0
    if trace.n_pos > WINDOW:
        start = st.slider(
            "From position", 0, trace.n_pos - WINDOW, 0, key="text", bind="query-params"
        )
    for one, column in zip(found, st.columns(len(found), gap="large"), strict=True):
        with column:
            if len(found) > 1:
                st.markdown(f"`{one.choice.policy}`")
            show_text(one, start)
