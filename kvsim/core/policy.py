"""A policy is composed of pieces: what is scored, how many stay, when, and what is protected.

Methods that go on with some of the prompt in deeper layers have one more, a propagation.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from kvsim.core.propagation import Propagation
from kvsim.core.trace import Trace
from kvsim.core.view import View
from kvsim.errors import BudgetError, PolicyError

# Budgets that are tried in search of one that a policy has a rule for.
_BUDGETS_TRIED = 10_000


def is_count(value: Any, least: int) -> bool:
    """Whether a value is a whole number of at least `least`; True and False are none."""
    try:
        return operator.index(value) >= least and not isinstance(value, bool)
    except TypeError:
        return False


@dataclass(frozen=True)
class Protection:
    """Entries that are always kept: the `sink` first positions, the `recent` last ones, the prompt.

    Counts of 0 or more; `prompt` keeps every position of the prompt.
    """

    sink: int = 0
    recent: int = 0
    prompt: bool = False

    def __post_init__(self) -> None:
        for name in ("sink", "recent"):
            value = getattr(self, name)
            if not is_count(value, 0):
                raise PolicyError(f"protect: {name} is {value!r}; expected 0 or more")
        if not isinstance(self.prompt, bool):
            raise PolicyError(f"protect: prompt is {self.prompt!r}; expected True or False")

    def __or__(self, other: Protection) -> Protection:
        return Protection(
            max(self.sink, other.sink), max(self.recent, other.recent), self.prompt or other.prompt
        )

    def size(self, prompt_len: int) -> int:
        """Entries that it keeps once that many exist."""
        return max(self.sink, prompt_len if self.prompt else 0) + self.recent

    def mask(self, pos: Tensor, row: int, prompt_len: int = 0) -> Tensor:
        """bool, the shape of pos: protected right after row `row`. Pads (-1) never are."""
        first = max(self.sink, prompt_len if self.prompt else 0)
        return ((pos < first) | (pos > row - self.recent)) & (pos >= 0)


def protected_by(protection: Callable[[int], Protection], view: View) -> Tensor:
    """What is protected at this event, bool [L, H, n].

    protection: of a budget, such as a scorer's; layers may have different ones.
    """
    budgets = view.budget.flatten().tolist()
    by_budget = {b: protection(b) for b in set(budgets)}
    if len(set(by_budget.values())) == 1:
        return by_budget[budgets[0]].mask(view.pos, view.row, view.prompt_len)
    masks = {b: p.mask(view.pos, view.row, view.prompt_len) for b, p in by_budget.items()}
    return torch.stack([masks[b][layer] for layer, b in enumerate(budgets)])


# ------------------------------------------------------------------------------------ the scorer


@dataclass(frozen=True)
class Scores:
    """What a scorer answers: values [L, H, n], higher = keep, and the new values of its columns."""

    values: Tensor
    columns: Mapping[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def of(answer: Tensor | Scores) -> Scores:
        """A stateless scorer answers with its values alone."""
        return answer if isinstance(answer, Scores) else Scores(answer)


class Scorer(ABC):
    """Which entries matter. A frozen dataclass whose fields are the policy's parameters.

    Subclasses take these defaults and replace what differs; a scorer without parameters, state or
    protection is one function, `score`.
    """

    #: carried with each entry: name -> value of an entry that has no history
    columns: ClassVar[Mapping[str, float]] = {}
    #: scores an entry from the last row and its own columns alone, so that rows can be replayed in
    #: blocks in which the entries that left remain as holes
    per_row: ClassVar[bool] = False

    @property
    def rows(self) -> int:
        """Most rows whose attention is asked for at once; memory budgets count what they take."""
        return 1

    @property
    def signed(self) -> bool:
        """Whether a score can be negative."""
        return False

    @property
    def needs(self) -> frozenset[str]:
        """Arrays that a trace must hold beyond q, k and v."""
        return frozenset()

    @property
    def clairvoyant(self) -> bool:
        """Whether rows later than the event are looked at: a bound, and no policy to deploy."""
        return False

    @property
    def least_rows(self) -> int:
        """Fewest rows that must exist at an event that acts."""
        return 1

    def check(self, trace: Trace, schedule: Schedule) -> None:  # noqa: B027  nothing to object to
        """Raise PolicyError for a trace or a schedule that the scorer has no rule for."""

    @abstractmethod
    def score(self, view: View) -> Tensor | Scores:
        """Scores of the view's entries, [L, H, n]."""

    def protection(self, budget: int) -> Protection:
        """What the scorer cannot score and therefore keeps: its window, its sinks."""
        return Protection()


