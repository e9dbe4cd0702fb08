"""A policy is composed of pieces: what is scored, how many stay, when, and what is protected."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from kvsim.errors import BudgetError, PolicyError
from kvsim.view import View

# Budgets that are tried in search of one that a policy has a rule for.
_BUDGETS_TRIED = 100_000


@dataclass(frozen=True)
class Protection:
    """Entries that are always kept: the `sink` first positions and the `recent` last ones."""

    sink: int = 0
    recent: int = 0

    def __or__(self, other: Protection) -> Protection:
        return Protection(max(self.sink, other.sink), max(self.recent, other.recent))

    def mask(self, pos: Tensor, row: int) -> Tensor:
        """bool, the shape of pos: protected right after row `row`. Pads (-1) never are."""
        return ((pos < self.sink) | (pos > row - self.recent)) & (pos >= 0)


@dataclass(frozen=True)
class Scores:
    """What a scorer answers: values [L, H, n], higher = keep, and the new values of its columns."""

    values: Tensor
    columns: Mapping[str, Tensor] = field(default_factory=dict)


class Scorer(Protocol):
    """Which entries matter. A frozen dataclass; its fields are the policy's parameters."""

    # A scorer whose window is longer than one row also says how long, as `rows`: memory budgets
    # count what attention of so many rows takes.

    #: carried with each entry: name -> value of an entry that has no history
    columns: ClassVar[Mapping[str, float]] = {}
    #: scores an entry from the last row and its own columns alone, so that rows can be replayed in
    #: blocks in which the entries that left remain as holes
    per_row: ClassVar[bool] = False

    def score(self, view: View) -> Tensor | Scores:
        """Scores of the view's entries, [L, H, n]."""

    def protection(self, budget: int) -> Protection:
        """What the scorer cannot score and therefore keeps: its window, its sinks."""


@dataclass(frozen=True)
class Plan:
    """How many entries each head keeps at an event: quotas int [L, H]."""

    quotas: Tensor


class Allocator(Protocol):
    """How many from where. `bounded` is False where the budget does not limit what stays."""

    bounded: ClassVar[bool] = True

    def plan(self, view: View, scores: Tensor, protected: Tensor) -> Plan:
        """Quotas for scores [L, H, n]; each at least the head's protected entries."""


@dataclass(frozen=True)
class Uniform:
    """Every head keeps the budget."""

    bounded: ClassVar[bool] = True

    def plan(self, view: View, scores: Tensor, protected: Tensor) -> Plan:
        """The same quota for every head."""
        return Plan(torch.full_like(view.count, view.budget))


@dataclass(frozen=True)
class Everything:
    """Every head keeps all it has: no budget binds."""

    bounded: ClassVar[bool] = False

    def plan(self, view: View, scores: Tensor, protected: Tensor) -> Plan:
        """What each head holds."""
        return Plan(view.count)


@dataclass(frozen=True)
class Schedule:
    """When a policy acts: after rows prompt_len - 1 + m * interval.

    interval: rows between decode-time events; None where only the prefill event (m = 0) fires.
    prefill: whether m = 0 fires.
    """

    interval: int | None = 1
    prefill: bool = True

    def __post_init__(self) -> None:
        if self.interval is not None and self.interval < 1:
            raise PolicyError(f"interval is {self.interval}; expected at least 1 row")

    def rows(self, prompt_len: int, n_pos: int) -> list[int]:
        """Rows after which an event fires in a trace of n_pos tokens."""
        prompt = [prompt_len - 1] if self.prefill else []
        if self.interval is None:
            return prompt
        return prompt + list(range(prompt_len - 1 + self.interval, n_pos, self.interval))

    def override(self, interval: int | None, prefill: bool | None) -> Schedule:
        """This schedule with what is given replaced."""
        out = self
        if interval is not None:
            out = replace(out, interval=interval)
        return out if prefill is None else replace(out, prefill=prefill)


@dataclass(frozen=True)
class Policy:
    """A policy, ready to replay: named pieces, no state.

    positions: "slot" where the implementation rotates keys to their slot in the cache instead of
    their position in the text (the output of the attention changes, the kept sets do not).
    per_query_head: keep one set per query head, which a grouped cache cannot store; for analysis.
    """

    name: str
    scorer: Scorer
    allocator: Allocator = Uniform()
    schedule: Schedule = Schedule()
    protect: Protection = Protection()
    positions: Literal["absolute", "slot"] = "absolute"
    per_query_head: bool = False

    def protection(self, budget: int) -> Protection:
        """The union of what the policy and its scorer protect."""
        return self.protect | self.scorer.protection(budget)

    def check_budget(self, budget: int) -> None:
        """Raise BudgetError where the policy has no rule for the budget."""
        if budget < 1:
            raise BudgetError(f"{self.name}: budget is {budget}; expected at least 1 entry")
        if self._protected(budget) <= budget:
            return
        larger = range(budget + 1, budget + _BUDGETS_TRIED)
        enough = next((b for b in larger if self._protected(b) <= b), None)
        way_out = (
            f"the smallest budget that works is {enough}"
            if enough is not None
            else f"no budget up to {larger.stop} works"
        )
        raise BudgetError(
            f"{self.name}: budget {budget} is below the {self._protected(budget)} entries that it "
            f"always keeps; {way_out}"
        )

    def _protected(self, budget: int) -> int:
        always = self.protection(budget)
        return always.sink + always.recent

    @property
    def params(self) -> dict[str, Any]:
        """The scorer's parameters by name, and those pieces of the policy that are not plain."""
        scorer: Any = self.scorer
        known = fields(scorer) if is_dataclass(scorer) else ()
        pieces: dict[str, Any] = {}
        if self.protect != Protection():
            pieces["protect"] = asdict(self.protect)
        if not isinstance(self.allocator, Uniform | Everything):
            pieces["allocator"] = repr(self.allocator)
        return {f.name: getattr(scorer, f.name) for f in known} | pieces

    @property
    def rows(self) -> int:
        """Most recent rows whose attention the scorer asks for at once."""
        return int(getattr(self.scorer, "rows", 1))
