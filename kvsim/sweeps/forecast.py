"""Forecast of replays and live runs: from the shapes of their traces, and the FLOPs of policies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvsim.core.flops import Event, attention_flops, causal_pairs, event_flops, unknown
from kvsim.core.threads import threads_for
from kvsim.core.trace import Trace
from kvsim.engine.layers import replay_bytes
from kvsim.store.forecast import PROCESS, Forecast, Rates, memory_of
from kvsim.sweeps.cells import Cell
from kvsim.sweeps.shards import Kept, Shards
from kvsim.sweeps.workers import processes

if TYPE_CHECKING:
    from kvsim.sweeps.planning import Plan
    from kvsim.sweeps.tasks import Task

#: Small operations of an event in a layer, of a metric there, and of one of events at every row.
_EVENT, _METRIC, _ROW = 100, 30, 10

#: Small operations that imports, and what is built once, take.
_FIRST = 250_000

#: Times that a task computes the full attention of its trace, and bytes that it decodes while a
#: product with a vector reads one.
_FULL, _DECODING = 1.5, 1 / 60

#: Bytes of a Table without rows, of a row (of a metric, a layer and a KV head), and of a cell's
#: documents in a part, and with a record.
_TABLE, _ROW_BYTES, _CELL, _RECORD = 9_500, 10, 400, 2_300


def forecast(
    plan: Plan, kept: Kept, jobs: int | None = 1, tasks: Sequence[Task] | None = None
) -> Forecast:
    """What the unfinished tasks of a plan take; time of all processes. jobs, tasks: as `work`."""
    tasks = plan.tasks if tasks is None else tasks
    rest = plan.left(kept, tasks)
    with threads_for(plan.traces):
        rates = Rates.measured(str(plan.parameters.get("device") or "cpu"))

    def work(some: Sequence[Task]) -> list[float]:
        of_each = (_work(plan, task, rates) for task in some)
        return [sum(column) for column in zip((0.0, 0.0), *of_each, strict=True)]

    flops, seconds = work(rest)
    seconds += _FIRST * rates.call * bool(rest)
    past = [each for each in tasks if each.key in kept.parts and each.cells]
    # by how much the forecast of finished tasks was wrong
    seconds *= sum(kept.parts[each.key].seconds for each in past) / (work(past)[1] or 1) or 1
    count = processes(jobs, plan.flops, len(tasks), plan.traces)
    written, files = _written(plan, rest) if isinstance(kept, Shards) else (0.0, 0)
    memory = max((_memory(plan, task) for task in rest), default=0)
    return Forecast(
        written=written,
        files=files,
        memory=max(memory_of("VmRSS") or 0, PROCESS) + memory,
        flops=flops,
        seconds=seconds / count,
        read=sum(map(plan.bytes_of, rest)),
    )


def _work(plan: Plan, task: Task, rates: Rates) -> tuple[float, float]:
    """Return FLOPs and seconds of a task, of one processor."""
    trace, layers = plan.trace_of(task), len(task.layers)
    pairs, entry = causal_pairs(trace.n_pos), trace.dim + trace.value_dim
    once = _FULL * layers * attention_flops(pairs, trace.n_qheads, entry)
    small = 0.0
    flops, work = once, plan.model
    for cell in task.cells:
        events = cell.schedule.rows(*trace.extent)
        of_event = _EVENT + _METRIC * len(task.metrics)
        small += layers * len(events) * (_ROW if cell.schedule.interval == 1 else of_event)
        kept = min(trace.n_pos, cell.budget + (cell.schedule.interval or trace.n_pos) / 2)
        after = trace.n_pos - cell.schedule.ends(trace.prompt_len, trace.context_len)[0]
        flops += layers * attention_flops(after * kept, trace.n_qheads, entry)
        flops += layers * _scoring(trace, cell, events)
        if work is not None:  # of the rows before once, where there are no states
            flops += after * (work.row + work.logits)
            new = int(plan.parameters.get("max_new_tokens") or 0)
            small += work.layers * _EVENT * new + new * work.read / rates.stream / rates.call
    if work is not None:
        flops += (
            trace.n_pos * (work.row + work.logits) / max(1, len(plan.tasks) // len(plan.traces))
        )
    decoded = plan.bytes_of(task) / (_DECODING * rates.stream)
    return flops, flops / rates.products + small * rates.call + decoded


def _scoring(trace: Trace, cell: Cell, events: list[int]) -> float:
    """FLOPs of a policy's events in one layer; 0 of one with unknown pieces, or of a user's own."""
    total, before = 0.0, 0
    if cell.policy.foreign:
        return total
    for number, row in enumerate(events[:2]):  # the second stands for all later ones
        seen, since = row + 1, row + 1 - before
        entries = min(seen, cell.budget + since) if number else seen
        sizes = (entries, seen, since, cell.budget)
        prompt, later = row < trace.prompt_len, trace.n_pos - seen
        event = Event(trace, *sizes, prompt=prompt, later=later)
        if unknown(cell.policy, event):
            return 0.0
        total += (len(events) - 1 if number else 1) * event_flops(cell.policy, event).total
        before = seen
    return total


def _memory(plan: Plan, task: Task) -> int:
    """Bytes of the arrays of a task, and of the block of layers that its cells replay."""
    trace, limit = plan.trace_of(task), task.options.get("memory")
    cells = [replay_bytes(trace, cell.policy, len(task.layers), limit) for cell in task.cells]
    return plan.bytes_of(task) + max(cells, default=0)


def _written(plan: Plan, tasks: list[Task]) -> tuple[float, int]:
    """Bytes and files of a run folder, with the parts of the tasks."""
    written, files = 3_000.0 + _TABLE, 5 + 2 * len(tasks)
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
