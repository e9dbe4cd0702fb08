"""Widgets that pages share; their values are part of the link.

A widget that is bound to the link takes its value from `?name=value` and writes it there. A value
that is not among its options is ignored, so a link can choose a trace from the listing and nothing
else.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast, get_args

import streamlit as st

import kvsim
from kvsim import Trace
from kvsim.cli.shared import parse_set
from kvsim.core.options import declared
from kvsim.core.parameters import parameters
from kvsim.errors import KvsimError, PolicyError
from kvsim.experiment import Experiment
from kvsim.policies import ACCESS, CATALOGUE, Entry, has_parameter, names
from kvsim.policies.ams import AMS
from kvsim.samples import SAMPLES, sample_trace
from kvsim.store.opening import find

from . import cache, elements

#: The sample trace with a text to read.
SAMPLE = "sample-smollm2"

#: The option for a sweep over the chosen trace instead of a run.
HERE = "the chosen trace, replayed here"

#: Kinds of pieces after an eviction: the word in links, and the effect of leaving each out.
BEHIND = {
    "sparse attention": ("reader", "reads all"),
    "quantizer": ("quantizer", "exact"),
    "merger": ("merger", "evicts"),
}

#: Options of experiments by name, whose help and defaults widgets have.
OPTIONS = {option.name: option for option in declared(Experiment)}

#: The option for no policy.
NONE = "none"

#: Where a widget stands.
Where = st.delta_generator.DeltaGenerator


def choose(
    label: str,
    key: str,
    options: Sequence[Any],
    start: int | None = 0,
    where: Where = st.sidebar,
    **more: Any,
) -> Any:
    """Choose one of some options, that at the place `start` by default."""
    more |= _kept(key, options, None if start is None else options[start])
    return where.selectbox(label, options, start, **more)


def several(label: str, key: str, options: Sequence[str], start: Sequence[str], **more: Any) -> Any:
    """Choose some of several options, `start` by default."""
    return st.sidebar.multiselect(label, options, start, **_kept(key, options, [*start]), **more)


def _kept(key: str, options: Sequence[Any], start: Any) -> dict[str, Any]:
    """Return keywords of a widget whose value is in the link and outlasts other options.

    Where the options change, as with the run, the earlier choice of a link or the user returns once
    it is an option again; until then the default is chosen.
    """
    state, chosen, offer = st.session_state, f"chosen_{key}", ([*options], start)
    links = st.query_params.get_all(key)
    state.setdefault(chosen, [x for x in options if str(x) in links or json.dumps(x) in links])
    if key in state and state.get(f"offer_{key}", offer) != offer:
        again = [x for x in options if x in state[chosen]]
        state[key] = again or start if isinstance(start, list) else next(iter(again), start)
    state[f"offer_{key}"] = offer

    def note() -> None:
        state[chosen] = state[key] if isinstance(start, list) else [state[key]]

    return {"key": key, "bind": "query-params", "on_change": note}


def number(
    label: str,
    key: str,
    ends: tuple[int, int],
    start: int,
    where: Where = st.sidebar,
    **more: Any,
) -> int:
    """Choose a whole number between two ends, both included."""
    return int(where.number_input(label, *ends, start, key=key, bind="query-params", **more))


def switch(label: str, key: str, about: str, *, on: bool = False) -> bool:
    """Choose yes or no."""
    return st.sidebar.toggle(label, on, help=about, **_kept(key, (False, True), on))


def about(name: str) -> str:
    """Return the help of an option of experiments."""
    return OPTIONS[name].help.text


def root() -> Path:
    """Return the folder of traces and runs."""
    return Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()


def traces() -> dict[str, Path]:
    """Return the traces of the folder by name, or the sample traces for an empty folder."""
    shipped = {name: sample_trace(model) for name, model in reversed(SAMPLES.items())}
    return find(root(), "trace") or shipped


def runs() -> dict[str, Path]:
    """Return the runs of the folder by name, the newest first."""
    listed = find(root(), "run")
    newest = sorted(listed, key=lambda name: -cache.Source.of(listed[name]).written)
    return {name: listed[name] for name in newest}


def sidebar(shown: Sequence[str]) -> None:
    """Show the choices that persist across pages: run, trace, layer and head, or some of these.

    They persist because the frame of the pages shows them, and not a page.
    """
    _restore("run", [*runs(), HERE])
    _restore("trace", traces())
    with st.sidebar:
        if "run" in shown:
            listed = runs()
            if not listed or choose("Run", "run", [*listed, HERE]) == HERE:
                shown = [*shown, "trace"]
        if "trace" in shown:
            choose("Trace", "trace", list(traces()))
            if not find(root(), "trace"):
                st.caption(
                    "Samples that come with kvsim, because this folder has no trace. Record some: "
                    "`kvsim prompts --n 4 --out prompts.jsonl`, then "
                    "`kvsim capture --model tiny --prompts prompts.jsonl --out traces`"
                )
        if "layer" not in shown:
            return
        # an unreadable trace has no layers; the page shows the error
        with contextlib.suppress(KvsimError):
            opened = cache.trace(source())
            # of the sample with a text, the head of the README's first figure; else the last layer
            # that policies act on
            sample = st.session_state["trace"] == SAMPLE and not find(root(), "trace")
            whole = [x for x in range(opened.n_layers) if x not in opened.windowed]
            layer, head = (0, 2) if sample else ((whole or [opened.n_layers - 1])[-1], 0)
            left, right = st.columns(2)
            choose("Layer", "layer", range(opened.n_layers), layer, left)
            if "head" in shown:
                choose("KV head", "head", range(opened.n_heads), head, right)


def _restore(key: str, options: Collection[str]) -> None:
    """Restore the choice of a link or the user after pages without the widget."""
    chosen = st.session_state.get(key) or st.query_params.get(key)
    if chosen is not None:
        st.session_state[f"chosen_{key}"] = [chosen]
    elif again := [x for x in st.session_state.get(f"chosen_{key}", ()) if x in options]:
        st.session_state[key] = again[0]


def trace() -> Trace:
    """Open the chosen trace. Where it cannot be read the page says why, and ends."""
    try:
        return cache.trace(source())
    except KvsimError as error:
        elements.stop("This trace cannot be read.", error, "Choose another one on the left.")


def folder() -> None:
    """Show where the traces and runs lie, from the home folder where they lie there."""
    place = root()
    with contextlib.suppress(ValueError, RuntimeError):  # elsewhere; no home
        place = Path("~", place.relative_to(Path.home().resolve()))
    st.sidebar.caption("Traces and runs of")
    st.sidebar.code(str(place), language=None, wrap_lines=True)


def source() -> cache.Source:
    """Return the chosen trace's folder."""
    return cache.Source.of(traces()[st.session_state["trace"]])


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
    return {**CATALOGUE, **ACCESS}[base].preset(preset)


