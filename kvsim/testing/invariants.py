"""What every policy must satisfy, a small function each, and `check_policy`, which tries them all.

A `Trial` is a generated trace with a policy, a budget and a schedule. An invariant replays it, and
variations of it, and raises `Broken` with what it found. Comparisons between two computations of
the same scores stop at a head's first near-tie: there rounding decides.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvsim.analysis.output.error import output_error
from kvsim.core.policy import Allocator, Even, Plan, Policy, Schedule, Uniform
from kvsim.core.record import Plans, Record, read_records, write_records
from kvsim.core.view import View
from kvsim.engine import check_cell, replay
from kvsim.errors import BudgetError, KvsimError, MemoryLimitError, PolicyError, suggest
from kvsim.policies import policy as named
from kvsim.schema import NEVER
from kvsim.testing import reference, strategies
from kvsim.testing.strategies import Case

Ints = npt.NDArray[np.int32]


class InvariantError(KvsimError, AssertionError):
    """A policy breaks an invariant; the message names it and the smallest case found."""


class Broken(AssertionError):  # noqa: N818  it is what happened, not an error of the program
    """What an invariant found."""


# -------------------------------------------------------------------------------------- the trial


@dataclass(frozen=True)
class Trial:
    """A policy on a generated trace. `salt` varies what an invariant changes."""

    policy: Policy
    case: Case
    budget: int
    interval: int | None
    prefill: bool | None
    salt: int

    def __repr__(self) -> str:
        return (
            f"{self.policy!r}, budget={self.budget}, interval={self.interval}, "
            f"prefill={self.prefill}, salt={self.salt}, on {self.case!r}"
        )

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """How Hypothesis shows it."""
        printer.text(repr(self))

    def replay(self, **hooks: Any) -> Record:
        """The policy's Record of the trace."""
        return replay(
            self.case.trace(),
            self.policy,
            self.budget,
            interval=self.interval,
            prefill=self.prefill,
            **hooks,
        )

    @cached_property
    def record(self) -> Record:
        """The Record that variations are compared with."""
        return self.replay()

    @cached_property
    def noted(self) -> Record:
        """The same with the scores of every event."""
        return self.replay(internals=True)

    @property
    def rows(self) -> list[int]:
        """Rows after which an event fires, by the definition of a schedule."""
        interval = self.policy.schedule.interval if self.interval is None else self.interval
        prefill = self.policy.schedule.prefill if self.prefill is None else self.prefill
        case = self.case
        return reference.event_rows(case.n, case.prompt_len, interval=interval, prefill=prefill)

    def protected(self, row: int, budget: int, layer: int) -> npt.NDArray[np.bool_]:
        """Positions that are always kept right after `row`; bool [pos]. budget: of the layer."""
        always = self.policy.protection(budget)
        present = self.present[layer]
        place = present.cumsum() - 1  # among the rows that the layer has
        prompt = int(present[: self.case.prompt_len].sum()) if always.prompt else 0
        first = max(always.sink, prompt)
        past = present & (np.arange(self.case.n) <= row)
        kept: npt.NDArray[np.bool_] = past & (
            (place < first) | (place > place[row] - always.recent)
        )
        return kept

    @cached_property
    def present(self) -> npt.NDArray[np.bool_]:
        """Which rows the layers have: those of the prompt that went on, and all behind it."""
        found: npt.NDArray[np.bool_] = self.record.evicted_at[:, 0] >= np.arange(self.case.n)
        return found

    @cached_property
    def settled(self) -> bool:
        """Whether the rows that go on to deeper layers stay the same if queries move a little."""
        if self.policy.propagation is None:
            return True
        rng = np.random.default_rng(self.salt)
        for _ in range(3):
            noise = 1 + 10 * self.case.tolerance * rng.standard_normal(self.case.q.shape)
            moved = replace(self.case, q=(self.case.q * noise).astype(self.case.q.dtype))
            if not np.array_equal(replace(self, case=moved).present, self.present):
                return False
        return True

    @cached_property
    def plain(self) -> bool:
        """Whether every head keeps its layer's budget, so that scores alone decide."""
        return isinstance(self.policy.allocator, Uniform)

    @cached_property
    def sure_until(self) -> Ints:
        """int32 [layer, head]: the row of each head's first cut that rounding could turn.

        What an allocator decides is not seen in the scores: for a built-in one the naive replay
        tells how close every decision was; for another, two scores of a layer that are nearly
        equal, one kept and one not, make all its heads unsure.
        """
        last = self.noted.evicted_at
        if not self.plain and self.naive is not None:
            return self.naive.sure_until(self.case.tolerance, ties=False, faint=self.case.faint)
        sure = np.full(last.shape[:2], NEVER, dtype=np.int32)
        for plans in self.noted.internals:
            for i, layer in enumerate(plans.layers):
                heads = range(last.shape[1])
                for shared in [[h] for h in heads] if self.plain else [list(heads)]:
                    if self._close(plans, i, last[layer], shared):
                        sure[layer, shared] = np.minimum(sure[layer, shared], plans.row)
        return sure

    def _close(self, plans: Plans, i: int, last: Ints, heads: list[int]) -> bool:
        """Whether in layer i of the block something kept and something gone nearly tie."""
        gone, rest = [], []
        for head in heads:
            live = plans.pos[i, head] >= 0
            pos, score = plans.pos[i, head][live], plans.scores[i, head][live]
            left = last[head, pos] == plans.row
            layer = plans.layers[i]
            free = ~left & ~self.protected(plans.row, int(plans.budgets[i]), layer)[pos]
            gone.append(score[left])
            rest.append(score[free])
        out, kept = np.concatenate(gone), np.concatenate(rest)[:, None]
        size = np.maximum(abs(kept), abs(out))
        with np.errstate(invalid="ignore"):  # a score may be -inf
            near = abs(kept - out) < self.case.tolerance * size
        return bool((near | (size < self.case.faint)).any())

    @cached_property
    def naive(self) -> reference.Outcome | None:
        """What the naive float64 loop finds; None for a policy that it does not know.

        And where there is room for everything, so that nothing is to be found.
        """
        policy = self.policy
        if self.budget >= self.case.n and policy.bounded:
            return None
        try:
            known = reference.defaults(policy.name)
            twin = named(policy.name, **policy.params)
        except KvsimError:
            return None
        if twin != policy:
            return None
        kept = policy.protect
        return self.case.naive(
            policy.name,
            {key: value for key, value in policy.params.items() if key in known},
            budget=self.budget,
            interval=self.interval,
            prefill=self.prefill,
            protect=(kept.sink, kept.recent, kept.prompt),
        )

    def same(self, other: npt.ArrayLike, what: str, *, until: int = NEVER) -> None:
        """Raise Broken where `other` [layer, head, pos] evicts otherwise, up to row `until`."""
        if not self.settled:
            return
        limit = np.minimum(self.sure_until, until)[:, :, None]
        mine, found = self.record.evicted_at, np.asarray(other)
        differ = np.minimum(mine, limit) != np.minimum(found, limit)
        if differ.any():
            layer, head, pos = (int(i[0]) for i in differ.nonzero())
            raise Broken(
                f"{what}: layer {layer}, head {head}, position {pos} leaves after row "
                f"{_row(found[layer, head, pos])}, before it was {_row(mine[layer, head, pos])}"
            )


