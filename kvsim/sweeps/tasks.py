"""Cells of a sweep, and tasks: cells of some layers of a trace, computed by one process.

Shared values are read and computed once. Tasks depend only on the grid: all cut alike.
"""

from __future__ import annotations

import functools
import itertools
import traceback
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import polars as pl

from kvsim.analysis.live.table import measure_live
from kvsim.analysis.measuring import available, measure
from kvsim.analysis.output.optimum import optimum
from kvsim.analysis.registry import METRICS
from kvsim.analysis.subject import Analysis
from kvsim.analysis.table import COLUMNS, OF_RECORD, columns_of, in_order
from kvsim.core.checks import resolve_device
from kvsim.core.lazy import threads_for, torch
from kvsim.core.parts import loaded
from kvsim.core.policy import Even, Policy, Schedule
from kvsim.core.record import Record
from kvsim.core.shared_results import DEFAULT_MEMORY
from kvsim.core.trace import Trace
from kvsim.engine.checks import DROPS, Setup, does
from kvsim.engine.replay import run
from kvsim.errors import ConfigError, KvsimError, TraceError, error_line
from kvsim.store.reader import open_trace
from kvsim.sweeps.code import of_kvsim

if TYPE_CHECKING:
    from kvsim.runner.judging import Judge

#: Called with (cells done, cells, current step).
Progress = Callable[[int, int, str], None]
#: Bytes of the arrays of a task in memory. More layers share more work, fewer keep more processes
#: busy.
_BLOCK = 64 << 20
#: Most cells of a task, and floating-point operations of their attention; a kill loses one task.
_TOGETHER, _FLOPS = 64, 2e13


class Cell(NamedTuple):
    """A policy at a budget on a trace, and the schedule of its events.

    share: the budget as it was given, if not in entries. layers: those that are replayed.
    """

    number: int
    trace: Trace
    policy: Policy
    budget: int
    share: str | None
    schedule: Schedule
    layers: tuple[int, ...]


@dataclass(frozen=True)
class Failure:
    """A failed cell of a sweep; the others are kept.

    unexpected: not an error of kvsim, but one of a policy's own code. cell: its number in the
    sweep.
    """

    trace: str
    policy: str
    budget: int
    error: str
    unexpected: bool = False
    cell: int = 0


@dataclass
class Outcome:
    """Outcome of a task: the rows of its cells, and their records in the order of `done`.

    done: for each measured cell by number the columns of a Table that identify its rows; -1 for a
    task that measures only the trace. remarks: on the results, each once.
    """

    table: pl.DataFrame = field(default_factory=pl.DataFrame)
    records: list[Record] = field(default_factory=list)
    done: dict[int, dict[str, Any]] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    interrupted: bool = False


#: Computes a task, and reports its finished cells.
Compute = Callable[..., Outcome]


