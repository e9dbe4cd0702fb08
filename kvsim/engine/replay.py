"""`replay`: from a trace, a policy and a budget to a Record."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvsim.core.policy import Even, Policy, Schedule, Uniform, is_count
from kvsim.core.record import Plans, Record
from kvsim.core.trace import Trace
from kvsim.core.view import LOGIT_BYTES, Setting
from kvsim.engine.block import Block
from kvsim.engine.depth import Descent, descend, recorded
from kvsim.engine.rows import replay_rows
from kvsim.engine.source import TraceSource, check_unwindowed, unhidden, windows
from kvsim.errors import BudgetError, MemoryLimitError, PolicyError
from kvsim.schema import NEVER, plural

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
    internals: bool | frozenset[str] = False,
    progress: Callable[[int, int], None] | None = None,
    _poison: bool = False,
    _by_row: bool = True,
) -> Record:
    """What the cache would have kept under `policy` at `budget` entries per KV head.

    interval, prefill: replace the policy's own schedule (rows between events; whether the event
    that ends the prefill fires). layers: indices in the trace; by default all that see the whole
    text, because a sliding window bounds the cache of the others by itself. memory: bytes that a
    block of layers may take, 2 GiB by default; a larger trace is replayed block by block.
    internals: keep scores, quotas and notes of every event; or the notes of these names alone,
    which take little memory. progress: called with (layers done, layers).

    Open loop: q, k, v are those of the full-cache run (see docs/concepts.md). Errors: BudgetError
    where the policy has no rule for the budget, ScoreError, MemoryLimitError.
    """
    source = trace.per_query_head() if policy.per_query_head else trace
    budget = whole(budget)
    schedule = policy.schedule.override(interval, prefill)
    check_cell(trace, policy, budget, memory, schedule)
    chosen = _chosen(trace, layers)
    evicted_at = np.empty((len(chosen), source.n_heads, trace.n_pos), dtype=np.int32)
    plans: list[Plans] = []

    def note(made: Plans) -> None:
        plans.append(made if isinstance(internals, bool) else made.brief(internals))

    by_row = (
        _by_row
        and schedule.interval == 1
        and policy.scorer.per_row
        and isinstance(policy.allocator, Uniform)
        and isinstance(policy.layer_budgets, Even)
        and not internals
        and not any(trace.formulas[layer].sinks for layer in chosen)
    )
    setting = setting_of(trace, policy, budget, schedule)
    done = 0
    together = policy.layer_budgets.across_layers
    if together:
        _check_together(trace, policy, chosen)
    most = len(chosen) if together else layers_per_block(source, policy, memory)
    on = torch.device(device)
    with torch.inference_mode():
        descent = None
        if policy.propagation is not None:
            look = recorded(trace, setting, on)
            descent = descend(policy.propagation, trace.n_layers, trace.prompt_len, look)
        for run in _blocks(trace, chosen, most, policy, descent):
            part = source if run.rows is None else source.only(run.rows)
            read = TraceSource(part, run.layers, on)
            block = Block(
                read,
                policy,
                replace(setting, prompt_len=part.prompt_len),
                torch.tensor(run.layers, device=device),
                poison=read.poison if _poison else None,
                note=note if internals else None,
            )
            noted = len(plans)
            events = [] if run.whole else schedule.rows(part.prompt_len, part.n_pos)
            if by_row:
                replay_rows(block, events)
            else:
                for row in events:
                    block.event(row)
            if run.rows is not None:
                at = part.positions.numpy()
                plans[noted:] = [_at(one, at) for one in plans[noted:]]
            found = block.evicted_at.cpu().numpy()
            if run.rows is not None:
                found = placed(found, part.positions.numpy(), trace.n_pos)
            evicted_at[done : done + len(run.layers)] = found
            done += len(run.layers)
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
        positions=_positions(policy, descent),
        per_query_head=policy.per_query_head,
        own_schedule=schedule == policy.schedule,
        remark=_remark(trace, policy, budget, schedule, descent),
        selection=None if descent is None else descent.selection,
        internals=tuple(plans),
    )


def _chosen(trace: Trace, layers: Sequence[int] | None) -> tuple[int, ...]:
    """The layers to replay, by their place in the trace."""
    if layers is None:
        chosen = tuple(i for i in range(trace.n_layers) if i not in trace.windowed)
        if not chosen:
            raise PolicyError(
                f"{trace.name}: every layer that it holds has a sliding window that is shorter "
                f"than its {trace.n_pos} tokens: {windows(trace)}; expected layers that see the "
                "whole text, because a window bounds the cache by itself; record "
                f"{'' if trace.whole else 'other layers of the model, or '}a text of at most "
                f"{unhidden(trace)} tokens"
            )
        return chosen
    chosen = tuple(layers)
    for layer in chosen:
        if not is_count(layer, 0) or layer >= trace.n_layers:
            raise PolicyError(f"layer is {layer!r}; expected 0..{trace.n_layers - 1}")
        check_unwindowed(trace, layer)
    if not chosen or len(set(chosen)) < len(chosen):
        raise PolicyError(f"layers are {list(chosen)}; expected some layers, each of them once")
    return chosen


def _differ(trace: Trace, one: int, other: int) -> str:
    """In what two layers differ that see the whole text; empty if a block may hold both."""
    # a window that hides nothing is none
    a, b = (replace(trace.formulas[layer], window=None) for layer in (one, other))
    if a != b:
        names = ("scale", "softcap", "sinks")
        return next(name for name in names if getattr(a, name) != getattr(b, name))
    return "" if trace.ropes[one] == trace.ropes[other] else "rotary embedding"


def _check_together(trace: Trace, policy: Policy, chosen: Sequence[int]) -> None:
    """Raise PolicyError where layers that share a budget cannot be replayed as one block."""
    for layer in chosen:
        what = _differ(trace, chosen[0], layer)
        if what:
            left_out = f", beside a window in {windows(trace)}" if trace.windowed else ""
            raise PolicyError(
                f"{policy.name}: the layers share one budget, and layers {chosen[0]} and {layer} "
                f"of {trace.name} differ in their {what}{left_out}; expected layers that compute "
                "alike; take a policy that deals each layer its own budget, such as snapkv"
            )


def _sharing(trace: Trace) -> int:
    """Layers that see the whole text and are dealt budgets; 1 where there is none to replay."""
    return max(1, trace.n_layers - len(trace.windowed))


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
            n_layers=_sharing(trace),
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
    if policy.propagation is not None:
        if not trace.whole:
            raise PolicyError(
                f"{policy.name}: goes through the layers from the first one on, and the trace has "
                f"layers {list(trace.layer_ids)}; expected 0, 1, 2, ... to the model's last"
            )
        policy.propagation.check(trace.n_layers)
        if trace.windowed:
            raise PolicyError(
                f"{policy.name}: hands rows of the prompt from layer to layer, and {trace.name} "
                f"has a sliding window in {windows(trace)}; expected layers that see the whole "
                "text; take a policy that cuts each layer by itself, such as snapkv, or record a "
                f"text of at most {unhidden(trace)} tokens"
            )
    layers_per_block(trace.per_query_head() if policy.per_query_head else trace, policy, memory)


def _remark(
    trace: Trace, policy: Policy, budget: int, schedule: Schedule, descent: Descent | None
) -> str:
    """What a reader of the outcome should know; empty for nothing."""
    events = schedule.rows(trace.prompt_len, trace.n_pos)
    fires = schedule.prefill or schedule.interval is not None  # `full` is not meant to
    fires &= descent is None or not descent.selection.dropped  # rows that are gone say enough
    if budget < trace.n_pos and policy.bounded and fires and not any(e >= budget for e in events):
        first = f"; the first event fires after row {events[0]}" if events else ""
        return (
            f"{policy.name}: nothing is evicted at budget {budget}, because no event fires while "
            f"more is held ({trace.n_pos} tokens{first}); give an interval that fits the trace"
        )
    said = [policy.remark(budget)]
    if trace.windowed:
        said.append(  # of the trace, so it is said once for all policies
            f"{len(trace.windowed)} of {trace.n_layers} layers have a sliding window that is "
            f"shorter than the text, and are not replayed: {windows(trace)}"
        )
    shares, n = policy.layer_budgets, _sharing(trace)
    planned = shares.planned(budget, n, trace.n_pos)
    partial = bool(trace.windowed) or not trace.whole
    if partial and (shares.across_layers or len(set(planned)) > 1):
        dealt = f"{policy.name}: the budget is dealt over the {plural(n, 'layer')} of the trace"
        seeing = f" that see{'s' * (n == 1)} the whole text" if trace.windowed else ""
        some = "" if trace.whole else ", which are not all of the model's"
        said.append(f"{dealt}{seeing}{some}")
    if policy.propagation is not None:
        across = policy.propagation.remark(trace.n_layers, trace.prompt_len, budget)
        said.append(f"{policy.name}: {across}" if across else "")
        if policy.propagation.alone and schedule.interval is not None:
            said.append(f"{policy.name}: nothing is evicted in decoding, for which it has no rule")
    return "; ".join(filter(None, said))


def setting_of(trace: Trace, policy: Policy, budget: int, schedule: Schedule) -> Setting:
    """What a View is told of the replay."""
    return Setting(
        budget=budget,
        prompt_len=trace.prompt_len,
        interval=schedule.interval,
        prefill=schedule.prefill,
        n_layers=trace.n_layers,
        clairvoyant=policy.scorer.clairvoyant,
        protected=policy.protection(budget).size(trace.prompt_len),
        longest=schedule.longest(trace.prompt_len, budget),
        windowed=trace.windowed,
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
        layers, what = _sharing(trace), f"{policy.name} shares a budget over all layers, which need"
    need = layers * (stored + event) + 4 * LOGIT_BYTES  # and those of one block of rows
    if need > limit:
        raise MemoryLimitError(
            f"{what} {need / 2**20:.0f} MiB to replay, the memory budget is "
            f"{limit / 2**20:.0f} MiB; give at least --memory {-(-need // 2**20)}MiB"
        )
    return layers * max(1, int((limit - 4 * LOGIT_BYTES) // (need - 4 * LOGIT_BYTES)))


@dataclass(frozen=True)
class _Run:
    """Layers that are replayed together.

    rows: those of the prompt that they go on with, None for all. whole: nothing is ever evicted.
    """

    layers: tuple[int, ...]
    rows: Tensor | None
    whole: bool


def _blocks(
    trace: Trace, layers: Sequence[int], most: int, policy: Policy, descent: Descent | None
) -> Iterator[_Run]:
    """Runs of layers that are alike, on the same rows, each at most `most` long.

    They follow each other, except where they share a budget.
    """
    run: list[int] = []
    rows, whole = None, False
    for layer in layers:
        own, never = _rows_of(layer, policy, descent)
        alike = own is rows and never == whole and not _differ(trace, layer, (run or [layer])[-1])
        follows = not run or layer == run[-1] + 1 or policy.layer_budgets.across_layers
        if run and (len(run) == most or not follows or not alike):
            yield _Run(tuple(run), rows, whole)
            run = []
        run, rows, whole = [*run, layer], own, never
    yield _Run(tuple(run), rows, whole)


def _positions(policy: Policy, descent: Descent | None) -> str:
    """Where keys are rotated to: rows that run through all layers again get new positions."""
    return "slot" if descent is not None and descent.selection.restarted else policy.positions


def _rows_of(layer: int, policy: Policy, descent: Descent | None) -> tuple[Tensor | None, bool]:
    if descent is None or policy.propagation is None:
        return None, False
    return descent.rows[layer], policy.propagation.whole(descent.selection, layer)


def placed(found: NDArray[np.int32], at: NDArray[np.int64], n_pos: int) -> NDArray[np.int32]:
    """evicted_at [L, H, T] by position, of one that counts the rows at positions `at` alone."""
    out = np.empty((*found.shape[:2], n_pos), np.int32)
    out[:] = np.arange(n_pos) - 1  # visible to no row
    left = found != NEVER
    out[..., at] = np.where(left, at[np.where(left, found, 0)], NEVER)
    return out


def _at(plans: Plans, at: NDArray[np.int64]) -> Plans:
    """Plans by position, of some that count the rows at positions `at` alone."""
    pos = np.where(plans.pos < 0, -1, at[plans.pos])
    return replace(plans, row=int(at[plans.row]), pos=pos)