def _row(evicted_at: int) -> str:
    return "never" if evicted_at == NEVER else str(evicted_at)


def _require(condition: object, message: str) -> None:
    if not condition:
        raise Broken(message)


# ---------------------------------------------------------------------------------- the invariants


def exact_size(trial: Trial) -> None:
    """After an event that acts, what is held has exactly the budget; at others nothing leaves."""
    record, policy = trial.noted, trial.policy
    heads, due = record.evicted_at.shape[1], trial.rows
    end = trial.case.prompt_len - 1
    # rows of the prompt are dropped whether an event fires or not
    allowed = set(due) if trial.present.all() else {*due, end}
    _require(set(record.events) <= allowed, f"entries left after rows {record.events}, due {due}")
    if policy.propagation is not None and policy.propagation.alone:  # decoding keeps everything
        due = [row for row in due if row == end]
    if not policy.exact:
        return
    shared = policy.layer_budgets.across_layers
    planned = {
        plans.row: [p for p in record.internals if p.row == plans.row] for plans in record.internals
    }
    for row in due:
        before, after = record.kept(row).sum(-1), record.retained(row).sum(-1)
        budgets = np.full(len(before), trial.budget)
        if not isinstance(policy.layer_budgets, Even):
            for plans in planned.get(row, []):
                budgets[list(plans.layers)] = plans.budgets
            _require(
                not planned.get(row) or budgets.sum() == budgets.size * trial.budget,
                f"after row {row} the layers' budgets are {budgets.tolist()}",
            )
        if shared:
            acts = np.full(len(before), before.sum() > before.size * trial.budget)
        else:
            acts = before.sum(-1) > heads * budgets
        expected = np.where(acts, heads * budgets, before.sum(-1))
        _require(
            (after.sum(-1) == expected).all(),
            f"after row {row} layers hold {after.tolist()}, expected {expected} over their heads",
        )
        if trial.plain:
            uneven = after[acts] != budgets[acts, None]
            _require(not uneven.any(), f"after row {row} heads hold {after.tolist()}")
        if shared and acts.all():
            _require(
                after.sum() == after.size * trial.budget,
                f"after row {row} the layers together hold {after.sum()}",
            )


