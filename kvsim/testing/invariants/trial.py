"""A policy on a generated trace, and what its invariants need: records, protection, near-ties.

Comparisons between two computations of the same scores stop at a head's first near-tie: there
rounding decides.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from kvsim.core.policy import Policy, Schedule, Uniform
from kvsim.core.record import Plans, Record
from kvsim.core.trace import Trace
from kvsim.engine.checks import Setup, least_budget
from kvsim.engine.replay import run
from kvsim.schema import NEVER, Compress
from kvsim.testing import loops
from kvsim.testing.strategies import Case

Ints = npt.NDArray[np.int32]


class Broken(AssertionError):  # noqa: N818  an outcome of a check, not an error of the program
    """A violated invariant."""


@dataclass(frozen=True)
class Trial:
    """A policy on a generated trace. `salt` varies what an invariant changes.

    rule: the same policy as a rule of the naive replay, where there is one. context_len, questions,
    compress, chunk: of the trace, and of the schedule.
    """

    policy: Policy
    case: Case
    budget: int
    interval: int | None
    prefill: bool | None
    salt: int
    rule: loops.Rule | None = None
    context_len: int | None = None
    compress: Compress = "prompt"
    questions: tuple[tuple[int, int], ...] = ()
    chunk: int | None = None

    def __repr__(self) -> str:
        return (
            f"{self.policy.name} {self.policy.params}, budget={self.budget}, "
            f"interval={self.interval}, prefill={self.prefill}, salt={self.salt}, on {self.case!r}"
        )

    _repr_pretty_ = Case._repr_pretty_  # how Hypothesis shows it

    def replay(self, trace: Trace | None = None, **options: Any) -> Record:
        """The policy's Record of the trace, by default the case's; `options` of the engine."""
        trace = self.case.trace(self.context_len, self.questions) if trace is None else trace
        setup = Setup(trace, self.policy, self.budget, self.schedule)
        return run(setup.checked(), **options)

    @property
    def schedule(self) -> Schedule:
        """The policy's schedule with what replaces it."""
        terms = self.interval, self.prefill, self.compress, self.chunk
        return self.policy.schedule.override(*terms)

    @cached_property
    def record(self) -> Record:
        """The Record that variations are compared with."""
        return self.replay()

    @cached_property
    def detailed(self) -> Record:
        """The same with the scores of every event."""
        return self.replay(internals=True)

    @property
    def ways(self) -> tuple[bool, ...]:
        """Values of `by_row` that make a difference: blocks of rows, and event by event."""
        by_row = self.schedule.interval == 1 and self.policy.scorer.per_row
        return (True, False) if by_row else (False,)

    @property
    def rows(self) -> list[int]:
        """Rows after which an event fires, by the definition of a schedule."""
        interval, prefill = self.schedule.interval, self.schedule.prefill
        n, prompt_len = self.case.n, self.case.prompt_len
        return loops.event_rows(n, prompt_len, interval=interval, prefill=prefill)

    def protected(self, row: int, budget: int, layer: int) -> npt.NDArray[np.bool_]:
        """Positions that are protected right after `row`; bool [pos]. budget: of the layer."""
        protection = self.policy.at(self.budget).protection(budget)
        present, prompt_len = self.present[layer], self.case.prompt_len
        if self.context_len is not None and (self.compress == "context" or row < prompt_len - 1):
            prompt_len = self.context_len  # what the policy takes for the prompt
        if self.chunk is not None:
            prompt_len = min(prompt_len, row + 1)
        count = present.cumsum()  # of the rows that the layer has, up to each
        first = max(protection.sink, count[prompt_len - 1] if protection.prompt else 0)
        ends = (count <= first) | (count > count[row] - protection.recent)
        mask: npt.NDArray[np.bool_] = ends & present & (np.arange(self.case.n) <= row)
        return mask

    @cached_property
    def present(self) -> npt.NDArray[np.bool_]:
        """Rows that each layer has: those of the prompt that reach it, and all after it."""
        mask: npt.NDArray[np.bool_] = self.record.evicted_at[:, 0] >= np.arange(self.case.n)
        return mask

    @cached_property
    def settled(self) -> bool:
        """Whether the same rows reach deeper layers if queries change a little."""
        if self.record.selection is None:
            return True
        rng = np.random.default_rng(self.salt)
        noises = (rng.standard_normal(self.case.q.shape) for _ in range(3))
        queries = (self.case.q * (1 + 10 * self.case.tolerance * noise) for noise in noises)
        moved = (replace(self.case, q=q.astype(self.case.q.dtype)) for q in queries)
        return all((replace(self, case=case).present == self.present).all() for case in moved)

    @cached_property
    def plain(self) -> bool:
        """Whether every head keeps its layer's budget, so that scores alone decide."""
        return isinstance(self.policy.allocator, Uniform)

    @cached_property
    def sure_until(self) -> Ints:
        """int32 [layer, head]: the row of each head's first cut that rounding could reverse.

        Scores do not show what an allocator decides. With a rule, the naive replay says how close
        every decision was; without one, two nearly equal scores of a layer, one kept and one not,
        make all its heads unsure.
        """
        last = self.detailed.evicted_at
        if not self.plain and self.naive is not None:
            return self.naive.sure_until(self.case.tolerance, ties=False, faint=self.case.faint)
        sure = np.full(last.shape[:2], NEVER, dtype=np.int32)
        for plans in self.detailed.internals:
            for i, layer in enumerate(plans.layers):
                heads = range(last.shape[1])
                for shared in [[h] for h in heads] if self.plain else [list(heads)]:
                    if self._close(plans, i, last[layer], shared):
                        sure[layer, shared] = np.minimum(sure[layer, shared], plans.row)
        return sure

    def _close(self, plans: Plans, i: int, last: Ints, heads: list[int]) -> bool:
        """Whether in layer i of the block an entry that stays and one that leaves nearly tie."""
        pos, scores = plans.pos[i, heads], plans.scores[i, heads]
        live, at = pos >= 0, pos.clip(0)
        leaving = live & (np.take_along_axis(last[heads], at, -1) == plans.row)
        protected = self.protected(plans.row, int(plans.budgets[i]), plans.layers[i])[at]
        out, kept = scores[leaving], scores[live & ~leaving & ~protected][:, None]
        size = np.maximum(abs(kept), abs(out))
        with np.errstate(invalid="ignore"):  # a score may be -inf
            near = abs(kept - out) < self.case.tolerance * size
        return bool((near | (size < self.case.faint)).any())

    @cached_property
    def naive(self) -> loops.Outcome | None:
        """The naive replay of the rule; None without a rule, or with room for everything."""
        # its loops know no context, and nothing rounded
        if self.compress not in ("prompt", "questions") or self.policy.storage is not None:
            return None
        if self.rule is None or (self.budget >= self.case.n and self.policy.bounded):
            return None
        protect = self.policy.protect
        return loops.replay(
            self.case,
            self.rule,
            budget=self.budget,
            interval=self.interval,
            prefill=self.prefill,
            protect=(protect.sink, protect.recent, protect.prompt),
            context=self.context_len,
            chunk=self.chunk,
            asked=[stop - 1 for _, stop in self.questions],
        )

    @cached_property
    def against_rule(self) -> tuple[str, int]:
        """The first difference from the rule, empty without one, and the decisions compared."""
        if self.naive is None or self.rule is None:
            return "", 0
        mine, other = self.record.evicted_at, self.naive.evicted_at
        if mine.shape != other.shape:
            return f"shape {mine.shape}, by the rule {other.shape}", 0
        ties = self.plain and self.rule.ties(self.case)
        sure = self.naive.sure_until(self.case.tolerance, ties=ties, faint=self.case.faint)
        at = loops.first_difference(mine, other, sure[:, :, None])
        return ("", self.naive.choices(sure)) if at is None else (_apart(at, other, mine), 0)

    def noise(self, mask: npt.NDArray[np.bool_]) -> dict[str, Any]:
        """Queries, keys and values, others where mask is True [layer or 1, head or 1, pos]."""
        rng = np.random.default_rng(self.salt)
        out = {}
        for name in "qkv":
            array = getattr(self.case, name)
            other = (3 * rng.standard_normal(array.shape)).astype(array.dtype)
            repeated = np.repeat(mask, array.shape[1] // mask.shape[1], axis=1)
            out[name] = np.where(repeated[..., None], other, array)
        return out

    def later(self, end: int, **changes: Any) -> Trial:
        """The trial with other rows from `end` on, and changes of its case."""
        noise = self.noise((np.arange(self.case.n) >= end)[None, None])
        return replace(self, case=replace(self.case, **noise, **changes))

    def first(self, end: int, **changes: Any) -> Trial:
        """The trial with the rows before `end` alone, and changes of its case."""
        rows = {name: getattr(self.case, name)[:, :, :end] for name in "qkv"}
        return replace(self, case=replace(self.case, **rows, **changes))

    def same(self, other: npt.ArrayLike, change: str, *, until: int = NEVER) -> None:
        """Raise Broken where `other` [layer, head, pos] evicts otherwise, up to row `until`."""
        before, after = self.record.evicted_at, np.asarray(other)
        equal = np.array_equal(np.minimum(before, until), np.minimum(after, until))
        if equal or not self.settled:
            return
        limit = np.minimum(self.sure_until, until)[:, :, None]
        at = loops.first_difference(before, after, limit)
        if at is not None:
            raise Broken(f"{change}: {_apart(at, before, after)}")


def _apart(at: tuple[int, ...], expected: Ints, found: Ints) -> str:
    layer, head, pos = at
    rows = ("never" if x[at] == NEVER else f"after row {x[at]}" for x in (found, expected))
    return f"layer {layer}, head {head}, position {pos} leaves {', expected '.join(rows)}"


def require(condition: object, message: str) -> None:
    """Raise Broken unless the condition holds."""
    if not condition:
        raise Broken(message)


def smallest_budget(policy: Policy, case: Case, schedule: Schedule | None = None) -> int:
    """The smallest budget that the policy has a rule for on this trace, its length at most."""
    layers, _, _, n, _ = case.shape
    sizes: Any = {"prompt_len": case.prompt_len, "n_pos": n, "n_layers": layers}
    return min(n, least_budget(policy, schedule=schedule, **sizes))
