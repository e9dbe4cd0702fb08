"""What is looked at: widgets that every page shares, and that its link holds.

A widget that is bound to the link takes its value from `?name=value` and writes it there. A value
that is not among its options is ignored, so a link can choose a trace from the listing, and nothing
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
from kvsim.store.listing import find_runs, find_traces
from kvsim.tiny.sample import sample_trace

from . import cache

SAMPLE = "sample"

#: What stands for no policy.
NONE = "none"


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
    """Which trace, layer and head. They stand in the frame and so outlive a change of page."""
    listed = traces()
    with st.sidebar:
        st.selectbox("Trace", list(listed), key="trace", bind="query-params")
        if SAMPLE in listed and len(listed) == 1:
            st.info(
                "No trace is in this folder, so the sample that comes with kvsim is shown. "
                "`kvsim capture --model tiny --prompts prompts.jsonl --out traces` records more.",
                icon=":material/info:",
            )
        # what cannot be read has no layers; the page says what is wrong
        with contextlib.suppress(KvsimError):
            one = cache.trace(source())
            layers, heads = (list(range(count)) for count in (one.n_layers, one.n_heads))
            st.selectbox("Layer", layers, len(layers) - 1, key="layer", bind="query-params")
            st.selectbox("KV head", heads, key="head", bind="query-params")
        st.caption("in")
        st.code(str(root()), language=None, wrap_lines=True)


def source() -> cache.Source:
    """The chosen trace's folder."""
    return cache.Source.of(traces()[st.session_state["trace"]])


def trace() -> Trace:
    """The chosen trace. Where it cannot be read the page says why, and ends there."""
    try:
        return cache.trace(source())
    except KvsimError as error:
        st.error("This trace cannot be read.", icon=":material/error:")
        st.text(str(error))
        st.caption("Choose another one on the left.")
        st.stop()


def layer() -> int:
    """The chosen layer by its place in the trace; the last one by default."""
    return int(st.session_state["layer"])


def head() -> int:
    """The chosen KV head."""
    return int(st.session_state["head"])


def part(one: Trace, parts: int, most: int = 1 << 20) -> int:
    """The power of two nearest to one of so many parts of a trace; 1 to `most`."""
    return min(most, 1 << max(0, round(math.log2(max(1, one.n_pos) / parts))))


def entry(name: str) -> Entry:
    """What the catalogue says of a name, its preset included."""
    base, _, preset = name.partition("@")
    return CATALOGUE[base].preset(preset)


def scorers() -> list[str]:
    """Names that can stand inside of another one."""
    return [name for name in names() if entry(name).kind == "scorer"]


def scorer(key: str, default: str, where: st.delta_generator.DeltaGenerator = st.sidebar) -> str:
    """The scorer inside; nothing chosen stands for the default."""
    found = where.selectbox(
        "Scorer inside", scorers(), index=None, placeholder=default, key=key, bind="query-params"
    )
    return found or default


def policy(
    label: str,
    key: str,
    first: str,
    *,
    optional: bool = False,
    where: st.delta_generator.DeltaGenerator = st.sidebar,
) -> str | None:
    """A policy of the catalogue with the scorer inside where it takes one; None for none.

    Nothing else can be named: a link must not choose what is imported.
    """
    listed = [NONE, *names()] if optional else names()
    name = where.selectbox(label, listed, listed.index(first), key=key, bind="query-params")
    if name == NONE:
        return None
    found = entry(name)
    if found.innermost:
        return name
    return f"{name}+{scorer(f'{key}_scorer', found.default or 'tova', where)}"


def required(name: str) -> dict[str, Any]:
    """Parameters without a default, with the value that the catalogue gives as an example."""
    return {key: value for one in name.split("+") for key, value in entry(one).required.items()}


def fitted(one: Trace) -> dict[str, int]:
    """Lengths of AMS that fit a trace: the paper's where it is long, fewer where it is short."""
    usual = AMS()
    return {
        "window": part(one, 16, usual.window),
        "min_segment": part(one, 64, usual.min_segment),
        "max_segment": part(one, 8, usual.max_segment),
        "recent": part(one, 16, usual.recent),
    }


