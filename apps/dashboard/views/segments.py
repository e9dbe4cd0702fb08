"""Page *Segments*: how AMS cuts a cache at an event, beside the scorer inside it alone."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import numpy as np
import polars as pl
import streamlit as st

import cached
import chosen
import drawn
import shown
from kvsim.analysis.kept.course import head_course, held
from kvsim.analysis.kept.segmentation import Segmented, segmented
from kvsim.analysis.kept.segments import NEAR, ams_segments, noted
from kvsim.analysis.table import fidelity
from kvsim.analysis.tiles import SIDE
from kvsim.errors import KvsimError, PolicyError
from kvsim.plots import mass_curve, save

#: Entries of all heads at all events up to which a replay keeps what was decided (some 60 bytes
#: each).
MOST = 10_000_000


def show_cut(one: Segmented) -> None:
    """How an event of AMS cut a head's cache: segments, how far they moved, masses."""
    found, recent = ams_segments(record, layer), noted(record, layer, "suffix_mass")
    if found is None or recent is None:
        return
    number = int(np.searchsorted(found.rows, one.row))
    moved = found.shift[head, number - 1] if number else math.nan
    again = found.f1[head, number - 1] if number else math.nan
    cells = (
        (
            "Segments",
            f"{found.count[head, number]}",
            f"{found.length[head, number]:.1f} entries each",
        ),
        (
            "Boundaries moved",
            "-" if math.isnan(moved) else f"{moved:.1f}",
            "first event" if math.isnan(again) else f"found again: F1 {again:.2f}",
        ),
        ("Credit held", f"{one.credit.sum():.3f}", "of 1; what was dropped is lost"),
        (
            "Mass of recent rows",
            f"{recent.by_event[head, number]:.1%}",
            f"counted as {record.params['suffix_fill']}",
        ),
    )
    helps = [
        "and their mean length",
        f"mean distance from the nearest boundary of the event before; F1 within {NEAR} positions",
        "sum of the credit that the entries carry",
        "share of the mass on the window's own rows, which most of it cannot see",
    ]
    for column, (label, value, below), how in zip(st.columns(4), cells, helps, strict=True):
        column.metric(label, value, below, delta_color="off", delta_arrow="off", help=how)


def figure() -> bytes:
    """The figure of kvsim.plots for this event and the one before."""
    rows = [which.row for which in (before, one) if which is not None]
    drawing = mass_curve(trace, record, layer=layer, head=head, events=rows)
    with tempfile.TemporaryDirectory() as folder:
        return save(drawing, Path(folder) / "segments.png").read_bytes()


trace = chosen.trace()
source = chosen.source()
layer, head = chosen.layer(), chosen.head()
st.sidebar.divider()
scorer = chosen.scorer("scorer", "tova")
budget, interval = chosen.budget(trace), chosen.interval(trace)
params = chosen.ams(trace)

shown.title(
    "Segments",
    "AMS adds up the attention mass of the cache from left to right and begins a segment where the "
    "sum passes the next multiple of *segment mass*. Each segment keeps its quota, the best of it "
    "by the scorer. Beside it, the scorer alone with the same budget and events: in the numbers, "
    "and as the last line of ticks.",
)
name = f"ams+{scorer}"
choice = cached.Choice.of(name, budget, interval, **chosen.required(name), **params)
if interval is not None and chosen.entries(trace, budget, interval) > MOST:
    st.warning("Too many events to keep what each of them decided; give a longer interval.")
    st.stop()
try:
    if cached.together(choice):
        raise PolicyError(f"{scorer}: the layers share one budget; expected one that scores alone")
    record = cached.record(source, choice, layer, internals=True)
    # on the same events as AMS
    token_wise = cached.Choice.of(
        scorer, budget, record.interval, record.prefill, **chosen.required(scorer)
    )
    other = cached.record(source, token_wise, layer)
    events = segmented(record, layer, head) if record.events else []
except KvsimError as error:
    st.warning("There are no segments on these terms.", icon=":material/block:")
    st.text(str(error))
    st.stop()
if record.remark:
    st.text(record.remark)
if not events:
    st.info(
        "Nothing is dropped in this layer. A smaller budget, or an interval that fits the trace, "
        "makes events act.",
        icon=":material/info:",
    )
    st.stop()

by_row = {one.row: one for one in events[::-1][:: max(1, len(events) // SIDE)][::-1]}
row = chosen.event(list(by_row))
number = [one.row for one in events].index(row)
one, before = events[number], events[number - 1] if number else None
at_alone = head * trace.group if other.per_query_head else head

shown.numbers(
    {
        called: head_course(which, layer, at).filter(pl.col("event") == row)
        for called, which, at in ((name, record, head), (f"{scorer} alone", other, at_alone))
    }
)
if len(one.quota) > SIDE:
    st.info(f"{len(one.quota):,} segments are too many to draw; the table has them all.")
else:
    st.plotly_chart(
        drawn.segments(
            one,
            before,
            held(other, layer, at_alone, row),
            ("ams", scorer),
            trace.token_text,
        ),
        key="segments",
        config={"displaylogo": False},
    )
show_cut(one)
shown.fidelity([fidelity(trace, which, "sets", layer) for which in (record, other)])

table = pl.concat([which.table() for which in events])
called = f"{trace.name}-{name}-layer-{layer}-head-{head}"
left, right, _ = st.columns([3, 2, 3])
left.download_button(
    "Segments of all events as CSV", table.write_csv(), f"{called}-segments.csv", "text/csv"
)
right.download_button(
    "Figure as PNG", figure, f"{called}-row-{row}.png", "image/png", on_click="ignore"
)
with st.expander("Segments of this event, and the parameters"):
    st.dataframe(one.table(), hide_index=True)
    st.json(dict(record.params), expanded=False)
