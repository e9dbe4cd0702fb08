"""What is looked at: widgets that every page shares, and that its link holds.

A widget that is bound to the link takes its value from `?name=value` and writes it there. A value
that is not among its options is ignored, so a link can choose a trace from the listing, and nothing
else.
"""

from __future__ import annotations

import sys
from pathlib import Path

import streamlit as st

import cached
from kvsim import Trace
from kvsim.errors import KvsimError
from kvsim.samples import sample_trace
from kvsim.store.listing import find_runs, find_traces

SAMPLE = "sample"


def root() -> Path:
    """The folder that is looked into."""
    return Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()


def traces() -> dict[str, Path]:
    """The traces of the folder by name; the sample trace where there is none."""
    return find_traces(root()) or {SAMPLE: sample_trace()}


def runs() -> dict[str, Path]:
    """The run folders of the folder by name."""
    return find_runs(root())


def sidebar() -> None:
    """Which trace; and where it lies."""
    listed = traces()
    with st.sidebar:
        st.selectbox("Trace", list(listed), key="trace", bind="query-params")
        if SAMPLE in listed and len(listed) == 1:
            st.info(
                "No trace is in this folder, so the sample that comes with kvsim is shown. "
                "`kvsim capture --model tiny --prompts prompts.jsonl --out traces` records more.",
                icon=":material/info:",
            )
        st.caption("in")
        st.code(str(root()), language=None, wrap_lines=True)


def source() -> cached.Source:
    """The chosen trace's folder."""
    return cached.Source.of(traces()[st.session_state["trace"]])


def trace() -> Trace:
    """The chosen trace. Where it cannot be read the page says why, and ends there."""
    try:
        return cached.trace(source())
    except KvsimError as error:
        st.error("This trace cannot be read.", icon=":material/error:")
        st.text(str(error))
        st.caption("Choose another one on the left.")
        st.stop()


def layer(one: Trace, where: st.delta_generator.DeltaGenerator = st.sidebar) -> int:
    """A layer by its place in the trace; the last one by default."""
    places = list(range(one.n_layers))
    return int(
        where.selectbox("Layer", places, index=len(places) - 1, key="layer", bind="query-params")
    )


def head(one: Trace, where: st.delta_generator.DeltaGenerator = st.sidebar) -> int:
    """A KV head."""
    heads = list(range(one.n_heads))
    return int(where.selectbox("KV head", heads, key="head", bind="query-params"))


def qhead(one: Trace, where: st.delta_generator.DeltaGenerator = st.sidebar) -> int:
    """A query head."""
    heads = list(range(one.n_qheads))
    return int(where.selectbox("Query head", heads, key="qhead", bind="query-params"))
