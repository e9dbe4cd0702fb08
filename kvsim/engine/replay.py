"""`replay`: from a trace, a policy and a budget to a Record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.core.checks import resolve_device
from kvsim.core.lazy import torch
from kvsim.core.parameters import of_a_user
from kvsim.core.policy import PolicyLike
from kvsim.core.record import Plans, Record, facts_of
from kvsim.core.shared_results import DEFAULT_MEMORY
from kvsim.engine.block import Block
from kvsim.engine.checks import Setup
from kvsim.engine.depth import Descent, descend, recorded
from kvsim.engine.layers import LayerRun, layers_to_replay, runs
from kvsim.engine.reading import read
from kvsim.engine.rows import goes_by_rows, replay_rows
from kvsim.engine.source import TraceSource, ended
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
    """Replay `policy` at `budget` entries per KV head on a recorded trace.

    Open loop: q, k, v are those of the full-cache run (see docs/concepts.md).

    Args:
        trace: a Trace, its path or URL, or the name of a sample.
        policy: a Policy, its name, or a bare scorer.
        budget: entries, a share of the trace's length such as "25%" or of the tokens so far such as
            "25%so-far", or bytes such as "64MiB" (`kvsim.core.budgets`).
        interval: rows between events after the prompt; the policy's own by default.
        prefill: whether the event that ends the prefill fires; by default the policy's choice.
        compress: whether that event fires after the whole prompt, after the context and before the
            question, or after both; and whether events follow the questions of later turns
            (`kvsim.core.policy.Schedule`); by default the policy's choice. With a compressed
            context, rows of the question count as rows after the prompt.
        prefill_chunk: rows of the prompt between events: each chunk is compressed before the next
            one attends. One event by default.
        layers: indices in the trace; by default all layers without a sliding window, which bounds
            the cache by itself.
        device: for the computation.
        memory: bytes that a block of layers may take, 2 GiB by default; a larger trace is replayed
            block by block.
        internals: keep scores, quotas and notes of every event; or only the notes with these names,
            which take little memory.
        progress: called with (layers done, layers).

    Returns:
        A Record: the row after which each entry left, int32 [layer, head, pos].

    Raises:
        BudgetError: the policy has no rule for the budget.
        NeedsError: the trace lacks an array or a context that the policy needs.
        PolicyError: the policy has no rule for the trace.
        ScoreError: a score that is NaN or +inf.
        MemoryLimitError: one layer does not fit into `memory`.

    Example:
        >>> record = kvsim.replay("sample", "tova", 64, interval=32)
        >>> record.evicted_at.shape, record.events[:2]
        ((3, 4, 472), [225, 257])
    """
    terms = interval, prefill, compress, prefill_chunk
    setup = Setup(as_trace(trace), policy, budget, None, *terms).checked(memory)
    where: Any = {"layers": layers, "device": resolve_device(device), "memory": memory}
    return run(setup, internals=internals, progress=progress, **where)


def run(
    setup: Setup,
    *,
    layers: Sequence[int] | None = None,
    device: str = "cpu",
    memory: int | None = None,
    internals: bool | frozenset[str] = False,
    progress: Callable[[int, int], None] | None = None,
    by_row: bool = True,
    copied: bool | None = None,
) -> Record:
    """`replay` after the checks.

    by_row: allow blocks of rows for an interval of 1. copied: read copies of a trace in memory; by
    default for a policy with pieces of a user, which may write to them.
    """
    trace, policy = setup.trace, setup.policy
    memory = DEFAULT_MEMORY if memory is None else memory
    chosen = layers_to_replay(trace, layers)
    owners = [trace.owners[layer] for layer in chosen]
    evicted_at = np.empty((len(chosen), setup.by_set.n_heads, trace.n_pos), dtype=np.int32)
    plans, reads, done = list[Plans](), None, 0
    if copied is None:
        copied = any(of_a_user(type(piece)) for level in policy.levels for piece in level)
    with torch.inference_mode():
        look = recorded(trace, setup.setting(), device, copied=copied)
        descent = descend(policy, trace.n_layers, trace.prompt_len, look)
        unique = [*dict.fromkeys(owners)]
        for layer_run in runs(setup.by_set, unique, policy, descent=descent, memory=memory):
            source = layer_run.source(device, memory, copied=copied)
            of_block, decisions = _replayed(setup, layer_run, source, internals, by_row=by_row)
            plans += decisions
            for layer, of_layer in zip(layer_run.layers, of_block, strict=True):
                evicted_at[[owner == layer for owner in owners]] = of_layer
                done += owners.count(layer)
            if progress is not None:
                progress(done, len(chosen))
        if policy.sparse is not None:
            behind = ended(trace, setup.ends[0])
            of_policy: Any = policy.sparse, evicted_at, setup.budget, chosen, device
            reads = read(behind, *of_policy, copied=copied)
    # rows that run through all layers again get new positions
    restarted = descent is not None and descent.selection.restarted
    return as_record(
        setup,
        evicted_at,
        chosen,
        descent=descent,
        reads=reads,
        digest=trace.fingerprint if trace.path is not None else "",
        positions="slot" if restarted else policy.positions,
        internals=tuple(plans),
    )


def _replayed(
    setup: Setup,
    layer_run: LayerRun,
    source: TraceSource,
    internals: bool | frozenset[str],
    *,
    by_row: bool,
) -> tuple[NDArray[np.int32], list[Plans]]:
    """`evicted_at` [L, H, T] of layers replayed together, and their decisions."""
    setting = setup.setting(layer_run.trace)
    block = Block(source, setup.policy, setting, layer_run.layers)
    events, plans = () if layer_run.uncut else setting.events, list[Plans]()
    if by_row and internals is not True and setting.interval == 1 and goes_by_rows(block):
        replay_rows(block, events)
    else:
        plans = block.fire(events, internals)
    evicted_at, positions = block.evicted_at.cpu().numpy(), layer_run.trace.positions.numpy()
    return at_all_positions(evicted_at, positions, setup.trace.n_pos), plans


def as_record(
    setup: Setup,
    evicted_at: NDArray[np.int32],
    layers: Sequence[int],
    *,
    descent: Descent | None,
    **more: Any,
) -> Record:
    """The Record of a policy's decisions; more: attributes that differ by run."""
    trace, policy, schedule = setup.trace, setup.policy, setup.schedule
    return Record(
        evicted_at=evicted_at,
        policy=policy.name,
        params=policy.params,
        per_query_head=policy.per_query_head,
        storage=policy.storage,
        schedule=schedule,
        facts=replace(facts_of(policy, schedule), share=setup.share),
        budget=setup.budget,
        prompt_len=trace.prompt_len,
        layers=tuple(layers),
        layer_ids=tuple(trace.layer_ids[layer] for layer in layers),
        trace=trace.name,
        remark="\n".join(setup.remarks(descent)),
        selection=None if descent is None else descent.selection,
        **more,
    )


def at_all_positions(
    evicted_at: NDArray[np.int32], rows: NDArray[np.int64], n_pos: int
) -> NDArray[np.int32]:
    """Return `evicted_at` of the rows [k], [L, H, k], for all positions, [L, H, n_pos]."""
    if len(rows) == n_pos:
        return evicted_at
    out = np.empty((*evicted_at.shape[:2], n_pos), np.int32)
    out[:] = np.arange(n_pos) - 1  # visible to no row
    gone = evicted_at != NEVER
    out[..., rows] = np.where(gone, rows[np.where(gone, evicted_at, 0)], NEVER)
    return out