def nothing_returns(trial: Trial) -> None:
    """What a row sees is what the row before it saw, less what left, and its own entry."""
    last, n = trial.record.evicted_at, trial.case.n
    present = trial.present[:, None]
    early = last < np.arange(n)
    _require((early == ~present).all(), "an entry left before its own row")
    _require((last[early] == early.nonzero()[2] - 1).all(), "a row that never was has an end")
    before = np.zeros(last.shape, dtype=bool)
    for row in range(n):
        seen = trial.record.kept(row)
        _require((seen == reference.seen_by(last, row)).all(), f"kept({row}) is not what is seen")
        own = seen[..., row] == present[..., row]
        _require(own.all(), f"row {row} does not see its own entry, or has none and sees it")
        _require(not (seen & ~before)[..., :row].any(), f"an entry returned at row {row}")
        before = seen & ~(last == row)
        _require(
            (before == trial.record.retained(row)).all(), f"retained({row}) is not what is held"
        )


def protected_survive(trial: Trial) -> None:
    """No event evicts an entry that is protected at it."""
    last = trial.noted.evicted_at
    for plans in trial.noted.internals:
        for layer, budget in zip(plans.layers, plans.budgets.tolist(), strict=True):
            lost = (last[layer] == plans.row) & trial.protected(plans.row, budget, layer)
            _require(
                not lost.any(),
                f"after row {plans.row} protected {np.unique(lost.nonzero()[1])} left",
            )


def full_budget(trial: Trial) -> None:
    """With room for everything nothing leaves, and the output error is exactly 0."""
    if not trial.policy.bounded:
        return
    for budget in (trial.case.n, trial.case.n + 3):
        record = replace(trial, budget=budget).replay()
        _require((record.evicted_at == NEVER).all(), f"an entry left at budget {budget}")
    error = output_error(trial.case.trace(), [record])[0]
    _require((error.error == 0).all(), f"output error {error.error.max()} with nothing evicted")
    _require((error.mass == 1).all(), f"retained mass {error.mass.min()} with nothing evicted")


def no_effect_while_there_is_room(trial: Trial) -> None:
    """As long as no more than the budget exists nothing leaves."""
    if trial.policy.bounded:
        first = int(trial.record.gone_after.min())
        _require(first >= trial.budget, f"an entry left after row {first}, which had room")


