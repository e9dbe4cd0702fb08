"""Errors and remarks of a replay before any work is done."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.core.merging import Merger
from kvsim.core.parameters import integer, is_finite
from kvsim.core.policy import Even, Policy, Schedule
from kvsim.core.reading import Reads
from kvsim.core.trace import Trace
from kvsim.engine.depth import Descent
from kvsim.engine.layers import layers_per_block, sharing
from kvsim.engine.source import ended, isolated, longest_unmasked, windows
from kvsim.errors import BudgetError, MemoryLimitError, NeedsError, PolicyError
from kvsim.schema import NEVER, plural


def whole(budget: int) -> int:
    """The budget as an int. BudgetError for anything else, a share or a truth value included."""
    entries = integer(budget)
    if entries is not None and entries <= NEVER:
        return entries
    raise BudgetError(
        f"budget is {budget!r}; expected a whole number of entries per KV head, at most {NEVER}"
    )


def check_options(memory: object, internals: object) -> None:
    """Raise a KvsimError where an option of `replay` is of another kind than it says."""
    if memory is not None and not is_finite(memory):
        raise MemoryLimitError(f"memory is {memory!r}; expected a number of bytes, or None")
    if not isinstance(internals, bool | Collection) or isinstance(internals, str):
        raise PolicyError(
            f"internals are {internals!r}; expected True, False or a set of names of notes"
        )


def check_cell(
    trace: Trace, policy: Policy, budget: int, memory: int | None, schedule: Schedule | None = None
) -> None:
    """Raise what a replay would raise, without any work.

    BudgetError: no rule for the budget. NeedsError: an array that the trace lacks. PolicyError: an
    event before there are enough rows for the scorer. MemoryLimitError.
    """
    policy = policy.at(whole(budget))
    trace = (isolated(trace) if policy.foreign else trace).evicting
    schedule = schedule or policy.schedule
    _check_context(trace, policy, schedule)
    _check_chunks(trace, policy, schedule)
    needs = policy.scorer.needs | (policy.reader.needs if policy.reader else frozenset())
    missing = sorted(name for name in needs if not trace.has(name))
    if missing:
        trace.read(missing[0])  # its error says how the array is recorded
    if whole(budget) < max(trace.n_pos, 1):  # a budget that never binds needs no rule
        for end in schedule.ends(trace.prompt_len, trace.context_len):
            first = policy.budget_at(_first_event(trace, schedule) + 1, budget)
            sizes: dict[str, Any] = {"prompt_len": trace.prompt_len, "n_pos": trace.n_pos}
            sizes |= {"context_len": trace.context_len, "end": end, "n_layers": sharing(trace)}
            policy.check_budget(first, **sizes, schedule=schedule)
        _check_rows(trace, policy, budget, schedule)
    policy.scorer.check(trace, schedule)
    policy.allocator.check(trace)
    if policy.reader is not None:
        first = schedule.ends(trace.prompt_len, trace.context_len)[0]
        policy.reader.check(ended(trace, first))
    if policy.codec is not None:
        if trace.header.latent is not None:
            raise PolicyError(
                f"{policy.name}: changes keys and values apart, and entries of {trace.name} are "
                "latents, which are both; expected a policy without a codec or merger"
            )
        for size in {trace.dim, trace.value_dim}:
            policy.codec.check(size)
    _check_shared(trace, policy)
    _check_propagation(trace, policy)
    layers_per_block(trace.per_query_head() if policy.per_query_head else trace, policy, memory)


def _check_context(trace: Trace, policy: Policy, schedule: Schedule) -> None:
    """Raise where a context is to be compressed that the trace has not, or the policy cannot."""
    if not schedule.compress.startswith(("context", "both")):
        return
    if trace.context_len is None:
        raise NeedsError(
            f"{trace.name} does not say where its context ends, expected that for compress "
            f"{schedule.compress!r}; record it with `context` in its line of --prompts "
            "(kvsim.capture(..., context=...)), or compress the prompt"
        )
    if policy.propagation is not None and trace.context_len < trace.prompt_len:
        raise PolicyError(
            f"{policy.name}: chooses the rows of the prompt that deeper layers compute by its last "
            "rows, and has no rule for a context before its question is known; expected compress "
            "'prompt', or a policy that drops no rows, such as snapkv"
        )


def _chunks(trace: Trace, schedule: Schedule) -> int:
    """Prefill events that a schedule has because of its chunks."""
    lengths, whole = (trace.prompt_len, trace.context_len), replace(schedule, prefill_chunk=None)
    return len(schedule.ends(*lengths)) - len(whole.ends(*lengths))


def _check_chunks(trace: Trace, policy: Policy, schedule: Schedule) -> None:
    """Raise PolicyError where a policy has no rule for a prompt of several chunks."""
    if not _chunks(trace, schedule):
        return
    gated = "o_proj" in policy.scorer.needs and trace.has("gate")
    reasons = {
        "chooses the rows of the prompt that deeper layers compute by its last rows": (
            policy.propagation is not None
        ),
        "reads a part of what is held": policy.reader is not None,
        "scores by rows that repeat the whole context": "probe_q" in policy.scorer.needs,
        "weighs values by the mean gate of the whole prompt": gated,
        "prunes channels by the last rows of the whole prompt": (
            policy.codec is not None and policy.codec.rows > 0
        ),
    }
    reason = next((text for text, applies in reasons.items() if applies), None)
    if reason is not None:
        raise PolicyError(
            f"{policy.name}: {reason}, and has no rule for chunks of {schedule.prefill_chunk} rows "
            "of it; expected no prefill chunk, or a policy that evicts alone, such as snapkv"
        )


def _chunk_remark(trace: Trace, policy: Policy, schedule: Schedule) -> str:
    """Remark on the chunks of the prefill; empty without any."""
    chunk = schedule.prefill_chunk
    if chunk is None:
        return ""
    if not schedule.prefill and not policy.rounds:
        return f"{policy.name}: no event ends the prefill in its schedule, also not of a chunk"
    more = _chunks(trace, schedule)
    if not more:
        return f"{trace.name}: a chunk of {chunk} rows holds the prompt, so that it has no effect"
    if not schedule.prefill:
        return f"{trace.name}: rows behind the first chunk of {chunk} rows see rounded entries"
    events = plural(more, "event")
    return f"{trace.name}: chunks of {chunk} rows add {events} within the prompt"


def _context_remark(trace: Trace, policy: Policy, schedule: Schedule) -> str:
    """Remark on the event of the prefill; empty if it compresses the prompt."""
    if schedule.compress.endswith("questions") and not trace.questions:
        return f"{trace.name}: it has one turn, so that no event follows a later question"
    alone = not schedule.compress.startswith(("context", "both"))
    if alone or trace.context_len == trace.prompt_len:
        return ""
    question = plural((trace.prompt_len - (trace.context_len or 0)), "token")
    if not schedule.prefill and (policy.reader or policy.rounds):
        return f"{trace.name}: its question of {question} reads the context as the response does"
    if not schedule.prefill:
        return f"{policy.name}: no event ends the prefill in its schedule, also not of the context"
    again = "" if schedule.compress == "context" else ", and again after it"
    return f"{trace.name}: the context is compressed before its question of {question}{again}"


def _first_event(trace: Trace, schedule: Schedule) -> int:
    """The row of the first event; the last row without one."""
    rows = schedule.rows(*trace.extent)
    return rows[0] if rows else trace.n_pos - 1


def _check_rows(trace: Trace, policy: Policy, budget: int, schedule: Schedule) -> None:
    """Raise PolicyError where the first event that evicts has too few rows for the scorer."""
    rows = schedule.rows(*trace.extent)
    first = next((r for r in rows if r >= policy.budget_at(r + 1, budget)), None)
    least = policy.scorer.least_rows
    if first is not None and first + 1 < least:
        raise PolicyError(
            f"{policy.name}: the first event that evicts fires after {first + 1} rows; "
            f"expected at least {least}; use a longer prompt, another schedule or other "
            "parameters"
        )


def _check_shared(trace: Trace, policy: Policy) -> None:
    """Raise PolicyError for a policy that treats layers apart which read the same entries."""
    layer = next((i for i, owner in enumerate(trace.owners) if owner != i), None)
    reasons = {
        "keeps a set for each query head": policy.per_query_head,
        "gives each layer a budget of its own": not isinstance(policy.layer_budgets, Even),
        "compares layers": policy.across_layers,
        "hands rows of the prompt from layer to layer": policy.propagation is not None,
    }
    reason = next((text for text, applies in reasons.items() if applies), None)
    if layer is not None and reason is not None:
        raise PolicyError(
            f"{policy.name}: {reason}, and layer {layer} of {trace.name} reads the entries of "
            f"layer {trace.owners[layer]}; expected one set and one budget for both, as of snapkv"
        )


def _check_propagation(trace: Trace, policy: Policy) -> None:
    """Raise PolicyError where a propagation cannot pass through the layers of the trace."""
    if policy.propagation is None:
        return
    if trace.header.other_layers:
        kinds = " and ".join(sorted({*trace.header.other_layers.values()}))
        raise PolicyError(
            f"{policy.name}: hands rows of the prompt from layer to layer, and other layers of the "
            f"model ({kinds}) pass a state from row to row; expected attention in all layers; take "
            "a policy that cuts each layer by itself, such as snapkv"
        )
    if not trace.whole:
        raise PolicyError(
            f"{policy.name}: goes through the layers from the first one on, and the trace has "
            f"layers {list(trace.layer_ids)}; expected 0, 1, 2, ... to the model's last"
        )
    policy.propagation.check(trace.n_layers)
    if trace.windowed:
        raise PolicyError(
            f"{policy.name}: hands rows of the prompt from layer to layer, and {trace.name} "
            f"has {windows(trace)}; expected layers that see the whole "
            "text; take a policy that cuts each layer by itself, such as snapkv, or record a "
            f"text of at most {longest_unmasked(trace)} tokens"
        )


def remark(
    trace: Trace,
    policy: Policy,
    budget: int,
    schedule: Schedule,
    descent: Descent | None,
    evicted_at: NDArray[np.int32],
    reads: Reads | None,
) -> str:
    """Remarks for readers of the Record of evicted_at and reads, a line each; empty if none."""
    evicted = _eviction_remark(trace, policy, budget, schedule, descent)
    return "\n".join(filter(None, (evicted, *_idle(trace, policy, evicted_at, reads))))


def _idle(
    trace: Trace, policy: Policy, evicted_at: NDArray[np.int32], reads: Reads | None
) -> Iterator[str]:
    """Say of a reader, codec or merger that it has no effect, on no row after the prompt.

    With an account of reads, rows from its first one on.
    """
    *layers, n_pos = evicted_at.shape
    if isinstance(policy.codec, Merger) and not policy.bounded and (evicted_at == NEVER).all():
        yield (
            f"{policy.name}: no entry leaves, so that nothing merges; expected an eviction before "
            "the merger, such as snapkv+lookm"
        )
    rows = np.arange(trace.prompt_len if reads is None else reads.first, n_pos)
    if not len(rows) or (reads is None and not policy.rounds):
        return
    ends = np.minimum(evicted_at, n_pos - 1).reshape(-1, n_pos) + 1
    ends = ends + np.arange(len(ends))[:, None] * (n_pos + 1)
    left = np.bincount(ends.ravel(), minlength=len(ends) * (n_pos + 1)).reshape(*layers, -1)
    held = rows + 1 - left.cumsum(-1)[..., rows]  # entries that a row sees, its own too
    if reads is not None and reads.whole(held):
        yield (
            f"{policy.name}: every row reads all that is held, so that its reader has no effect; "
            "give a smaller budget"
        )
    if policy.codec is not None and policy.rounds:
        least = min(clock.exact + clock.step for clock in policy.codec.clocks)
        if held.max() - 1 < least:
            yield (
                f"{policy.name}: no entry is rounded before the last row, because no head holds "
                f"{least}, from which its codec begins; give a smaller window or a larger budget"
            )


def _eviction_remark(
    trace: Trace, policy: Policy, budget: int, schedule: Schedule, descent: Descent | None
) -> str:
    """Remark on what stays, and on the trace."""
    events = schedule.rows(*trace.extent)
    fires = schedule.prefill or schedule.interval is not None  # `full` is not meant to
    fires &= descent is None or not descent.selection.dropped  # dropped rows say enough
    if policy.bounded and fires and budget >= trace.n_pos:
        return (  # without the policy's name, so that it appears once for all policies
            f"budget {budget} holds all {trace.n_pos} tokens, so that nothing is evicted; give a "
            "smaller one"
        )
    if (
        budget < trace.n_pos
        and policy.bounded
        and fires
        and not any(row >= policy.budget_at(row + 1, budget) for row in events)
    ):
        first = f"; the first event fires after row {events[0]}" if events else ""
        return (
            f"{policy.name}: nothing is evicted at budget {budget}, because no event fires while "
            f"more is held ({trace.n_pos} tokens{first}); give an interval that fits the trace"
        )
    of_scorer = policy.scorer.remark(trace, schedule)
    small = policy.budget_at(_first_event(trace, schedule) + 1, budget)
    remarks = [policy.remark(small), f"{policy.name}: {of_scorer}" if of_scorer else ""]
    remarks.append(_context_remark(trace, policy, schedule))
    remarks.append(_chunk_remark(trace, policy, schedule))
    # else rows of the question or of later chunks see what is left
    alone = schedule.ends(trace.prompt_len, trace.context_len) == [trace.prompt_len]
    if fires and alone and trace.prompt_len == trace.n_pos and policy.propagation is None:
        remarks.append(
            "the prompt fills the text: no row sees what is evicted, and metrics of rows after the "
            "prompt have no value"
        )
    if policy.reader is not None:
        of_reader = policy.reader.remark(trace, budget)
        remarks.append(f"{policy.name}: {of_reader}" if of_reader else "")
    latent = trace.header.latent is not None
    if latent and policy.allocator.across_heads:
        remarks.append(
            f"{policy.name}: the heads of a layer share a budget, and entries of latent attention "
            "have one head, which gets all of it"
        )
    if latent and policy.scorer.reads_values:
        remarks.append(f"{policy.name}: reads values, which are latents before their projection")
    if policy.per_query_head and trace.group > 1:
        remarks.append(
            f"{policy.name}: keeps a set for each query head, which holds {trace.group} times the "
            "bytes of one for each KV head at the same budget"
        )
    if trace.windowed:
        sized = any((trace.formulas[x].reach or trace.n_pos) >= trace.n_pos for x in trace.windowed)
        remarks.append(  # about the trace, so that it appears once for all policies
            f"{len(trace.windowed)} of {trace.n_layers} layers do not see the whole text"
            f"{', or have heads of another size' * sized}, and are not replayed: {windows(trace)}"
        )
    if policy.so_far is not None and policy.bounded and events:
        last = policy.budget_at(events[-1] + 1, budget)
        remarks.append(
            f"the budget grows from {small} entries after row {events[0]} to {last} after row "
            f"{events[-1]}"
        )
    remarks.append(_budget_remark(trace, policy, budget))
    remarks.append(_full_layers_remark(trace, policy, budget, schedule))
    if policy.propagation is not None:
        across = policy.propagation.remark(trace.n_layers, trace.prompt_len, budget)
        remarks.append(f"{policy.name}: {across}" if across else "")
        if policy.propagation.alone and schedule.interval is not None:
            remarks.append(
                f"{policy.name}: nothing is evicted in decoding, for which it has no rule"
            )
    return "\n".join(filter(None, remarks))


def _full_layers_remark(trace: Trace, policy: Policy, budget: int, schedule: Schedule) -> str:
    """In how many layers a smaller budget than the policy's is full of what is protected."""
    protected = policy.protection(budget).size(trace.prompt_len)
    longest = schedule.longest(trace.prompt_len, budget, trace.n_pos, trace.context_len)
    planned = policy.layer_budgets.planned(budget, sharing(trace), longest)
    full = sum(of_layer <= protected for of_layer in planned)
    if not full or not policy.bounded:
        return ""
    where = f"in {full} of {plural(len(planned), 'layer')} " * (full < len(planned))
    return (
        f"{policy.name}: {where}the budget holds only what is protected "
        f"({plural(protected, 'token')}), so that nothing is selected{' there' * bool(where)}; "
        f"compare with a smaller window{', such as that of --fit' * bool(policy.lengths)}"
    )


def _budget_remark(trace: Trace, policy: Policy, budget: int) -> str:
    """Over which layers a budget is shared, if those are not all of the model's; else empty."""
    shares, n = policy.layer_budgets, sharing(trace)
    planned = shares.planned(budget, n, trace.n_pos)
    partial = bool(trace.windowed) or not trace.whole
    pooled = shares.across_layers or policy.allocator.across_layers
    if not partial or not (pooled or len(set(planned)) > 1):
        return ""
    shared = f"{policy.name}: the budget is shared over the {plural(n, 'layer')} of the trace"
    seeing = f" that see{'s' * (n == 1)} the whole text" if trace.windowed else ""
    suffix = "" if trace.whole else ", which are not all of the model's"
    return f"{shared}{seeing}{suffix}"