def scorers() -> list[str]:
    """Return the policies that can stand inside another policy."""
    return [name for name in names() if entry(name).kind == "scorer"]


def scorer(key: str, default: str) -> str:
    """Choose the scorer inside, the default where nothing is chosen."""
    return choose("Scorer inside", key, scorers(), None, placeholder=default) or default


def policy(label: str, key: str, first: str, *, optional: bool = False) -> str:
    """Choose a policy of the catalogue: an eviction, sparse attention, a quantizer.

    optional: `NONE` can be chosen too.

    A link cannot name a policy outside of the catalogue, because that would import code.
    """
    listed = [NONE, *names()] if optional else names()
    name = choose(label, key, listed, listed.index(first))
    if name == NONE:
        return NONE
    listing = entry(name)
    if not listing.innermost:
        name = f"{name}+{scorer(f'{key}_scorer', listing.default or 'tova')}"
    return access(name, key)


def access(name: str, key: str) -> str:
    """Choose sparse attention, a quantizer and a merger after an eviction, none by default."""
    behind = []
    keys = {kind: f"{key}_{word}" for kind, (word, _) in BEHIND.items()}
    used = any(st.session_state.get(x) or x in st.query_params for x in keys.values())
    box = st.sidebar.expander("Sparse attention, quantizer, merger", expanded=used)
    for kind, (_, without) in BEHIND.items():
        listed = [each for each in names(ACCESS) if entry(each).kind == kind]
        part = choose(kind.capitalize(), keys[kind], listed, None, box, placeholder=without)
        behind += [part] if part else []
    alone = name == "full" and behind and not entry(behind[0]).default
    return "+".join(behind if alone else [name, *behind])