def causality(trial: Trial) -> None:
    """Rows later than an event, changed or absent, change nothing at or before it."""
    case = trial.case
    if trial.policy.scorer.clairvoyant:
        return
    now = case.prompt_len - 1 + trial.salt % (case.n - case.prompt_len + 1)
    if trial.record.events and trial.salt % 4:  # mostly a row whose event evicts
        now = trial.record.events[trial.salt % len(trial.record.events)]
    rng = np.random.default_rng(trial.salt)
    later = {}
    for name in "qkv":
        array = getattr(case, name).copy()
        array[:, :, now + 1 :] = 3 * rng.standard_normal(array[:, :, now + 1 :].shape)
        later[name] = array
    changed = replace(trial, case=replace(case, **later))
    trial.same(changed.replay().evicted_at, f"rows after {now} changed", until=now + 1)
    past = {name: getattr(case, name)[:, :, : now + 1] for name in "qkv"}
    short = replace(trial, case=replace(case, **past)).replay().evicted_at
    padded = np.full_like(trial.record.evicted_at, NEVER)
    padded[:, :, : now + 1] = short
    trial.same(padded, f"rows after {now} cut off", until=now + 1)


def no_peeking_at_the_dead(trial: Trial) -> None:
    """Keys and values overwritten with NaN at the moment they leave change nothing."""
    for by_row in (True, False):
        try:
            found = trial.replay(_poison=True, _by_row=by_row)
        except KvsimError as error:
            raise Broken(f"a dead entry shows: {error}") from error
        trial.same(found.evicted_at, "dead entries overwritten")


def absent_rows(trial: Trial) -> None:
    """Queries, keys and values of rows that did not go on to a layer change nothing there."""
    if trial.present.all():
        return
    rng = np.random.default_rng(trial.salt)
    absent = ~trial.present[:, None, :, None]
    if trial.policy.propagation is not None and trial.policy.propagation.restarts:
        dropped = trial.record.selection.dropped[0] if trial.record.selection else 0
        absent = absent & (np.arange(len(absent)) > dropped)[:, None, None, None]
    case = trial.case
    moved = {}
    for name in "qkv":
        array = getattr(case, name)
        noise = (3 * rng.standard_normal(array.shape)).astype(array.dtype)
        moved[name] = np.where(absent, noise, array)
    found = replace(trial, case=replace(case, **moved)).replay()
    trial.same(found.evicted_at, "rows that did not go on were overwritten")


def isolation(trial: Trial) -> None:
    """A, then B, then A again: the same as A alone, and the policy object is as it was."""
    before = repr(trial.policy)
    mine = trial.record.evicted_at.copy()
    layers, heads, group, n, dim = trial.case.shape
    other = strategies.make_case(
        "sharp",
        layers=layers,
        heads=heads,
        group=group,
        n=n,
        dim=dim,
        prompt_len=trial.case.prompt_len,
        seed=trial.salt + 1,
    )
    replace(trial, case=other).replay()
    _require(
        (trial.replay().evicted_at == mine).all(),
        "another trace replayed in between changes the outcome",
    )
    _require(repr(trial.policy) == before, f"the policy was {before}, is {trial.policy!r}")


def layer_blocks(trial: Trial) -> None:
    """Layers one by one, or in the smallest memory that works, as in one block."""
    layers = trial.case.shape[0]
    if layers == 1 or trial.policy.layer_budgets.across_layers:
        return
    alone = [trial.replay(layers=[layer]).evicted_at[0] for layer in range(layers)]
    trial.same(np.stack(alone), "layers replayed one by one")
    trial.same(trial.replay(memory=_smallest_memory(trial)).evicted_at, "smallest memory")


def _smallest_memory(trial: Trial) -> int:
    low, high = 0, 1 << 40  # too little, enough
    trace = trial.case.trace()
    while high - low > 1 << 10:
        middle = (low + high) // 2
        try:  # the limit does not depend on what is evicted
            check_cell(trace, trial.policy, trial.case.n, middle)
            high = middle
        except MemoryLimitError:
            low = middle
    return high


