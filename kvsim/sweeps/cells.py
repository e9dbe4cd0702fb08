"""The cells of a sweep: replayed one by one, measured together."""

from __future__ import annotations

import contextlib
import functools
import itertools
import traceback
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl

from kvsim.analysis.definition import Metric
from kvsim.analysis.live.table import measure_judged
from kvsim.analysis.output.optimum import Terms
from kvsim.analysis.registry import METRICS
from kvsim.analysis.table import COLUMNS, OF_RECORD, available, columns_of, in_order, measure
from kvsim.core.policy import Policy, Schedule
from kvsim.core.record import Record
from kvsim.core.threads import threads_for
from kvsim.core.trace import Trace
from kvsim.engine import replay
from kvsim.errors import KvsimError, TraceError, error_line
from kvsim.policies.oracle import Oracle
from kvsim.store import open_trace
from kvsim.sweeps.outcome import Failure, Run
from kvsim.sweeps.parts import Parts, Replayed, Rows
from kvsim.sweeps.workers import Lost, in_processes

#: Called with (cells done, cells, what is being done).
Progress = Callable[[int, int, str], None]

#: Cells that are measured together where results go to a folder. Records of a trace share most of
#: the work, and a kill loses the measurements of so many at most.
TOGETHER = 32


class Cell(NamedTuple):
    """A policy at a budget on a trace, and the schedule of its events.

    share: the budget as a share, if it was given as one. layers: those that are replayed, all if
    None.
    """

    number: int
    trace: Trace
    policy: Policy
    budget: int
    share: str | None
    schedule: Schedule
    layers: tuple[int, ...] | None = None


def flops_of(trace: Trace, layers: int) -> float:
    """Floating-point operations of the attention outputs of a cell in some layers, about."""
    return layers * trace.n_qheads * trace.dim * 2.0 * trace.n_pos**2


def named(judge: bool | str) -> str:
    """The name of the model that judges; empty for the one that a trace names."""
    return "" if judge is True else str(judge)


class Share(NamedTuple):
    """Cells of one trace, without it, that one process computes.

    name, path, digest: of the trace. metrics: names.
    """

    name: str
    path: str
    digest: str
    cells: tuple[Cell, ...]
    metrics: tuple[str, ...]
    parameters: Mapping[str, Any]
    accounts: bool = True


class Computed(NamedTuple):
    """Outcome of a share: records by the numbers of cells, values, and errors."""

    records: Mapping[int, Record]
    rows: Sequence[Rows]
    failures: Sequence[Failure]
    unmeasurable: frozenset[int] = frozenset()


def compute(share: Share) -> Computed:
    """Replay and measure the cells of a share. Raises TraceError for another trace."""
    trace = reopened(share.path, share.digest)
    cells = [cell._replace(trace=trace) for cell in share.cells]
    metrics = {name: METRICS[name] for name in share.metrics}
    options = dict(share.parameters)
    return Cells(cells, metrics, options, lambda *_: None, accounts=share.accounts).computed()


def reopened(path: str, digest: str) -> Trace:
    """Open a trace that is to be the one of that digest. Raises TraceError."""
    trace = open_trace(path)
    if trace.digest != digest:
        raise TraceError(
            f"{path} is another trace than when the sweep began, expected digest {digest[:12]}; "
            "start again"
        )
    return trace