def params(
    names: Sequence[str], where: st.delta_generator.DeltaGenerator = st.sidebar
) -> dict[str, Any]:
    """Parameters of policies as they are typed; KvsimError for what is none of any of them."""
    typed = where.text_input(
        "Parameters",
        key="set",
        bind="query-params",
        placeholder="window=16 min_quota=4",
        help="KEY=VALUE between blanks, for each policy that has the parameter",
    )
    found = dict(parse_set(setting) for setting in (typed or "").split())
    for key in found:
        if key.endswith("calibration"):  # it can name a file, which a link must not choose
            raise PolicyError("calibration cannot be set here; kvsim replay --set can")
        if not any(has_parameter(name, key) for name in names):
            raise PolicyError(f"none of {', '.join(names)} has a parameter {key!r}")
    return found


def settings(name: str, one: Trace, typed: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of a policy: what it needs, lengths of AMS that fit the trace, and those typed."""
    fit = fitted(one) if name.partition("+")[0] == "ams" else {}
    taken = {key: value for key, value in typed.items() if has_parameter(name, key)}
    return {**required(name), **fit, **taken}


def budget(one: Trace, where: st.delta_generator.DeltaGenerator = st.sidebar) -> int:
    """Entries per KV head; a quarter of the trace or so by default."""
    most = max(2, one.n_pos)
    return int(
        where.number_input(
            "Budget",
            1,
            most,
            min(most, part(one, 4)),
            step=16,
            key="budget",
            bind="query-params",
            help="entries that stay in each KV head, what is always kept included",
        )
    )


def interval(one: Trace, where: st.delta_generator.DeltaGenerator = st.sidebar) -> int | None:
    """Rows between events; None for those of the policy's own schedule."""
    found = where.number_input(
        "Interval",
        0,
        max(2, one.n_pos),
        part(one, 12),
        step=16,
        key="interval",
        bind="query-params",
        help="rows between events; 0 is the policy's own schedule",
    )
    return int(found) or None


def entries(one: Trace, budget: int, interval: int) -> int:
    """Live entries of a layer's heads, summed over its events; at most."""
    return one.n_heads * (one.n_pos // interval + 1) * (budget + interval)


def event(rows: Sequence[int]) -> int:
    """One of the events, the last by default; the nearest to what was chosen among others."""
    if len(rows) == 1:
        st.caption(f"One event, after row {rows[0]}.")
        return rows[0]
    before = st.session_state.get("event")
    if before is not None and before not in rows:
        st.session_state["event"] = min(rows, key=lambda row: abs(row - before))
    return int(
        st.select_slider("After the event of row", rows, rows[-1], key="event", bind="query-params")
    )


def ams(one: Trace, where: st.delta_generator.DeltaGenerator = st.sidebar) -> dict[str, Any]:
    """Parameters of AMS; lengths fit the trace by default, the rest is the paper's."""
    usual, fit = AMS(), fitted(one)

    def whole(label: str, name: str, least: int, value: int, how: str) -> int:
        most = max(2, one.n_pos)
        return int(
            box.number_input(label, least, most, value, key=name, bind="query-params", help=how)
        )

    def share(label: str, name: str, least: float, how: str) -> float:
        value = float(getattr(usual, name))
        return float(
            box.slider(label, least, 1.0, value, 0.01, key=name, bind="query-params", help=how)
        )

    box = where.expander("Segments", expanded=True)
    found: dict[str, Any] = {
        "segment_mass": share("Segment mass", "segment_mass", 0.01, "mass that a segment holds"),
        "min_segment": whole("Shortest", "min_segment", 1, fit["min_segment"], "entries, at least"),
        "max_segment": whole("Longest", "max_segment", 1, fit["max_segment"], "entries, at most"),
        "min_quota": whole("Least quota", "min_quota", 0, usual.min_quota, "that each one keeps"),
    }
    box = where.expander("Mass and credit", expanded=True)
    found |= {
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
        found[name] = box.selectbox(label, options, key=name, bind="query-params")
    found["sink"] = whole("Sinks", "sink", 0, usual.sink, "first entries, always kept")
    found["recent"] = whole("Recent", "recent", 0, fit["recent"], "last entries, always kept")
    return found