def compute(
    cells: Sequence[Cell],
    record: Callable[[Cell], Record],
    table: Callable[[Sequence[Cell], Sequence[Record]], pl.DataFrame],
    report: Progress,
) -> Outcome:
    """Compute cells of one trace; failures keep the other cells, Ctrl-C the finished ones.

    record: computes the kept sets of a cell. table: measures cells with their records.
    """
    outcome = Outcome()
    tables: list[pl.DataFrame] = []
    pending: list[tuple[Cell, Record]] = []

    def measure(group: Sequence[tuple[Cell, Record]]) -> None:
        try:
            tables.append(table(*zip(*group, strict=True)))
        except KvsimError as error:
            if len(group) > 1:
                for pair in group:  # all that can be measured
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
            except (Exception, SystemExit) as error:  # noqa: BLE001 a policy is user code
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
    """Replays the cells of a trace, and measures their records and their references.

    options: `events`, `memory`, `device`, and `judge` unless it is left out.
    """

    def __init__(self, trace: Trace, metrics: Sequence[str], options: Mapping[str, Any]) -> None:
        chosen = [METRICS[name] for name in metrics]
        self._trace, self._metrics, self._options = trace, metrics, options
        self._limits = {name: options[name] for name in ("memory", "device")}
        self._compares = any(metric.beside for metric in chosen)
        self._notes = frozenset[str]().union(*(metric.notes for metric in chosen))
        self._optima: dict[Hashable, Record] = {}
        self._compared: dict[int, Record | None] = {}

    def record(self, cell: Cell) -> Record:
        """Replay a cell, and its reference on the same terms."""
        policy = cell.policy
        setup = Setup(cell.trace, policy, cell.budget, cell.schedule)
        record = run(setup, layers=cell.layers, internals=self._notes, **self._limits)
        remarks, best = [record.remark], None
        if self._compares and policy.bounded:
            try:
                best = optimum(cell.trace, policy, record, known=self._optima, **self._limits)
            except KvsimError as error:
                remarks.append(f"{policy.name}, budget {cell.budget}: no regret: {error}")
        self._compared[cell.number] = best
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
        optima = [self._compared[cell.number] for cell in cells]
        options = {name: self._options[name] for name in ("events", "device")}
        if self._compares:
            options["optima"] = optima
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
        """Judge the records that the model can judge."""
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

    cells: the trace of each, and its columns (`OF_RECORD`). Rows of only a trace come before those
    of its first cell.
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
    of_trace = pl.col("policy").is_null()  # in the order of its metrics' rows
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


@dataclass(frozen=True)
class Task:
    """Cells of some layers of one trace, without their trace.

    number: its place in the sweep. trace: its path, or the trace itself if it is in memory. name,
    fingerprint: the trace's when the sweep was planned. Without cells it measures only the trace.
    """

    number: int
    trace: str | Trace
    name: str
    fingerprint: str
    layers: tuple[int, ...]
    cells: tuple[Cell, ...]
    metrics: tuple[str, ...]
    options: Mapping[str, Any]
    code: str

    @property
    def numbers(self) -> list[int]:
        """The numbers of its cells; -1 if it measures only the trace."""
        return [cell.number for cell in self.cells] or [-1]

    def without(self, done: Collection[int]) -> Task | None:
        """The task of the unfinished cells; None without any."""
        if all(number in done for number in self.numbers):
            return None
        return replace(self, cells=tuple(cell for cell in self.cells if cell.number not in done))

    def lost(self, error: Exception) -> Outcome:
        """The outcome of a task that raised an error."""
        unexpected = not isinstance(error, KvsimError)
        reason = f"{type(error).__name__}: {error_line(error)}" if unexpected else str(error)
        of_cells = [failure(x, reason, unexpected=unexpected, trace=self.name) for x in self.cells]
        of_trace = Failure(self.name, "", 0, reason, unexpected, cell=-1)
        return Outcome(failures=of_cells or [of_trace])


def tasks_of(
    cells: Sequence[Cell],
    metrics: Sequence[str],
    options: Mapping[str, Any],
    refused: Collection[int] = (),
    *,
    together: int | None = None,
) -> list[Task]:
    """Cut cells into tasks of `together` cells of a trace; options: the executor's.

    refused: numbers of cells that are in no task, and change the number of none.
    """
    of_trace = tuple(name for name in metrics if METRICS[name].kind == "trace")
    of_records = tuple(name for name in metrics if METRICS[name].kind != "trace")
    tasks: list[Task] = []
    for _, group in itertools.groupby(cells, lambda cell: cell.trace.name):
        of_group = list(group)
        trace, layers = of_group[0].trace, of_group[0].layers
        parts = [*_parts(of_group, layers, options, together)]
        parts += [([], layers)] * bool(of_trace)
        tasks += [
            Task(
                number=len(tasks) + place,
                trace=trace if trace.path is None else str(trace.path),
                name=trace.name,
                fingerprint=trace.fingerprint,
                layers=block,
                cells=tuple(cell._replace(trace=None, layers=block) for cell in part),  # type: ignore[arg-type]
                metrics=of_records if part else of_trace,
                options=options,
                code=of_kvsim(),
            )
            for place, (part, block) in enumerate(parts)
        ]
    alive = {cell.trace.name for cell in cells if cell.number not in refused}
    return [rest for x in tasks if x.name in alive and (rest := x.without(refused))]


