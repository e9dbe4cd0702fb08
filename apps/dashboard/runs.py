"""Runs of the folder, and a small sweep over the chosen trace."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import streamlit as st

import kvsim
from kvsim import Record, Trace
from kvsim.analysis.comparison import Comparison
from kvsim.analysis.evidence import EVIDENCE, ranking
from kvsim.analysis.folder import RECORDS, read_run
from kvsim.analysis.live.metrics import KL_TOKENS
from kvsim.analysis.measuring import available
from kvsim.analysis.output.error import check_record
from kvsim.analysis.output.metrics import REGRET
from kvsim.analysis.registry import METRICS
from kvsim.analysis.results import REQUESTED, labelled, mixed
from kvsim.analysis.sentences import answer
from kvsim.analysis.summaries import (
    averages,
    stages,
)
from kvsim.analysis.table import columns_of
from kvsim.errors import KvsimError, OutputError, PolicyError
from kvsim.policies import ACCESS, names
from kvsim.store.records import read_records
from kvsim.sweeps.driver import replay_all
from kvsim.sweeps.grid import INTERVAL

from . import cache, controls, elements

#: The label of a variant without a name.
PLAIN = "main"
#: Replayed by default.
POLICIES = ("streaming_llm", "snapkv", "tova", "ams+tova")
#: Evictions that are offered with sparse attention or a quantizer after them.
COMBINED = ("h2o", "snapkv", "tova")
BUDGETS = ("64", "128")
#: Budgets for traces of at least so many tokens.
LONG, SHARES = 2048, ("10%", "25%")
MEASURED = (
    *("weighted_error", "layer_error", "output_error", "retained_mass", "wipeout", "retained_iou"),
    *("middle_coverage", "burst_share", "entries_seen", "bytes_held", "bytes_read"),
)
#: Tokens times layers up to which a trace is replayed without a click.
AT_ONCE = 3000


@dataclass(frozen=True)
class Replay:
    """A sweep over one trace."""

    source: cache.Source
    policies: tuple[str, ...]
    budgets: tuple[str, ...]
    interval: int | None
    regret: bool
    judge: bool


#: The folder of a run, or a sweep.
Origin = cache.Source | Replay


@dataclass(frozen=True)
class Run:
    """A run as pages show it.

    name: of the folder or the trace. first: the first value of each policy, whose label names the
    parameters that distinguish it. parts: the Table by metric, so that a page reads no others.
    measured: metrics with a value of a policy. ranking: those that rank, the best evidence first.
    """

    origin: Origin
    name: str
    first: pl.DataFrame
    parts: Mapping[str, pl.DataFrame]
    measured: Sequence[str]
    ranking: Sequence[str]
    parameters: Mapping[str, Any]

    @property
    def policies(self) -> list[str]:
        """Labels of the policies, in their order."""
        return self.first["policy"].to_list()

    @property
    def table(self) -> pl.DataFrame:
        """All values, in the memory of the parts."""
        return pl.concat([self.first.clear(), *self.parts.values()])


@st.cache_resource(max_entries=12, show_spinner="reading the run, or replaying the policies")
def load(origin: Origin) -> Run:
    """Read the run of a folder, or replay one."""
    if isinstance(origin, cache.Source):
        saved = read_run(origin.path)
        return _run(origin, saved.path.name, saved.table, saved.parameters)
    trace = cache.trace(origin.source)
    measured = (*MEASURED, *REGRET) if origin.regret else MEASURED
    swept = replay_all(
        [trace],
        [kvsim.policy(name) for name in origin.policies],
        list(origin.budgets),
        interval=origin.interval,
        fit=True,
        metrics=available(measured, [trace]),
        judge=origin.judge,
    )
    return _run(origin, trace.name, swept.table, swept.describe())


def _run(origin: Origin, name: str, table: pl.DataFrame, parameters: Mapping[str, Any]) -> Run:
    if remark := mixed(table):
        raise PolicyError(remark)
    table = labelled(table)
    values = table.select("metric", "policy", "value", "fidelity").with_row_index("row")
    values = values.drop_nulls(["policy", "value"])
    first = table[values.unique("policy", keep="first", maintain_order=True)["row"]]
    parts = {part["metric"][0]: part for part in table.partition_by("metric", maintain_order=True)}
    names = {*values["metric"]}
    known = [name for name in METRICS if name in names and name != KL_TOKENS]
    measured = [*known, *sorted(names - {*METRICS})]
    return Run(origin, name, first, parts, measured, [*ranking(values)], parameters)


@st.cache_resource(max_entries=256, show_spinner=False)
def values_of(origin: Origin, metric: str, variant: str) -> pl.DataFrame:
    """Return values of a variant of a metric."""
    run = load(origin)
    return run.parts.get(metric, run.first.clear()).filter(variant=variant)


def means(
    origin: Origin,
    policies: Sequence[str],
    metrics: Mapping[str, str],
    by: str | None = None,
) -> pl.DataFrame:
    """Average one variant of each metric over prompts."""
    named = pl.col("policy").is_in(list(policies))
    return _means(origin, metrics, by).filter(named)


@st.cache_data(max_entries=128, show_spinner="averaging over prompts")
def _means(origin: Origin, metrics: Mapping[str, str], by: str | None) -> pl.DataFrame:
    """Average over prompts, of all policies, so that another choice of them computes nothing."""
    table = pl.concat(values_of(origin, *of) for of in metrics.items()).drop_nulls("policy")
    if by == "stage":
        table = stages(table)
    of = [] if by is None else [by]
    table = table.drop_nulls(of) if of else table
    return averages(table, of).filter(pl.col("mean").is_not_null())


@st.cache_data(max_entries=32, show_spinner="testing which policies could be the best")
def verdict(
    origin: Origin, policies: Sequence[str], metric: str
) -> tuple[Comparison | None, list[str]]:
    """Compare policies by a metric; with sentences that say which could be the best."""
    names = dict.fromkeys((metric, *EVIDENCE, "entries_seen"))  # that `answer` reads
    table = pl.concat(values_of(origin, name, METRICS[name].main) for name in names)
    others = load(origin).first.join(table, on="policy", how="anti")  # for the answer to name
    named = pl.col("policy").is_in(list(policies))
    return answer(pl.concat([table, others]).filter(named), [metric], metric)


@st.cache_resource(max_entries=4, show_spinner="reading the records of the run")
def _records(origin: Origin) -> list[Record]:
    place = origin.path if isinstance(origin, cache.Source) else ""
    return read_records(Path(place) / RECORDS)


def record(run: Run, trace: Trace, policy: str, budget: str) -> Record:
    """Return the record of a result of a run with a folder; KvsimError where the folder has none.

    policy, budget: its label, and the budget as requested.
    """
    table = run.parts[KL_TOKENS].filter(budget == REQUESTED, policy=policy, trace=trace.name)
    same = {x: table[x][0] for x in ("params", "interval", "prefill", "budget")}
    for each in _records(run.origin):
        named = (each.trace, each.policy) == (trace.name, policy.partition(" (")[0])
        if named and same.items() <= columns_of(each).items():
            check_record(trace, each)
            return each
    raise OutputError(f"{run.name} has no record of {policy} at budget {budget}")


def run() -> Run:
    """Return the chosen run. Without a run folder the page replays the chosen trace."""
    folders = controls.runs()
    name = st.session_state.get("run", controls.HERE)
    if name in folders:
        return read(folders[name])
    if not folders:
        st.info(
            "This folder holds no run, so a few policies are replayed on the trace chosen on the "
            "left. For more traces, policies and budgets, and for intervals over prompts, make a "
            "run on the command line:"
        )
        st.code(
            "kvsim replay traces/*.zarr --policy tova,snapkv,ams+tova --budget 64,128,25% "
            "--interval 32 --set fit=true --out runs/first",
            language="bash",
            wrap_lines=True,
        )
    return _replayed(controls.trace())


def read(path: Path) -> Run:
    """Read the run of a folder. Where it cannot be read the page says why, and ends."""
    return _loaded(cache.Source.of(path), "This run cannot be read.", "Choose another one.")


def _loaded(origin: Origin, what: str, advice: str) -> Run:
    try:
        return load(origin)
    except KvsimError as error:
        elements.stop(what, error, advice)


def _replayed(trace: Trace) -> Run:
    """Replay a few policies on one trace: at once if it is short, else after a click."""
    policies = controls.several("Replayed policies", "replay", _offered(), POLICIES)
    sizes = BUDGETS if trace.n_pos < LONG else SHARES
    offered = [*dict.fromkeys((*sizes, "32", "64", "128", "256", "512", "1024", *_SHARES))]
    about = controls.about("budgets")
    budgets = controls.several("Budgets", "budgets", offered, sizes, help=about)
    regret = controls.switch("Regret", "regret", METRICS["regret"].summary)
    judged = trace.header.whole and trace.tokens is not None
    judge = judged and controls.switch("Judge", "judge", controls.about("judge"))
    if not policies or not budgets:
        st.info("Choose at least one policy and one budget.")
        st.stop()
    origin = Replay(controls.source(), tuple(policies), tuple(budgets), INTERVAL, regret, judge)
    requested: set[Origin] = st.session_state.setdefault("requested", set())
    if trace.n_pos * trace.n_layers > AT_ONCE and origin not in requested:
        st.caption(
            f"{trace.n_pos:,} tokens and {trace.n_layers} layers take more than a moment, so the "
            "replay waits for you."
        )
        if not st.button("Replay", type="primary"):
            st.stop()
        requested.add(origin)
    return _loaded(origin, "These policies cannot be replayed.", "Choose others, or other budgets.")


_SHARES = ("5%", "10%", "25%", "50%")


def _offered() -> list[str]:
    """Return evictions and later pieces without required parameters, and some combinations."""
    offered = []
    for name in names():
        entry = controls.entry(name)
        if not entry.required:
            offered.append(name if entry.innermost else f"{name}+{entry.default or 'tova'}")
    behind = [name for name in names(ACCESS) if not controls.entry(name).required]
    real = [name for name in behind if not name.startswith("top")]  # bounds are not combined
    return [*offered, *behind, *(f"{first}+{name}" for first in COMBINED for name in real)]


def variant(values: pl.DataFrame, metric: str, key: str = "variant") -> str:
    """Choose a variant of a metric, the main one by default."""
    main = METRICS[metric].main if metric in METRICS else ""
    listed = sorted(values["variant"].unique(maintain_order=True), key=lambda name: name != main)
    label = controls.choose("Variant of the metric", key, [name or PLAIN for name in listed])
    return "" if label == PLAIN else str(label)


def provenance(run: Run) -> None:
    """Show failures, and the parameters of the run folder."""
    failures = run.parameters.get("failures")
    if isinstance(failures, list) and failures:
        st.warning(f"{len(failures)} cells of this run failed; the others are shown.")
        st.code(json.dumps(failures[:20], indent=2), language="json")
    if run.parameters.get("interrupted"):
        st.warning("This run was interrupted; what was done until then is shown.")
    with st.expander("Parameters of the run"):
        st.code(json.dumps(run.parameters, indent=2), language="json")
