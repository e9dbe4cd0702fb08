"""Errors and remarks of a replay before any work is done."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator
from dataclasses import replace

from kvsim.core.budgets import budget_at, sharing
from kvsim.core.parameters import integer, is_finite
from kvsim.core.parts import by_query_head
from kvsim.core.pieces import BOUNDED, Run
from kvsim.core.policy import Even, Policy, Schedule
from kvsim.core.trace import Trace
from kvsim.engine.depth import Descent
from kvsim.engine.layers import layers_per_block
from kvsim.engine.source import ended, windows
from kvsim.errors import BudgetError, NeedsError, PolicyError
from kvsim.policies.fit import remark_of
from kvsim.schema import NEVER


def whole(budget: int) -> int:
    """The budget as an int. BudgetError for anything else, a share or a truth value included."""
    entries = integer(budget)
    if entries is not None and entries <= NEVER:
        return entries
    raise BudgetError(
        f"budget is {budget!r}; expected a whole number of entries per KV head, at most {NEVER}"
    )


def check_options(memory: object, internals: object) -> None:
    """Raise PolicyError where an option of `replay` is of another kind than it says."""
    named = isinstance(internals, bool | Collection) and not isinstance(internals, str)
    if not named or not (memory is None or is_finite(memory)):
        raise PolicyError(
            f"memory is {memory!r}, and internals are {internals!r}; expected bytes or None, and "
            "True, False or names of notes"
        )


def check_cell(
    trace: Trace, policy: Policy, budget: int, memory: int | None, schedule: Schedule | None = None
) -> None:
    """Raise what a replay would raise, without any work.

    BudgetError: no rule for the budget. NeedsError: an array that the trace lacks. PolicyError: an
    event before there are enough rows for the scorer. MemoryLimitError.
    """
    policy = policy.at(whole(budget))
    trace = trace.part()
    schedule = schedule or policy.schedule
    if schedule.compress.startswith(("context", "both")) and trace.header.context_len is None:
        raise NeedsError(
            f"{trace.name} does not say where its context ends, expected that for compress "
            f"{schedule.compress!r}; record it with `context` in its line of --prompts "
            "(kvsim.capture(..., context=...)), or compress the prompt"
        )
    _check_conflicts(trace, policy, schedule)
    missing = sorted(name for name in policy.reads.arrays if not trace.has(name))
    if missing:
        trace.read(missing[0])  # its error says how the array is recorded
    ends = schedule.ends(trace.prompt_len, trace.header.context_len)
    if budget < max(trace.n_pos, 1):  # a budget that never binds needs no rule
        rows = schedule.rows(*trace.extent)
        first = budget_at(policy, (rows[0] if rows else trace.n_pos - 1) + 1, budget)
        check_budget(
            policy,
            first,
            prompt_len=trace.prompt_len,
            n_pos=trace.n_pos,
            n_layers=sharing(trace),
            schedule=schedule,
            context_len=trace.header.context_len,
            end=ends[-1],  # at which most is protected
        )
        least = policy.reads.least
        event = next((row for row in rows if row >= budget_at(policy, row + 1, budget)), least)
        if event + 1 < least:
            raise PolicyError(
                f"{policy.name}: the first event that evicts fires after {event + 1} rows; "
                f"expected at least {least}; use a longer prompt, another schedule or other "
                "parameters"
            )
    inner = policy.scorer, policy.allocator, policy.layer_budgets, policy.propagation
    for piece in (*inner, policy.reader, policy.storage):
        if piece is not None:
            seen = ended(trace, ends[0]) if piece is policy.reader else trace
            piece.check(Run(trace.n_layers, schedule, seen))
    layers_per_block(by_query_head(trace) if policy.per_query_head else trace, policy, memory)


def check_budget(
    policy: Policy,
    budget: int,
    *,
    prompt_len: int = 0,
    n_pos: int = NEVER,
    n_layers: int = 1,
    schedule: Schedule | None = None,
    context_len: int | None = None,
    end: int | None = None,
) -> None:
    """Raise BudgetError where the policy has no rule for the budget.

    schedule: replaces the policy's own. end: tokens that an event takes for the prompt, None for
    prompt_len. The other sizes are those of the trace.
    """
    across = policy.at(budget).propagation
    least = 1 if across is None else across.least_budget
    if budget < least:
        raise BudgetError(
            f"{policy.name}: budget is {budget}; the smallest budget that works is {least}"
        )
    events = schedule or policy.schedule

    def exceeded(total: int) -> tuple[int, int] | None:
        """The first budget of a layer below the size of its protection, and that size."""
        longest = events.longest(prompt_len, total, n_pos, context_len)
        fit = policy.at(total)
        planned = fit.layer_budgets.planned(total, n_layers, longest)
        sizes = ((b, fit.protection(b).size(end or prompt_len)) for b in dict.fromkeys(planned))
        return next(((b, size) for b, size in sizes if size > b), None)

    first = exceeded(budget) if policy.allocator.effect in BOUNDED else None
    if first is None:
        return
    totals = range(NEVER + 1)  # all above one that works do, too
    smallest = bisect_left(totals, x=True, lo=budget, key=lambda total: exceeded(total) is None)
    works = f"the smallest budget that works is {smallest}"
    way_out = works if smallest in totals else "no budget works"
    share, protected = first
    where = f"budget {budget}" if share == budget else f"budget {share} of a layer"
    raise BudgetError(
        f"{policy.name}: {where} is below the {protected} entries that it protects; {way_out}"
    )


def _check_conflicts(trace: Trace, policy: Policy, schedule: Schedule) -> None:
    """Raise PolicyError where a part of the policy has no rule for the trace or the schedule."""
    reads, storage = policy.reads, policy.storage
    drops = policy.propagation is not None and "hands rows of the prompt from layer to layer"
    of_whole_prompt = (
        drops,
        policy.reader is not None and "reads a part of what is held",
        reads.context_again and "scores by rows that repeat the whole context",
        "o_proj" in reads.arrays
        and trace.has("gate")
        and "weighs values by the prompt's mean gate",
        storage is not None
        and storage.reads.last > 0
        and "prunes channels by the last rows of the prompt",
    )
    changes = storage is not None and "changes keys and values apart"
    by_layer = (
        drops,
        policy.per_query_head and "keeps a set for each query head",
        policy.layer_budgets != Even() and "gives each layer a budget of its own",
        policy.across_layers and "compares layers",
    )
    lengths = trace.prompt_len, trace.header.context_len
    at_once = replace(schedule, prefill_chunk=None).ends(*lengths)
    chunks = len(schedule.ends(*lengths)) > len(at_once)
    context = schedule.compress.startswith(("context", "both"))
    question = context and (trace.header.context_len or 0) < trace.prompt_len
    shared = tuple(trace.owners) != tuple(range(trace.n_layers))
    other = " and ".join(sorted({*trace.header.other_layers.values()}))
    conflicts = {
        f"a prompt in chunks of {schedule.prefill_chunk} rows": (chunks, of_whole_prompt),
        "a context before its question is known": (question, (drops,)),
        "layers that read the entries of others": (shared, by_layer),
        f"layers that pass a state from row to row ({other})": (other, (drops,)),
        f"layers {[*trace.layer_ids]}, not all of a model": (not trace.header.whole, (drops,)),
        f"layers that do not see the whole text ({windows(trace)})": (trace.windowed, (drops,)),
        "latents, which are keys and values at once": (trace.header.latent, (changes,)),
    }
    for facts, (there, parts) in conflicts.items():
        for part in filter(None, parts if there else ()):
            raise PolicyError(
                f"{policy.name}: {part}, and has no rule for {facts}; expected a policy that cuts "
                "each layer by itself, such as snapkv, or another trace or schedule"
            )


def remarks(
    trace: Trace, policy: Policy, budget: int, schedule: Schedule, descent: Descent | None
) -> Iterator[str]:
    """Yield remarks for readers of a Record: on what stays, and on the trace."""
    events = schedule.rows(*trace.extent)
    fires = schedule.prefill or schedule.interval is not None  # `full` is not meant to
    fires &= descent is None or not descent.selection.dropped  # dropped rows say enough
    if policy.bounded and fires and budget >= trace.n_pos:
        yield (  # without the policy's name, so that it appears once for all policies
            f"budget {budget} holds all {trace.n_pos} tokens, so that nothing is evicted; give a "
            "smaller one"
        )
        return
    acts = any(row >= budget_at(policy, row + 1, budget) for row in events)
    if budget < trace.n_pos and policy.bounded and fires and not acts:
        first = f"; the first event fires after row {events[0]}" if events else ""
        yield (
            f"{policy.name}: nothing is evicted at budget {budget}, because no event fires while "
            f"more is held ({trace.n_pos} tokens{first}); give an interval that fits the trace"
        )
        return
    small = budget_at(policy, (events[0] if events else trace.n_pos - 1) + 1, budget)
    if of_policy := remark_of(policy, small):
        yield of_policy
    # else rows of the question or of later chunks see what is left
    alone = schedule.ends(trace.prompt_len, trace.header.context_len) == [trace.prompt_len]
    if fires and alone and trace.prompt_len == trace.n_pos and policy.propagation is None:
        yield (
            "the prompt fills the text: no row sees what is evicted, and metrics of rows after the "
            "prompt have no value"
        )
    if trace.windowed:
        yield (  # about the trace, so that it appears once for all policies
            f"{len(trace.windowed)} of {trace.n_layers} layers do not see the whole text, or have "
            f"heads of another size, and are not replayed: {windows(trace)}"
        )
