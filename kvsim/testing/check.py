"""`check_policy`: every invariant on one policy, over generated traces."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from kvsim.core.policy import Policy
from kvsim.errors import KvsimError, PolicyError, suggest
from kvsim.policies import policy as named
from kvsim.schema import plural
from kvsim.testing.invariants import EXEMPT, INVARIANTS
from kvsim.testing.invariants.trial import Broken, Trial, smallest_budget
from kvsim.testing.loops import Rule
from kvsim.testing.strategies import cases, draw_budget, draw_schedule


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
    least = max(least, min(policy.scorer.least_rows, case.n))
    return replace(trial, budget=draw_budget(draw, least, max(trial.rows, default=0)))


@dataclass(frozen=True)
class Passed:
    """The result of `check_policy`: the invariants that hold, and on how many generated cases."""

    policy: str
    invariants: tuple[str, ...]
    cases: int

    def __repr__(self) -> str:
        return (
            f"{self.policy}: passed {plural(len(self.invariants), 'invariant')} on "
            f"{plural(self.cases, 'generated case')}"
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

    Returns what has passed, which prints as a line.

    rule: the policy once more, as a rule of the naive replay (`kvsim.testing.loops`): the policy
    must evict what the rule evicts. max_examples: generated traces, each with a budget and a
    schedule. max_n: tokens of the longest. only, exempt: names of INVARIANTS to try alone, or to
    leave out. shrink: look for the smallest case that fails.

    Raises InvariantError, which names the invariant and the case.
    """
    subject = named(policy, **params) if isinstance(policy, str) else policy
    chosen = set(INVARIANTS) if only is None else set(only)
    parts = [part.partition("@")[0] for part in subject.name.split("+")]
    chosen -= {name for part in parts for name in EXEMPT.get(part, ())} | set(exempt)
    for name in {*chosen, *exempt} - set(INVARIANTS):
        raise PolicyError(
            f"unknown invariant {name!r}{suggest(name, INVARIANTS)}; known: {', '.join(INVARIANTS)}"
        )
    phases = set(Phase) - ({Phase.explain} if shrink else {Phase.explain, Phase.shrink})

    tried = Counter[str]()

    @settings(
        max_examples=max_examples,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        phases=phases,
    )
    @given(trials(subject, rule, max_n))
    def attempt(trial: Trial) -> None:
        tried["cases"] += 1
        for name, invariant in INVARIANTS.items():
            if name not in chosen:
                continue
            try:
                invariant(trial)
            except (Broken, KvsimError) as error:
                verb = "breaks" if isinstance(error, Broken) else "fails during"
                raise InvariantError(
                    f"{subject.name} {verb} the invariant {name!r}: {error}\n  {trial}"
                ) from error

    if settings().derandomize:  # the same cases every time, but others for every policy
        attempt = seed(zlib.crc32(subject.name.encode()))(attempt)
    attempt()
    return Passed(
        subject.name, tuple(name for name in INVARIANTS if name in chosen), tried["cases"]
    )
