"""Page *Segments*: the segments of a cache at an event of AMS, compared with only its scorer.

Both act after the prompt too, as on *Retention*, so that every text longer than its budget has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
import streamlit as st

from kvsim import Record, Trace
from kvsim.analysis.kept.text import spaced
from kvsim.analysis.results import csv_text
from kvsim.analysis.table import fidelity
from kvsim.errors import KvsimError, PolicyError
from kvsim.plots import mass_curve
from kvsim.plots.style import picture
from kvsim.studies.segments.segments import Segmented, segmented

from .. import cache, controls, cuts, elements, event_charts, readings
from ..tiles import SIDE

#: Entries of all heads at all events up to which a replay keeps the decisions of its events (some
#: 60 bytes each).
MOST = 10_000_000


@dataclass(frozen=True)
class Replays:
    """AMS around a scorer, and only the scorer, on the same budget and events."""

    trace: Trace
    layer: int
    head: int
    name: str
    scorer: str
    ams: Record
    alone: Record
    events: Sequence[Segmented]

    @property
    def head_alone(self) -> int:
        """The KV head on the axis of the scorer's record."""
        return self.head * self.trace.group if self.alone.per_query_head else self.head


def page() -> None:
    """Show the segments of one event, and the entries that only the scorer keeps then."""
    trace = controls.trace()
    place = st.sidebar.container()
    st.sidebar.divider()
    scorer = controls.scorer("scorer", "tova")
    budget, interval = controls.budget(trace), controls.interval(trace)
    params = controls.ams(trace, budget)
    elements.title(
        "Segments",
        "How AMS cuts the cache at one event. A segment begins where the attention mass, added up "
        "from the left, passes the next multiple of *segment mass*. Each segment keeps its quota "
        "of entries, the best by the scorer; below, the scorer alone with the same budget.",
    )
    # live entries of the heads of a layer, summed over its events
    later = (trace.n_pos - trace.prompt_len) // interval if interval else 0
    if trace.n_heads * (trace.prompt_len + later * (budget + (interval or 0))) > MOST:
        st.warning("Too many events to keep the decisions of each; give a longer interval.")
        st.stop()
    replays = _replays(trace, scorer, budget, interval, params)
    events = replays.events
    shown = events[::-1][:: max(1, len(events) // SIDE)][::-1]
    row = controls.event([event.row for event in shown], place)
    number = [event.row for event in events].index(row)
    _event(replays, events[number], events[number - 1] if number else None)


def _replays(
    trace: Trace, scorer: str, budget: int, interval: int | None, params: dict[str, Any]
) -> Replays:
    """Replay both. Where there are no segments the page says why, and ends."""
    name, source = f"ams+{scorer}", controls.source()
    layer, head = controls.layer(), controls.head()
    prefill = True if interval else None
    choice = cache.Choice(name, controls.required(name) | params, budget, interval, prefill)
    try:
        if cache.together(choice):
            raise PolicyError(
                f"{scorer}: the layers share one budget; expected one that scores alone"
            )
        record = cache.record(source, choice, layer, internals=True)
        # on the same events as AMS
        required = controls.required(scorer)
        fires = record.schedule.interval, record.schedule.prefill
        alone = cache.Choice(scorer, required, budget, *fires)
        other = cache.record(source, alone, layer)
        events = segmented(record, layer, head)
    except KvsimError as error:
        st.warning("There are no segments with these settings.", icon=":material/block:")
        st.text(str(error))
        st.stop()
    return Replays(trace, layer, head, name, scorer, record, other, events)


def _event(replays: Replays, event: Segmented, before: Segmented | None) -> None:
    trace, layer, row = replays.trace, replays.layer, event.row
    kept = replays.alone.retained(row)[0, replays.head_alone]
    alone = np.flatnonzero(kept)
    texts = None if trace.token_text is None else spaced(trace.token_text)
    elements.reading(readings.segments(event, alone, replays.scorer, texts))
    if len(event.quota) > SIDE:
        st.info(f"{len(event.quota):,} segments are too many to draw; the table has them all.")
    else:
        names = ("ams", replays.scorer)
        elements.chart(event_charts.segments(event, before, alone, names, texts), "segments")
    _cut(replays, event, before)
    if replays.ams.remark:
        elements.reading(replays.ams.remark)
    records = (replays.ams, replays.alone)
    elements.fidelity([fidelity(trace, record, "sets", layer) for record in records])
    _downloads(replays, event, before)


def _cut(replays: Replays, event: Segmented, before: Segmented | None) -> None:
    shifts = np.abs(np.diff(cuts.moves(event, before))) if before else np.zeros(0)
    moved = f"{shifts.mean():.1f}" if shifts.size else "-"
    again = "" if shifts.size else "first event" if before is None else "no boundaries"
    size, counted = len(event.quota), f"counted as {replays.ams.params['suffix_fill']}"
    cells = (
        ("Segments", f"{size}", f"{len(event.pos) / size:.1f} entries each"),
        ("Boundaries moved, positions", moved, again),
        ("Credit held", f"{event.credit.sum():.3f}", "of 1; what was evicted is lost"),
        ("Mass of recent rows", f"{event.suffix:.1%}", counted),
    )
    helps = (
        "and their mean length",
        "mean distance from the nearest boundary of the event before",
        "sum of the credit that the entries carry",
        "share of the mass on the window's own rows, which most of its rows cannot see",
    )
    for column, (label, value, below), text in zip(st.columns(4), cells, helps, strict=True):
        column.metric(label, value, below, delta_color="off", delta_arrow="off", help=text)


def _downloads(replays: Replays, event: Segmented, before: Segmented | None) -> None:
    def figure() -> bytes:
        rows = [cut.row for cut in (before, event) if cut is not None]
        place = {"layer": replays.layer, "head": replays.head}
        drawing = mass_curve(replays.trace, replays.ams, **place, events=rows)
        return picture(drawing, "png")

    table = pl.concat([cuts.table(each) for each in replays.events])
    name = f"{replays.trace.name}-{replays.name}-layer-{replays.layer}-head-{replays.head}"
    left, right, _ = st.columns([3, 2, 3])
    left.download_button(
        "Segments of all events as CSV", lambda: csv_text(table), f"{name}-segments.csv", "text/csv"
    )
    right.download_button(
        "Figure as PNG", figure, f"{name}-row-{event.row}.png", "image/png", on_click="ignore"
    )
    with st.expander("Segments of this event, and the parameters"):
        st.dataframe(cuts.table(event), hide_index=True)
        st.json(dict(replays.ams.params), expanded=False)
