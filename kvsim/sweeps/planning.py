"""A sweep before it runs and after: its tasks, and the Run of what is finished of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvsim.core.record import Record
from kvsim.core.trace import Trace
from kvsim.errors import ConfigError
from kvsim.sweeps.cells import Cell, flops_of, in_cell_order
from kvsim.sweeps.grid import Grid, grid_of, read_grid
from kvsim.sweeps.outcome import Run, provenance
from kvsim.sweeps.run import cell_remarks, params_of
from kvsim.sweeps.shards import Kept
from kvsim.sweeps.tasks import Task, tasks_of


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
    """A grid cut into tasks."""

    grid: Grid
    traces: list[Trace]
    cells: list[Cell]
    tasks: list[Task]

    @staticmethod
    def of(grid: Grid) -> Plan:
        """Open the traces of a grid, and cut it."""
        traces = grid.opened()
        cells = grid.cells(traces)
        return Plan(grid, traces, cells, tasks_of(grid, traces, cells))

    def share(self, shard: tuple[int, int] | None) -> list[Task]:
        """The tasks of shard i of n, counted from 0: every n-th one, so that shards are alike."""
        if shard is None:
            return self.tasks
        number, count = shard
        if not 0 <= number < count:
            raise ConfigError(f"shard is {number}/{count}; expected i/N with i from 0 to N - 1")
        return self.tasks[number::count]

    def document(self) -> dict[str, Any]:
        """The grid as a configuration, and what it was resolved to."""
        policies = [
            {policy.name: json.loads(json.dumps(policy.params))} for policy in self.grid.built()
        ]
        traces = {trace.name: trace.digest for trace in self.traces}
        resolved = {"policies": policies, "traces": traces, "cells": len(self.cells)}
        return self.grid.document() | {
            "resolved": resolved | {"versions": provenance()["versions"]}
        }

    @property
    def flops(self) -> float:
        """Floating-point operations of the attention outputs of all cells, about."""
        return sum(map(self.flops_of, self.tasks))

    def flops_of(self, task: Task) -> float:
        """Floating-point operations of the attention outputs of the cells of a task, about."""
        return max(1, len(task.cells)) * flops_of(self._trace(task), len(task.layers))

    def _trace(self, task: Task) -> Trace:
        return next(each for each in self.traces if each.name == task.name)

    def bytes_of(self, task: Task) -> int:
        """Bytes of queries, keys, values and outputs that a task reads, as they are stored."""
        trace = self._trace(task)
        return len(task.layers) * sum(
            int(np.prod(trace.source.shapes[name][1:]))
            * np.dtype(trace.source_dtypes[name]).itemsize
            for name in ("q", "k", "v", "attn_out", "lse")
            if name in trace.source.shapes
        )

    @property
    def keys(self) -> dict[int, list[str]]:
        """The keys of each cell, one for each block of layers; those of a trace alone are at -1."""
        keys: dict[int, list[str]] = {-1: [], **{cell.number: [] for cell in self.cells}}
        for task in self.tasks:
            numbers = [cell.number for cell in task.cells] or [-1]
            for number, key in zip(numbers, task.keys, strict=True):
                keys[number].append(key)
        return keys

    def run(self, kept: Kept, *, interrupted: bool = False) -> Run:
        """The Run of what is finished."""
        keys = self.keys
        parts = {key: part for part in kept.parts.values() for key in part.done}
        done = [c for c in self.cells if all(key in parts for key in keys[c.number])]
        wanted = [key for cell in done for key in keys[cell.number]]
        first = [(cell.trace.name, keys[cell.number][0]) for cell in done]
        columns = [(name, parts[key].done[key]) for name, key in first]
        tables = kept.tables([*keys[-1], *wanted])
        table = in_cell_order(tables, columns, self.grid.chosen(self.traces))
        records = kept.records(wanted) if self.grid.records else {}
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

        shared = (remark for _, remark in self.grid.schedules(self.grid.built()))
        notes = filter(None, (*shared, *cell_remarks(done)))
        remarks = dict.fromkeys((*notes, *(text for key in wanted for text in parts[key].remarks)))
        return Run(
            tuple(_joined([records[key] for key in keys[cell.number]]) for cell in done if records),
            table,
            tuple(failures.values()),
            self._parameters(len(done), sum(map(missing, keys.values()))),
            interrupted,
            digests={trace.name: trace.digest for trace in self.traces},
            notes=tuple(remarks),
        )

    def _parameters(self, done: int, missing: int) -> dict[str, Any]:
        """Parameters and counts of the run, ready for JSON."""
        names = (
            "budgets",
            "intervals",
            "prefill",
            "compress",
            "layers",
            "regret",
            "judge",
            "events",
        )
        return {
            "policies": params_of(self.grid.built()),
            **{name: getattr(self.grid, name) for name in (*names, "memory", "device")},
            "metrics": self.grid.chosen(self.traces),
            "cells": len(self.cells),
            "done": done,
            "missing": missing,
        }


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