def thread_count(trial: Trial) -> None:
    """The number of threads changes nothing."""
    before = torch.get_num_threads()
    try:
        for threads in {1, 2} - {before}:
            torch.set_num_threads(threads)
            trial.same(trial.replay().evicted_at, f"with {threads} threads")
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class PerHead(Allocator):
    """A testing allocator: a fixed number of entries for each KV head."""

    quotas: tuple[int, ...]

    def plan(self, view: View, scores: Tensor, protected: Tensor) -> Plan:
        """The same quotas in every layer and at every event."""
        return Plan(torch.tensor(self.quotas).expand_as(view.count))


def ragged(trial: Trial) -> None:
    """Heads that keep different numbers keep what each would keep at its own number.

    Where what is protected depends on the budget, or nothing has room to differ, it says nothing.
    """
    heads, n = trial.record.evicted_at.shape[1], trial.case.n
    if heads < 2 or not trial.plain or not isinstance(trial.policy.layer_budgets, Even):
        return
    if trial.policy.propagation is not None:  # the budget also says how many rows go on
        return
    least = smallest_budget(trial.policy, trial.case)
    spread = 1 + trial.salt % 3
    budget = least + spread
    quotas = [budget] * heads
    quotas[trial.salt % heads] += spread
    quotas[(trial.salt + 1) % heads] -= spread
    always = trial.policy.protection(budget)
    if budget + spread >= n or min(quotas) < always.size(n):
        return
    # the prompt is longer than every quota, so that all heads act at the same events
    prompt_len = max(trial.case.prompt_len, budget + spread + 1)
    case = replace(trial.case, prompt_len=prompt_len)
    together = replace(
        trial,
        policy=replace(trial.policy, allocator=PerHead(tuple(quotas))),
        case=case,
        budget=budget,
        prefill=True,
    ).replay()
    for head, quota in enumerate(quotas):
        if trial.policy.protection(quota) != always:
            continue
        alone = replace(trial, case=case, budget=quota, prefill=True)
        found = alone.record.evicted_at.copy()
        found[:, head] = together.evicted_at[:, head]
        alone.same(found, f"head {head} with {quota} entries beside heads with {quotas}")


def tie_rule(trial: Trial) -> None:
    """Of the unprotected entries those with the higher score stay; of equal ones the lower."""
    last = trial.noted.evicted_at
    for plans in trial.noted.internals:
        for i, layer in enumerate(plans.layers):
            for head in range(last.shape[1]):
                live = plans.pos[i, head] >= 0
                pos, score = plans.pos[i, head][live], plans.scores[i, head][live]
                _require((np.diff(pos) > 0).all(), f"entries out of order at row {plans.row}")
                gone = last[layer, head, pos] == plans.row
                if plans.eligible is not None:
                    gone &= plans.eligible[i, head][live]
                rest = ~gone & (last[layer, head, pos] != plans.row)
                rest &= ~trial.protected(plans.row, int(plans.budgets[i]), layer)[pos]
                group = np.zeros_like(pos) if plans.groups is None else plans.groups[i, head][live]
                for one in np.unique(group[gone]):
                    stays, leaves = rest & (group == one), gone & (group == one)
                    if stays.any():
                        worst = max(zip(-score[stays], pos[stays], strict=True))
                        best = min(zip(-score[leaves], pos[leaves], strict=True))
                        _require(
                            worst < best,
                            f"after row {plans.row} of layer {layer}, head {head}: position "
                            f"{best[1]} with score {-best[0]} left, {worst[1]} with {-worst[0]} "
                            "stayed",
                        )


def head_permutation(trial: Trial) -> None:
    """Permuting the KV heads, their queries with them, permutes the outcome."""
    _, heads, group, _, _ = trial.case.shape
    order = np.random.default_rng(trial.salt).permutation(heads)
    qorder = (order[:, None] * group + np.arange(group)).ravel()
    case = trial.case
    moved = replace(
        case,
        q=case.q[:, qorder],
        k=case.k[:, order],
        v=case.v[:, order],
        o_proj=None if case.o_proj is None else case.o_proj[:, qorder],
    )
    found = replace(trial, case=moved).replay().evicted_at
    back = np.empty_like(found)
    back[:, qorder if trial.policy.per_query_head else order] = found
    trial.same(back, f"heads in the order {order.tolist()}")


