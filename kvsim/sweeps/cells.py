"""The cells of a sweep, and what computes those of one trace."""

from __future__ import annotations

import functools
import itertools
import traceback
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import polars as pl

from kvsim.analysis.live.table import measure_judged
from kvsim.analysis.output.optimum import OptimumTerms
from kvsim.analysis.registry import METRICS
from kvsim.analysis.table import COLUMNS, OF_RECORD, available, in_order, measure
from kvsim.core.arguments import share_of
from kvsim.core.budgets import budgeted
from kvsim.core.policy import Policy, Schedule
from kvsim.core.record import Record
from kvsim.core.threads import threads_for
from kvsim.core.trace import Trace
from kvsim.engine import replay
from kvsim.errors import KvsimError, TraceError, error_line
from kvsim.store import open_trace
from kvsim.sweeps.outcome import Failure
from kvsim.sweeps.terms import Terms
from kvsim.sweeps.workers import Lost

if TYPE_CHECKING:
    from kvsim.runner.judging import Judge

#: Called with (cells done, cells, what is being done).
Progress = Callable[[int, int, str], None]

#: What rules of a policy other than a scorer's return.
_RETURNED = {"plan": "a Plan with quotas [layer, KV head]", "budgets": "budgets [layer]"}

#: Cells that are measured together where records do not keep what readers read.
TOGETHER = 32


class Cell(NamedTuple):
    """A policy at a budget on a trace, and the schedule of its events.

    share: the budget as it was given, if not in entries. layers: those that are replayed, all if
    None.
    """

    number: int
    trace: Trace
    policy: Policy
    budget: int
    share: str | None
    schedule: Schedule
    layers: tuple[int, ...] | None = None


def cells_of(
    traces: Sequence[Trace],
    policies: Sequence[Policy],
    budgets: Sequence[int | str],
    schedules: Sequence[Terms],
) -> list[Cell]:
    """Return every cell, with its budget in entries and its schedule."""
    cells: list[Cell] = []
    growing: dict[tuple[int, float], Policy] = {}  # one object for the cells of all traces
    for trace, given, budget, terms in itertools.product(traces, policies, budgets, schedules):
        policy, entries = budgeted(given, trace, budget)
        if policy.so_far is not None:
            policy = growing.setdefault((id(given), policy.so_far), policy)
        events = policy.schedule.override(*terms)
        cells.append(Cell(len(cells), trace, policy, entries, share_of(budget), events))
    return cells


def flops_of(trace: Trace, layers: int) -> float:
    """Floating-point operations of the attention outputs of a cell in some layers, about."""
    trace = trace.evicting
    return layers * trace.n_qheads * (trace.dim + trace.value_dim) * float(trace.n_pos**2)


def named(judge: bool | str) -> str:
    """The name of the model that judges; empty for the one that a trace names."""
    return "" if judge is True else str(judge)


def reopened(path: str, fingerprint: str) -> Trace:
    """Return the trace of a fingerprint, opened once for the tasks that follow; or TraceError."""
    status = next((x.stat() for x in (Path(path, "zarr.json"), Path(path)) if x.is_file()), None)
    written = None if status is None else (status.st_ino, status.st_mtime_ns)
    trace = open_trace(path) if written is None else _opened(path, written)
    if trace.fingerprint != fingerprint:
        raise TraceError(
            f"{path} is another trace than when the sweep began: {trace.fingerprint}, expected "
            f"{fingerprint}; start again"
        )
    return trace


@functools.lru_cache(maxsize=1)
def _opened(path: str, _: tuple[int, int]) -> Trace:
    """Return a trace; opening lists its folder, which may have many files."""
    return open_trace(path)


class Executor(Protocol):
    """What computes cells of one trace; together: cells measured at once, all if None."""

    together: int | None

    def record(self, cell: Cell) -> Record:
        """Decide what a cell retains."""

    def table(self, cells: Sequence[Cell], records: Sequence[Record]) -> pl.DataFrame:
        """Measure cells whose records it has made."""

    def kept(self, record: Record) -> Record:
        """What is kept of a record that is measured."""


class Computed(NamedTuple):
    """Cells that were measured: their records by number, the rows of all, and what failed."""

    records: Mapping[int, Record]
    table: pl.DataFrame
    failures: Sequence[Failure]
    interrupted: bool = False


