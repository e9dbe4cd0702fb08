"""Page *Response*: what each event of a run evicted, and what the response lost until the next."""

from __future__ import annotations

from time import sleep

import plotly.graph_objects as go
import polars as pl
import streamlit as st

from kvsim.analysis.kept.text import text_of
from kvsim.analysis.live.metrics import KL_TOKENS
from kvsim.analysis.live.table import kl_by_token
from kvsim.errors import KvsimError
from kvsim.plots.style import COLOURS

from .. import cache, controls, elements, line_charts, readings, replays, runs
from ..html_text import KL_LEGEND, kl_by_event, kl_html, token_html

#: Seconds for which an event is shown where events play.
SECONDS = 1.5


def page() -> None:
    """Show an event: the text in one head after it, and the KL of tokens up to the next event."""
    where = st.sidebar.container()
    elements.title(
        "Response",
        "Where a policy breaks the response: the text that one KV head has after an event, and the "
        "KL of the model's prediction of each token until the next event to that with the full "
        "cache. *Play* goes from event to event.",
    )
    run, trace = runs.run(), controls.trace()
    try:
        results = kl_by_token(run.parts.get(KL_TOKENS, run.first.clear()), trace)
        texts, source = text_of(trace), controls.source()
        labels = {f"{policy}, budget {budget}": (policy, budget) for policy, budget in results}
        result = labels[controls.choose("Result", "result", list(labels))]
        record = runs.record(run, trace, *result)
    except KvsimError as error:
        elements.reading(str(error))
        st.stop()
    tokens = results[result]
    periods = kl_by_event(tokens, record)
    if not periods.height:
        st.info("This policy evicts nothing before a token of the response.")
        st.stop()
    state, rows = st.session_state, periods["event"].to_list()
    if "following" in state:
        state["event"] = state.pop("following")
    row = controls.event(rows, where)
    where.button("Play", on_click=lambda: state.update(event=rows[0], playing=True))
    period = periods.row(by_predicate=pl.col("event") == row, named=True)
    _course(periods, row)
    elements.reading(readings.response(period, float(periods["kl"].sum())))
    left, right = st.columns(2)
    with left:
        layer, head = controls.layer(), controls.head()
        st.subheader(f"Text after row {row}, layer {layer}, KV head {head}", anchor=False)
        st.html(replays.LEGEND)
        part = {"start": max(0, row + 1 - replays.WINDOW), "stop": row + 1}
        try:
            needed = cache.needed(source, layer, head)
            place = {"layer": layer, "head": head, "row": row, **part}
            st.html(token_html(trace, record, needed=needed, **place))
        except KvsimError as error:  # a layer with a window
            st.text(str(error))
    with right:
        st.subheader(f"Response from position {period['start']}", anchor=False)
        st.html(KL_LEGEND)
        after = pl.col("position").is_between(period["start"], period["last"])
        st.html(kl_html(texts, tokens.filter(after)))
    elements.fidelity(run.parts[KL_TOKENS]["fidelity"].cast(pl.String))
    runs.provenance(run)
    if state.get("playing") and row != rows[-1]:
        sleep(SECONDS)
        state["following"] = rows[rows.index(row) + 1]
        st.rerun()
    state["playing"] = False


def _course(periods: pl.DataFrame, row: int) -> None:
    names = {f"row {event}": COLOURS[1 if event == row else -1] for event in periods["event"]}
    bars = go.Bar(x=[*names], y=periods["kl"].to_list(), marker_color=[*names.values()])
    figure = go.Figure(bars)
    figure.update_layout(xaxis_title="event", yaxis_title="KL until the next event, nats")
    line_charts.draw(figure, "periods", 240)