@dataclass(frozen=True)
class Wrapper(Scorer):
    """A scorer around another: it looks at what that one looks at, and keeps what that one keeps.

    Subclasses define `score` and add their own parameters.
    """

    scorer: Scorer

    @property
    def columns(self) -> Mapping[str, float]:  # type: ignore[override]  # those of a part
        """The scorer's."""
        return self.scorer.columns

    @property
    def rows(self) -> int:
        """The scorer's."""
        return self.scorer.rows

    @property
    def needs(self) -> frozenset[str]:
        """The scorer's."""
        return self.scorer.needs

    @property
    def clairvoyant(self) -> bool:
        """If the scorer is."""
        return self.scorer.clairvoyant

    @property
    def least_rows(self) -> int:
        """The scorer's."""
        return self.scorer.least_rows

    def check(self, trace: Trace, schedule: Schedule) -> None:
        """As the scorer."""
        self.scorer.check(trace, schedule)

    def inner(self, view: View) -> Scores:
        """What the scorer answers."""
        return Scores.of(self.scorer.score(view))

    def protection(self, budget: int) -> Protection:
        """The scorer's."""
        return self.scorer.protection(budget)


# --------------------------------------------------------------------------------- the allocator


@dataclass(frozen=True)
class Plan:
    """How many entries stay at an event, and from where.

    quotas: int [L, H], or [L, H, S] where each of S groups is chosen from by itself; groups then
    says which one every entry belongs to, int [L, H, n]. eligible: bool [L, H, n], entries outside
    leave unless they are protected. columns: new values of the allocator's columns. notes: what
    figures may want to show, by name; [L, H, ...].
    """

    quotas: Tensor
    groups: Tensor | None = None
    eligible: Tensor | None = None
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    notes: Mapping[str, Tensor] = field(default_factory=dict)


class Allocator(ABC):
    """How many from where. A frozen dataclass whose fields are parameters."""

    #: carried with each entry, as a scorer's
    columns: ClassVar[Mapping[str, float]] = {}
    #: names of what its plans note that metrics read: a few numbers for each head, not one for each
    #: entry (`kvsim.analysis.kept.segments` says which)
    notes: ClassVar[frozenset[str]] = frozenset()

    @property
    def rows(self) -> int:
        """Most rows whose attention is asked for at once."""
        return 1

    @property
    def bounded(self) -> bool:
        """False where no budget binds."""
        return True

    @property
    def exact(self) -> bool:
        """False where what stays is near the budget and not equal to it."""
        return True

    @property
    def binds(self) -> bool:
        """False where protection only shows in the plan and is not enforced."""
        return True

    def protection(self, budget: int) -> Protection:
        """What the allocator itself keeps in any case."""
        return Protection()

    def remark(self, budget: int) -> str:
        """What a reader of results at this budget should know; empty for nothing."""
        return ""

    @abstractmethod
    def plan(self, view: View, scores: Tensor, protected: Tensor) -> Plan:
        """Quotas for scores [L, H, n]; together at least the head's protected entries."""


@dataclass(frozen=True)
class Uniform(Allocator):
    """Every head keeps the budget of its layer."""

    def plan(self, view: View, scores: Tensor, protected: Tensor) -> Plan:
        """The same quota for every head."""
        return Plan(view.budget.expand_as(view.count))


@dataclass(frozen=True)
class Everything(Allocator):
    """Every head keeps all it has: no budget binds."""

    @property
    def bounded(self) -> bool:
        """Never."""
        return False

    def plan(self, view: View, scores: Tensor, protected: Tensor) -> Plan:
        """What each head holds."""
        return Plan(view.count)


# ---------------------------------------------------------------------------- the layers' budgets


class LayerBudgets(ABC):
    """How much each layer gets, in entries per head."""

    #: the layers share one budget: an event acts on all of them together, or on none
    across_layers: ClassVar[bool] = False

    @property
    def rows(self) -> int:
        """Most rows whose attention is asked for at once."""
        return 1

    @property
    def bounded(self) -> bool:
        """False where the policy's budget does not bind."""
        return True

    @property
    def exact(self) -> bool:
        """False where the layers together are near their budgets and not equal to them."""
        return True

    def planned(self, budget: int, n_layers: int, longest: int) -> Sequence[int]:
        """What is known beforehand of the layers' budgets; `longest` entries at most are held."""
        return (budget,)

    @abstractmethod
    def budgets(self, view: View, budget: int) -> Tensor:
        """The budget of each layer at an event, int [L]; `budget` is the policy's."""