def compute(executor: Executor, cells: Sequence[Cell], report: Progress) -> Computed:
    """Compute cells; failures leave the rest, Ctrl-C what is done; report: (done, cells, label)."""
    records: dict[int, Record] = {}
    tables: list[pl.DataFrame] = []
    failures: list[Failure] = []
    pending: list[tuple[Cell, Record]] = []
    together = executor.together or len(cells)

    def measure(group: Sequence[tuple[Cell, Record]]) -> None:
        if not group:
            return
        of_group, made = zip(*group, strict=True)
        try:
            tables.append(executor.table(of_group, made))
        except KvsimError as error:
            if len(group) > 1:
                for pair in group:  # whichever can be measured
                    measure([pair])
                return
            failures.append(failure(of_group[0], Lost(f"measuring: {error}", unexpected=False)))
        else:
            records.update((cell.number, executor.kept(record)) for cell, record in group)

    done, interrupted = 0, False
    try:
        for done, cell in enumerate(cells, 1):
            label = f"{cell.trace.name}: {cell.policy.name}, budget {cell.budget}"
            report(done - 1, len(cells), label)
            try:
                pending.append((cell, replace(executor.record(cell), share=cell.share)))
            except KvsimError as error:
                failures.append(failure(cell, Lost(str(error), unexpected=False)))
            except (Exception, SystemExit) as error:  # noqa: BLE001  a policy is anybody's code
                failures.append(failure(cell, Lost(_unexpected(error))))
            if len(pending) == together:
                report(done, len(cells), f"{cell.trace.name}: measuring")
                group, pending = pending, []
                measure(group)
    except KeyboardInterrupt:
        interrupted = True
    if pending:
        report(done, len(cells), f"{pending[0][0].trace.name}: measuring")
    try:
        measure(pending)
    except KeyboardInterrupt:
        interrupted = True
    return Computed(records, in_order(tables), failures, interrupted)


class Replays:
    """Replays the cells of a trace, and measures their records beside what they are compared with.

    options: `regret`, `events`, `memory`, `device`, and `judge` and `accounts` where they are not
    left out. accounts: whether records keep what readers read (`Record.reads`).
    """

    def __init__(self, trace: Trace, metrics: Sequence[str], options: Mapping[str, Any]) -> None:
        chosen = [METRICS[name] for name in metrics]
        self._trace, self._metrics, self._options = trace, metrics, options
        self._limits = {name: options[name] for name in ("memory", "device")}
        self._beside = {metric.beside for metric in chosen if metric.beside}
        self._notes = frozenset[str]().union(*(metric.notes for metric in chosen))
        self._optima: dict[Hashable, Record] = {}
        self._compared: dict[int, dict[str, Record]] = {}
        self._accounts = bool(options.get("accounts", True))
        self.together: int | None = None if self._accounts else TOGETHER

    def record(self, cell: Cell) -> Record:
        """Replay a cell, and what it is compared with on the same terms."""
        policy = cell.policy
        record = replay(
            cell.trace,
            policy,
            cell.budget,
            layers=cell.layers,
            internals=self._notes & policy.allocator.notes,
            **vars(cell.schedule),
            **self._limits,
        )
        self._compared[cell.number] = {}
        try:
            self._compare(cell, record)
        except KvsimError as error:
            remark = f"{policy.name}, budget {cell.budget}: no regret: {error}"
            record = replace(record, remark="\n".join(filter(None, (record.remark, remark))))
        if "judge" in self._options:
            from kvsim.runner.full import uncompared  # noqa: PLC0415  transformers
            from kvsim.runner.judging import unjudged  # noqa: PLC0415  transformers
            from kvsim.runner.recorded import unchecked  # noqa: PLC0415  transformers

            remarks = [record.remark, unjudged(record)]
            if not remarks[-1]:
                of_pass = self._judge.running, self._trace, record.schedule
                remarks += [uncompared(*of_pass), unchecked(self._trace)]
            record = replace(record, remark="\n".join(filter(None, remarks)))
        return record

    def _compare(self, cell: Cell, record: Record) -> None:
        """Replay what a cell is compared with, on the same terms."""
        policy, compared = cell.policy, self._compared[cell.number]
        if "optimum" in self._beside and policy.bounded:
            of_policy = OptimumTerms.of(cell.trace, policy, record)
            each = {"optima": of_policy, "unprotected": of_policy.unprotected}
            for name, terms in each.items():
                if terms.key not in self._optima:
                    self._optima[terms.key] = terms.optimum(cell.trace, **self._limits)
                compared[name] = self._optima[terms.key]

    def table(self, cells: Sequence[Cell], records: Sequence[Record]) -> pl.DataFrame:
        """Measure records; optima where regret is asked for."""
        compared = [self._compared[cell.number] for cell in cells]
        references: dict[str, Any] = {}
        if self._options["regret"]:
            for name in ("optima", "unprotected"):
                references[name] = [each.get(name) for each in compared]
        options = {name: self._options[name] for name in ("events", "device")}
        of_replay = [name for name in self._metrics if METRICS[name].kind != "live"]
        names = available(of_replay, [self._trace])
        table = measure(self._trace, records, names, **options, **references)
        if of_model := [name for name in self._metrics if name not in of_replay]:
            table = in_order([table, self._judged(records, of_model)])
        for cell in cells:
            del self._compared[cell.number]
        return table

    def kept(self, record: Record) -> Record:
        """A record without what only measuring needs."""
        return replace(record, internals=(), reads=record.reads if self._accounts else None)

    @functools.cached_property
    def _judge(self) -> Judge:
        from kvsim.runner.judging import judge_of  # noqa: PLC0415  transformers

        return judge_of(self._trace, self._options["judge"], **self._limits)

    def _judged(self, records: Sequence[Record], names: Sequence[str]) -> pl.DataFrame:
        """What the model says of those records that it can judge."""
        from kvsim.runner.judging import unjudged  # noqa: PLC0415  transformers

        judged = [record for record in records if not unjudged(record)]
        with threads_for(self._judge.running.model):
            outcomes = self._judge.outcomes(judged)
        return measure_judged(self._trace, judged, outcomes, names)


