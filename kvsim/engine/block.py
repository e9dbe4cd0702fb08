"""The events of one block of layers: append, score, plan, select, evict."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsim.composition import Policy, Scores
from kvsim.engine.source import TraceSource
from kvsim.errors import BudgetError, ScoreError
from kvsim.record import Plans
from kvsim.schema import NEVER
from kvsim.select import select
from kvsim.view import Entries, View


class Block:
    """The cache of a block of layers while a policy is replayed over it.

    evicted_at: int32 [L, H, T], what the replay is for. since: int [L], the row of the last event
    that acted on each layer, -1 for none.
    """

    def __init__(
        self,
        source: TraceSource,
        policy: Policy,
        budget: int,
        layers: Tensor,
        *,
        prompt_len: int,
        poison: bool = False,
        internals: list[Plans] | None = None,
    ) -> None:
        self.source, self.policy, self.budget = source, policy, budget
        self.layers, self.prompt_len = layers, prompt_len
        self.poison, self._internals = poison, internals
        keys = source.keys
        shape = keys.shape[:3]
        self.evicted_at = torch.full(shape, NEVER, dtype=torch.int32, device=keys.device)
        self.entries = Entries(shape[0], shape[1], policy.scorer.columns, like=keys)
        self.since = torch.full_like(layers, -1)
        self._next = 0  # first position not yet appended

    def event(self, row: int) -> bool:
        """Fire the event after row `row`. True if it acted on any layer.

        It acts on the layers that hold more than the budget; in the others nothing moves.
        """
        entries, policy = self.entries, self.policy
        entries.append(self._next, row + 1)
        self._next = row + 1
        heads = entries.pos.shape[1]
        acts = entries.count.sum(1) > self.budget * heads
        if not bool(acts.any()):
            return False
        view = View(
            self.source,
            entries,
            row=row,
            since=self.since,
            layers=self.layers,
            budget=self.budget,
            is_prompt=row == self.prompt_len - 1,
        )
        answer = policy.scorer.score(view)
        scores = answer if isinstance(answer, Scores) else Scores(answer)
        values = scores.values
        check(policy, values, entries.live, self.layers, row)
        protected = policy.protection(self.budget).mask(entries.pos, row)
        quotas = policy.allocator.plan(view, values, protected).quotas
        if bool((quotas < protected.sum(-1)).any()):
            raise BudgetError(
                f"{policy.name}: at row {row} a head is given fewer entries than are protected; "
                "use a larger budget or protect less"
            )
        acts = acts.view(-1, 1, 1)
        keep = select(values, quotas, protected, entries.live).where(acts, entries.live)
        if self._internals is not None:
            self._internals.append(self._plans(row, values, quotas))
        self._evict(entries.live & ~keep, row)
        for name, column in scores.columns.items():
            entries.columns[name] = column.where(acts, entries.columns[name])
        entries.compress(keep)
        self.since = self.since.masked_fill(acts.flatten(), row)
        return True

    def advance(self, stop: int) -> None:
        """Rows up to stop - 1 were replayed on `entries` by other means, each of them acting."""
        self._next, self.since = stop, torch.full_like(self.since, stop - 1)

    def _evict(self, gone: Tensor, row: int) -> None:
        layer, head, slot = gone.nonzero(as_tuple=True)
        pos = self.entries.pos[layer, head, slot]
        self.evicted_at[layer, head, pos] = row
        if self.poison:
            self.source.poison(self.evicted_at != NEVER)

    def _plans(self, row: int, values: Tensor, quotas: Tensor) -> Plans:
        shown = values.double().masked_fill(~self.entries.live, torch.nan)
        return Plans(
            row,
            tuple(self.layers.tolist()),
            self.entries.pos.cpu().numpy(),
            shown.cpu().numpy(),
            quotas.cpu().numpy(),
        )


def check(policy: Policy, values: Tensor, live: Tensor, layers: Tensor, row: int) -> None:
    """Raise ScoreError unless each live entry has a score below infinity, float32 or better."""
    if values.shape != live.shape or values.dtype not in (torch.float32, torch.float64):
        raise ScoreError(
            f"{policy.name}: scores at row {row} are {values.dtype} {list(values.shape)}; expected "
            f"torch.float32 or torch.float64 {list(live.shape)} [layer, head, entry]"
        )
    # NaN compares with nothing, so what is not below infinity is either
    bad = ~(values < torch.inf) & live
    if bool(bad.any()):
        layer, head, slot = bad.nonzero()[0].tolist()
        found = "NaN" if bool(values[layer, head, slot].isnan()) else "infinite"
        raise ScoreError(
            f"{policy.name}: {found} score at row {row}, layer {int(layers[layer])}, head {head}; "
            "a scorer must give every live entry a number, and what must stay is protected"
        )
