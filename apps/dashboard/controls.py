"""Widgets that pages share; their values are part of the link.

A widget that is bound to the link takes its value from `?name=value` and writes it there. A value
that is not among its options is ignored, so a link can choose a trace from the listing and nothing
else.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import streamlit as st

from kvsim import Trace
from kvsim.cli.values import parse_set
from kvsim.errors import KvsimError, PolicyError
from kvsim.policies import CATALOGUE, Entry, has_parameter, names
from kvsim.policies.ams import AMS
from kvsim.store.index import find_runs, find_traces
from kvsim.tiny.sample import sample_trace

from . import cache

SAMPLE = "sample"

#: The option for no policy.
NONE = "none"


def root() -> Path:
    """Return the folder of traces and runs."""
    return Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()


def traces() -> dict[str, Path]:
    """Return the traces of the folder by name, or the sample trace of an empty folder."""
    return find_traces(root()) or {SAMPLE: sample_trace()}


def runs() -> dict[str, Path]:
    """Return the runs of the folder by name."""
    return find_runs(root())


def sidebar() -> None:
    """Show the choice of trace, layer and head, which stays when the page changes."""
    listed = traces()
    with st.sidebar:
        st.selectbox("Trace", list(listed), key="trace", bind="query-params")
        if SAMPLE in listed and len(listed) == 1:
            st.info(
                "No trace is in this folder, so the sample that comes with kvsim is shown. "
                "`kvsim capture --model tiny --prompts prompts.jsonl --out traces` records more.",
                icon=":material/info:",
            )
        # a trace that cannot be read has no layers; the page says what is wrong
        with contextlib.suppress(KvsimError):
            chosen = cache.trace(source())
            layers, heads = (list(range(count)) for count in (chosen.n_layers, chosen.n_heads))
            st.selectbox("Layer", layers, len(layers) - 1, key="layer", bind="query-params")
            st.selectbox("KV head", heads, key="head", bind="query-params")
        st.caption("in")
        st.code(str(root()), language=None, wrap_lines=True)


def source() -> cache.Source:
    """Return the chosen trace's folder."""
    return cache.Source.of(traces()[st.session_state["trace"]])


def trace() -> Trace:
    """Open the chosen trace. Where it cannot be read the page says why, and ends."""
    try:
        return cache.trace(source())
    except KvsimError as error:
        st.error("This trace cannot be read.", icon=":material/error:")
        st.text(str(error))
        st.caption("Choose another one on the left.")
        st.stop()


def layer() -> int:
    """Return the chosen layer as an index in the trace; the last layer by default."""
    return int(st.session_state["layer"])


def head() -> int:
    """Return the chosen KV head."""
    return int(st.session_state["head"])


def part(trace: Trace, parts: int, most: int = 1 << 20) -> int:
    """Return the power of two nearest to the length of a trace over `parts`; 1 to `most`."""
    return min(most, 1 << max(0, round(math.log2(max(1, trace.n_pos) / parts))))


def entry(name: str) -> Entry:
    """Return the catalogue's entry of a name, with its preset."""
    base, _, preset = name.partition("@")
    return CATALOGUE[base].preset(preset)


def scorers() -> list[str]:
    """Return the policies that can stand inside another policy."""
    return [name for name in names() if entry(name).kind == "scorer"]


def scorer(key: str, default: str, where: st.delta_generator.DeltaGenerator = st.sidebar) -> str:
    """Choose the scorer inside, the default where nothing is chosen."""
    name = where.selectbox(
        "Scorer inside", scorers(), index=None, placeholder=default, key=key, bind="query-params"
    )
    return name or default


def policy(
    label: str,
    key: str,
    first: str,
    *,
    optional: bool = False,
    where: st.delta_generator.DeltaGenerator = st.sidebar,
) -> str | None:
    """Choose a policy of the catalogue, with its scorer inside; None for no policy.

    A link cannot name a policy outside of the catalogue, because that would import code.
    """
    listed = [NONE, *names()] if optional else names()
    name = where.selectbox(label, listed, listed.index(first), key=key, bind="query-params")
    if name == NONE:
        return None
    listing = entry(name)
    if listing.innermost:
        return name
    return f"{name}+{scorer(f'{key}_scorer', listing.default or 'tova', where)}"


def required(name: str) -> dict[str, Any]:
    """Return parameters without a default, with the example value of the catalogue."""
    return {key: value for part in name.split("+") for key, value in entry(part).required.items()}


def fitted(trace: Trace) -> dict[str, int]:
    """Return lengths of AMS that fit a trace: the paper's for a long trace, else shorter ones."""
    paper = AMS()
    return {
        "window": part(trace, 16, paper.window),
        "min_segment": part(trace, 64, paper.min_segment),
        "max_segment": part(trace, 8, paper.max_segment),
        "recent": part(trace, 16, paper.recent),
    }


