"""A policy set up on a trace, with errors and remarks before any work."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from itertools import chain
from typing import Any

from kvsim.core.arguments import share_of
from kvsim.core.budgets import budget_at, budgeted, sharing
from kvsim.core.parts import by_query_head
from kvsim.core.pieces import BOUNDED, Run
from kvsim.core.policy import Even, Policy, PolicyLike, Schedule
from kvsim.core.setting import Setting
from kvsim.core.trace import Trace
from kvsim.engine.depth import Descent
from kvsim.engine.layers import layers_per_block
from kvsim.engine.source import ended, windows
from kvsim.errors import BudgetError, NeedsError, PolicyError
from kvsim.policies import as_policy
from kvsim.policies.fit import remark_of
from kvsim.schema import NEVER

#: Features of policies that some runs do not support, in words.
_DOES: dict[str, Callable[[Policy], object]] = {
    "reads rows of the future": lambda policy: policy.scorer.reads.future,
    "chooses what it reads by rows of the trace": lambda policy: policy.reads.trace,
    "keeps sets per query head": lambda policy: policy.per_query_head,
    "rotates keys to their slots": lambda policy: policy.positions == "slot",
    "drops rows of the prompt": lambda policy: policy.propagation is not None,
    "reads a part of the cache": lambda policy: policy.sparse is not None,
    "rounds entries": lambda policy: policy.rounds,
    "merges entries": lambda policy: policy.storage is not None and not policy.rounds,
    "reads the context again": lambda policy: policy.reads.context_again,
    "reads output projections": lambda policy: "o_proj" in policy.reads.arrays,
    "prunes channels by the last rows of the prompt": (
        lambda policy: policy.storage is not None and policy.storage.reads.last
    ),
    "compares layers": lambda policy: policy.across_layers or policy.layer_budgets != Even(),
}
FUTURE, TRACE, QUERY_HEADS, SLOTS, DROPS, PART, *_OTHERS = _DOES
ROUNDS, MERGES, REPEATS, PROJECTS, PRUNES, COMPARES = _OTHERS


def does(policy: Policy, *which: str) -> str:
    """Return the first of these features that a policy has, in words, or an empty text."""
    return next((each for each in which if _DOES[each](policy)), "")


def refuse(policy: Policy, *which: str, advice: str) -> None:
    """Raise PolicyError for a policy with one of these features. advice: reason and remedy."""
    if words := does(policy, *which):
        raise PolicyError(f"{policy.name}: {words}, {advice}")


class Setup:
    """The start of replays and live runs: a policy at a budget on a trace, with a schedule.

    trace: with the layers of one size. policy: with its scaled lengths at the budget. budget: in
    entries per head; share: as requested (`kvsim.core.budgets`), if not in entries. schedule: the
    policy's own by default; terms override it (`Schedule.override`). ends: tokens before each
    prefill event, ascending. events: the rows after which events fire.
    """

    def __init__(
        self,
        trace: Trace,
        policy: PolicyLike,
        budget: int | str,
        schedule: Schedule | None = None,
        *terms: Any,
    ) -> None:
        policy = as_policy(policy)
        policy, self.budget = budgeted(policy, trace, budget)
        self.trace, self.share = trace.part(), share_of(budget)
        self.schedule = (schedule or policy.schedule).override(*terms)
        self.policy = policy.at(self.budget)
        self.ends = self.schedule.ends(trace.prompt_len, trace.header.context_len)
        self.events = self.schedule.rows(*trace.extent)

    @cached_property
    def by_set(self) -> Trace:
        """The trace with a KV head for each kept set."""
        return by_query_head(self.trace) if self.policy.per_query_head else self.trace

    def setting(self, part: Trace | None = None) -> Setting:
        """Return the setting of events; part: the trace of the layers' rows."""
        trace, policy, part = self.trace, self.policy, part or self.trace
        last = self.ends[-1] if part.n_pos == trace.n_pos else part.prompt_len
        protection = policy.protection(self.budget)
        longest = partial(self.schedule.longest, trace.prompt_len, self.budget)
        return Setting(
            budget=self.budget,
            prompt_len=last,
            ends=(*self.ends[:-1], last),
            interval=self.schedule.interval,
            n_layers=trace.n_layers,
            clairvoyant=policy.scorer.reads.future,
            protected=protection.size(self.ends[-1]),
            longest=partial(longest, context_len=trace.header.context_len),
            windowed=trace.windowed,
            events=tuple(self.schedule.rows(*part.extent)),
            scorer_protection=cache(policy.scorer.protection),
            protected_ends=(protection.first(last), protection.recent),
            response=part.prompt_len,
            policy=policy.name,
        )

    @cached_property
    def first_budget(self) -> int:
        """The budget at the first event."""
        row = self.events[0] if self.events else self.trace.n_pos - 1
        return budget_at(self.policy, row + 1, self.budget)

    @cached_property
    def evicting(self) -> int | None:
        """The first event at which the cache exceeds the budget, or None."""
        of_row = ((row, budget_at(self.policy, row + 1, self.budget)) for row in self.events)
        return next((row for row, budget in of_row if row >= budget), None)

    def checked(self, memory: int | None = None) -> Setup:
        """Return itself, or raise the errors of a replay, without any work.

        BudgetError: no rule for the budget. NeedsError: a missing array. PolicyError: an event
        without enough rows for the scorer. MemoryLimitError.
        """
        trace, policy, schedule = self.trace, self.policy, self.schedule
        if schedule.compress.startswith(("context", "both")) and trace.header.context_len is None:
            raise NeedsError(
                f"{trace.name} does not say where its context ends, expected that for compress "
                f"{schedule.compress!r}; record it with `context` in its line of --prompts "
                "(kvsim.capture(..., context=...)), or compress the prompt"
            )
        self._check_conflicts()
        missing = sorted(name for name in policy.reads.arrays if not trace.has(name))
        if missing:
            trace.read(missing[0])  # its error explains how to record the array
        if self.budget < max(trace.n_pos, 1):  # a budget that never binds needs no rule
            check_budget(
                policy,
                self.first_budget,
                prompt_len=trace.prompt_len,
                n_pos=trace.n_pos,
                n_layers=sharing(trace),
                schedule=schedule,
                context_len=trace.header.context_len,
            )
            least = policy.reads.least
            if self.evicting is not None and self.evicting + 1 < least:
                raise PolicyError(
                    f"{policy.name}: the first event that evicts fires after {self.evicting + 1} "
                    f"rows; expected at least {least}; use a longer prompt, another schedule or "
                    "other parameters"
                )
        for piece in chain(*policy.levels):
            seen = ended(trace, self.ends[0]) if piece is policy.sparse else trace
            piece.check(Run(trace.n_layers, schedule, seen))
        layers_per_block(self.by_set, policy, memory)
        return self

    def _check_conflicts(self) -> None:
        trace, policy, schedule = self.trace, self.policy, self.schedule
        at_once = replace(schedule, prefill_chunk=None)
        chunks = len(self.ends) > len(at_once.ends(trace.prompt_len, trace.header.context_len))
        context = schedule.compress.startswith(("context", "both"))
        question = context and (trace.header.context_len or 0) < trace.prompt_len
        shared = tuple(trace.owners) != tuple(range(trace.n_layers))
        other = " and ".join(sorted({*trace.header.other_layers.values()}))
        # a gate weighs values by its mean over the prompt
        whole_prompt = DROPS, PART, REPEATS, PRUNES, *([PROJECTS] if trace.has("gate") else [])
        conflicts: dict[str, tuple[object, Sequence[str]]] = {
            f"a prompt in chunks of {schedule.prefill_chunk} rows": (chunks, whole_prompt),
            "a context before its question is known": (question, [DROPS]),
            "layers that read the entries of others": (shared, [DROPS, QUERY_HEADS, COMPARES]),
            f"layers that pass a state from row to row ({other})": (other, [DROPS]),
            f"layers {[*trace.layer_ids]}, not all of a model": (not trace.header.whole, [DROPS]),
            f"layers that do not see the whole text ({windows(trace)})": (trace.windowed, [DROPS]),
            "latents, which are keys and values at once": (trace.header.latent, [ROUNDS, MERGES]),
        }
        for facts, (there, which) in conflicts.items():
            if there:
                advice = "expected a policy that cuts each layer by itself, such as snapkv"
                advice = f"and has no rule for {facts}; {advice}, or another trace or schedule"
                refuse(policy, *which, advice=advice)

    def remarks(self, descent: Descent | None) -> Iterator[str]:
        """Yield remarks for a Record: on kept entries, and on the trace."""
        trace, policy, schedule = self.trace, self.policy, self.schedule
        budget = self.budget
        fires = schedule.prefill or schedule.interval is not None  # except `full`
        fires &= descent is None or not descent.selection.dropped  # they have their own remark
        if policy.bounded and fires and budget >= trace.n_pos:
            yield (  # without the policy's name, so that it appears once for all policies
                f"budget {budget} holds all {trace.n_pos} tokens, so that nothing is evicted; give "
                "a smaller one"
            )
            return
        if budget < trace.n_pos and policy.bounded and fires and self.evicting is None:
            yield (
                f"{policy.name}: nothing is evicted at budget {budget}, because no event fires "
                f"while more is held; give an interval that fits the {trace.n_pos} tokens"
            )
            return
        if of_policy := remark_of(policy, self.first_budget):
            yield of_policy
        # else rows of the question or of later chunks see evictions
        alone = self.ends == [trace.prompt_len]
        if fires and alone and trace.prompt_len == trace.n_pos and policy.propagation is None:
            yield (
                "the prompt fills the text: no row follows an event, and metrics of rows after "
                "the prompt have no value"
            )
        if trace.windowed:
            yield (  # about the trace, so that it appears once for all policies
                f"{len(trace.windowed)} of {trace.n_layers} layers do not see the whole text, or "
                f"have heads of another size, and are not replayed: {windows(trace)}"
            )