def finite(trial: Trial) -> None:
    """Scores, output error and retained mass are numbers, whatever the trace holds."""
    for plans in trial.noted.internals:
        _require(not np.isnan(plans.scores[plans.pos >= 0]).any(), f"NaN score at row {plans.row}")
    found = output_error(trial.case.trace(), [trial.record])[0]
    for name in ("error", "mass", "missing"):
        known = np.isfinite(getattr(found, name)).reshape(len(trial.present), -1, trial.case.n)
        _require((known == trial.present[:, None]).all(), f"{name} is not finite, or without a row")


def retained_mass(trial: Trial) -> None:
    """Retained mass is in [0, 1], 1 where nothing was evicted, and grows with the kept set."""
    trace, record = trial.case.trace(), trial.record
    if record.positions == "slot":  # a larger set moves the slots, and with them the logits
        return
    rng = np.random.default_rng(trial.salt)
    back = (rng.random(record.evicted_at.shape) < 0.5) & trial.present[:, None]
    larger = replace(record, evicted_at=np.where(back, NEVER, record.evicted_at).astype(np.int32))
    first = 0 if trial.present.all() else trial.case.prompt_len
    some, more = (found.mass[..., first:] for found in output_error(trace, [record, larger]))
    if not some.size:
        return
    _require((some >= 0).all() and (some <= 1).all(), f"mass in {some.min()}..{some.max()}")
    before = (record.events[0] + 1 if record.events else trial.case.n) - first
    _require((some[:, :, :before] == 1).all(), "mass below 1 before the first event")
    # the difference of two log-sum-exps is as exact as logits in the hundreds are
    slack = 1e-6 if trial.case.q.dtype == np.float64 else 1e-4
    _require((more >= some - slack).all(), f"mass falls by {(some - more).max()} with a larger set")


def round_trip(trial: Trial) -> None:
    """A Record that was stored and read again is the same."""
    if trial.salt % 4:  # writing files takes longer than all the rest
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records.zarr"
        write_records(path, [trial.record])
        (found,) = read_records(path)
    for part in fields(Record):
        mine, its = getattr(trial.record, part.name), getattr(found, part.name)
        same = np.array_equal(mine, its) if part.name == "evicted_at" else mine == its
        _require(same, f"{part.name} was {mine}, is {its}")


def rows_equal_events(trial: Trial) -> None:
    """The path for an interval of 1 and the general one give the same Record, noted or not."""
    trial.same(trial.replay(_by_row=False).evicted_at, "by events instead of rows")
    trial.same(trial.noted.evicted_at, "with internals noted")


def naive_replay(trial: Trial) -> None:
    """A built-in policy evicts what a naive float64 loop evicts."""
    if trial.naive is None:
        return
    found = trial.record.evicted_at
    ties = trial.plain and trial.case.ties_are_exact(trial.policy.name)
    _require(
        trial.naive.agrees(found, trial.case.tolerance, ties=ties, faint=trial.case.faint),
        f"naive {trial.naive.evicted_at.tolist()}, engine {found.tolist()}",
    )


Invariant = Callable[[Trial], None]

#: Every invariant by name, in the order in which they are tried.
INVARIANTS: Mapping[str, Invariant] = {
    invariant.__name__: invariant
    for invariant in (
        exact_size,
        nothing_returns,
        protected_survive,
        no_effect_while_there_is_room,
        full_budget,
        finite,
        tie_rule,
        causality,
        no_peeking_at_the_dead,
        absent_rows,
        isolation,
        rows_equal_events,
        layer_blocks,
        thread_count,
        ragged,
        head_permutation,
        retained_mass,
        round_trip,
        naive_replay,
    )
}