def in_cell_order(
    tables: Sequence[pl.DataFrame],
    cells: Iterable[tuple[str, Mapping[str, Any]]],
    metrics: Iterable[str],
) -> pl.DataFrame:
    """Return the rows of some cells in the order of cells, metrics and layers.

    cells: the trace of each, and its columns (`OF_RECORD`). Rows of a trace alone stand before
    those of its first cell, whatever was measured first.
    """
    table = in_order(tables)
    keys = [
        {"trace": trace, "cell": number, **columns}
        for number, (trace, of_record) in enumerate(cells)
        for columns in ({}, of_record)
    ]
    on = ["trace", *OF_RECORD]
    schema = {name: COLUMNS[name] for name in on} | {"cell": pl.Int64}
    order = pl.DataFrame(keys, schema).unique(on, keep="first")
    place = {name: number for number, name in enumerate(metrics)}
    of_trace = pl.col("policy").is_null()  # in the order in which its metrics give them
    return (
        table.join(order, on=on, how="inner", nulls_equal=True, maintain_order="left")
        .with_columns(
            place=pl.col("metric").replace_strict(place, return_dtype=pl.Int64),
            within=pl.when(of_trace).then(-1).otherwise(pl.col("layer").fill_null(-1)),
        )
        .sort("cell", "place", "within", maintain_order=True)
        .select(table.columns)
    )


def failure(cell: Cell, lost: Lost, trace: str = "") -> Failure:
    """Return the failure of a cell; trace: the name of its trace where it has none."""
    where = trace or cell.trace.name, cell.policy.name, cell.budget
    return Failure(*where, lost.reason, unexpected=lost.unexpected, cell=cell.number)


def _unexpected(error: BaseException) -> str:
    """Return one line on an error of a policy's own code: what, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = frames[-1]
    returned = [_RETURNED[each.name] for each in frames if each.name in _RETURNED]
    return (
        f"the policy raised {type(error).__name__} ({error_line(error)}) in "
        f"{Path(frame.filename).name}, line {frame.lineno}; expected "
        f"{['scores [layer, KV head, entry]', *returned][-1]}"
    )