def params(
    names: Sequence[str], where: st.delta_generator.DeltaGenerator = st.sidebar
) -> dict[str, Any]:
    """Read typed parameters of policies; KvsimError for one that no policy has."""
    typed = where.text_input(
        "Parameters",
        key="set",
        bind="query-params",
        placeholder="window=16 min_quota=4",
        help="KEY=VALUE between blanks, for each policy that has the parameter",
    )
    values = dict(parse_set(setting) for setting in (typed or "").split())
    for key in values:
        if key.endswith("calibration"):  # it can name a file, which a link must not choose
            raise PolicyError("calibration cannot be set here; kvsim replay --set can")
        if not any(has_parameter(name, key) for name in names):
            raise PolicyError(f"none of {', '.join(names)} has a parameter {key!r}")
    return values


def settings(name: str, trace: Trace, typed: Mapping[str, Any]) -> dict[str, Any]:
    """Return a policy's parameters: required ones, lengths of AMS that fit, and typed ones."""
    fit = fitted(trace) if name.partition("+")[0] == "ams" else {}
    given = {key: value for key, value in typed.items() if has_parameter(name, key)}
    return {**required(name), **fit, **given}


def budget(trace: Trace, where: st.delta_generator.DeltaGenerator = st.sidebar) -> int:
    """Choose the entries per KV head, about a quarter of the trace by default."""
    most = max(2, trace.n_pos)
    return int(
        where.number_input(
            "Budget",
            1,
            most,
            min(most, part(trace, 4)),
            step=16,
            key="budget",
            bind="query-params",
            help="entries that stay in each KV head, protected ones included",
        )
    )


def interval(trace: Trace, where: st.delta_generator.DeltaGenerator = st.sidebar) -> int | None:
    """Choose the rows between events; None for the policy's own schedule."""
    rows = where.number_input(
        "Interval",
        0,
        max(2, trace.n_pos),
        part(trace, 12),
        step=16,
        key="interval",
        bind="query-params",
        help="rows between events; 0 is the policy's own schedule",
    )
    return int(rows) or None


def entries(trace: Trace, budget: int, interval: int) -> int:
    """Return the most live entries of a layer's heads, summed over its events."""
    return trace.n_heads * (trace.n_pos // interval + 1) * (budget + interval)


def event(rows: Sequence[int]) -> int:
    """Choose an event, the last by default; keep the choice among other events if it is near."""
    if len(rows) == 1:
        st.caption(f"One event, after row {rows[0]}.")
        return rows[0]
    before = st.session_state.get("event")
    if before is not None and before not in rows:
        st.session_state["event"] = min(rows, key=lambda row: abs(row - before))
    return int(
        st.select_slider("After the event of row", rows, rows[-1], key="event", bind="query-params")
    )


def ams(trace: Trace, where: st.delta_generator.DeltaGenerator = st.sidebar) -> dict[str, Any]:
    """Choose the parameters of AMS; by default lengths fit the trace, the rest is the paper's."""
    paper, fit = AMS(), fitted(trace)

    def whole(label: str, name: str, least: int, value: int, how: str) -> int:
        most = max(2, trace.n_pos)
        return int(
            box.number_input(label, least, most, value, key=name, bind="query-params", help=how)
        )

    def share(label: str, name: str, least: float, how: str) -> float:
        value = float(getattr(paper, name))
        return float(
            box.slider(label, least, 1.0, value, 0.01, key=name, bind="query-params", help=how)
        )

    box = where.expander("Segments", expanded=True)
    values: dict[str, Any] = {
        "segment_mass": share("Segment mass", "segment_mass", 0.01, "mass that a segment holds"),
        "min_segment": whole("Shortest", "min_segment", 1, fit["min_segment"], "entries, at least"),
        "max_segment": whole("Longest", "max_segment", 1, fit["max_segment"], "entries, at most"),
        "min_quota": whole("Least quota", "min_quota", 0, paper.min_quota, "that each one keeps"),
    }
    box = where.expander("Mass and credit", expanded=True)
    values |= {
        "credit_decay": share("Credit decay", "credit_decay", 0.0, "weight of earlier events"),
        "credit_mix": share("Credit mix", "credit_mix", 0.0, "weight of what is observed now"),
        "window": whole("Window", "window", 1, fit["window"], "rows that vote"),
    }
    box = where.expander("More")
    for label, name, options in (
        ("Mode", "mode", ["strict", "reference"]),
        (
            "Recent entries count as",
            "suffix_fill",
            ["head_max", "global_max", "head_mean", "observed", "zero"],
        ),
    ):
        values[name] = box.selectbox(label, options, key=name, bind="query-params")
    values["sink"] = whole("Sinks", "sink", 0, paper.sink, "first entries, protected")
    values["recent"] = whole("Recent", "recent", 0, fit["recent"], "last entries, protected")
    return values