@dataclass(frozen=True)
class Even(LayerBudgets):
    """Every layer gets the budget."""

    def budgets(self, view: View, budget: int) -> Tensor:
        """The same for all."""
        return torch.full_like(view.layers, budget)


# ---------------------------------------------------------------------------------- the schedule


@dataclass(frozen=True)
class Schedule:
    """When a policy acts: after rows prompt_len - 1 + m * interval.

    interval: rows between decode-time events; None where only the prefill event (m = 0) fires.
    prefill: whether m = 0 fires.
    """

    interval: int | None = 1
    prefill: bool = True

    def __post_init__(self) -> None:
        if self.interval is not None and not is_count(self.interval, 1):
            raise PolicyError(f"interval is {self.interval!r}; expected at least 1 row")

    def rows(self, prompt_len: int, n_pos: int) -> list[int]:
        """Rows after which an event fires in a trace of n_pos tokens."""
        prompt = [prompt_len - 1] if self.prefill else []
        if self.interval is None:
            return prompt
        return prompt + list(range(prompt_len - 1 + self.interval, n_pos, self.interval))

    def longest(self, prompt_len: int, budget: int) -> int:
        """Entries that a head holds before an event at most, once it has been cut to the budget."""
        prompt = prompt_len if self.prefill else 0
        return max(prompt, budget + (self.interval or 0), 1)

    def override(self, interval: int | None, prefill: bool | None) -> Schedule:
        """This schedule with what is given replaced."""
        out = self
        if interval is not None:
            out = replace(out, interval=interval)
        return out if prefill is None else replace(out, prefill=prefill)


# ------------------------------------------------------------------------------------ the policy


