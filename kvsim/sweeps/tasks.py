"""Tasks of a sweep: what one process computes at a time, cells of some layers of one trace.

What a task reads of its trace is read once and held in memory for all its cells, and what they
share is computed once. Tasks depend on the grid alone, so that every process cuts a sweep alike.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any, NamedTuple

import polars as pl

from kvsim.analysis.registry import METRICS
from kvsim.analysis.subject import Analysis
from kvsim.analysis.table import columns_of, measure
from kvsim.core.lazy import torch
from kvsim.core.policy import Even, Policy
from kvsim.core.record import Record
from kvsim.core.trace import Trace
from kvsim.engine.layers import DEFAULT_MEMORY, replayed
from kvsim.sweeps.cells import Cell, Cells, failure, named, reopened
from kvsim.sweeps.grid import Grid
from kvsim.sweeps.outcome import Failure
from kvsim.sweeps.parts import code_of, identity
from kvsim.sweeps.workers import Lost

#: Bytes of the arrays of a task as they are held in memory. More layers share more work, fewer are
#: done sooner and keep more processes busy.
_BLOCK = 64 << 20
#: Most cells of a task; whoever is killed loses one task.
_TOGETHER = 64


@dataclass(frozen=True)
class Task:
    """Cells of some layers of one trace.

    key: names the task by what it computes. trace: its path, or the trace itself if it is in
    memory. name, digest: the trace's when the sweep was planned. keys: of each cell, what it
    depends on. Without cells it measures the trace alone.
    """

    key: str
    trace: str | Trace
    name: str
    digest: str
    layers: tuple[int, ...]
    cells: tuple[Cell, ...]  # without their trace
    keys: tuple[str, ...]
    metrics: tuple[str, ...]
    options: Mapping[str, Any]

    def without(self, done: AbstractSet[str]) -> Task | None:
        """The task of the cells that are not done yet; None if there are none."""
        if done.isdisjoint(self.keys):
            return self
        pairs = [
            (cell, key) for cell, key in zip(self.cells, self.keys, strict=False) if key not in done
        ]
        if not pairs:
            return None
        cells, keys = zip(*pairs, strict=True)
        return replace(self, key=key_of(keys), cells=cells, keys=keys)


class Outcome(NamedTuple):
    """Outcome of a task.

    done: for each measured cell its key, and the columns of a Table that say which rows are its.
    failed: what went wrong, by the keys of cells. records: those of `done`, or none. remarks: on
    the results, each once. seconds: of processor time.
    """

    table: pl.DataFrame
    records: tuple[Record, ...] = ()
    done: Mapping[str, Mapping[str, Any]] = {}
    failed: Mapping[str, Failure] = {}
    remarks: tuple[str, ...] = ()
    seconds: float = 0.0
    interrupted: bool = False

    @property
    def key(self) -> str:
        """The key of a task of the cells that it has."""
        return key_of([*self.done, *self.failed])

    @staticmethod
    def lost(task: Task, lost: Lost) -> Outcome:
        """The outcome of a task of which nothing came."""
        failures = [failure(task.name, cell, lost) for cell in task.cells]
        if not failures:
            failures = [Failure(task.name, "", 0, lost.reason, lost.unexpected, cell=-1)]
        return Outcome(pl.DataFrame(), failed=dict(zip(task.keys, failures, strict=True)))


def tasks_of(grid: Grid, traces: Sequence[Trace], cells: Sequence[Cell]) -> list[Task]:
    """Cut a grid into tasks, in the order of its cells."""
    metrics = grid.chosen(traces)
    groups = itertools.groupby(cells, lambda cell: cell.trace.name)
    return [
        task
        for trace, (_, group) in zip(traces, groups, strict=True)
        for task in _of_one(grid, trace, list(group), metrics)
    ]


def _of_one(
    grid: Grid, trace: Trace, cells: Sequence[Cell], metrics: Sequence[str]
) -> Iterator[Task]:
    names = ("regret", "events", "memory", "device", "records")
    options = {name: getattr(grid, name) for name in names}
    if grid.judge:
        options["judge"] = named(grid.judge)
    layers = replayed(trace, grid.layers)
    of_trace = tuple(name for name in metrics if METRICS[name].kind == "trace")
    of_records = tuple(name for name in metrics if METRICS[name].kind != "trace")

    def task(part: Sequence[Cell], of_task: tuple[int, ...], names: tuple[str, ...]) -> Task:
        of_cells: Sequence[Cell | None] = part or [None]
        keys = tuple(_key(cell, of_task, names, options, trace) for cell in of_cells)
        return Task(
            key=key_of(keys),
            trace=trace if trace.path is None else str(trace.path),
            name=trace.name,
            digest=trace.digest,
            layers=of_task,
            cells=tuple(cell._replace(trace=None, layers=of_task) for cell in part),  # type: ignore[arg-type]
            keys=keys,
            metrics=names,
            options=options,
        )

    if of_trace:
        yield task([], layers, of_trace)
    whole = [cell for cell in cells if _across_layers(cell.policy)]
    single = [cell for cell in cells if not _across_layers(cell.policy)]
    together = "judge" in options or any(METRICS[name].together for name in of_records)
    of_single = [layers] if together else _blocks(trace, layers)
    for part, blocks in ((single, of_single), (whole, [layers])):
        for block in blocks:
            for start in range(0, len(part), _TOGETHER):
                yield task(part[start : start + _TOGETHER], block, of_records)


def _across_layers(policy: Policy) -> bool:
    """Whether a policy does in one layer what depends on others, or at other events than there."""
    separate = isinstance(policy.layer_budgets, Even) and not policy.across_layers
    return not separate or policy.propagation is not None


def _blocks(trace: Trace, layers: Sequence[int]) -> list[tuple[int, ...]]:
    """Layers that follow each other, in blocks of about equal size.

    Two at least: values of one alone would be those of a run in which no other layer evicts
    (`kvsim.analysis.table.fidelity`).
    """
    count = -(-len(layers) * _layer_bytes(trace) // _BLOCK)
    count = max(1, min(count, len(layers) // 2))
    ends = [len(layers) * number // count for number in range(count + 1)]
    return [tuple(layers[a:b]) for a, b in itertools.pairwise(ends)]


def _layer_bytes(trace: Trace) -> int:
    """Bytes of queries, keys, values and outputs of a layer in memory."""
    item = torch.empty((), dtype=trace.dtype).element_size()
    return 2 * (trace.n_qheads + trace.n_heads) * trace.n_pos * trace.dim * item


def _key(
    cell: Cell | None,
    layers: tuple[int, ...],
    metrics: Sequence[str],
    options: Mapping[str, Any],
    trace: Trace,
) -> str:
    """A name for all that the values of a cell in some layers depend on."""
    content: dict[str, Any] = {
        "trace": [trace.name, identity(trace)],
        "layers": layers,
        "metrics": metrics,
        "options": {x: y for x, y in options.items() if x != "memory"},
        "versions": {name: version(name) for name in ("kvsim", "torch")},
    }
    if cell is not None:
        policy = cell.policy
        content |= {
            "policy": [policy.name, policy.params, vars(policy.schedule)],
            "code": dict(code_of(policy)),
            "budget": [cell.budget, cell.share],
            "schedule": vars(cell.schedule),
        }
    return _digest([json.dumps(content, sort_keys=True)])


def key_of(keys: Iterable[str]) -> str:
    """Return the key of a task, of those of its cells in any order."""
    return _digest(sorted(set(keys)))


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:20]


# ------------------------------------------------------------------------------ computing a task


def compute(task: Task) -> Outcome:
    """Replay and measure the cells of a task; failures of cells are among what it returns.

    Raises KvsimError where nothing can be computed.
    """
    began = time.process_time()
    trace = _loaded(task)
    outcome = _of_cells(task, trace) if task.cells else _of_trace(task, trace)
    return outcome._replace(seconds=time.process_time() - began)


def _of_cells(task: Task, trace: Trace) -> Outcome:
    cells = [cell._replace(trace=trace) for cell in task.cells]
    metrics = {name: METRICS[name] for name in task.metrics}
    work = Cells(cells, metrics, dict(task.options), lambda *_: None)
    run = work.run()
    keys = {cell.number: key for cell, key in zip(task.cells, task.keys, strict=True)}
    failed = {keys[failure.cell]: failure for failure in run.failures}
    done = [number for number in sorted(work.measured) if keys[number] not in failed]
    records = tuple(map(work.record, done))
    return Outcome(
        run.table,
        records if task.options["records"] else (),
        {keys[at]: columns_of(record) for at, record in zip(done, records, strict=True)},
        failed,
        tuple(dict.fromkeys(record.remark for record in records if record.remark)),
        interrupted=run.interrupted,
    )


def _of_trace(task: Task, trace: Trace) -> Outcome:
    analysis = Analysis(trace, device=task.options["device"], only=task.layers)
    table = measure(analysis, metrics=task.metrics, events=task.options["events"])
    return Outcome(table, done={task.keys[0]: {}})


def _loaded(task: Task) -> Trace:
    """Return the trace of a task, its layers held in memory where they fit. Raises TraceError."""
    given = task.trace
    trace = given if isinstance(given, Trace) else reopened(given, task.digest)
    limit = (task.options["memory"] or DEFAULT_MEMORY) // 4
    span = slice(min(task.layers), max(task.layers) + 1)
    if (span.stop - span.start) * _layer_bytes(trace) > limit:
        return trace  # read as it is needed
    return trace.loaded(span)
