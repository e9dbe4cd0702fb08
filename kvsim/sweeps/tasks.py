"""Tasks of a sweep: what one process computes at a time, cells of some layers of one trace.

What cells share is read and computed once. Tasks depend on the grid alone: all cut alike.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any, NamedTuple, Protocol

import polars as pl

from kvsim.analysis.registry import METRICS
from kvsim.analysis.subject import Analysis
from kvsim.analysis.table import columns_of, measure
from kvsim.core.lazy import torch
from kvsim.core.policy import Even, Policy
from kvsim.core.record import Record
from kvsim.core.threads import threads_for
from kvsim.core.trace import Trace
from kvsim.engine.layers import DEFAULT_MEMORY
from kvsim.sweeps.cells import (
    Cell,
    Executor,
    Progress,
    Replays,
    compute,
    failure,
    flops_of,
    reopened,
)
from kvsim.sweeps.code import code_of, of_kvsim
from kvsim.sweeps.outcome import Failure
from kvsim.sweeps.workers import Lost

#: Bytes of the arrays of a task as they are held in memory. More layers share more work, fewer are
#: done sooner and keep more processes busy.
_BLOCK = 64 << 20
#: Most cells of a task, and floating-point operations of their attention; a kill loses one task.
_TOGETHER, _FLOPS = 64, 2e13


@dataclass(frozen=True)
class Task:
    """Cells of some layers of one trace.

    key: names the task by what it computes. trace: its path, or the trace itself if it is in
    memory. name, fingerprint: the trace's when the sweep was planned. keys: of each cell, what it
    depends on. Without cells it measures the trace alone.
    """

    key: str
    trace: str | Trace
    name: str
    fingerprint: str
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
    the results, each once.
    """

    table: pl.DataFrame
    records: tuple[Record, ...] = ()
    done: Mapping[str, Mapping[str, Any]] = {}
    failed: Mapping[str, Failure] = {}
    remarks: tuple[str, ...] = ()
    interrupted: bool = False

    @property
    def key(self) -> str:
        """The key of a task of the cells that it has."""
        return key_of([*self.done, *self.failed])

    @staticmethod
    def lost(task: Task, lost: Lost) -> Outcome:
        """The outcome of a task of which nothing came."""
        failures = [failure(cell, lost, task.name) for cell in task.cells]
        if not failures:
            failures = [Failure(task.name, "", 0, lost.reason, lost.unexpected, cell=-1)]
        return Outcome(pl.DataFrame(), failed=dict(zip(task.keys, failures, strict=True)))


class Compute(Protocol):
    """Computes a task, and reports the cells that are done of it."""

    def __call__(self, task: Task, report: Progress = ..., /) -> Outcome:
        """Return what became of its cells. Raises KvsimError where nothing can be computed."""
        ...


def tasks_of(
    cells: Sequence[Cell],
    metrics: Sequence[str],
    options: Mapping[str, Any],
    *,
    together: int | None = None,
) -> list[Task]:
    """Cut cells into tasks of `together` cells of a trace; options: executor's, and `records`."""
    groups = itertools.groupby(cells, lambda cell: cell.trace.name)
    policies = {id(cell.policy): cell.policy for cell in cells}
    code: dict[object, Any] = {number: code_of([policy]) for number, policy in policies.items()}
    code |= {name: code_of([METRICS[name].cells]) for name in metrics}
    return [
        task
        for _, group in groups
        for task in _of_one(list(group), metrics, options, code, together=together)
    ]