def works(
    policy: Policy,
    budget: int,
    *,
    prompt_len: int = 0,
    n_pos: int = NEVER,
    n_layers: int = 1,
    schedule: Schedule | None = None,
    context_len: int | None = None,
) -> bool:
    """Whether the policy has a rule for the budget: each layer can hold its protected entries.

    schedule: replaces the policy's own. Sizes: of the trace.
    """
    fit, events = policy.at(budget), schedule or policy.schedule
    if budget < (1 if fit.propagation is None else fit.propagation.least_budget):
        return False
    if policy.allocator.effect not in BOUNDED:
        return True
    end = max(events.ends(prompt_len, context_len), default=0)  # with the most protected entries
    longest = events.longest(prompt_len, budget, n_pos, context_len)
    of_layers = fit.layer_budgets.planned(budget, n_layers, longest)
    return all(fit.protection(b).size(end) <= b for b in dict.fromkeys(of_layers))


def least_budget(policy: Policy, start: int = 1, **sizes: Any) -> int:
    """The first budget from `start` on from which all budgets `work`; NEVER + 1 without one."""
    key = partial(works, policy, **sizes)
    return bisect_left(range(NEVER + 1), x=True, lo=max(0, start), key=key)


def check_budget(policy: Policy, budget: int, **sizes: Any) -> None:
    """Raise BudgetError for a budget that does not work; sizes as in `works`."""
    if not works(policy, budget, **sizes):
        least = least_budget(policy, budget, **sizes)
        way_out = f"the smallest budget that works is {least}" if least <= NEVER else "none works"
        raise BudgetError(f"{policy.name}: budget is {budget}; {way_out}")
