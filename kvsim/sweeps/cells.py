"""The cells of a sweep, and what replays and measures those of one trace."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import polars as pl

from kvsim.analysis.live.table import measure_live
from kvsim.analysis.measuring import available, measure
from kvsim.analysis.output.optimum import optimum
from kvsim.analysis.registry import METRICS
from kvsim.analysis.table import COLUMNS, OF_RECORD, columns_of, in_order
from kvsim.core.policy import Policy, Schedule
from kvsim.core.record import Record
from kvsim.core.threads import threads_for
from kvsim.core.trace import Trace
from kvsim.engine.checks import Setup
from kvsim.engine.replay import run
from kvsim.errors import KvsimError, error_line
from kvsim.sweeps.outcome import Failure

if TYPE_CHECKING:
    from kvsim.runner.judging import Judge

#: Called with (cells done, cells, what is being done).
Progress = Callable[[int, int, str], None]


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


@dataclass
class Outcome:
    """Outcome of a task: the rows of its cells, and their records in the order of `done`.

    done: for each measured cell by number the columns of a Table that say which rows are its; -1
    stands for a task that measures the trace alone. remarks: on the results, each once.
    """

    table: pl.DataFrame = field(default_factory=pl.DataFrame)
    records: list[Record] = field(default_factory=list)
    done: dict[int, dict[str, Any]] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    interrupted: bool = False


def compute(
    cells: Sequence[Cell],
    record: Callable[[Cell], Record],
    table: Callable[[Sequence[Cell], Sequence[Record]], pl.DataFrame],
    report: Progress,
) -> Outcome:
    """Compute cells of one trace; failures leave the rest, Ctrl-C what is done.

    record: decides what a cell retains. table: measures cells with their records.
    """
    outcome = Outcome()
    tables: list[pl.DataFrame] = []
    pending: list[tuple[Cell, Record]] = []

    def measure(group: Sequence[tuple[Cell, Record]]) -> None:
        try:
            tables.append(table(*zip(*group, strict=True)))
        except KvsimError as error:
            if len(group) > 1:
                for pair in group:  # whichever can be measured
                    measure([pair])
            else:
                outcome.failures.append(failure(group[0][0], f"measuring: {error}"))
        else:
            for cell, each in group:
                outcome.records.append(replace(each, internals=()))
                outcome.done[cell.number] = columns_of(each)

    try:
        for done, cell in enumerate(cells):
            report(done, len(cells), f"{cell.trace.name}: {cell.policy.name}, budget {cell.budget}")
            try:
                each = record(cell)
                facts = replace(each.facts, share=cell.share)
                pending.append((cell, replace(each, facts=facts)))
            except KvsimError as error:
                outcome.failures.append(failure(cell, str(error)))
            except (Exception, SystemExit) as error:  # noqa: BLE001  a policy is anybody's code
                outcome.failures.append(failure(cell, _unexpected(error), unexpected=True))
    except KeyboardInterrupt:
        outcome.interrupted = True
    try:
        if pending:
            report(len(cells), len(cells), f"{pending[0][0].trace.name}: measuring")
            measure(pending)
    except KeyboardInterrupt:
        outcome.interrupted = True
    outcome.table = in_order(tables)
    outcome.remarks = list(dict.fromkeys(x.remark for x in outcome.records if x.remark))
    return outcome


class Replays:
    """Replays the cells of a trace, and measures their records beside what they are compared with.

    options: `events`, `memory`, `device`, and `judge` where it is not left out.
    """

    def __init__(self, trace: Trace, metrics: Sequence[str], options: Mapping[str, Any]) -> None:
        chosen = [METRICS[name] for name in metrics]
        self._trace, self._metrics, self._options = trace, metrics, options
        self._limits = {name: options[name] for name in ("memory", "device")}
        self._beside = {metric.beside for metric in chosen if metric.beside}
        self._notes = frozenset[str]().union(*(metric.notes for metric in chosen))
        self._optima: dict[Hashable, Record] = {}
        self._compared: dict[int, dict[str, Record]] = {}

    def record(self, cell: Cell) -> Record:
        """Replay a cell, and what it is compared with on the same terms."""
        policy = cell.policy
        setup = Setup(cell.trace, policy, cell.budget, cell.schedule)
        record = run(setup, layers=cell.layers, internals=self._notes, **self._limits)
        compared = self._compared[cell.number] = dict[str, Record]()
        remarks = [record.remark]
        if self._beside and policy.bounded:
            try:
                for name in self._beside:
                    options = {**self._limits, "protected": name == "optimum"}
                    compared[name] = optimum(
                        cell.trace, policy, record, known=self._optima, **options
                    )
            except KvsimError as error:
                remarks.append(f"{policy.name}, budget {cell.budget}: no regret: {error}")
        if "judge" in self._options:
            from kvsim.runner.full import uncompared  # noqa: PLC0415  transformers
            from kvsim.runner.judging import unjudged  # noqa: PLC0415  transformers
            from kvsim.runner.recorded import unchecked  # noqa: PLC0415  transformers

            remarks.append(unjudged(record))
            if not remarks[-1]:
                of_pass = self._judge.running, self._trace, record.schedule
                remarks += [uncompared(*of_pass), unchecked(self._trace)]
        return replace(record, remark="\n".join(filter(None, remarks)))

    def table(self, cells: Sequence[Cell], records: Sequence[Record]) -> pl.DataFrame:
        """Measure records, next to their optima if a metric compares with them."""
        compared = [self._compared[cell.number] for cell in cells]
        options = {name: self._options[name] for name in ("events", "device")}
        for name in self._beside:
            keyword = "optima" if name == "optimum" else name
            options[keyword] = [each.get(name) for each in compared]
        of_replay = [name for name in self._metrics if METRICS[name].kind != "live"]
        names = available(of_replay, [self._trace])
        table = measure(self._trace, records, names, **options)
        if of_model := [name for name in self._metrics if name not in of_replay]:
            table = in_order([table, self._judged(records, of_model)])
        for cell in cells:
            del self._compared[cell.number]
        return table

    @functools.cached_property
    def _judge(self) -> Judge:
        from kvsim.runner.judgments import judge_of  # noqa: PLC0415  transformers

        return judge_of(self._trace, self._options["judge"], **self._limits)

    def _judged(self, records: Sequence[Record], names: Sequence[str]) -> pl.DataFrame:
        """What the model says of those records that it can judge."""
        from kvsim.runner.judging import unjudged  # noqa: PLC0415  transformers

        judged = [record for record in records if not unjudged(record)]
        with threads_for(self._judge.running.model):
            outcomes = self._judge.outcomes(judged)
        return measure_live(self._trace, judged, outcomes, names)


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


def failure(cell: Cell, reason: str, *, unexpected: bool = False, trace: str = "") -> Failure:
    """Return the failure of a cell; trace: the name of its trace where it has none."""
    where = trace or cell.trace.name, cell.policy.name, cell.budget
    return Failure(*where, reason, unexpected=unexpected, cell=cell.number)


def _unexpected(error: BaseException) -> str:
    """Return one line on an error of a policy's own code: what, and where it was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(frame.filename).name}, line {frame.lineno}"
    return f"the policy raised {type(error).__name__} ({error_line(error)}) in {where}"
