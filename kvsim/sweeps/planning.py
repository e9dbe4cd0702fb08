"""A sweep before it runs and after: its tasks, and the Run of what is finished of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvsim.analysis.results import by_model, models_of
from kvsim.core.checks import resolve_device
from kvsim.core.lazy import torch
from kvsim.core.policy import Policy
from kvsim.core.record import Record
from kvsim.core.trace import Trace
from kvsim.errors import ConfigError
from kvsim.schema import PREFILL
from kvsim.sweeps.cells import Cell, flops_of, in_cell_order, named
from kvsim.sweeps.grid import Grid, grid_of, read_grid
from kvsim.sweeps.outcome import Run, provenance
from kvsim.sweeps.remarks import cell_remarks
from kvsim.sweeps.shards import Kept, Shards
from kvsim.sweeps.tasks import Compute, Task, replayed, tasks_of
from kvsim.sweeps.terms import Terms, described, params_of


def grid_from(config: str | Path | Mapping[str, Any] | Grid | None, **more: Any) -> Grid:
    """The grid of a file, of a mapping, or of keywords."""
    if isinstance(config, Grid) and not more:
        return config
    if config is None or (isinstance(config, Mapping) and not more):
        return grid_of(more if config is None else dict(config), Path(), where="the grid")
    if isinstance(config, str | Path) and not more:
        return read_grid(config)
    raise ConfigError(
        f"the grid is {type(config).__name__} and keywords ({', '.join(more)}); expected a file, a "
        "mapping, or keywords alone"
    )


class Plan(NamedTuple):
    """Cells cut into tasks, and what computes them.

    policies: of the cells, each once. metrics: names. parameters: of the run, ready for JSON.
    notes: remarks on all results. document: the configuration, which a folder keeps. records:
    whether they are kept. model_bytes: weights of the model that runs. compute: of one task, in
    this process or another one. check: raises where no task can be computed, before the first of
    them.
    """

    traces: Sequence[Trace]
    policies: Sequence[Policy]
    cells: Sequence[Cell]
    tasks: Sequence[Task]
    metrics: Sequence[str]
    parameters: Mapping[str, Any]
    document: Mapping[str, Any]
    compute: Compute
    notes: Sequence[str] = ()
    records: bool = True
    model_bytes: int = 0
    check: Callable[[], None] = lambda: None

    @staticmethod
    def of(grid: Grid, metrics: Sequence[str] | None = None, *, accounts: bool = True) -> Plan:
        """Open the traces of a grid, and cut it.

        metrics: by default those of the grid, checked. accounts: keep what readers read.
        """
        traces, policies = grid.opened(), grid.built()
        schedules = grid.schedules(policies)
        cells = grid.cells(traces)
        names = grid.chosen(traces) if metrics is None else metrics
        judge, device = grid.options["judge"], grid.options["device"]
        options = {x: grid.options[x] for x in ("regret", "events", "memory", "device")}
        options |= {"records": grid.records} | ({"judge": named(judge)} if judge else {})
        options |= {} if accounts else {"accounts": False}
        return Plan(
            traces=traces,
            policies=policies,
            cells=cells,
            tasks=tasks_of(cells, names, options),
            metrics=names,
            parameters=_parameters(grid, policies, [terms for terms, _ in schedules]),
            notes=[*filter(None, (remark for _, remark in schedules))],
            document=_document(grid, policies, traces, len(cells)),
            compute=replayed,
            records=grid.records,
            check=partial(check_run, judge, traces, device),
        )

    def share(self, shard: tuple[int, int] | None) -> Sequence[Task]:
        """The tasks of shard i of n, counted from 0: every n-th one, so that shards are alike."""
        if shard is None:
            return self.tasks
        number, count = shard
        if not 0 <= number < count:
            raise ConfigError(f"shard is {number}/{count}; expected i/N with i from 0 to N - 1")
        return self.tasks[number::count]

    @property
    def flops(self) -> float:
        """Estimated floating-point operations of the attention outputs of all cells."""
        return sum(map(self.flops_of, self.tasks))

    def flops_of(self, task: Task) -> float:
        """Floating-point operations of the attention outputs of the cells of a task, about."""
        return max(1, len(task.cells)) * flops_of(self.trace_of(task), len(task.layers))

    def trace_of(self, task: Task) -> Trace:
        """The trace of a task."""
        return next(each for each in self.traces if each.name == task.name)

    def bytes_of(self, task: Task) -> int:
        """Bytes of queries, keys, values and outputs that a task reads, as they are stored."""
        trace = self.trace_of(task)
        return len(task.layers) * sum(
            int(np.prod(trace.source.shapes[name][1:]))
            * int(getattr(torch, trace.source_dtypes[name]).itemsize)
            for name in ("q", "k", "v", "attn_out", "lse")
            if name in trace.source.shapes
        )

    def left(self, kept: Kept) -> list[Task]:
        """The tasks that are left, each of the cells that are."""
        done = kept.done
        of_each = (each.without(done) for each in self.tasks)
        return [task for task in of_each if task is not None]

    @property
    def keys(self) -> dict[int, list[str]]:
        """The keys of each cell, one for each block of layers; those of a trace alone are at -1."""
        keys: dict[int, list[str]] = {-1: [], **{cell.number: [] for cell in self.cells}}
        for task in self.tasks:
            numbers = [cell.number for cell in task.cells] or [-1]
            for number, key in zip(numbers, task.keys, strict=True):
                keys[number].append(key)
        return keys

    def check_kind(self, kept: Kept) -> None:
        """Raise OutputError where results of another command would be replaced."""
        if isinstance(kept, Shards):
            keys = {key for of_cell in self.keys.values() for key in of_cell}
            kept.check_kind(self.document["command"], keys, records=self.records)

    def run(self, kept: Kept, *, interrupted: bool = False) -> Run:
        """The Run of what is finished."""
        keys = self.keys
        parts = {key: part for part in kept.parts.values() for key in part.done}
        done = [c for c in self.cells if all(key in parts for key in keys[c.number])]
        wanted = [key for cell in done for key in keys[cell.number]]
        first = [(cell.trace.name, keys[cell.number][0]) for cell in done]
        columns = [(name, parts[key].done[key]) for name, key in first]
        tables = kept.tables([*keys[-1], *wanted])
        models = models_of(self.traces)
        table = by_model(in_cell_order(tables, columns, self.metrics), models)
        records = kept.records(wanted) if self.records else {}
        finished = {cell.number for cell in done}
        failed = {key: x for part in kept.parts.values() for key, x in part.failed.items()}
        failures = {
            (number, failed[key].error): replace(failed[key], cell=number)  # that of this grid
            for number in keys
            if number not in finished
            for key in keys[number]
            if key in failed and key not in parts
        }

        def missing(of_cell: Sequence[str]) -> bool:
            return not all(key in parts or key in failed for key in of_cell)

        notes = (*self.notes, *cell_remarks(done))
        remarks = dict.fromkeys((*notes, *(text for key in wanted for text in parts[key].remarks)))
        counts = {"cells": len(self.cells), "done": len(done)}
        of_traces = keys.pop(-1)  # tasks that measure a trace alone
        counts["missing"] = sum(map(missing, keys.values()))
        counts["missing_traces"] = sum(missing([key]) for key in of_traces)
        return Run(
            tuple(_joined([records[key] for key in keys[cell.number]]) for cell in done if records),
            table,
            tuple(failures.values()),
            {**self.parameters, **counts, "models": models},
            interrupted,
            digests={trace.name: trace.fingerprint for trace in self.traces},
            notes=tuple(remarks),
        )


def check_run(judge: bool | str, traces: Sequence[Trace], device: str) -> None:
    """Raise PolicyError for a device that is not here, and as `judge_of` for a model."""
    resolve_device(device)
    if judge:
        from kvsim.runner.judging import judge_of  # noqa: PLC0415  transformers

        for trace in traces:
            judge_of(trace, named(judge), device, None)


def _parameters(
    grid: Grid, policies: Sequence[Policy], schedules: Sequence[Terms]
) -> dict[str, Any]:
    """Parameters of a run, ready for JSON."""
    return {
        "policies": params_of(policies),
        "schedules": [described(terms) for terms in schedules],
        "budgets": grid.budgets,
        **{name: x for name, x in grid.options.items() if name not in _ELSEWHERE},
    }


#: Options that `run.json` has among schedules and parameters of policies.
_ELSEWHERE = ("prefill", *PREFILL, "fit", "protect")


def _document(
    grid: Grid, policies: Sequence[Policy], traces: Sequence[Trace], cells: int
) -> dict[str, Any]:
    """The grid as a configuration, and what it was resolved to."""
    resolved = {
        "policies": [{one.name: json.loads(json.dumps(one.params))} for one in policies],
        "traces": {trace.name: trace.fingerprint for trace in traces},
        "cells": cells,
        "versions": provenance()["versions"],
    }
    return grid.document() | {"command": "sweep", "resolved": resolved}


def _joined(records: Sequence[Record]) -> Record:
    """One record of those of blocks of layers."""
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
