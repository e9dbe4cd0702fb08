"""`check_policy`: every invariant on one policy, over generated traces."""

from __future__ import annotations

import zlib
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from kvsim.core.policy import Policy
from kvsim.errors import KvsimError, PolicyError, suggest
from kvsim.policies import policy as named
from kvsim.schema import NEVER, plural
from kvsim.testing.invariants import EXEMPT, INVARIANTS
from kvsim.testing.invariants.trial import Broken, Trial, smallest_budget
from kvsim.testing.loops import Rule
from kvsim.testing.strategies import cases, draw_budget, draw_schedule

#: The invariant that compares with a rule: in fewer cases, or decisions, a wrong rule may pass.
RULED, LEAST_CASES, LEAST_DECISIONS = "naive_replay", 50, 20
#: Cases of which one at least evicts; of fewer, none may by chance.
ENOUGH = 16


class InvariantError(KvsimError, AssertionError):
    """A policy breaks an invariant; the message names it and the smallest failing case."""


@st.composite
def trials(draw: st.DrawFn, policy: Policy, rule: Rule | None, max_n: int) -> Trial:
    """The policy on any small trace, at budgets near what it protects and at any schedule."""
    case = draw(cases(dtypes=(np.float64, np.float32, np.float16), max_n=max_n))
    interval, prefill = draw_schedule(draw, case.n, case.prompt_len)
    salt = draw(st.integers(0, 2**16))
    trial = Trial(policy, case, case.n, interval, prefill, salt, rule)
    schedule = policy.schedule.override(interval, prefill)
    least = smallest_budget(policy, case, schedule)
    # an event that acts needs enough rows for the scorer
    least = max(least, min(policy.reads.least, case.n))
    return replace(trial, budget=draw_budget(draw, least, max(trial.rows, default=0)))


@dataclass(frozen=True)
class Passed:
    """The invariants that hold, generated cases, and decisions that were compared with a rule."""

    policy: str
    invariants: tuple[str, ...]
    cases: int
    decisions: int = 0

    def __repr__(self) -> str:
        return (
            f"{self.policy}: passed {plural(len(self.invariants), 'invariant')} on "
            f"{plural(self.cases, 'generated case')}"
            + (f", {self.decisions} decisions equal to the rule's" if self.decisions else "")
        )


def check_policy(
    policy: Policy | str,
    *,
    rule: Rule | None = None,
    max_examples: int = 50,
    max_n: int = 32,
    only: Collection[str] | None = None,
    exempt: Collection[str] = (),
    shrink: bool = True,
    **params: Any,
) -> Passed:
    """Try every invariant on `policy`, a Policy or the name of one with `params`.

    Returns a one-line report of the invariants that passed.

    rule: the policy once more, as a rule of the naive replay (`kvsim.testing.loops`): the policy
    must evict what the rule evicts, in 50 cases and 20 decisions at least. max_examples: generated
    traces, each with a budget and a schedule. max_n: tokens of the longest. only, exempt: names of
    INVARIANTS to try alone, or to leave out. shrink: look for the smallest case that fails.

    Raises InvariantError, which names the invariant and the case.
    """
    subject = named(policy, **params) if isinstance(policy, str) else policy
    chosen = set(INVARIANTS) if only is None else set(only)
    parts = [x for part in subject.name.split("+") for x in {part, part.partition("@")[0]}]
    chosen -= {name for part in parts for name in EXEMPT.get(part, ())} | set(exempt)
    for name in {*chosen, *exempt} - set(INVARIANTS):
        raise PolicyError(
            f"unknown invariant {name!r}{suggest(name, INVARIANTS)}; known: {', '.join(INVARIANTS)}"
        )
    phases = set(Phase) - ({Phase.explain} if shrink else {Phase.explain, Phase.shrink})
    counts, decisions, evicting = list[int](), 0, 0  # generated cases

    def attempt(tested: Collection[str], examples: int) -> None:
        counts.append(0)

        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
            phases=phases,
        )
        @given(trials(subject, rule, max_n))
        def one(trial: Trial) -> None:
            nonlocal decisions, evicting
            for name in tested:
                try:
                    INVARIANTS[name](trial)
                except (Broken, KvsimError) as error:
                    verb = "breaks" if isinstance(error, Broken) else "fails during"
                    raise InvariantError(
                        f"{subject.name} {verb} the invariant {name!r}: {error}\n  {trial}"
                    ) from error
            counts[-1] += 1
            evicting += bool((trial.record.evicted_at != NEVER).any())
            decisions += trial.against_rule[1] if tested == [RULED] else 0

        # the same cases every time, but others for every policy
        (seed(zlib.crc32(subject.name.encode()))(one) if settings().derandomize else one)()

    ruled = rule is not None and rule.score is not None and RULED in chosen
    passed = [name for name in INVARIANTS if name in chosen and (rule or name != RULED)]
    if not passed:
        hint = f"; {RULED} compares with a rule, give one" * (RULED in chosen)
        raise PolicyError(f"no invariant is left to try{hint}")
    if unruled := [name for name in passed if name != RULED or not ruled]:
        attempt(unruled, max_examples)
    if ruled:
        attempt([RULED], max(max_examples, LEAST_CASES))
        if decisions < LEAST_DECISIONS:
            raise InvariantError(
                f"{subject.name}: {plural(decisions, 'decision')} among entries compared with the "
                f"rule, expected at least {LEAST_DECISIONS}; raise max_examples or max_n"
            )
    if sum(counts) >= ENOUGH and not evicting and subject.bounded:
        raise InvariantError(
            f"{subject.name}: nothing was evicted in {plural(sum(counts), 'case')} of at most "
            f"{max_n} tokens, which its smallest budgets hold; raise max_n or protect fewer"
        )
    return Passed(subject.name, tuple(passed), min(counts, default=0), decisions)