def _of_one(
    cells: Sequence[Cell],
    metrics: Sequence[str],
    options: Mapping[str, Any],
    code: Mapping[object, Any],
    *,
    together: int | None,
) -> Iterator[Task]:
    trace = cells[0].trace
    layers = cells[0].layers or tuple(range(trace.n_layers))
    of_trace = tuple(name for name in metrics if METRICS[name].kind == "trace")
    of_records = tuple(name for name in metrics if METRICS[name].kind != "trace")

    def task(part: Sequence[Cell], of_task: tuple[int, ...], names: tuple[str, ...]) -> Task:
        of_cells: Sequence[Cell | None] = part or [None]
        keys = tuple(_key(cell, of_task, names, options, trace, code) for cell in of_cells)
        return Task(
            key=key_of(keys),
            trace=trace if trace.path is None else str(trace.path),
            name=trace.name,
            fingerprint=trace.fingerprint,
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
    undivided = together or "judge" in options or any(METRICS[name].together for name in of_records)
    of_single = [layers] if undivided else _blocks(trace, layers)
    for part, blocks in ((single, of_single), (whole, [layers])):
        for block in blocks:
            most = int(min(_TOGETHER, max(1, _FLOPS // flops_of(trace, len(block)))))
            size = together or most
            for start in range(0, len(part), size):
                yield task(part[start : start + size], block, of_records)


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
    item, trace = torch.empty((), dtype=trace.dtype).element_size(), trace.evicting
    return (trace.n_qheads + trace.n_heads) * trace.n_pos * (trace.dim + trace.value_dim) * item


def _key(
    cell: Cell | None,
    layers: tuple[int, ...],
    metrics: Sequence[str],
    options: Mapping[str, Any],
    trace: Trace,
    code: Mapping[object, Any],
) -> str:
    """A name for all that the values of a cell in some layers depend on.

    code: of metrics by name, and of policies by id (`code_of`).
    """
    content: dict[str, Any] = {
        "trace": [trace.name, trace.fingerprint],
        "layers": layers,
        "metrics": metrics,
        "options": {x: y for x, y in options.items() if x != "memory"},
        "versions": {name: version(name) for name in ("kvsim", "torch")},
        "code": [of_kvsim(), *(code[name] for name in metrics)],
    }
    if cell is not None:
        policy = cell.policy
        content |= {
            "policy": [policy.name, policy.params, vars(policy.schedule), code[id(policy)]],
            "budget": [cell.budget, cell.share],
            "schedule": vars(cell.schedule),
        }
    return _digest([json.dumps(content, sort_keys=True)])


def key_of(keys: Iterable[str]) -> str:
    """Return the key of a task, of those of its cells in any order."""
    return _digest(sorted(set(keys)))


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:20]


def replayed(task: Task, report: Progress = lambda *_: None) -> Outcome:
    """Replay and measure a task, failures of cells included; KvsimError if nothing can be done."""
    trace = _loaded(task)
    with threads_for([trace]):
        if task.cells:
            return outcome_of(task, trace, Replays(trace, task.metrics, task.options), report)
        analysis = Analysis(trace, device=task.options["device"], only=task.layers)
        table = measure(analysis, metrics=task.metrics, events=task.options["events"])
        return Outcome(table, done={task.keys[0]: {}})


def outcome_of(task: Task, trace: Trace, executor: Executor, report: Progress) -> Outcome:
    """Compute the cells of a task."""
    cells = [cell._replace(trace=trace) for cell in task.cells]
    computed = compute(executor, cells, report)
    keys = {cell.number: key for cell, key in zip(task.cells, task.keys, strict=True)}
    records = computed.records
    return Outcome(
        computed.table,
        tuple(records.values()) if task.options["records"] else (),
        {keys[number]: columns_of(record) for number, record in records.items()},
        {keys[one.cell]: one for one in computed.failures},
        tuple(dict.fromkeys(record.remark for record in records.values() if record.remark)),
        interrupted=computed.interrupted,
    )


def _loaded(task: Task) -> Trace:
    """Return the trace of a task, its layers held in memory where they fit. Raises TraceError."""
    given = task.trace
    trace = given if isinstance(given, Trace) else reopened(given, task.fingerprint)
    limit = (task.options["memory"] or DEFAULT_MEMORY) // 4
    span = slice(min(task.layers), max(task.layers) + 1)
    if (span.stop - span.start) * _layer_bytes(trace) > limit:
        return trace  # read as it is needed
    return trace.loaded(span)
