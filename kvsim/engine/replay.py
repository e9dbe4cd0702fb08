"""`replay`: from a trace, a policy and a budget to a Record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.core.arguments import share_of
from kvsim.core.budgets import budgeted
from kvsim.core.checks import check_progress, resolve_device
from kvsim.core.lazy import torch
from kvsim.core.policy import Even, Policy, PolicyLike, Schedule, Uniform
from kvsim.core.reading import Reads
from kvsim.core.record import Plans, Record, facts_of
from kvsim.core.shared_results import DEFAULT_MEMORY, MEMO_BYTES
from kvsim.core.trace import Trace
from kvsim.core.view import Setting
from kvsim.engine.block import Block
from kvsim.engine.checks import check_cell, check_options, remarks, whole
from kvsim.engine.depth import Descent, descent_of
from kvsim.engine.layers import LayerRun, layers_per_block, replayed, runs
from kvsim.engine.reading import read
from kvsim.engine.rows import replay_rows
from kvsim.engine.source import TraceSource, ended, read_together
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
    options = ReplayOptions(layers, resolve_device(device), memory, internals, progress)
    check_progress(progress)
    schedule = policy.schedule.override(interval, prefill, compress, prefill_chunk)
    entries = 0
    if isinstance(budget, str):
        policy, entries = budgeted(policy, trace, budget)
    else:
        entries = whole(budget)
    record = run(trace, policy, entries, schedule, options)
    return replace(record, facts=replace(record.facts, share=share_of(budget)))


@dataclass(frozen=True)
class ReplayOptions:
    """How a replay runs: the keywords of `replay`, and what tests change about it.

    Attributes:
        checked: `check_cell` has passed already.
        by_row: replay an interval of 1 in blocks of rows where that is possible.
    """

    layers: Sequence[int] | None = None
    device: str = "cpu"
    memory: int | None = None
    internals: bool | frozenset[str] = False
    progress: Callable[[int, int], None] | None = None
    checked: bool = False
    by_row: bool = True


def run(
    trace: Trace, policy: Policy, budget: int, schedule: Schedule, options: ReplayOptions
) -> Record:
    """`replay` with the schedule resolved, and the options of tests."""
    policy, trace = policy.at(budget), trace.evicting
    source = trace.per_query_head() if policy.per_query_head else trace
    if not options.checked:
        check_cell(trace, policy, budget, options.memory, schedule)
    chosen = replayed(trace, options.layers)
    by_row = _goes_by_row(trace, policy, schedule, chosen, options)
    options = replace(options, by_row=by_row)
    settings = settings_of(trace, policy, budget, schedule)
    evicted_at = np.empty((len(chosen), source.n_heads, trace.n_pos), dtype=np.int32)
    plans: list[Plans] = []
    done = 0
    with torch.inference_mode():
        descent = descent_of(trace, policy, settings[-1], options.device)
        owners = [trace.owners[layer] for layer in chosen]
        parts = [*dict.fromkeys(owners)]
        for part in runs(source, parts, policy, descent=descent, memory=options.memory):
            result, decided = _replay(source, part, policy, settings, schedule, options)
            for layer, of_layer in zip(part.layers, result, strict=True):
                evicted_at[[owner == layer for owner in owners]] = of_layer
                done += owners.count(layer)
            plans += decided
            if options.progress is not None:
                options.progress(done, len(chosen))
    reads = None
    if policy.reader is not None:
        memory = DEFAULT_MEMORY if options.memory is None else options.memory
        with torch.inference_mode():
            first = schedule.ends(trace.prompt_len, trace.context_len)[0]
            reads = read(
                *(ended(trace, first), policy.reader, evicted_at, budget, chosen),
                device=options.device,
                memory=memory,
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
        codec=policy.codec,
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


def _replay(
    trace: Trace,
    run: LayerRun,
    policy: Policy,
    settings: Sequence[Setting],
    schedule: Schedule,
    options: ReplayOptions,
) -> tuple[NDArray[np.int32], list[Plans]]:
    """Replay layers as one block: `evicted_at` [L, H, T], and its events on request."""
    part, places = trace if run.rows is None else trace.only(run.rows), run.layers
    if len(trace.header.readers(places[0])) > 1:
        part, places = read_together(trace, places[0]), (0,)
    events = schedule.rows(*part.extent)
    if run.rows is not None:
        settings = [replace(x, prompt_len=part.prompt_len) for x in settings]
    protection = policy.protection(settings[-1].budget)
    future: dict[str, Any] = {
        "events": tuple(events),
        "protected_ends": (protection.first(settings[-1].prompt_len), protection.recent),
        "response": part.prompt_len,
    }
    most = MEMO_BYTES if options.memory is None else options.memory // 16
    device = torch.device(options.device)
    each = layers_per_block(part, policy, options.memory) if policy.apart else None
    source = TraceSource(part, places, device, most=most, each=each)
    layers = torch.tensor(run.layers, device=device)
    block = Block(source, policy, [replace(x, **future) for x in settings], layers)
    plans: list[Plans] = []
    if run.whole:
        events = []
    if options.by_row:
        replay_rows(block, events)
        events = []
    for row in events:
        choice = block.choose(row)
        if names := options.internals:
            of_event = choice.plans()
            plans += of_event if names is True else [x.brief(names) for x in of_event]
        block.apply(choice)
        del choice  # the next event's attention takes its place
    evicted_at = block.evicted_at.cpu().numpy()
    if run.rows is None:
        return evicted_at, plans
    positions = part.positions.numpy()
    return placed(evicted_at, positions, trace.n_pos), [_at(p, positions) for p in plans]


def _goes_by_row(
    trace: Trace, policy: Policy, schedule: Schedule, layers: Sequence[int], options: ReplayOptions
) -> bool:
    """Whether events fire after every row and the faster way through them applies."""
    return (
        options.by_row
        and schedule.interval == 1
        and policy.scorer.per_row
        and isinstance(policy.allocator, Uniform)
        and isinstance(policy.layer_budgets, Even)
        and policy.codec is None
        and policy.so_far is None
        and not options.internals
        and not any(trace.formulas[layer].sinks for layer in layers)
    )


def settings_of(trace: Trace, policy: Policy, budget: int, schedule: Schedule) -> list[Setting]:
    """Return the settings of prefill events, ascending; the last is that of all later events."""
    protection = policy.protection(budget)
    longest = partial(schedule.longest, trace.prompt_len, budget, context_len=trace.context_len)
    return [
        Setting(
            budget=budget,
            prompt_len=end,
            interval=schedule.interval,
            n_layers=trace.n_layers,
            clairvoyant=policy.scorer.reads.future,
            protected=protection.size(end),
            longest=longest,
            windowed=trace.windowed,
            policy=policy.name,
        )
        for end in schedule.ends(trace.prompt_len, trace.context_len)
    ]


def placed(evicted_at: NDArray[np.int32], at: NDArray[np.int64], n_pos: int) -> NDArray[np.int32]:
    """Return evicted_at [L, H, n_pos] of one over the rows at positions `at` alone, [L, H, k]."""
    out = np.empty((*evicted_at.shape[:2], n_pos), np.int32)
    out[:] = np.arange(n_pos) - 1  # visible to no row
    gone = evicted_at != NEVER
    out[..., at] = np.where(gone, at[np.where(gone, evicted_at, 0)], NEVER)
    return out


def _at(plans: Plans, at: NDArray[np.int64]) -> Plans:
    """Return plans by position of those over the rows at positions `at` alone."""
    pos = np.where(plans.pos < 0, -1, at[plans.pos])
    return replace(plans, row=int(at[plans.row]), pos=pos)
