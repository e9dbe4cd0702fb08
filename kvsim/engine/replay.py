"""`replay`: from a trace, a policy and a budget to a Record."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence

import numpy as np
import torch

from kvsim.composition import Even, Policy, Schedule, Uniform, is_count
from kvsim.engine.block import Block
from kvsim.engine.rows import replay_rows
from kvsim.engine.source import TraceSource
from kvsim.errors import BudgetError, MemoryLimitError, PolicyError
from kvsim.record import Plans, Record
from kvsim.schema import NEVER
from kvsim.trace import Trace
from kvsim.view import LOGIT_BYTES, Setting

#: Bytes of keys, queries and working space that one block of layers may take by default.
DEFAULT_MEMORY = 2 << 30


def replay(
    trace: Trace,
    policy: Policy,
    budget: int,
    *,
    interval: int | None = None,
    prefill: bool | None = None,
    layers: Sequence[int] | None = None,
    device: str = "cpu",
    memory: int | None = None,
    internals: bool = False,
    progress: Callable[[int, int], None] | None = None,
    _poison: bool = False,
    _by_row: bool = True,
) -> Record:
    """What the cache would have kept under `policy` at `budget` entries per KV head.

    interval, prefill: replace the policy's own schedule (rows between events; whether the event
    that ends the prefill fires). layers: indices in the trace, all by default. memory: bytes that a
    block of layers may take, 2 GiB by default; a larger trace is replayed block by block.
    internals: keep scores and quotas of every event. progress: called with (layers done, layers).

    Open loop: q, k, v are those of the full-cache run (see docs/concepts.md). Errors: BudgetError
    where the policy has no rule for the budget, ScoreError, MemoryLimitError.
    """
    source = trace.per_query_head() if policy.per_query_head else trace
    budget = whole(budget)
    schedule = policy.schedule.override(interval, prefill)
    check_cell(trace, policy, budget, memory, schedule)
    chosen = tuple(range(trace.n_layers)) if layers is None else tuple(layers)
    for layer in chosen:
        if not is_count(layer, 0) or layer >= trace.n_layers:
            raise PolicyError(f"layer is {layer!r}; expected 0..{trace.n_layers - 1}")
    if not chosen or len(set(chosen)) < len(chosen):
        raise PolicyError(f"layers are {list(chosen)}; expected some layers, each of them once")
    events = schedule.rows(trace.prompt_len, trace.n_pos)
    evicted_at = np.empty((len(chosen), source.n_heads, trace.n_pos), dtype=np.int32)
    plans: list[Plans] | None = [] if internals else None
    by_row = (
        _by_row
        and schedule.interval == 1
        and policy.scorer.per_row
        and isinstance(policy.allocator, Uniform)
        and isinstance(policy.layer_budgets, Even)
        and not internals
    )
    setting = _setting(trace, policy, budget, schedule)
    done = 0
    together = policy.layer_budgets.across_layers
    if together and list(chosen) != list(range(chosen[0], chosen[0] + len(chosen))):
        raise PolicyError(
            f"{policy.name}: the layers share one budget, and layers {list(chosen)} were to be "
            "replayed; expected consecutive ones"
        )
    most = len(chosen) if together else layers_per_block(source, policy, memory)
    runs = _blocks(chosen, most)
    with torch.inference_mode():
        for run in runs:
            block = Block(
                TraceSource(source, slice(run[0], run[-1] + 1), torch.device(device)),
                policy,
                setting,
                torch.tensor(run, device=device),
                poison=_poison,
                internals=plans,
            )
            if by_row:
                replay_rows(block, events)
            else:
                for row in events:
                    block.event(row)
            evicted_at[done : done + len(run)] = block.evicted_at.cpu().numpy()
            done += len(run)
            if progress is not None:
                progress(done, len(chosen))
    return Record(
        evicted_at=evicted_at,
        policy=policy.name,
        params=policy.params,
        budget=budget,
        interval=schedule.interval,
        prefill=schedule.prefill,
        prompt_len=trace.prompt_len,
        layers=chosen,
        trace=trace.name,
        digest=trace.digest if trace.path is not None else "",
        positions=policy.positions,
        per_query_head=policy.per_query_head,
        own_schedule=schedule == policy.schedule,
        remark=_remark(trace, policy, budget, schedule),
        internals=tuple(plans or ()),
    )


def whole(budget: int) -> int:
    """The budget as an int. BudgetError for anything else, a share or a truth value included."""
    try:
        if not isinstance(budget, bool) and operator.index(budget) <= NEVER:
            return operator.index(budget)
    except TypeError:
        pass
    raise BudgetError(
        f"budget is {budget!r}; expected a whole number of entries per KV head, at most {NEVER}"
    )


def check_cell(
    trace: Trace,
    policy: Policy,
    budget: int,
    memory: int | None,
    schedule: Schedule | None = None,
) -> None:
    """Raise what a replay would refuse, without any work.

    BudgetError: no rule for the budget. NeedsError: an array that the trace lacks. PolicyError: an
    event before there are rows enough for the scorer. MemoryLimitError.
    """
    schedule = schedule or policy.schedule
    missing = sorted(name for name in policy.scorer.needs if not trace.has(name))
    if missing:
        trace.read(missing[0])  # says what is missing and how it is recorded
    if whole(budget) < max(trace.n_pos, 1):  # a budget that never binds needs no rule
        policy.check_budget(
            budget,
            prompt_len=trace.prompt_len,
            n_layers=trace.n_layers,
            schedule=schedule,
        )
        first = next((r for r in schedule.rows(trace.prompt_len, trace.n_pos) if r >= budget), None)
        least = policy.scorer.least_rows
        if first is not None and first + 1 < least:
            raise PolicyError(
                f"{policy.name}: the first event that evicts fires after {first + 1} rows; "
                f"expected at least {least}; use a longer prompt, another schedule or other "
                "parameters"
            )
    policy.scorer.check(trace, schedule)
    layers_per_block(trace.per_query_head() if policy.per_query_head else trace, policy, memory)


def _remark(trace: Trace, policy: Policy, budget: int, schedule: Schedule) -> str:
    """What a reader of the outcome should know; empty for nothing."""
    events = schedule.rows(trace.prompt_len, trace.n_pos)
    fires = schedule.prefill or schedule.interval is not None  # `full` is not meant to
    if budget < trace.n_pos and policy.bounded and fires and not any(e >= budget for e in events):
        first = f"; the first event fires after row {events[0]}" if events else ""
        return (
            f"{policy.name}: nothing is evicted at budget {budget}, because no event fires while "
            f"more is held ({trace.n_pos} tokens{first}); give an interval that fits the trace"
        )
    return policy.remark(budget)


def _setting(trace: Trace, policy: Policy, budget: int, schedule: Schedule) -> Setting:
    return Setting(
        budget=budget,
        prompt_len=trace.prompt_len,
        interval=schedule.interval,
        prefill=schedule.prefill,
        n_layers=trace.n_layers,
        clairvoyant=policy.scorer.clairvoyant,
        protected=policy.protection(budget).size(trace.prompt_len),
        longest=schedule.longest(trace.prompt_len, budget),
    )


def layers_per_block(trace: Trace, policy: Policy, memory: int | None) -> int:
    """Layers whose q, k, v and working space fit the memory budget, MemoryLimitError for none."""
    limit = DEFAULT_MEMORY if memory is None else memory
    item = torch.empty((), dtype=trace.dtype).element_size()
    stored = (trace.n_qheads + 2 * trace.n_heads) * trace.n_pos * trace.dim * item
    # gathered keys and values of the largest event, and what a scorer makes of them (turned, put
    # in other order); logits, mask and attention of the window; projections in two layouts
    event = 4 * trace.n_heads * trace.n_pos * trace.dim * item
    event += 3 * trace.n_qheads * min(policy.rows, trace.n_pos) * trace.n_pos * item
    if "o_proj" in policy.scorer.needs and trace.has("o_proj"):
        event += 2 * math.prod(trace.source.shapes["o_proj"][1:]) * item
    layers, what = 1, "one layer of this trace needs"
    if policy.layer_budgets.across_layers:
        layers, what = trace.n_layers, f"{policy.name} shares a budget over all layers, which need"
    need = layers * (stored + event) + 4 * LOGIT_BYTES  # and those of one block of rows
    if need > limit:
        raise MemoryLimitError(
            f"{what} {need / 2**20:.0f} MiB to replay, the memory budget is "
            f"{limit / 2**20:.0f} MiB; give at least --memory {-(-need // 2**20)}MiB"
        )
    return layers * max(1, int((limit - 4 * LOGIT_BYTES) // (need - 4 * LOGIT_BYTES)))


def _blocks(layers: Sequence[int], most: int) -> list[list[int]]:
    """Runs of consecutive layers, each at most `most` long."""
    out: list[list[int]] = []
    for layer in layers:
        if out and len(out[-1]) < most and out[-1][-1] + 1 == layer:
            out[-1].append(layer)
        else:
            out.append([layer])
    return out
