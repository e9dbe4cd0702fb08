"""Page *Retention*: retained positions after the events of a policy, and wiped-out regions."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st

from kvsim.analysis.kept.states import REGION
from kvsim.errors import KvsimError

from .. import controls, elements, event_charts, replays
from ..replays import WINDOW, Replayed, Settings
from ..tiles import SIDE


def page() -> None:
    """Show one policy, or two side by side, at all events and at one of them."""
    settings, names, events = _settings()
    trace = settings.trace
    elements.title(
        "Retention",
        "Which positions one KV head still has. Each line is the cache after an event. Blue "
        "positions are kept; a column that turns grey has lost its token for good. Red are regions "
        f"of {REGION} positions of which nothing is left. With sparse attention, a second map "
        "shows what each row reads of the positions that are held.",
    )
    results = [replays.replay(settings, name) for name in names]
    shown = [result for result in results if isinstance(result, Replayed)]
    rows = sorted({int(row) for each in shown for row in each.picture.rows})
    readers = any(each.reads for each in shown)
    if readers:  # rows between events read other entries
        step = -(-(trace.n_pos - trace.prompt_len) // SIDE)
        rows = sorted({*rows, *range(trace.n_pos - 2, trace.prompt_len - 2, -step)})
    label = "After row" if readers else "After the event of row"
    row = controls.event(rows, events, label) if rows else trace.n_pos - 1
    lines = max((len(each.picture.rows) for each in shown), default=0)
    height = 170 + min(340, 26 * lines)
    if any(each.events.size for each in shown):
        st.html(event_charts.LEGEND)
    columns = st.columns(len(names))
    for number, (name, result, column) in enumerate(zip(names, results, columns, strict=True)):
        with column:
            if isinstance(result, Replayed):
                st.subheader(result.name, anchor=False)
                _map(number, result, row, height)
            else:
                st.subheader(name, anchor=False)
                replays.unable(result)
    elements.fidelity([each.fidelity for each in shown])
    _texts(settings, shown, row)
    for each in shown:
        with st.expander(f"Parameters, {each.name}"):
            st.json(dict(each.record.params), expanded=False)


def _settings() -> tuple[Settings, list[str], st.delta_generator.DeltaGenerator]:
    """Read the controls, and return where the choice of the event belongs.

    Where the parameters cannot be read the page says why, and ends.
    """
    trace = controls.trace()
    events = st.sidebar.container()
    st.sidebar.divider()
    names = [controls.policy("Policy", "policy", "tova")]
    second = controls.policy("Second policy", "beside", "ams", optional=True)
    if second != controls.NONE:
        names.append(second)
    budget, interval = controls.budget(trace), controls.interval(trace)
    fit = controls.switch("Fit lengths to the budget", "fit", controls.about("fit"), on=True)
    about = "for policies whose layers share one budget: replay all of them, which takes longer"
    all_layers = controls.switch("All layers", "all", about)
    try:
        params = controls.params(names)
    except KvsimError as error:
        elements.stop("The parameters cannot be read.", error)
    place = (controls.source(), controls.layer(), controls.head())
    return Settings(trace, *place, budget, interval, fit, all_layers, params), names, events


def _map(number: int, replay: Replayed, row: int, height: int) -> None:
    """Show the map of all events, and describe retained and read entries after the chosen one."""
    if replay.events.size:
        _events(number, replay, row, height)
    elif not replay.reads:
        st.info(
            "Nothing is evicted in this layer. A smaller budget, or an interval that fits the "
            "trace, makes events act.",
            icon=":material/info:",
        )
    if replay.reads:
        _reads(number, replay, min(row + 1, replay.settings.trace.n_pos - 1))
    if replay.record.remark:
        elements.reading(replay.record.remark)


def _reads(number: int, replay: Replayed, row: int) -> None:
    st.html(event_charts.READ_LEGEND)
    texts = replay.settings.trace.token_text
    figure = event_charts.reading(replay.map_of_reads, texts, row, 420)
    elements.chart(figure, f"reads-{number}")


def _events(number: int, replay: Replayed, row: int, height: int) -> None:
    texts = replay.settings.trace.token_text
    figure = event_charts.retention(replay.picture, texts, row, height)
    elements.chart(figure, f"map-{number}")
    if not (replay.events <= row).any():
        st.caption(f"Nothing has been evicted after row {row}.")


def _texts(settings: Settings, shown: Sequence[Replayed], row: int) -> None:
    trace = settings.trace
    st.subheader("Text", anchor=False)
    if trace.token_text is None:
        st.info("This trace has no text of its tokens; record it with a tokenizer.")
        return
    if not shown:
        return
    start = 0
    if trace.n_pos > WINDOW:
        start = st.sidebar.slider(
            "Text from position", 0, trace.n_pos - WINDOW, 0, key="text", bind="query-params"
        )
    replays.legend({each.name: each.states(row) for each in shown}, settings)
    for replay, column in zip(shown, st.columns(len(shown)), strict=True):
        with column:
            if len(shown) > 1:
                st.markdown(f"`{replay.name}`")
            replays.text(replay, row, start)
