"""The events of one block of layers: append, score, plan, select, evict."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.core.budgets import budget_at
from kvsim.core.entries import Entries
from kvsim.core.lazy import Tensor, torch
from kvsim.core.merging import Store
from kvsim.core.policy import Plan, Policy, Scores, protected_by
from kvsim.core.record import Plans
from kvsim.core.select import select
from kvsim.core.view import Setting, Source, View
from kvsim.errors import BudgetError, PolicyError, ScoreError
from kvsim.schema import GUIDE, NEVER


@dataclass(frozen=True)
class Choice:
    """A policy's choice at an event, and its inputs; valid until `Block.apply`.

    Attributes:
        view: the policy's view.
        acts: layers that hold more than their budget, bool [L]; others are unchanged.
        keep: entries to keep, bool [L, H, n].
        scores: [L, H, n]; None, like protected and plan, if no layer acts.
        protected: bool [L, H, n].
        plan: the quotas.
        columns: new values of columns, [L, H, n].
    """

    view: View
    acts: Tensor
    keep: Tensor
    scores: Tensor | None = None
    protected: Tensor | None = None
    plan: Plan | None = None
    columns: Mapping[str, Tensor] = field(default_factory=dict)

    def recorded(self, internals: bool | Collection[str], positions: NDArray[Any]) -> list[Plans]:
        """Return the decision for a record; empty if there is nothing to record.

        internals: only some notes by name, or everything. positions: of each row in the text.
        """
        view, plan = self.view, self.plan
        if plan is None or self.scores is None or internals is False:
            return []
        if internals is not True and plan.notes.keys().isdisjoint(internals):
            return []
        pos = view.pos.cpu().numpy()
        plans = Plans(
            row=int(positions[view.row]),
            layers=tuple(view.layers.tolist()),
            pos=np.where(pos < 0, -1, positions[pos]),
            scores=self.scores.double().masked_fill(~view.live, torch.nan).cpu().numpy(),
            budgets=view.budget.flatten().cpu().numpy(),
            quotas=plan.quotas.cpu().numpy(),
            groups=None if plan.groups is None else plan.groups.cpu().numpy(),
            eligible=None if plan.eligible is None else plan.eligible.cpu().numpy(),
            notes={name: note.cpu().numpy() for name, note in plan.notes.items()},
        )
        return [plans if internals is True else plans.brief(internals)]


class Block:
    """The cache of a block of layers while a policy acts on it.

    Args:
        source: keys, values and queries of the layers.
        policy: decides at each event.
        setting: constants of the events; prefill events have their own.
        layers: index of each layer in the trace.

    Attributes:
        entries: the live entries, with the policy's columns.
        evicted_at: the row after which each entry left, or NEVER; int32 [L, H, T].
        since: the row of the last event that acted on each layer, -1 before the first; int [L].
        store: the stored numbers of entries.
    """

    def __init__(
        self,
        source: Source,
        policy: Policy,
        setting: Setting,
        layers: Sequence[int],
    ) -> None:
        self.source, self.policy, self.setting = source, policy, setting
        keys = source.keys
        self.layers = torch.tensor(layers, device=keys.device)
        n, heads = keys.shape[:2]
        shape = (n, heads, source.n_rows)
        self.evicted_at = torch.full(shape, NEVER, dtype=torch.int32, device=keys.device)
        self.entries = Entries(n, heads, policy.columns, like=keys, compacted=source.compacted)
        self.since = torch.full_like(self.layers, -1)
        self._next = 0  # first position not yet appended
        first = setting.ends[0] - 1
        self.store = Store(policy.storage, source, self.evicted_at, first, layers)

    def fire(self, rows: Iterable[int], internals: bool | Collection[str] = False) -> list[Plans]:
        """Fire the events after rows; returns decisions on request (`Choice.recorded`)."""
        positions, plans = self.source.positions.cpu().numpy(), list[Plans]()
        for row in rows:
            choice = self.choose(row)
            plans += choice.recorded(internals, positions)
            self.apply(choice)
            del choice  # the next event's attention takes its place
        return plans

    def event(self, row: int) -> bool:
        """Fire the event after row `row`. True if it acted on any layer."""
        choice = self.choose(row)
        self.apply(choice)
        return choice.plan is not None

    def choose(self, row: int, *, fires: bool = True) -> Choice:
        """Append the rows up to `row`, and return the policy's choice after it.

        It acts on the layers that hold more than their budget. Layers that share one budget or
        ranking act together.

        Args:
            row: the row after which the event fires.
            fires: False if the policy has no event, so that it keeps everything.

        Raises:
            ScoreError, PolicyError, BudgetError: invalid scores, columns or quotas.
        """
        entries, policy = self.entries, self.policy
        entries.append(self._next, row + 1)
        self._next = row + 1
        self.store.before(row, self.in_source)
        view = View(
            self.source,
            entries,
            self._setting_at(row),
            row=row,
            since=self.since,
            layers=self.layers,
            rounded_after=self.store.rounded_after,
            rounded=policy.storage is not None,
        )
        acts = self._set_budgets(view) & fires
        if not bool(acts.any()):
            return Choice(view, acts, entries.live)
        scores = view.scored(policy.scorer)
        check(policy, view, scores)
        protected = protected_by(partial(policy.protection, enforced=False), view)
        plan = policy.allocator.plan(view, scores.values, protected)
        if not policy.allocator.enforces:
            protected = torch.zeros_like(protected)
        _check_plan(policy, view, plan, protected)
        chosen = plan.quotas, protected, entries.live, plan.groups, plan.eligible
        keep = select(scores.values, *chosen).where(acts.view(-1, 1, 1), entries.live)
        columns = {**scores.columns, **plan.columns}
        return Choice(view, acts, keep, scores.values, protected, plan, columns)

    def apply(self, choice: Choice, keep: Tensor | None = None) -> None:
        """Evict all entries but the policy's choice, or those in keep, bool [L, H, n]."""
        entries, row, acts = self.entries, choice.view.row, choice.acts
        if keep is None and choice.plan is None:
            return
        for name, column in choice.columns.items():
            entries.columns[name] = column.where(acts.view(-1, 1, 1), entries.columns[name])
        if keep is None:
            keep = choice.keep
        else:
            acts = acts | (keep != entries.live).flatten(1).any(1)
        gone = entries.places(self.evicted_at.shape[-1])[entries.live & ~keep]
        self.evicted_at.view(-1).index_fill_(0, gone, row)
        if len(gone):
            self.store.left(row, self.in_source)
        slots = entries.compress(keep)
        self.source.evict(slots, entries.live, self.evicted_at)
        self.since = self.since.masked_fill(acts.flatten(), row)

    def in_source(self, marked: Tensor, row: int) -> Tensor:
        """Positions before row `row`, bool [L, H, T], by their place in the source."""
        if not self.source.compacted:
            return marked
        new = torch.arange(self._next, row, device=marked.device)
        pos = torch.cat([self.entries.pos, new.expand(*marked.shape[:2], -1)], -1)
        return marked.gather(-1, pos.clamp(min=0)) & (pos >= 0)

    def _setting_at(self, row: int) -> Setting:
        setting, policy = self.setting, self.policy
        end = setting.ends[max(0, bisect_right(setting.ends, row + 1) - 1)]
        if end == setting.prompt_len and policy.so_far is None:
            return setting
        budget = budget_at(policy, row + 1, setting.budget)
        held = policy.protection(budget).size(end)
        return replace(setting, prompt_len=end, budget=budget, protected=held)

    def _set_budgets(self, view: View) -> Tensor:
        """Set the budgets of the view; return the layers above their budget, bool [L]."""
        policy, budget, heads = self.policy, view.setting.budget, view.pos.shape[1]
        always, live = policy.allocator.effect == "rule", view.count.sum(1)  # [L]
        if policy.across_layers:  # all layers act, or none
            room = budget * heads * len(live)
            acts = ((live.sum() > room) | always).expand_as(live)
            if not bool(acts.any()):
                return acts
        budgets = policy.layer_budgets.budgets(view, budget)
        view.budget = budgets.unsqueeze(-1)
        return acts if policy.across_layers else (live > budgets * heads) | always

    def advance(self, stop: int) -> None:
        """Skip to row `stop`: all rows before it acted, and `entries` is up to date."""
        self._next, self.since = stop, torch.full_like(self.since, stop - 1)


