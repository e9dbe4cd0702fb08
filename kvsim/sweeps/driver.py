"""`kvsim.sweep`: a grid of replays, computed on any executor into one Table."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from kvsim.analysis.registry import METRICS
from kvsim.analysis.results import by_model, models_of
from kvsim.core.checks import resolve_device
from kvsim.core.lazy import torch
from kvsim.core.options import takes_options
from kvsim.core.policy import Policy, PolicyLike
from kvsim.core.record import Record
from kvsim.core.shared_results import DEFAULT_MEMORY
from kvsim.core.trace import Trace
from kvsim.engine.checks import Setup
from kvsim.engine.layers import replay_bytes
from kvsim.errors import ConfigError, KvsimError
from kvsim.experiment import ReplayOptions, SweepOptions
from kvsim.progress import with_bar
from kvsim.schema import object_at
from kvsim.store.forecast import PROCESS, Forecast, resident_bytes
from kvsim.store.opening import Traces
from kvsim.sweeps.code import code_of, of_kvsim
from kvsim.sweeps.folder import Parts, Run, provenance
from kvsim.sweeps.grid import EVERYTHING, Grid, described, grid_of, params_of
from kvsim.sweeps.pool import IN_MEMORY, in_processes, in_this_process, on_executor, processes
from kvsim.sweeps.tasks import (
    Cell,
    Compute,
    Failure,
    Outcome,
    Progress,
    Task,
    failure,
    flops_of,
    in_cell_order,
    layer_bytes,
    replayed,
    tasks_of,
)

#: Bytes of a Table without rows, of a row (of a metric, a layer and a KV head) in a part and in the
#: results, of a cell's documents, of a layer of a record, and of an entry of it.
_TABLE, _ROW, _CELL, _LAYER, _ENTRY = 9_500.0, 20, 400, 200, 0.4
#: Bytes of the description of a run, and of a record in its group.
_DOCUMENTS, _RECORD = 3_000.0, 2_300


@with_bar("cells")
@takes_options(SweepOptions)
def sweep(
    config: str | Path | Mapping[str, Any] | None = None,
    /,
    *,
    executor: Any = None,
    progress: Progress | bool | None = None,
    **options: Unpack[SweepOptions],
) -> Run:
    """Replay a grid of policies, parameters, budgets and intervals over traces, and measure it.

    Values and Table equal those of `kvsim.replay` and `kvsim.measure`, cell by cell. A cell that
    fails stops no other one. Ctrl-C ends the sweep with its finished cells; the same call with the
    folder `out` resumes it. With several `jobs`, a script needs `if __name__ == "__main__":`, as
    for any use of multiprocessing. Give your own process pool
    `mp_context=multiprocessing.get_context("spawn")`: a process forked while another thread holds a
    lock may hang.

    Args:
        config: a YAML file (docs/sweeps.md), or the keys of one as a mapping; keywords replace
            them. Each of traces, policies, budgets and interval is one value or several; a policy
            with settings is `{name: {parameter: values}}`.
        executor: computes the tasks: any `concurrent.futures.Executor`, such as
            `dask.distributed`'s `Client(...).get_executor()`, or one of submitit. Its workers read
            the traces by the same paths.
        progress: called with (cells done, cells, current step); True shows a bar.
        **options: the options of `kvsim.experiment.SweepOptions`.

    Raises:
        ConfigError: not a valid grid.
        PolicyError: an unknown policy, parameter or metric.
        NeedsError: a requested metric needs an array that a trace lacks.
        TraceError: a trace that cannot be opened, or two traces with one name.
        OutputError: a folder that cannot be written, or has the run of another grid.

    Example:
        >>> run = kvsim.sweep(traces="sample", policies=["tova", "h2o"], budgets=[64, "25%"])
        >>> run
        Run(tova, h2o; records=0, failed=0)
    """
    show: Any = progress or None
    plan = Plan.of(grid_of(config, **options))
    return plan.finish(plan.begin(), executor=executor, progress=show)


@takes_options(ReplayOptions)
def replay_all(
    traces: Traces,
    policies: PolicyLike | Iterable[PolicyLike],
    budgets: int | str | Iterable[int | str],
    *,
    progress: Progress | bool | None = None,
    **options: Unpack[ReplayOptions],
) -> Run:
    """Replay every policy at every budget over every trace, and measure the outcome.

    As `sweep`, with records and all metrics unless `records` and `metrics` say otherwise.

    Args:
        traces: one or several: objects, paths, folders, names of samples.
        policies: one or several: objects or names.
        budgets: one or several: entries per KV head, or shares such as `25%`.
        progress: called with (cells done, cells, current step); True shows a bar.
        **options: the options of `kvsim.experiment.ReplayOptions`.
    """
    given = dict[str, Any](options, traces=traces, policies=policies, budgets=budgets)
    return sweep({"records": True, "metrics": "all"}, progress=progress, **given)


@dataclass(frozen=True)
class Plan:
    """Cells cut into tasks, and the function that computes them.

    metrics: names. parameters: of the run, ready for JSON. description: everything that results
    depend on, ready for JSON. options: of the experiment; where to write. notes: remarks on all
    results. refused: why cells cannot be computed, by number; they are in no task. model_bytes:
    weights of the model that runs. compute: runs one task, in this process or another one. check:
    raises if none of the given tasks can be computed. closing: remarks at the end.
    """

    traces: Sequence[Trace]
    cells: Sequence[Cell]
    tasks: Sequence[Task]
    metrics: Sequence[str]
    parameters: Mapping[str, Any]
    description: Mapping[str, Any]
    options: Mapping[str, Any]
    compute: Compute = replayed
    notes: Sequence[str] = ()
    refused: Mapping[int, KvsimError] = field(default_factory=dict)
    model_bytes: int = 0
    check: Callable[[Sequence[Task]], None] = lambda _: None
    closing: Callable[[], Sequence[str]] = tuple

    @staticmethod
    def of(grid: Grid) -> Plan:
        """Open the traces of a grid, check its cells, and cut it."""
        traces, given = grid.opened(), grid.options
        schedules = grid.schedules()
        cells = grid.cells(traces, [terms for terms, _ in schedules])
        names = grid.chosen(traces)
        judge = "" if given["judge"] is True else given["judge"]
        options = {name: given[name] for name in ("events", "memory", "device", "records")}
        options |= {} if judge is False else {"judge": judge}
        refused = refusals(cells, given["memory"])
        parameters = {
            "policies": params_of(grid.policies),
            "schedules": [described(terms) for terms, _ in schedules],
            "budgets": list(grid.budgets),
            "layers": given["layers"],
            "metrics": None if given["metrics"] == EVERYTHING else given["metrics"],
            **{name: given[name] for name in ("events", "memory", "device", "judge")},
        }
        of_all = {**parameters, "records": given["records"]}
        return Plan(
            traces=traces,
            cells=cells,
            tasks=tasks_of(cells, names, options, refused),
            metrics=names,
            parameters=parameters,
            description=describe(traces, grid.policies, names, of_all),
            options=given,
            notes=[*filter(None, (remark for _, remark in schedules))],
            refused=refused,
            check=lambda _: check_run(judge, traces, given["device"]),
        )

    @property
    def flops(self) -> float:
        """Estimated floating-point operations of the attention outputs of all cells."""
        return sum(
            flops_of(self.trace_of(task), len(task.layers)) * max(1, len(task.cells))
            for task in self.tasks
        )

    def trace_of(self, task: Task) -> Trace:
        """The trace of a task."""
        return next(each for each in self.traces if each.name == task.name)

    def forecast(self, rest: Sequence[Task]) -> Forecast:
        """Return the forecast of the unfinished tasks, from the shapes of their traces."""
        memory, size = 0, _DOCUMENTS + _TABLE
        for task in rest:
            whole, cells, layers = self.trace_of(task), len(task.cells), len(task.layers)
            trace, limit = whole.part(), task.options.get("memory") or DEFAULT_MEMORY
            held = [min(limit, layers * replay_bytes(trace, x.policy)) for x in task.cells]
            judge = _judge_bytes(whole) if "judge" in task.options else 0
            loaded = layers * layer_bytes(trace)
            loaded = loaded if loaded <= limit // 4 else 0  # else read on demand
            memory = max(memory, loaded + max(held, default=0) + judge)
            rows = layers * trace.n_heads * len(task.metrics)
            size += _TABLE + cells * (rows * _ROW + _CELL)
            if self.options["records"]:
                size += cells * layers * (_LAYER + trace.n_pos * trace.n_heads * _ENTRY)
        memory += self.model_bytes
        size += _RECORD * len(self.cells) * self.options["records"]
        on_device = self.parameters.get("device") not in (None, "cpu")
        return Forecast(
            written=0 if self.options["out"] is None else size,
            memory=max(resident_bytes() or 0, PROCESS) + (0 if on_device else memory),
            device_memory=memory if on_device else 0,
        )

    def begin(self) -> Parts:
        """Check that the plan can be computed, and return the finished part in the folder.

        Raises the error of the first cell where no cell can be computed.
        """
        if len(self.refused) == len(self.cells):
            raise next(iter(self.refused.values()))
        out = self.options["out"]
        if out is not None and self.options["overwrite"]:
            self.check(self.tasks)
            shutil.rmtree(out, ignore_errors=True)
            return Parts(out, self.description)
        parts = Parts(out, self.description)
        self.check(parts.left(self.tasks))
        return parts

    def finish(
        self, parts: Parts, *, executor: Any = None, progress: Progress | None = None
    ) -> Run:
        """Compute the unfinished tasks, and write the whole run into the folder."""
        todo = parts.left(self.tasks)
        of_one = self.forecast(todo) if self.options["jobs"] is None else Forecast()
        count = processes(self.options["jobs"], self.flops, len(todo), self.traces, of_one)
        if executor is not None and any(trace.path is None for trace in self.traces):
            raise ConfigError(IN_MEMORY)
        total = sum(len(task.cells) for task in self.tasks)
        done = total - sum(len(task.cells) for task in todo)
        show = progress or (lambda *_: None)
        failures = [failure(self.cells[number], str(x)) for number, x in self.refused.items()]
        interrupted = False

        def compute(task: Task) -> Outcome:
            return self.compute(task, lambda now, _, label: show(done + now, total, label))

        if executor is not None:
            results = on_executor(self.compute, todo, executor)
        elif count > 1:
            results = in_processes(self.compute, todo, count)
        else:
            results = in_this_process(compute, todo)
        try:
            try:
                show(done, total, "")
                with contextlib.closing(results):
                    for task, result in results:
                        outcome = task.lost(result) if isinstance(result, Exception) else result
                        parts.add(task, outcome)
                        failures += outcome.failures
                        done += len(task.cells)
                        show(done, total, task.name)
                        interrupted = outcome.interrupted
                        if interrupted:
                            break
            except KeyboardInterrupt:
                interrupted = True
            run = self.run(parts, failures, interrupted=interrupted)
            if run.parameters["done"]:
                parts.publish(run)
            return run
        finally:
            parts.close()

    def run(self, parts: Parts, failures: Sequence[Failure], *, interrupted: bool = False) -> Run:
        """The Run of the finished tasks."""
        outcomes = [part for task in self.tasks for part in parts.outcomes.get(task.number, ())]
        left = {number for task in parts.left(self.tasks) for number in task.numbers}
        columns: dict[int, Any] = {}
        records: dict[int, list[Record]] = {}
        for part in outcomes:
            columns = {**part.done, **columns}
            for number, record in zip(part.done, part.records, strict=False):
                records.setdefault(number, []).append(record)
        failed = {each.cell for each in failures}
        done = [x for x in self.cells if x.number not in left | failed]
        models = models_of(self.traces)
        rows = [(cell.trace.name, columns[cell.number]) for cell in done]
        table = in_cell_order([part.table for part in outcomes], rows, self.metrics)
        counts = {"cells": len(self.cells), "done": len(done)}
        counts["missing"] = len({*range(len(self.cells))} & left - failed)
        notes = (*self.notes, *(x for part in outcomes for x in part.remarks), *self.closing())
        return Run(
            tuple(_joined(records[cell.number]) for cell in done if self.options["records"]),
            by_model(table, models),
            # a cell whose layers are in several tasks fails in each of them
            tuple({(x.trace, x.cell, x.error): x for x in failures}.values()),
            {**self.parameters, **counts, "models": models},
            interrupted,
            digests={trace.name: trace.fingerprint for trace in self.traces},
            notes=tuple(dict.fromkeys(notes)),
        )


def _judge_bytes(trace: Trace) -> int:
    """Bytes of the model that judges a trace: weights, the full cache, and some rows of logits."""
    from kvsim.recorder.counting import count_model  # noqa: PLC0415  transformers
    from kvsim.recorder.head import LOGITS  # noqa: PLC0415  as above

    model = object_at(trace.meta, "model")
    try:
        counts = count_model(object_at(model, "config"))
    except KvsimError:  # the judge reports the error
        return 0
    item = getattr(torch, str(model.get("dtype")), torch.float32).itemsize
    entries = trace.n_pos * sum(heads * (dim + value) for _, heads, dim, value in trace.sizes)
    logits = min(LOGITS, (trace.n_pos - trace.prompt_len) * counts["vocab"])
    return int(item * (counts["parameters"] + 2 * entries + 3 * logits))


def refusals(cells: Sequence[Cell], memory: int | None) -> dict[int, KvsimError]:
    """Return why cells cannot be computed, by number: their budget, or missing arrays."""
    refused: dict[int, KvsimError] = {}
    for cell in cells:
        try:
            Setup(cell.trace, cell.policy, cell.budget, cell.schedule).checked(memory)
        except KvsimError as error:
            refused[cell.number] = error
    return refused


def describe(
    traces: Sequence[Trace],
    policies: Sequence[Policy],
    metrics: Sequence[str],
    parameters: Mapping[str, Any],
) -> dict[str, Any]:
    """Return everything that results depend on, ready for JSON, to compare with a folder."""
    roots = [*policies, *(METRICS[name].cells for name in metrics)]
    own = [[x.name, x.params, vars(x.schedule)] for x in policies]
    return {
        **{name: x for name, x in parameters.items() if name not in ("memory", "batch")},
        "policies": own,
        "metrics": list(metrics),
        "traces": {trace.name: trace.fingerprint for trace in traces},
        "versions": {x: y for x, y in provenance()["versions"].items() if x in ("kvsim", "torch")},
        "code": [of_kvsim(), code_of(roots)],
    }


def check_run(judge: bool | str, traces: Sequence[Trace], device: str) -> None:
    """Raise PolicyError for a missing device, and as `judge_of` for a model."""
    resolve_device(device)
    if judge is not False:
        from kvsim.runner.judgments import judge_of  # noqa: PLC0415  transformers

        for trace in traces:
            judge_of(trace, str(judge), device, None)


def _joined(records: Sequence[Record]) -> Record:
    """Join the records of blocks of layers."""
    first = records[0]
    if len(records) == 1:
        return first
    evicted_at = np.concatenate([record.evicted_at for record in records])
    layers = tuple(layer for record in records for layer in record.layers)
    layer_ids = tuple(number for record in records for number in record.layer_ids)
    reads = None
    if first.reads is not None:
        bits = np.concatenate([record.reads.bits for record in records if record.reads])
        reads = replace(first.reads, bits=bits)
    return replace(first, evicted_at=evicted_at, layers=layers, layer_ids=layer_ids, reads=reads)
