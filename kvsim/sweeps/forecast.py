"""Forecast of replays and live runs, from the shapes of their traces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvsim.core.lazy import torch
from kvsim.core.trace import Trace
from kvsim.engine.layers import replay_bytes
from kvsim.errors import KvsimError
from kvsim.schema import object_at
from kvsim.store.forecast import PROCESS, Forecast, resident_bytes

if TYPE_CHECKING:
    from kvsim.sweeps.driver import Plan
    from kvsim.sweeps.tasks import Task

#: Bytes of a Table without rows, of a row (of a metric, a layer and a KV head), and of a cell's
#: documents in a part, and with a record.
_TABLE, _ROW_BYTES, _CELL, _RECORD = 9_500, 10, 400, 2_300


def forecast(plan: Plan, rest: Sequence[Task], *, written: bool) -> Forecast:
    """Return what the unfinished tasks of a plan take; written: into a folder."""
    size, files = _written(plan, rest) if written else (0.0, 0)
    memory = plan.model_bytes + max((_memory(plan, task) for task in rest), default=0)
    on_device = plan.parameters.get("device") not in (None, "cpu")
    return Forecast(
        written=size,
        files=files,
        memory=max(resident_bytes() or 0, PROCESS) + (0 if on_device else memory),
        device_memory=memory if on_device else 0,
        read=sum(map(plan.bytes_of, rest)),
    )


def _memory(plan: Plan, task: Task) -> int:
    """Bytes of the arrays of a task, of the layers that its cells replay, and of its judge."""
    trace, limit = plan.trace_of(task), task.options.get("memory")
    cells = [replay_bytes(trace, cell.policy, len(task.layers), limit) for cell in task.cells]
    judge = _judge_bytes(trace) if "judge" in task.options else 0
    return plan.bytes_of(task) + max(cells, default=0) + judge


def _judge_bytes(trace: Trace) -> int:
    """Bytes of the model that judges a trace: weights, the full cache, and some rows of logits."""
    from kvsim.recorder.counting import count_model  # noqa: PLC0415  transformers
    from kvsim.recorder.head import LOGITS  # noqa: PLC0415  as above

    model = object_at(trace.meta, "model")
    try:
        counts = count_model(object_at(model, "config"))
    except KvsimError:  # the judge says what is wrong
        return 0
    item = getattr(torch, str(model.get("dtype")), torch.float32).itemsize
    entries = trace.n_pos * sum(heads * (dim + value) for _, heads, dim, value in trace.sizes)
    logits = min(LOGITS, (trace.n_pos - trace.prompt_len) * counts["vocab"])
    return int(item * (counts["parameters"] + 2 * entries + 3 * logits))


def _written(plan: Plan, tasks: Sequence[Task]) -> tuple[float, int]:
    """Bytes and files of a run folder, with the parts of the tasks."""
    written, files = 3_000.0 + _TABLE, 5 + len(tasks)
    for task in tasks:
        trace = plan.trace_of(task)
        rows = len(task.cells) * len(task.metrics) * len(task.layers) * trace.n_heads
        written += _TABLE + _CELL * len(task.cells) + 2 * rows * _ROW_BYTES
        if plan.records and task.cells:
            files += 1
            of_layer = 100 + 0.2 * trace.n_pos * trace.n_heads  # evictions, compressed
            written += 2 * len(task.cells) * len(task.layers) * of_layer
    if plan.records:
        files += 1 + sum(2 + len(cell.layers or cell.trace.layer_ids) for cell in plan.cells)
        written += _RECORD * len(plan.cells)
    return written, files