def check(policy: Policy, view: View, scores: Scores) -> None:
    """Raise ScoreError unless each live entry has a score below infinity, float32 or better."""
    values, live, entries = scores.values, view.live, "[layer, KV head, entry]"
    if _shape(values) != [*live.shape] or values.dtype not in (torch.float32, torch.float64):
        expected = f"torch.float32 or torch.float64 {[*live.shape]} {entries}"
        raise ScoreError(_misfit(policy, view, "the score", values, expected))
    # max propagates NaN, which fails the comparison
    fine = float(values.max()) < torch.inf
    bad = [] if fine else (~(values < torch.inf) & live).nonzero().tolist()
    if bad:
        layer, head, slot = bad[0]
        where = f"layer {int(view.layers[layer])}, head {head}"
        given = "NaN" if bool(values[layer, head, slot].isnan()) else "infinite"
        expected = f"a number for every live entry ({where}); protect entries that must stay"
        raise ScoreError(_misfit(policy, view, "the score", given, expected))
    _check_columns(policy, view, scores.columns)


def _check_plan(policy: Policy, view: View, plan: Any, protected: Tensor) -> None:
    """Raise PolicyError unless quotas are whole numbers, one for each head or group.

    BudgetError if the quota of a head or group is below its protected entries.
    """
    heads, quotas = [*protected.shape[:2]], plan.quotas if isinstance(plan, Plan) else None
    shape = _shape(quotas)
    fits = shape[:2] in (heads, [heads[0], 1]) and (len(shape) == 2 or plan.groups is not None)
    if quotas is None or not fits or quotas.is_floating_point():
        expected = f"a kvsim.core.policy.Plan with integers {heads} [layer, KV head]"
        given = plan if quotas is None else quotas
        raise PolicyError(_misfit(policy, view, "the plan of its allocator", given, expected))
    _check_columns(policy, view, plan.columns)
    if plan.groups is None:
        least = protected.sum(-1)
    else:
        least = torch.zeros_like(quotas)
        least.scatter_add_(-1, plan.groups, protected.to(quotas.dtype))
    if bool((quotas < least).any()):
        raise BudgetError(
            f"{policy.name}: at row {view.row} a head is given fewer entries than are protected; "
            "use a larger budget or protect less"
        )


def _check_columns(policy: Policy, view: View, columns: Mapping[str, Tensor]) -> None:
    for name, column in columns.items():
        if name not in policy.columns or _shape(column) != [*view.live.shape]:
            declared = ", ".join(policy.columns) or "none"
            expected = (
                f"{[*view.live.shape]} [layer, KV head, entry] of a declared one ({declared})"
            )
            raise PolicyError(_misfit(policy, view, f"column {name!r}", column, expected))


def _shape(given: Any) -> list[int]:
    return [*getattr(given, "shape", ())]


def _misfit(policy: Policy, view: View, name: str, given: Any, expected: str) -> str:
    kind = given if isinstance(given, str) else type(given).__name__
    found = f"{given.dtype} {_shape(given)}" if isinstance(given, Tensor) else kind
    return f"{policy.name}: {name} at row {view.row} is {found}; expected {expected}, see {GUIDE}"
