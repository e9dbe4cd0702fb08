"""Page *Retention*: what the events of a policy leave of every position, and what they wipe out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl
import streamlit as st

from kvsim import Record, Trace
from kvsim.analysis.kept.states import REGION, token_states
from kvsim.analysis.table import fidelity
from kvsim.engine.source import check_unwindowed
from kvsim.errors import KvsimError
from kvsim.plots import token_html
from kvsim.sweeps import shared_prefill

from .. import cache, controls, elements, event_charts

#: Tokens of the text that are shown at once.
WINDOW = 4096


@dataclass(frozen=True)
class Settings:
    """What the controls of the page say."""

    trace: Trace
    source: cache.Source
    layer: int
    head: int
    policies: Sequence[str]
    budget: int
    interval: int | None
    all_layers: bool
    params: Mapping[str, Any]


@dataclass(frozen=True)
class Replayed:
    """A record of a policy; alone: the layer that was replayed by itself, None for all layers."""

    settings: Settings
    choice: cache.Choice
    alone: int | None
    record: Record

    @property
    def head(self) -> int:
        """The chosen KV head on the record's axis; of several query heads the first."""
        head = self.settings.head
        return head * self.settings.trace.group if self.record.per_query_head else head

    @property
    def course(self) -> pl.DataFrame:
        """What the events leave of the head, in numbers."""
        chosen = self.settings
        return cache.course(chosen.source, self.choice, self.alone, chosen.layer, self.head)

    @property
    def picture(self) -> cache.Retained:
        """What the events leave of the head, by position."""
        chosen = self.settings
        return cache.retention(chosen.source, self.choice, self.alone, chosen.layer, self.head)


def page() -> None:
    """Show one policy, or two side by side, at all events and at one of them."""
    settings = _settings()
    trace, names = settings.trace, settings.policies
    elements.title(
        "Retention",
        "Positions that one KV head still holds. Each line is the cache after an event: a column "
        f"that turns grey has lost its token for good. Regions of {REGION} positions of which "
        "nothing is left are dark blue; the bar is the longest dropped run. A frame "
        "marks the event of the numbers and the text.",
    )
    results = [_replayed(settings, name) for name in names]
    replays = [result for result in results if isinstance(result, Replayed)]
    rows = sorted({int(row) for replay in replays for row in replay.picture.tile.rows})
    row = controls.event(rows) if rows else trace.n_pos - 1
    lines = max((len(replay.picture.tile.rows) for replay in replays), default=0)
    height = 300 + min(320, 24 * lines)
    if rows:
        elements.numbers(
            {
                replay.choice.policy: replay.course.filter(pl.col("event") <= row).tail(1)
                for replay in replays
            }
        )
    columns = st.columns(len(names), gap="large")
    for number, (name, result, column) in enumerate(zip(names, results, columns, strict=True)):
        with column:
            st.subheader(name, anchor=False)
            if isinstance(result, Replayed):
                _map(number, result, row, height)
            else:
                st.warning(
                    "This policy cannot be replayed with these settings.", icon=":material/block:"
                )
                st.text(result)
    if replays:
        levels = [fidelity(trace, one.record, "sets", settings.layer) for one in replays]
        elements.fidelity(levels)
    _texts(trace, replays, row)


def _settings() -> Settings:
    """Read the controls. Where the parameters cannot be read the page says why, and ends."""
    trace = controls.trace()
    st.sidebar.divider()
    policies = [
        controls.policy("Policy", "policy", "tova"),
        controls.policy("Second policy", "beside", "ams", optional=True),
    ]
    names = [name for name in policies if name is not None]
    budget, interval = controls.budget(trace), controls.interval(trace)
    all_layers = st.sidebar.toggle(
        "All layers",
        key="all",
        bind="query-params",
        help="for policies whose layers share one budget: replay all of them, which takes longer",
    )
    try:
        params = controls.params(names)
    except KvsimError as error:
        st.error("The parameters cannot be read.", icon=":material/error:")
        st.text(str(error))
        st.stop()
    return Settings(
        trace,
        controls.source(),
        controls.layer(),
        controls.head(),
        names,
        budget,
        interval,
        all_layers,
        params,
    )


def _replayed(settings: Settings, name: str) -> Replayed | str:
    """Replay the layer alone, or all layers where they share a budget; else return the reason."""
    trace, layer = settings.trace, settings.layer
    try:
        check_unwindowed(trace, layer)
        params = controls.settings(name, trace, settings.params)
        prefill = shared_prefill(settings.interval, None)  # the same events for both policies
        choice = cache.Choice.of(name, settings.budget, settings.interval, prefill, **params)
        alone = None if cache.together(choice) else layer
        if alone is None and not settings.all_layers:
            return (
                f"{name}: the layers share one budget, so one of them cannot be replayed alone; "
                "switch on 'All layers' on the left to replay them together"
            )
        return Replayed(settings, choice, alone, cache.record(settings.source, choice, alone))
    except KvsimError as error:
        return str(error)


def _map(number: int, replay: Replayed, row: int, height: int) -> None:
    """Show the map of all events, and the numbers as a file."""
    trace, chosen = replay.settings.trace, replay.settings
    if replay.record.remark:
        st.text(replay.record.remark)
    if not replay.course.height:
        st.info(
            "Nothing is dropped in this layer. A smaller budget, or an interval that fits the "
            "trace, makes events act.",
            icon=":material/info:",
        )
        return
    st.plotly_chart(
        event_charts.retention(replay.picture, trace.token_text, row, height),
        key=f"map-{number}",
        config={"displaylogo": False},
    )
    if replay.choice.params:
        st.text(", ".join(f"{key}={value}" for key, value in replay.choice.params))
    with st.expander("Parameters and numbers of all events"):
        st.json(dict(replay.record.params), expanded=False)
        st.dataframe(replay.course, hide_index=True)
    st.download_button(
        "Download numbers of all events as CSV",
        replay.course.write_csv(),
        f"{trace.name}-{replay.choice.policy}-layer-{chosen.layer}-head-{chosen.head}.csv",
        "text/csv",
        key=f"numbers-{number}",
    )


def _texts(trace: Trace, replays: Sequence[Replayed], row: int) -> None:
    """Show the text of each replay at the event."""
    st.subheader("Text", anchor=False)
    if trace.token_text is None:
        st.info("This trace has no text of its tokens; record it with a tokenizer.")
        return
    if not replays:
        return
    start = 0
    if trace.n_pos > WINDOW:
        start = st.slider(
            "From position", 0, trace.n_pos - WINDOW, 0, key="text", bind="query-params"
        )
    for replay, column in zip(replays, st.columns(len(replays), gap="large"), strict=True):
        with column:
            if len(replays) > 1:
                st.markdown(f"`{replay.choice.policy}`")
            _text(replay, row, start)


def _text(replay: Replayed, row: int, start: int) -> None:
    """Show the text by the state of its tokens, with the colours of `token_html`."""
    events = replay.course.filter(pl.col("event") <= row)["event"]
    if not len(events):
        st.caption("Nothing has been dropped by then.")
        return
    trace, record, chosen = replay.settings.trace, replay.record, replay.settings
    place = {"layer": chosen.layer, "head": chosen.head, "row": int(events[-1])}
    counts = token_states(trace, record, **place).counts(start, start + WINDOW)
    st.caption(
        f"**bold**: retained ({counts['retained']}); grey: dropped ({counts['dropped']}); "
        f"*italic*: not yet scored ({counts['not yet scored']}). After row {events[-1]}."
    )
    st.html(token_html(trace, record, **place, start=start, stop=start + WINDOW))
