"""Tasks of a sweep: what one process computes at a time, cells of some layers of one trace.

What cells share is read and computed once. Tasks depend on the grid alone: all cut alike.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvsim.analysis.measuring import measure
from kvsim.analysis.registry import METRICS
from kvsim.analysis.subject import Analysis
from kvsim.core.checks import resolve_device
from kvsim.core.lazy import torch
from kvsim.core.parts import loaded
from kvsim.core.policy import Even, Policy
from kvsim.core.shared_results import DEFAULT_MEMORY
from kvsim.core.threads import threads_for
from kvsim.core.trace import Trace
from kvsim.engine.checks import DROPS, does
from kvsim.errors import ConfigError, KvsimError, TraceError, error_line
from kvsim.store.reader import open_trace
from kvsim.sweeps.cells import Cell, Outcome, Progress, Replays, compute, failure
from kvsim.sweeps.code import of_kvsim
from kvsim.sweeps.outcome import Failure

#: Bytes of the arrays of a task as they are held in memory. More layers share more work, fewer are
#: done sooner and keep more processes busy.
_BLOCK = 64 << 20
#: Most cells of a task, and floating-point operations of their attention; a kill loses one task.
_TOGETHER, _FLOPS = 64, 2e13

#: Computes a task, and reports the cells that are done of it.
Compute = Callable[..., Outcome]


@dataclass(frozen=True)
class Task:
    """Cells of some layers of one trace, without their trace.

    number: its place in the sweep. trace: its path, or the trace itself if it is in memory. name,
    fingerprint: the trace's when the sweep was planned. Without cells it measures the trace alone.
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
        """The numbers of its cells; -1 if it measures the trace alone."""
        return [cell.number for cell in self.cells] or [-1]

    def without(self, done: Collection[int]) -> Task | None:
        """The task of the cells that are not done yet; None if there are none."""
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
    *,
    together: int | None = None,
) -> list[Task]:
    """Cut cells into tasks of `together` cells of a trace; options: the executor's."""
    of_trace = tuple(name for name in metrics if METRICS[name].kind == "trace")
    of_records = tuple(name for name in metrics if METRICS[name].kind != "trace")
    tasks: list[Task] = []
    for _, group in itertools.groupby(cells, lambda cell: cell.trace.name):
        of_group = list(group)
        trace, layers = of_group[0].trace, of_group[0].layers
        layers = layers or tuple(range(trace.n_layers))
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
    return tasks


def _parts(
    cells: Sequence[Cell],
    layers: tuple[int, ...],
    options: Mapping[str, Any],
    together: int | None,
) -> Iterator[tuple[list[Cell], tuple[int, ...]]]:
    """Yield the cells and the layers of each task of a trace."""
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
    """Whether a policy does in one layer what depends on others, or at other events than there."""
    separate = isinstance(policy.layer_budgets, Even) and not policy.across_layers
    return not separate or bool(does(policy, DROPS))


def _blocks(trace: Trace, layers: Sequence[int]) -> list[tuple[int, ...]]:
    """Layers that follow each other, in blocks of about equal size.

    Two at least: values of one alone would be those of a run in which no other layer evicts
    (`kvsim.analysis.table.fidelity`).
    """
    count = -(-len(layers) * layer_bytes(trace) // _BLOCK)
    count = max(1, min(count, len(layers) // 2))
    ends = [len(layers) * number // count for number in range(count + 1)]
    return [tuple(layers[a:b]) for a, b in itertools.pairwise(ends)]


def flops_of(trace: Trace, layers: int) -> float:
    """Floating-point operations of the attention outputs of a cell in some layers, about."""
    trace = trace.part()
    return layers * trace.n_qheads * (trace.dim + trace.value_dim) * float(trace.n_pos**2)


def layer_bytes(trace: Trace) -> int:
    """Bytes of queries, keys, values and outputs of a layer in memory."""
    item, trace = torch.empty((), dtype=trace.dtype).element_size(), trace.part()
    return (trace.n_qheads + trace.n_heads) * trace.n_pos * (trace.dim + trace.value_dim) * item


def replayed(task: Task, report: Progress = lambda *_: None) -> Outcome:
    """Replay and measure a task, failures of cells included; KvsimError if nothing can be done."""
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
        return trace  # read as it is needed
    return loaded(trace, span)


def _reopened(path: str, fingerprint: str) -> Trace:
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
