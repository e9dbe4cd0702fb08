"""Many policies and budgets over many traces, into one Table and one run folder."""

from __future__ import annotations

import functools
import itertools
import json
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import polars as pl

from kvsim.analysis.registry import METRICS
from kvsim.analysis.results import check_distinct
from kvsim.analysis.summaries import uneven
from kvsim.analysis.table import COLUMNS, choose, measure
from kvsim.core.policy import Policy, Schedule
from kvsim.core.record import Record, write_records
from kvsim.core.trace import Trace
from kvsim.engine import check_cell, replay
from kvsim.errors import BudgetError, KvsimError, OutputError, PolicyError
from kvsim.files import unbroken
from kvsim.policies.oracle import Oracle

#: Called with (cells done, cells, what is being done).
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Failure:
    """A cell of a sweep that went wrong; the others are kept."""

    trace: str
    policy: str
    budget: int
    error: str


@dataclass(frozen=True)
class Run:
    """The outcome of a sweep: records in the order of traces, policies, budgets; one Table.

    interrupted: Ctrl-C ended the sweep; records and Table hold what was done until then.
    """

    records: tuple[Record, ...]
    table: pl.DataFrame
    failures: tuple[Failure, ...]
    parameters: dict[str, Any]
    interrupted: bool = False

    @property
    def remarks(self) -> list[str]:
        """Remarks on the results, each once."""
        layers = uneven({record.trace: record.layers for record in self.records})
        remarks = (*(record.remark for record in self.records), layers)
        return list(dict.fromkeys(filter(None, remarks)))

    def save(self, out: str | Path) -> Path:
        """Write `run.json`, `records.zarr` and `results.parquet` into a new folder `out`.

        The folder appears whole or not at all. Raises OutputError where something is there already.
        """
        folder = Path(out)
        check_output(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}.tmp-", dir=folder.parent))
        try:
            (draft / "run.json").write_text(json.dumps(self.describe(), indent=2) + "\n")
            with unbroken():
                write_records(draft / "records.zarr", self.records)
            self.table.write_parquet(draft / "results.parquet")
            draft.chmod(0o755)  # a temporary folder is private, a result is not
            draft.rename(folder)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        return folder

    def describe(self) -> dict[str, Any]:
        """Parameters, traces with their digests, versions and failures, ready for JSON."""
        traces = {record.trace: record.digest for record in self.records}
        return {
            **self.parameters,
            "traces": traces,
            "failures": [vars(failure) for failure in self.failures],
            "remarks": self.remarks,
            "interrupted": self.interrupted,
            "versions": {name: version(name) for name in ("kvsim", "torch", "zarr", "polars")}
            | {"python": platform.python_version()},
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
        }


def resolve_budget(budget: int | str, n_pos: int) -> int:
    """Entries: an integer, or `25%` of the trace's final length, rounded down, at least 1."""
    text = str(budget).strip()
    try:
        if not text.endswith("%"):
            return int(text)
        share = float(text[:-1])
    except ValueError:
        raise BudgetError(f"budget is {text!r}; expected entries (128) or a share (25%)") from None
    if not 0 < share <= 100:
        raise BudgetError(f"budget is {text}; expected a share above 0% and up to 100%")
    return max(1, int(n_pos * share / 100 + 1e-9))


def shared_prefill(interval: int | None, prefill: bool | None) -> bool | None:
    """Whether the prefill event fires where policies are compared; None is each policy's own.

    An interval stands for one schedule, so it brings the prefill event along for all policies,
    also for those whose own schedule leaves it out, unless `prefill` decides.
    """
    return True if interval is not None and prefill is None else prefill


def check_output(path: Path) -> None:
    """Raise OutputError where something is at `path` already."""
    if path.exists():
        raise OutputError(f"{path} exists; give another --out or move it away, nothing was changed")