def required(name: str) -> dict[str, Any]:
    """Return parameters without a default, with the example value of the catalogue."""
    return {key: value for part in name.split("+") for key, value in entry(part).required.items()}


def params(names: Sequence[str]) -> dict[str, Any]:
    """Read typed parameters of policies; KvsimError for one that no policy has."""
    typed = st.sidebar.text_input(
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


def settings(name: str, typed: Mapping[str, Any]) -> dict[str, Any]:
    """Return a policy's parameters: required ones, and typed ones that it has."""
    given = {key: value for key, value in typed.items() if has_parameter(name, key)}
    return {**required(name), **given}


def budget(trace: Trace) -> int:
    """Choose the entries per KV head, about a quarter of the trace by default."""
    most = max(2, trace.n_pos)
    start = min(most, part(trace, 4))
    return number("Budget", "budget", (1, most), start, step=16, help=about("budgets"))


def interval(trace: Trace) -> int | None:
    """Choose the rows between events; None for the policy's own schedule."""
    ends, text = (
        (0, max(2, trace.n_pos)),
        f"{about('interval')} Here 0 is the policy's own schedule.",
    )
    return number("Interval", "interval", ends, part(trace, 12), step=16, help=text) or None


def event(rows: Sequence[int], where: Where, label: str = "After the event of row") -> int:
    """Choose an event, the last by default; keep the choice among other events if it is near."""
    if len(rows) == 1:
        where.caption(f"One event, after row {rows[0]}.")
        return rows[0]
    before = st.session_state.get("event")
    if before is not None and before not in rows:
        st.session_state["event"] = min(rows, key=lambda row: abs(row - before))
    return int(where.select_slider(label, rows, rows[-1], key="event", bind="query-params"))


def _least(name: str) -> float:
    """Return the lower bound of a parameter of AMS."""
    return float(get_args(parameters(AMS)[name].hint)[1].limit)


def ams(trace: Trace, budget: int) -> dict[str, Any]:
    """Choose the parameters of AMS: by default lengths of `ams@scaled`, the rest is the paper's."""
    scaled = cast("AMS", kvsim.policy("ams@scaled").at(budget).allocator)

    def whole(label: str, name: str, how: str) -> int:
        value: int = getattr(scaled, name)
        # a length follows the budget until it is changed
        last = st.session_state.get(f"scaled {name}")
        if last is not None and st.session_state.get(name) == last:
            st.session_state[name] = value
        st.session_state[f"scaled {name}"] = value
        ends = int(_least(name)), max(2, trace.n_pos, value)
        return number(label, name, ends, value, box, help=how)

    def share(label: str, name: str, how: str) -> float:
        value, step = float(getattr(scaled, name)), 0.01
        least = math.ceil(_least(name) / step) * step  # above 0 where 0 is not allowed
        return float(
            box.slider(label, least, 1.0, value, step, key=name, bind="query-params", help=how)
        )

    def among(label: str, name: str) -> str:
        return str(choose(label, name, get_args(parameters(AMS)[name].hint), where=box))

    box = st.sidebar.expander("Segments", expanded=True)
    values: dict[str, Any] = {
        "segment_mass": share("Segment mass", "segment_mass", "mass that a segment holds"),
        "min_segment": whole("Shortest", "min_segment", "entries, at least"),
        "max_segment": whole("Longest", "max_segment", "entries, at most"),
        "min_quota": whole("Least quota", "min_quota", "entries that each one keeps"),
    }
    box = st.sidebar.expander("Mass and credit")
    values |= {
        "credit_decay": share("Credit decay", "credit_decay", "weight of earlier events"),
        "credit_mix": share("Credit mix", "credit_mix", "weight of what is observed now"),
        "window": whole("Window", "window", "rows that vote"),
    }
    box = st.sidebar.expander("More")
    return values | {
        "mode": among("Mode", "mode"),
        "suffix_fill": among("Recent entries count as", "suffix_fill"),
        "sink": whole("Sinks", "sink", "first entries, protected"),
        "recent": whole("Recent", "recent", "last entries, protected"),
    }