#: What a built-in policy is exempt from, by the definition of the policy; any part of its name.
EXEMPT: Mapping[str, Collection[str]] = {
    "random": {"head_permutation"},  # the head's number is part of the draw
    "tova": {"ragged"},  # one ranking for all heads is defined while they hold the same entries
    "rpc": {"ragged"},  # the same
    "criticalkv": {"ragged"},  # its first stage is a share of the even budget
    # a layer has its own budget, which is below the policy's in some even if there is room
    "pyramidkv": {"full_budget", "no_effect_while_there_is_room"},
    # as many rows as it is told go on from a prompt that just fills the budget
    "fastkv": {"full_budget", "no_effect_while_there_is_room"},
}


# ------------------------------------------------------------------------------------- trying them


def smallest_budget(policy: Policy, case: Case, schedule: Schedule | None = None) -> int:
    """The smallest budget that the policy has a rule for on this trace, its length at most."""
    layers, _, _, n, _ = case.shape
    for budget in range(1, n):
        try:
            policy.check_budget(
                budget, prompt_len=case.prompt_len, n_layers=layers, schedule=schedule
            )
        except BudgetError:
            continue
        return budget
    return max(1, n)


@st.composite
def trials(draw: st.DrawFn, policy: Policy, max_n: int = 32) -> Trial:
    """The policy on any small trace, at budgets near what it protects and at any schedule."""
    case = draw(strategies.cases(dtypes=(np.float64, np.float32, np.float16), max_n=max_n))
    interval, prefill = strategies.draw_schedule(draw, case.n, case.prompt_len)
    trial = Trial(policy, case, case.n, interval, prefill, draw(st.integers(0, 2**16)))
    schedule = policy.schedule.override(interval, prefill)
    least = smallest_budget(policy, case, schedule)
    # an event that acts needs rows enough for the scorer
    least = max(least, min(policy.scorer.least_rows, case.n))
    return replace(trial, budget=strategies.draw_budget(draw, least, max(trial.rows, default=0)))


@contextmanager
def _told(policy: Policy, name: str, trial: Trial) -> Iterator[None]:
    """Whatever goes wrong inside says during which invariant, and on what."""
    try:
        yield
    except Broken as broken:
        raise InvariantError(
            f"{policy.name} breaks the invariant {name!r}: {broken}\n  {trial}"
        ) from broken
    except KvsimError as error:
        raise InvariantError(
            f"{policy.name} fails during the invariant {name!r}: {error}\n  {trial}"
        ) from error


def check_policy(
    policy: Policy | str,
    *,
    max_examples: int = 50,
    max_n: int = 32,
    only: Collection[str] | None = None,
    exempt: Collection[str] = (),
    shrink: bool = True,
    **params: Any,
) -> None:
    """Try every invariant on `policy`, a Policy or the name of one with `params`.

    max_examples: generated traces, each with a budget and a schedule. max_n: tokens of the longest.
    only, exempt: names of INVARIANTS to try alone, or to leave out. shrink: look for the smallest
    case that fails. Raises InvariantError, which names the invariant and the case.
    """
    subject = named(policy, **params) if isinstance(policy, str) else policy
    chosen = set(INVARIANTS) if only is None else set(only)
    parts = [part.partition("@")[0] for part in subject.name.split("+")]
    chosen -= {name for part in parts for name in EXEMPT.get(part, ())} | set(exempt)
    for name in {*chosen, *exempt} - set(INVARIANTS):
        known = ", ".join(INVARIANTS)
        raise PolicyError(f"unknown invariant {name!r}{suggest(name, INVARIANTS)}; known: {known}")
    phases = set(Phase) - ({Phase.explain} if shrink else {Phase.explain, Phase.shrink})

    @settings(
        max_examples=max_examples,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        phases=phases,
    )
    @given(trials(subject, max_n))
    def attempt(trial: Trial) -> None:
        for name, invariant in INVARIANTS.items():
            if name in chosen:
                with _told(subject, name, trial):
                    invariant(trial)

    attempt()
