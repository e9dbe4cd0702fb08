"""Forecast of replays and live runs, from the shapes of their traces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvsim.core.lazy import torch
from kvsim.core.shared_results import DEFAULT_MEMORY
from kvsim.core.trace import Trace
from kvsim.engine.layers import replay_bytes
from kvsim.errors import KvsimError
from kvsim.schema import object_at
from kvsim.store.forecast import PROCESS, Forecast, resident_bytes
from kvsim.sweeps.tasks import layer_bytes

if TYPE_CHECKING:
    from kvsim.sweeps.driver import Plan
    from kvsim.sweeps.tasks import Task

#: Bytes of a Table without rows, of a row (of a metric, a layer and a KV head) in a part and in the
#: results, of a cell's documents, and of a layer of a record, and of one of its entries.
_TABLE, _ROW, _CELL, _LAYER, _ENTRY = 9_500.0, 20, 400, 200, 0.4
#: Bytes of the description of a run, and of that of a record in its group.
_DOCUMENTS, _RECORD = 3_000.0, 2_300


def forecast(plan: Plan, rest: Sequence[Task]) -> Forecast:
    """Return what the unfinished tasks of a plan take."""
    memory, size = 0, _DOCUMENTS + _TABLE
    for task in rest:
        trace, cells, layers = plan.trace_of(task), len(task.cells), len(task.layers)
        limit = task.options.get("memory") or DEFAULT_MEMORY
        held = [min(limit, layers * replay_bytes(trace, x.policy)) for x in task.cells]
        judge = _judge_bytes(trace) if "judge" in task.options else 0
        memory = max(memory, layers * layer_bytes(trace) + max(held, default=0) + judge)
        size += _TABLE + cells * layers * trace.n_heads * len(task.metrics) * _ROW + cells * _CELL
        if plan.options["records"]:
            size += cells * layers * (_LAYER + trace.n_pos * trace.n_heads * _ENTRY)
    memory += plan.model_bytes
    size += _RECORD * len(plan.cells) * plan.options["records"]
    on_device = plan.parameters.get("device") not in (None, "cpu")
    return Forecast(
        written=0 if plan.options["out"] is None else size,
        memory=max(resident_bytes() or 0, PROCESS) + (0 if on_device else memory),
        device_memory=memory if on_device else 0,
    )


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