@dataclass(frozen=True)
class Policy:
    """A policy, ready to replay: named pieces, no state.

    protect: kept in any case, beside what scorer and allocator keep by their own definition.
    positions: "slot" where the implementation rotates keys to their slot in the cache instead of
    their position in the text (the output of the attention changes, the kept sets do not).
    per_query_head: keep one set per query head, which a grouped cache cannot store; for analysis.
    propagation: which rows of the prompt deeper layers go on with; None for all of them.
    """

    name: str
    scorer: Scorer
    allocator: Allocator = Uniform()
    schedule: Schedule = Schedule()
    protect: Protection = Protection()
    layer_budgets: LayerBudgets = Even()
    positions: Literal["absolute", "slot"] = "absolute"
    per_query_head: bool = False
    propagation: Propagation | None = None

    def __post_init__(self) -> None:
        pieces = {"scorer": Scorer, "allocator": Allocator, "layer_budgets": LayerBudgets}
        if self.propagation is not None:
            pieces["propagation"] = Propagation
        for name, kind in pieces.items():
            found = type(getattr(self, name))
            if not issubclass(found, kind):
                raise PolicyError(
                    f"{self.name}: {name} is a {found.__name__}; expected a "
                    f"{kind.__module__}.{kind.__name__}: class {found.__name__}({kind.__name__})"
                )
        both = set(self.scorer.columns) & set(self.allocator.columns)
        if both:
            raise PolicyError(
                f"{self.name}: scorer and allocator both carry a column {min(both)!r} with each "
                "entry; expected different names"
            )
        if self.propagation is not None and self.protect != Protection():
            raise PolicyError(
                f"{self.name}: entries are to be protected (sink, recent, prompt), and which rows "
                "of the prompt reach deeper layers is decided without regard to that; expected "
                "nothing more to protect with a policy that drops rows"
            )
        if self.propagation is not None and self.layer_budgets.across_layers:
            raise PolicyError(
                f"{self.name}: its layers share one budget, and deeper layers are to go on with "
                "fewer rows; expected a policy with a budget for each layer, such as snapkv"
            )

    @property
    def columns(self) -> Mapping[str, float]:
        """What is carried with each entry."""
        return {**self.scorer.columns, **self.allocator.columns}

    @property
    def bounded(self) -> bool:
        """Whether the budget binds at all."""
        if self.propagation is not None and (
            self.propagation.alone or not self.propagation.bounded
        ):
            return self.propagation.bounded
        return self.allocator.bounded and self.layer_budgets.bounded

    @property
    def exact(self) -> bool:
        """Whether exactly the budget stays after an event, over the heads of a layer."""
        all_rows = self.propagation is None or self.propagation.exact
        return self.bounded and all_rows and self.allocator.exact and self.layer_budgets.exact

    def asked(self, budget: int) -> Protection:
        """The union of what the policy, its scorer and its allocator ask to keep."""
        return self.protect | self.scorer.protection(budget) | self.allocator.protection(budget)

    def protection(self, budget: int) -> Protection:
        """What is kept in any case: all that is asked for, if the allocator lets that bind."""
        return self.asked(budget) if self.allocator.binds else Protection()

    def check_budget(
        self,
        budget: int,
        *,
        prompt_len: int = 0,
        n_layers: int = 1,
        schedule: Schedule | None = None,
    ) -> None:
        """Raise BudgetError where the policy has no rule for the budget.

        prompt_len, n_layers: of the trace; schedule: what the policy's own is replaced by.
        """
        if budget < 1:
            raise BudgetError(f"{self.name}: budget is {budget}; expected at least 1 entry")
        if self.propagation is not None and budget < self.propagation.least_budget:
            raise BudgetError(
                f"{self.name}: budget {budget} is below the window of "
                f"{self.propagation.least_budget} rows that goes on in any case; the smallest "
                f"budget that works is {self.propagation.least_budget}"
            )
        schedule = schedule or self.schedule
        least = self._least(budget, prompt_len, n_layers, schedule)
        if least is None:
            return
        larger = range(budget + 1, budget + _BUDGETS_TRIED)
        enough = next(
            (b for b in larger if self._least(b, prompt_len, n_layers, schedule) is None), None
        )
        way_out = (
            f"the smallest budget that works is {enough}"
            if enough is not None
            else f"no budget up to {larger.stop} works"
        )
        own, always = least
        share = f"budget {budget}" if own == budget else f"budget {own} of a layer"
        raise BudgetError(
            f"{self.name}: {share} is below the {always} entries that it always keeps; {way_out}"
        )

    def _least(
        self, budget: int, prompt_len: int, n_layers: int, schedule: Schedule
    ) -> tuple[int, int] | None:
        """The first budget of a layer, and what is protected there, that do not fit."""
        if not self.allocator.bounded:
            return None
        longest = schedule.longest(prompt_len, budget)
        planned = self.layer_budgets.planned(budget, n_layers, longest)
        sizes = ((own, self.protection(own).size(prompt_len)) for own in dict.fromkeys(planned))
        return next(((own, always) for own, always in sizes if always > own), None)

    def remark(self, budget: int) -> str:
        """What a reader of results at this budget should know; empty for nothing."""
        said = self.allocator.remark(budget) if self.bounded else ""
        return f"{self.name}: {said}" if said else ""

    @property
    def levels(self) -> tuple[tuple[Any, ...], ...]:
        """The pieces from the outside in: propagation, allocator, wrapped scorers, the innermost.

        Pieces of one level share their parameters.
        """
        chain: list[Any] = [self.scorer]
        while hasattr(chain[-1], "scorer"):
            chain.append(chain[-1].scorer)
        outer: list[tuple[Any, ...]] = []
        if self.propagation is not None:
            outer.append((self.propagation,))
        if not isinstance(self.allocator, Uniform | Everything):
            outer.append((self.allocator,))
        return (*outer, *((one,) for one in chain[:-1]), (chain[-1], self.layer_budgets))

    @property
    def params(self) -> dict[str, Any]:
        """The parameters of all pieces, by the names under which `kvsim.policy` takes them."""
        out: dict[str, Any] = {}
        seen: dict[str, int] = {}
        for depth, name, value in self._parameters():
            if name in seen and seen[name] == depth:
                continue  # pieces of one level share it
            out["scorer__" * (seen.get(name, -1) + 1) + name] = value
            seen[name] = depth
        if self.protect != Protection():
            out["protect"] = asdict(self.protect)
        return out

    def _parameters(self) -> Iterator[tuple[int, str, Any]]:
        for depth, pieces in enumerate(self.levels):
            for piece in pieces:
                for one in fields(piece) if is_dataclass(piece) else ():
                    if one.name != "scorer":
                        yield depth, one.name, getattr(piece, one.name)

    @property
    def rows(self) -> int:
        """Most recent rows whose attention is asked for at once."""
        window = 1 if self.propagation is None else self.propagation.window_rows
        return max(self.scorer.rows, self.allocator.rows, self.layer_budgets.rows, window)