def _parts(
    cells: Sequence[Cell],
    layers: tuple[int, ...],
    options: Mapping[str, Any],
    together: int | None,
) -> Iterator[tuple[list[Cell], tuple[int, ...]]]:
    trace = cells[0].trace
    whole = [cell for cell in cells if _across_layers(cell.policy)]
    single = [cell for cell in cells if not _across_layers(cell.policy)]
    undivided = together or "judge" in options
    for group, blocks in (
        (single, [layers] if undivided else _blocks(trace, layers)),
        (whole, [layers]),
    ):
        for block in blocks:
            most = int(min(_TOGETHER, max(1, _FLOPS // flops_of(trace, len(block)))))
            size = together or most
            for start in range(0, len(group), size):
                yield group[start : start + size], block


def _across_layers(policy: Policy) -> bool:
    """Whether a policy's decisions in a layer depend on other layers, or on their events."""
    separate = isinstance(policy.layer_budgets, Even) and not policy.across_layers
    return not separate or bool(does(policy, DROPS))


def _blocks(trace: Trace, layers: Sequence[int]) -> list[tuple[int, ...]]:
    """Consecutive layers, in blocks of about equal size, of two at least.

    Values of a single layer would be those of a run in which no other layer evicts
    (`kvsim.analysis.table.fidelity`).
    """
    count = -(-len(layers) * layer_bytes(trace) // _BLOCK)
    count = max(1, min(count, len(layers) // 2))
    ends = [len(layers) * number // count for number in range(count + 1)]
    return [tuple(layers[a:b]) for a, b in itertools.pairwise(ends)]


def flops_of(trace: Trace, layers: int) -> float:
    """Estimated floating-point operations of the attention outputs of a cell in some layers."""
    trace = trace.part()
    return layers * trace.n_qheads * (trace.dim + trace.value_dim) * float(trace.n_pos**2)


def layer_bytes(trace: Trace) -> int:
    """Bytes of queries, keys, values and outputs of a layer in memory."""
    item, trace = torch.empty((), dtype=trace.dtype).element_size(), trace.part()
    return (trace.n_qheads + trace.n_heads) * trace.n_pos * (trace.dim + trace.value_dim) * item


def replayed(task: Task, report: Progress = lambda *_: None) -> Outcome:
    """Replay and measure a task, failures of cells included; KvsimError if no cell can run."""
    if task.code != of_kvsim():
        raise ConfigError("the executor runs another kvsim; expected the same version everywhere")
    resolve_device(task.options["device"])
    trace = _loaded(task)
    with threads_for([trace]):
        if task.cells:
            cells = [cell._replace(trace=trace) for cell in task.cells]
            replays = Replays(trace, task.metrics, task.options)
            return compute(cells, replays.record, replays.table, report)
        analysis = Analysis(trace, device=task.options["device"], only=task.layers)
        table = measure(analysis, metrics=task.metrics, events=task.options["events"])
        return Outcome(table, done={-1: {}})


def _loaded(task: Task) -> Trace:
    """Return the trace of a task, its layers held in memory where they fit. Raises TraceError."""
    given = task.trace
    trace = given if isinstance(given, Trace) else _reopened(given, task.fingerprint)
    limit = (task.options["memory"] or DEFAULT_MEMORY) // 4
    span = slice(min(task.layers), max(task.layers) + 1)
    if (span.stop - span.start) * layer_bytes(trace) > limit:
        return trace  # read on demand
    return loaded(trace, span)


def _reopened(path: str, fingerprint: str) -> Trace:
    """Return the trace of a fingerprint, opened once for several tasks; or TraceError."""
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
    """Return a trace, cached because opening lists its folder, which may have many files."""
    return open_trace(path)