class Cells:
    """The work of a sweep, and what is done of it; with parts, all of it is stored there.

    accounts: keep what readers read when it is measured.
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        metrics: Mapping[str, Metric],
        parameters: dict[str, Any],
        report: Progress,
        parts: Parts | None = None,
        *,
        accounts: bool = True,
    ) -> None:
        self._accounts, self._together = accounts, TOGETHER
        self._cells, self._metrics, self._report = cells, metrics, report
        self._parameters, self._parts = parameters, parts
        self._beside = {metric.beside for metric in metrics.values() if metric.beside}
        self._notes = frozenset[str]().union(*(metric.notes for metric in metrics.values()))
        self._limits = {name: parameters[name] for name in ("memory", "device")}
        self._replayed: dict[int, Replayed] = {} if parts is None else parts.cells()
        rows = () if parts is None else parts.rows()
        self._rows = [each for each in rows if set(each.cells) <= set(self._replayed)]
        self._whole = set(self._replayed)  # with what they are compared with
        self._failures: list[Failure] = []
        self._unmeasurable: set[int] = set()
        self._interrupted = False
        self._judge: Any = None  # of the trace at hand
        self._release(self.measured)

    @property
    def measured(self) -> set[int]:
        """Numbers of the cells that are measured."""
        return {number for rows in self._rows for number in rows.cells}

    def record(self, number: int) -> Record:
        """The record of a cell that is measured."""
        return self._replayed[number].record

    def run(self, jobs: int = 1) -> Run:
        """Compute what is not done yet, in this process or in several."""
        if jobs > 1:
            self._spread(jobs)
        else:
            self._compute()
        done = self.measured | self._unmeasurable
        return Run(
            tuple(self._replayed[number].record for number in sorted(done)),
            self._table(),
            tuple(sorted(self._failures, key=lambda failure: failure.cell)),
            self._parameters,
            self._interrupted,
            len(self._replayed) - len(done),
        )

    def computed(self) -> Computed:
        """Compute what is not done yet, and return what became of it."""
        self._compute()
        records = {number: self.record(number) for number in self.measured | self._unmeasurable}
        return Computed(records, self._rows, self._failures, frozenset(self._unmeasurable))

    def _compute(self) -> None:
        for _, cells in itertools.groupby(self._cells, lambda cell: cell.trace.name):
            try:
                self._trace(list(cells))
            except KeyboardInterrupt:  # while it is measured or stored
                self._interrupted = True
            if self._interrupted:
                break

    def _spread(self, jobs: int) -> None:
        """Compute shares in processes, and take what they return."""
        shares = self._shares(jobs)
        done = len(self._cells) - sum(len(share.cells) for share in shares)
        results = in_processes(compute, shares, jobs)
        try:
            with contextlib.closing(results):
                for share, result in results:
                    self._take(share, result)
                    done += len(share.cells)
                    self._report(done, len(self._cells), share.name)
        except KeyboardInterrupt:
            self._interrupted = True

    def _shares(self, jobs: int) -> list[Share]:
        """Cut the missing cells; the first share of a trace measures the trace, too."""
        measured = self.measured
        missing = [cell for cell in self._cells if cell.number not in measured]
        size = max(1, min(self._together, -(-len(missing) // jobs)))
        seen = {rows.trace for rows in self._rows}
        shares = []
        for name, of_trace in itertools.groupby(missing, lambda cell: cell.trace.name):
            cells = list(of_trace)
            trace = cells[0].trace
            for first in range(0, len(cells), size):
                part = tuple(cell._replace(trace=None) for cell in cells[first : first + size])  # type: ignore[arg-type]
                names = tuple(self._names(first=name not in seen and first == 0))
                shares.append(
                    Share(
                        name=name,
                        path=str(trace.path),
                        digest=trace.digest,
                        cells=part,
                        metrics=names,
                        parameters=self._parameters,
                        accounts=self._accounts,
                    )
                )
        return shares

    def _names(self, *, first: bool) -> list[str]:
        """Metrics by name; first: with those of the trace alone."""
        return [name for name, metric in self._metrics.items() if first or metric.kind != "trace"]

    def _take(self, share: Share, result: Computed | Lost) -> None:
        if isinstance(result, Lost):
            result = Computed({}, (), [failure(share.name, cell, result) for cell in share.cells])
        self._failures += result.failures
        self._unmeasurable |= result.unmeasurable
        for number, record in result.records.items():
            self._replayed[number] = Replayed(record)
            if self._parts is not None and number not in result.unmeasurable:
                self._parts.add_cell(number, self._replayed[number])
        for rows in result.rows:
            self._rows.append(rows)
            if self._parts is not None:
                self._parts.add_rows(rows)

    def _trace(self, cells: Sequence[Cell]) -> None:
        """Replay the cells of a trace and measure them."""
        bound = functools.cache(functools.partial(replay, cells[0].trace, **self._limits))
        optima: dict[Hashable, Record] = {}
        reading = not self._accounts and any(cell.policy.reader for cell in cells)
        apart = self._parts is not None or reading
        together = self._together if apart else len(cells)
        measured = self.measured
        missing = [cell for cell in cells if cell.number not in measured]
        pending: list[Cell] = []
        try:
            for cell in missing:
                label = f"{cell.trace.name}: {cell.policy.name}, budget {cell.budget}"
                self._report(cell.number, len(self._cells), label)
                if cell.number not in self._whole:
                    self._replay(cell, bound, optima)
                pending += [cell] * (cell.number in self._whole)
                if len(pending) == together:
                    group, pending = pending, []
                    self._measure(group)
                if self._interrupted:
                    return
        except KeyboardInterrupt:
            self._interrupted = True
        self._measure(pending)
        # what they are compared with failed, so they are measured alone, and again when resumed
        replayed = [cell for cell in missing if cell.number in self._replayed]
        self._measure([cell for cell in replayed if cell.number not in self._whole], store=False)
        self._release({cell.number for cell in cells} & set(self._replayed))

    def _replay(
        self, cell: Cell, bound: Callable[..., Record], optima: dict[Hashable, Record]
    ) -> None:
        """Replay a cell, and what it is compared with on the same terms.

        bound: replays equal oracles once. optima: those of the trace by their terms.
        """
        policy, budget = cell.policy, cell.budget
        internals = self._notes & policy.allocator.notes
        try:
            record = replace(self._record(cell, internals), share=cell.share)
            self._replayed[cell.number] = replayed = Replayed(record)
            if "oracle" in self._beside and policy.bounded:
                oracle = bound(_oracle(policy, record), budget, layers=cell.layers)
                replayed = replayed._replace(oracle=oracle)
            if "optimum" in self._beside and policy.bounded:
                of_policy = Terms.of(cell.trace, policy, record)
                each = {"optimum": of_policy, "unprotected": of_policy.unprotected}
                for terms in each.values():
                    if terms.key not in optima:
                        optima[terms.key] = terms.optimum(cell.trace, **self._limits)
                replayed = replayed._replace(
                    **{name: optima[terms.key] for name, terms in each.items()}
                )
            self._replayed[cell.number] = replayed
        except KvsimError as error:
            self._fail(cell, str(error))
        except (Exception, SystemExit) as error:  # noqa: BLE001  a policy is anybody's code
            self._fail(cell, _unexpected(error), unexpected=True)
        else:
            self._whole.add(cell.number)
            if self._parts is not None:
                self._parts.add_cell(cell.number, self._replayed[cell.number])

    def _record(self, cell: Cell, internals: frozenset[str]) -> Record:
        """Record of a cell."""
        options: dict[str, Any] = {**vars(cell.schedule), **self._limits}
        return replay(
            *(cell.trace, cell.policy, cell.budget),
            layers=cell.layers,
            internals=internals,
            **options,
        )

    def _values(self, cells: Sequence[Cell], names: Sequence[str]) -> pl.DataFrame:
        replayed = [self._replayed[cell.number] for cell in cells]
        options: dict[str, Any] = {name: self._parameters[name] for name in ("events", "device")}
        if self._parameters["regret"]:
            options["oracles"] = [each.oracle for each in replayed]
            options["optima"] = [each.optimum for each in replayed]
            options["unprotected"] = [each.unprotected for each in replayed]
        trace, records = cells[0].trace, [each.record for each in replayed]
        of_replay = [name for name in names if METRICS[name].kind != "live"]
        table = measure(trace, records, available(of_replay, [trace]), **options)
        if len(of_replay) == len(names):
            return table
        return in_order([table, self._judged(cells, [x for x in names if x not in of_replay])])

    def _judged(self, cells: Sequence[Cell], names: Sequence[str]) -> pl.DataFrame:
        """What the model says of the records of cells; of others, a remark says why it cannot."""
        from kvsim.runner.judging import judge_of, unjudged  # noqa: PLC0415  transformers

        trace, records = cells[0].trace, []
        for cell in cells:
            each = self._replayed[cell.number]
            reason = unjudged(each.record)
            if not reason:
                records.append(each.record)
                continue
            remark = "\n".join(filter(None, (each.record.remark, reason)))
            self._replayed[cell.number] = each._replace(record=replace(each.record, remark=remark))
        if self._judge is None or self._judge.trace is not trace:
            self._judge = judge_of(trace, self._parameters["judge"], **self._limits)
        with threads_for(self._judge.running.model):
            outcomes = self._judge.outcomes(records)
        return measure_judged(trace, records, outcomes, names)

    def _measure(self, cells: Sequence[Cell], *, store: bool = True) -> None:
        """Measure replayed cells of a trace; with the first of a trace, the trace itself."""
        if not cells:
            return
        trace, number = cells[0].trace, cells[-1].number
        self._report(number + 1, len(self._cells), f"{trace.name}: measuring")
        first = not any(rows.trace == trace.name for rows in self._rows)
        try:
            table = self._values(cells, self._names(first=first))
        except KvsimError as error:
            if len(cells) == 1:
                self._fail(cells[0], f"measuring: {error}")
                self._unmeasurable.add(number)
            else:
                for cell in cells:  # whichever can be measured
                    self._measure([cell] * (not self._interrupted), store=store)
            return
        except KeyboardInterrupt:
            self._interrupted = True
            return
        rows = Rows(tuple(cell.number for cell in cells), trace.name if first else None, table)
        self._rows.append(rows)
        if not self._accounts:
            self._release(set(rows.cells))
        if store and self._parts is not None:
            self._parts.add_rows(rows)

    def _fail(self, cell: Cell, error: str, *, unexpected: bool = False) -> None:
        self._failures.append(failure(cell.trace.name, cell, Lost(error, unexpected)))

    def _release(self, numbers: set[int]) -> None:
        """Free what only measuring needs."""
        for number in numbers:
            record = replace(self._replayed[number].record, internals=())
            self._replayed[number] = Replayed(
                record if self._accounts else replace(record, reads=None)
            )

    def _table(self) -> pl.DataFrame:
        records = (self.record(number) for number in sorted(self.measured))
        cells = [(record.trace, columns_of(record)) for record in records]
        return in_cell_order([rows.table for rows in self._rows], cells, self._metrics)


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


def _oracle(policy: Policy, record: Record) -> Policy:
    """Return the mass oracle with the events of a record, the same protection and heads."""
    return Policy(
        "oracle",
        Oracle(by="mass"),
        schedule=Schedule(record.interval, record.prefill, record.compress),
        protect=policy.at(record.budget).protection(record.budget),
        per_query_head=policy.per_query_head,
    )


def failure(trace: str, cell: Cell, lost: Lost) -> Failure:
    """Return the failure of a cell of a trace of that name."""
    where = trace, cell.policy.name, cell.budget
    return Failure(*where, lost.reason, unexpected=lost.unexpected, cell=cell.number)


def _unexpected(error: BaseException) -> str:
    """Return one line on an error of a policy's own code: what, and where it was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"the policy raised {type(error).__name__} ({error_line(error)}) in "
        f"{Path(frame.filename).name}, line {frame.lineno}; expected scores "
        "[layer, KV head, entry]"
    )