def sweep(
    traces: Sequence[Trace],
    policies: Sequence[Policy],
    budgets: Sequence[int | str],
    *,
    interval: int | None = None,
    prefill: bool | None = None,
    metrics: Sequence[str] | None = None,
    regret: bool = False,
    events: bool = False,
    memory: int | None = None,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Run:
    """Replay every policy at every budget over every trace and measure the outcome.

    interval: rows between events, the same events for every policy; the prefill event is one of
    them unless prefill is False. Without an interval each policy keeps its own schedule, of which
    prefill replaces the prefill event alone. The schedule is recorded with every result.

    regret: replay the mass oracle beside each cell, at the same events and with the same entries
    protected, and measure by how much it retains more (metric `regret`). Policies that no budget
    binds have none. What metrics read of the decisions at events (`Metric.notes`) is noted and
    measured; the records are returned without it.

    Budgets that a policy has no rule for (BudgetError), a memory budget that holds no layer
    (MemoryLimitError) and two traces of one name (TraceError) are found before any work starts. A
    cell that fails later is listed in `failures`, and the others are kept. Ctrl-C ends the replays;
    what is done by then is measured and kept, and a second Ctrl-C leaves the last trace unmeasured.
    """
    _check_names(policies)
    check_distinct(traces)
    prefill = shared_prefill(interval, prefill)
    if regret and metrics is not None:
        metrics = list(dict.fromkeys([*metrics, "regret"]))
    read = frozenset[str]().union(*(m.notes for m in choose(metrics, oracles=regret).values()))
    for trace, policy, budget, _ in _cells(traces, policies, budgets):
        check_cell(trace, policy, budget, memory, policy.schedule.override(interval, prefill))
    limits: dict[str, Any] = {"memory": memory, "device": device}
    total = len(traces) * len(policies) * len(budgets)
    report = progress or (lambda *_: None)
    records: list[Record] = []
    failures: list[Failure] = []
    tables = [pl.DataFrame(schema=COLUMNS)]
    interrupted = False
    done = 0
    for trace in traces:
        # records with those of their oracles; equal oracles are replayed once
        cells: list[tuple[Record, Record | None]] = []
        bound = functools.cache(functools.partial(replay, trace, **limits))
        try:
            for _, policy, budget, share in _cells([trace], policies, budgets):
                report(done, total, f"{trace.name}: {policy.name}, budget {budget}")
                terms = {"interval": interval, "prefill": prefill, **limits}
                try:
                    internals = read & policy.allocator.notes
                    record = replay(trace, policy, budget, internals=internals, **terms)
                    cells.append((replace(record, share=share), None))
                    if regret and policy.bounded:
                        cells[-1] = cells[-1][0], bound(_oracle(policy, record), budget)
                except KvsimError as error:
                    failures.append(Failure(trace.name, policy.name, budget, str(error)))
                done += 1
        except KeyboardInterrupt:
            interrupted = True
        of_trace = [record for record, _ in cells]
        try:
            report(done, total, f"{trace.name}: measuring")
            if cells:
                oracles = [oracle for _, oracle in cells] if regret else None
                options: dict[str, Any] = {"events": events, "device": device, "oracles": oracles}
                tables.append(measure(trace, of_trace, metrics, **options))
        except KvsimError as error:
            failures += [
                Failure(trace.name, record.policy, record.budget, f"measuring: {error}")
                for record in of_trace
            ]
        except KeyboardInterrupt:
            interrupted = True
        records += [replace(record, internals=()) for record in of_trace]
        if interrupted:
            break
    parameters = {
        "policies": {policy.name: policy.params for policy in policies},
        "budgets": [str(budget) for budget in budgets],
        "interval": interval,
        "prefill": prefill,
        "metrics": None if metrics is None else list(metrics),
        "regret": regret,
        **limits,
    }
    return Run(tuple(records), pl.concat(tables), tuple(failures), parameters, interrupted)


def _check_names(policies: Sequence[Policy]) -> None:
    """Raise PolicyError where two policies of one name differ."""
    by_name: dict[str, Policy] = {}
    for policy in policies:
        if by_name.setdefault(policy.name, policy) != policy:
            raise PolicyError(
                f"two different policies are called {policy.name!r}; expected one of a name, so "
                "that results can be told apart: replay them one by one or name them differently"
            )


def _oracle(policy: Policy, record: Record) -> Policy:
    """Return the mass oracle with the events of a record, the same protection and heads."""
    return Policy(
        "oracle",
        Oracle(by="mass"),
        schedule=Schedule(record.interval, prefill=record.prefill),
        protect=policy.protection(record.budget),
        per_query_head=policy.per_query_head,
    )


def _cells(
    traces: Sequence[Trace], policies: Sequence[Policy], budgets: Sequence[int | str]
) -> Iterator[tuple[Trace, Policy, int, str | None]]:
    """Every cell: its budget in entries, and the share that was asked for, None where none was."""
    for trace, policy, budget in itertools.product(traces, policies, budgets):
        size = str(budget).strip()
        share = size if size.endswith("%") else None
        yield trace, policy, resolve_budget(budget, trace.n_pos), share


#: Metrics of the summary, in the order in which they are shown.
SUMMARY = ("entries_seen", "output_error", "retained_mass", "wipeout", "retained_iou")


def summarise(table: pl.DataFrame, metrics: Sequence[str] = (*SUMMARY, "regret")) -> pl.DataFrame:
    """One row per policy, parameters and budget as asked for, with the mean of each metric.

    Means over layers and heads within a trace, then over traces, of each metric's main variant:
    `wipeout` is that of 32-token regions of which nothing is left, after the last event;
    `iou_chance` stands beside `retained_iou`; `exact` is the share of the values behind the row
    whose fidelity is exact. Null where a policy has no value of the main variant, whatever others
    it has: the segments of a policy that makes none are not counted by those of its proxy.
    """
    main = pl.col("metric").replace_strict({name: one.main for name, one in METRICS.items()})
    keys = ["policy", "params", "asked", "interval", "prefill"]
    last = pl.col("event") == pl.col("event").max().over(*keys, "trace", "metric", "layer")
    asked = pl.coalesce("share", pl.col("budget").cast(pl.String))
    chosen = (
        table.with_columns(asked=asked, main=pl.col("variant") == main)
        .filter(pl.col("policy").is_not_null() & pl.col("metric").is_in(metrics))
        .filter((pl.col("metric") != "wipeout") | last)
    )
    within = chosen.group_by(*keys, "trace", "metric", maintain_order=True).agg(
        pl.col("value", "chance").filter(pl.col("main")).mean()
    )
    means = within.group_by(*keys, "metric", maintain_order=True).agg(
        pl.col("value").mean(), pl.col("chance").mean()
    )
    wide = means.pivot(on="metric", index=keys, values="value", maintain_order=True)
    chance = means.filter(pl.col("metric") == "retained_iou").select(*keys, iou_chance="chance")
    exact = chosen.group_by(keys).agg(
        exact=(pl.col("fidelity") == "exact").filter(pl.col("main")).mean()
    )
    of_trace = chosen.group_by(*keys, "trace").agg(pl.col("budget", "share").first())
    sizes = of_trace.group_by(keys).agg(
        pl.col("budget").mean().round().cast(pl.Int64), pl.col("share").first()
    )
    for more in (chance, exact, sizes):
        wide = wide.join(more, on=keys, how="left", nulls_equal=True, maintain_order="left")
    measured = [name for name in metrics if name in wide.columns]
    if "retained_iou" in measured:
        measured.append("iou_chance")
    cell = ("policy", "params", "budget", "share", "interval", "prefill")
    return wide.select(*cell, *measured, "exact")
