"""`replay`: from a trace, a policy and a budget to a Record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.core.arguments import share_of
from kvsim.core.budgets import budgeted
from kvsim.core.checks import resolve_device
from kvsim.core.lazy import torch
from kvsim.core.parts import by_query_head
from kvsim.core.policy import Policy, PolicyLike, Schedule
from kvsim.core.reading import Reads
from kvsim.core.record import Plans, Record, facts_of
from kvsim.core.shared_results import DEFAULT_MEMORY
from kvsim.core.trace import Trace
from kvsim.core.view import Setting
from kvsim.engine.block import Block
from kvsim.engine.checks import check_cell, check_options, remarks, whole
from kvsim.engine.depth import Descent, descent_of
from kvsim.engine.layers import replayed, runs
from kvsim.engine.reading import read
from kvsim.engine.rows import goes_by_rows, replay_rows
from kvsim.engine.source import ended
from kvsim.policies import as_policy
from kvsim.schema import NEVER, Compress
from kvsim.store.opening import TraceLike, as_trace


def replay(
    trace: TraceLike,
    policy: PolicyLike,
    budget: int | str,
    *,
    interval: int | None = None,
    prefill: bool | None = None,
    compress: Compress | None = None,
    prefill_chunk: int | None = None,
    layers: Sequence[int] | None = None,
    device: str = "cpu",
    memory: int | None = None,
    internals: bool | frozenset[str] = False,
    progress: Callable[[int, int], None] | None = None,
) -> Record:
    """Return what the cache would have kept under `policy` at `budget` entries per KV head.

    Open loop: q, k, v are those of the full-cache run (see docs/concepts.md).

    Args:
        trace: a Trace, its path or URL, or the name of a sample.
        policy: a Policy, its name, or a scorer alone.
        budget: entries, a share of the trace's length such as "25%" or of the tokens so far such as
            "25%so-far", or bytes such as "64MiB" (`kvsim.core.budgets`).
        interval: rows between events after the prompt; the policy's own by default.
        prefill: whether the event that ends the prefill fires; as the policy says by default.
        compress: whether that event fires after the whole prompt, after the context and before the
            question, or after both; and whether events follow the questions of later turns
            (`kvsim.core.policy.Schedule`); as the policy says by default. What follows the context
            reads and is stored as what follows the prompt.
        prefill_chunk: rows of the prompt between events: each chunk is compressed before the next
            one attends. One event by default.
        layers: indices in the trace; by default all that see the whole text, because a sliding
            window bounds the cache of the others by itself.
        device: where to compute.
        memory: bytes that a block of layers may take, 2 GiB by default; a larger trace is replayed
            block by block.
        internals: keep scores, quotas and notes of every event; or the notes of these names alone,
            which take little memory.
        progress: called with (layers done, layers).

    Returns:
        When each entry of each head left, int32 [layer, head, pos].

    Raises:
        BudgetError: the policy has no rule for the budget.
        NeedsError: the trace lacks an array or a context that the policy needs.
        PolicyError: the policy has no rule for the trace.
        ScoreError: a score that is no number below infinity.
        MemoryLimitError: one layer does not fit into `memory`.
    """
    trace, policy = as_trace(trace), as_policy(policy)
    check_options(memory, internals)
    schedule = policy.schedule.override(interval, prefill, compress, prefill_chunk)
    entries = 0
    if isinstance(budget, str):
        policy, entries = budgeted(policy, trace, budget)
    else:
        entries = whole(budget)
    how: Any = {"layers": layers, "device": resolve_device(device), "memory": memory}
    record = run(trace, policy, entries, schedule, internals=internals, progress=progress, **how)
    return replace(record, facts=replace(record.facts, share=share_of(budget)))


def run(
    trace: Trace,
    policy: Policy,
    budget: int,
    schedule: Schedule,
    *,
    layers: Sequence[int] | None = None,
    device: str = "cpu",
    memory: int | None = None,
    internals: bool | frozenset[str] = False,
    progress: Callable[[int, int], None] | None = None,
    checked: bool = False,
    by_row: bool = True,
) -> Record:
    """`replay` with the schedule resolved.

    checked: `check_cell` has passed already. by_row: an interval of 1 may go in blocks of rows.
    """
    policy, trace = policy.at(budget), trace.part()
    source = by_query_head(trace) if policy.per_query_head else trace
    if not checked:
        check_cell(trace, policy, budget, memory, schedule)
    chosen = replayed(trace, layers)
    evicted_at = np.empty((len(chosen), source.n_heads, trace.n_pos), dtype=np.int32)
    owners = [trace.owners[layer] for layer in chosen]
    plans: list[Plans] = []
    done, reads = 0, None
    with torch.inference_mode():
        setting = setting_of(trace, policy, budget, schedule)
        descent = descent_of(trace, policy, setting, device)
        parts = [*dict.fromkeys(owners)]
        for part in runs(source, parts, policy, descent=descent, memory=memory):
            setting = setting_of(trace, policy, budget, schedule, part.trace)
            block = Block(part.source(device, memory), policy, setting, part.layers)
            positions = part.trace.positions.numpy()
            rows = () if part.whole else block.setting.events
            if by_row and internals is not True and schedule.interval == 1 and goes_by_rows(block):
                replay_rows(block, rows)
            else:
                plans += block.fire(rows, internals)
            result = placed(block.evicted_at.cpu().numpy(), positions, trace.n_pos)
            for layer, of_layer in zip(part.layers, result, strict=True):
                evicted_at[[owner == layer for owner in owners]] = of_layer
                done += owners.count(layer)
            if progress is not None:
                progress(done, len(chosen))
        if policy.reader is not None:
            first = schedule.ends(trace.prompt_len, trace.header.context_len)[0]
            reads = read(
                *(ended(trace, first), policy.reader, evicted_at, budget, chosen),
                device=device,
                memory=DEFAULT_MEMORY if memory is None else memory,
            )
    # rows that run through all layers again get new positions
    restarted = descent is not None and descent.selection.restarted
    return record_of_run(
        *(trace, policy, budget, schedule, descent, evicted_at, reads, chosen),
        digest=trace.fingerprint if trace.path is not None else "",
        positions="slot" if restarted else policy.positions,
        internals=tuple(plans),
    )


def record_of_run(
    trace: Trace,
    policy: Policy,
    budget: int,
    schedule: Schedule,
    descent: Descent | None,
    evicted_at: NDArray[np.int32],
    reads: Reads | None,
    layers: Sequence[int],
    **more: Any,
) -> Record:
    """The Record of what a policy decided in some layers; more: attributes that differ by run."""
    return Record(
        evicted_at=evicted_at,
        policy=policy.name,
        params=policy.params,
        per_query_head=policy.per_query_head,
        storage=policy.storage,
        schedule=schedule,
        facts=facts_of(policy, schedule),
        budget=budget,
        prompt_len=trace.prompt_len,
        layers=tuple(layers),
        layer_ids=tuple(trace.layer_ids[layer] for layer in layers),
        trace=trace.name,
        remark="\n".join(remarks(trace, policy, budget, schedule, descent)),
        selection=None if descent is None else descent.selection,
        reads=reads,
        **more,
    )


def setting_of(
    trace: Trace, policy: Policy, budget: int, schedule: Schedule, part: Trace | None = None
) -> Setting:
    """Return the setting of events; part: the trace of the rows that the layers compute."""
    protection, part = policy.protection(budget), part or trace
    context_len = trace.header.context_len
    ends = tuple(schedule.ends(trace.prompt_len, context_len))
    last = ends[-1] if part.n_pos == trace.n_pos else part.prompt_len
    return Setting(
        budget=budget,
        prompt_len=last,
        ends=(*ends[:-1], last),
        interval=schedule.interval,
        n_layers=trace.n_layers,
        clairvoyant=policy.scorer.reads.future,
        protected=protection.size(ends[-1]),
        longest=partial(schedule.longest, trace.prompt_len, budget, context_len=context_len),
        windowed=trace.windowed,
        events=tuple(schedule.rows(*part.extent)),
        scorer_protection=cache(policy.scorer.protection),
        protected_ends=(protection.first(last), protection.recent),
        response=part.prompt_len,
        policy=policy.name,
    )


def placed(evicted_at: NDArray[np.int32], at: NDArray[np.int64], n_pos: int) -> NDArray[np.int32]:
    """Return evicted_at [L, H, n_pos] of one over the rows at positions `at` alone, [L, H, k]."""
    if len(at) == n_pos:
        return evicted_at
    out = np.empty((*evicted_at.shape[:2], n_pos), np.int32)
    out[:] = np.arange(n_pos) - 1  # visible to no row
    gone = evicted_at != NEVER
    out[..., at] = np.where(gone, at[np.where(gone, evicted_at, 0)], NEVER)
    return out
