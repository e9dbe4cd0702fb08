"""The pieces of a policy: scorer, allocator, budgets of the layers, protection and schedule.

A piece is implicitly a frozen dataclass. Its annotated fields are parameters
(`kvsim.core.parameters`), checked when it is built.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from itertools import pairwise
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, final, get_args

from kvsim.core import setting
from kvsim.core.lazy import Tensor, torch
from kvsim.core.parameters import AtLeast, AtMost, Parametrised, of_a_user
from kvsim.core.view import View
from kvsim.errors import PolicyError, suggest
from kvsim.schema import GUIDE, NEVER, REPETITION, Compress, Spans

Scores = setting.Scores

#: Effects of a budget, from strong to weak: heads hold exactly as much, about as much, only some
#: heads do, a rule that acts at every event ignores it, or everything does.
Effect = Literal["exact", "near", "some", "rule", "none"]
EFFECTS: tuple[Effect, ...] = get_args(Effect)
#: Effects of a budget that bounds all heads.
BOUNDED = EFFECTS[:2]

#: Heads that share one budget: none, those of a layer, those of the same place in all layers, or
#: all.
Shared = Literal["none", "heads", "layers", "all"]
#: Layers share it, so an event acts on all of them or none.
ACROSS_LAYERS = ("layers", "all")


@dataclass(frozen=True)
class Inputs:
    """Inputs of a piece; `a | b` is their union.

    rows: most rows whose attention is read at once, for memory budgets. first, last: rows at the
    beginning of the text and most recent ones whose queries an event in decoding reads, in addition
    to `rows` and those since the last event that acted; a live run keeps no others. least: fewest
    rows that must exist at an event that acts. arrays: of a trace, beyond q, k and v. copies:
    number of copies of the keys in a score; 0 if it uses only attention. every_key: the choice of
    entries reads every key, which counts as read. future: reads rows after the event, or other
    facts that a cache cannot have: a bound, not deployable. trace: reads rows of the trace itself,
    which a running model does not have.
    """

    rows: int = 1
    first: int = 0
    last: int = 0
    least: int = 1
    arrays: frozenset[str] = frozenset()
    copies: int = 4
    every_key: bool = False
    future: bool = False
    trace: bool = False

    @property
    def context_again(self) -> bool:
        """Whether it reads rows that repeat the context, which a model runs in addition."""
        return not self.arrays.isdisjoint(REPETITION)

    def __or__(self, other: Inputs) -> Inputs:
        both = ((name, vars(self)[name], vars(other)[name]) for name in vars(self))
        return Inputs(**{name: x | y if name == "arrays" else max(x, y) for name, x, y in both})


class Run(NamedTuple):
    """The run to check; for sparse attention, `trace.prompt_len` is its first row.

    trace: None if only sizes are known; then only propagations are checked.
    """

    n_layers: int
    schedule: Any = None
    trace: Any = None

    @property
    def dims(self) -> set[int]:
        """The head dimensions of keys and values."""
        return {self.trace.dim, self.trace.value_dim}


class Piece(Parametrised):
    """Base of all pieces; `label` is the file of a kvsim policy, or the class of a user's piece.

    A subclass that checks combinations of parameters calls `super().__post_init__()` first.
    """

    @property
    def reads(self) -> Inputs:
        """Its inputs; also an attribute, `reads = Inputs(...)`."""
        return Inputs()

    def __init_subclass__(cls, **options: Any) -> None:
        """Name the class in errors. Raise PolicyError for a name outside its contract.

        Of methods, only for one that is close to a member.
        """
        super().__init_subclass__(**options)
        for base in cls.__bases__:
            if vars(base).get("__final__"):
                raise PolicyError(
                    f"{cls.__name__} is a subclass of {base.__name__}, by whose class replays take "
                    f"shortcuts; expected one of {base.__bases__[0].__name__}, see {GUIDE}"
                )
        known = {x for base in cls.__mro__ for x in vars(base).get("__annotations__", ())}
        members = [name for name in dir(cls.__mro__[1]) if name[0] != "_"]

        def misspelt(name: str) -> bool:
            return of_a_user(cls) and bool(get_close_matches(name, members, cutoff=0.75))

        for name, value in vars(cls).items() if ABC not in cls.__bases__ else ():
            method = hasattr(value, "__get__")
            fits = name[0] == "_" or name.isupper() or name in known
            fits = fits or hasattr(super(cls, cls), name) or (method and not misspelt(name))
            if not fits:
                other = f"_{name}" if method else f"a parameter, `{name}: {type(value).__name__}`"
                raise PolicyError(
                    f"{cls.__name__} declares {name}{suggest(name, members)}; expected a member of "
                    f"the contract, see {GUIDE}, or {other}"
                )
        if not vars(cls).get("label"):
            package, _, file = cls.__module__.rpartition(".")
            cls.label = file if package == "kvsim.policies" else cls.__name__

    def check(self, run: Run) -> None:
        """Raise PolicyError for a run outside the piece's rule."""


class Protection(Parametrised):
    """Entries that are never evicted.

    The `sink` first positions, the `recent` last ones; with `prompt`, every position of the prompt.
    """

    sink: Annotated[int, AtLeast(0)] = 0
    recent: Annotated[int, AtLeast(0)] = 0
    prompt: bool = False

    label = "protect"

    def __or__(self, other: Protection) -> Protection:
        for each, rest in ((self, other), (other, self)):
            if rest == _NOTHING:  # called at every event; building one takes much longer
                return each
        return Protection(
            max(self.sink, other.sink), max(self.recent, other.recent), self.prompt or other.prompt
        )

    def first(self, prompt_len: int) -> int:
        """Number of protected first positions."""
        return max(self.sink, prompt_len if self.prompt else 0)

    def size(self, prompt_len: int) -> int:
        """Number of protected entries once that many exist."""
        return self.first(prompt_len) + self.recent

    def mask(self, pos: Tensor, row: int, prompt_len: int = 0) -> Tensor:
        """bool, the shape of pos: protected right after row `row`. Pads (-1) never are."""
        mask = pos > max(row - self.recent, -1)
        if first := self.first(prompt_len):
            mask |= (pos < first) & (pos >= 0)
        return mask


_NOTHING = Protection()


def _named(piece: Piece) -> Protection:
    names = {"sink": "sink", "recent": "recent", "prompt": "protect_prompt"}
    ends = {end: getattr(piece, name) for end, name in names.items() if hasattr(piece, name)}
    return Protection(**ends) if ends else _NOTHING


def protected_by(protection: Callable[[int], Protection], view: View) -> Tensor:
    """Mask of the entries that are protected at this event, bool [L, H, n].

    protection: returns the protection at a budget; layers may have different budgets.
    """
    budgets = view.budget.flatten().tolist()
    by_budget = {b: protection(b) for b in set(budgets)}
    if len(set(by_budget.values())) == 1:
        return by_budget[budgets[0]].mask(view.pos, view.row, view.setting.prompt_len)
    masks = {b: p.mask(view.pos, view.row, view.setting.prompt_len) for b, p in by_budget.items()}
    return torch.stack([masks[b][layer] for layer, b in enumerate(budgets)])


class Schedule(Parametrised):
    """When a policy acts: after rows prompt_len - 1 + m * interval.

    Attributes:
        interval: rows between decode-time events; None for only the prefill event (m = 0).
        prefill: whether m = 0 fires.
        compress: target of the prefill event. With "context" it fires after row context_len - 1,
            before the question: the policy treats the context as the prompt, and the question as
            rows after it. With "both" it fires after both. With "questions", or
            "context+questions", events also follow the questions of later turns.
        prefill_chunk: rows between prefill events, the last of which follows `compress`; each
            treats the tokens so far as the prompt.
    """

    interval: Annotated[int, AtLeast(1), AtMost(NEVER)] | None = 1
    prefill: bool = True
    compress: Compress = "prompt"
    prefill_chunk: Annotated[int, AtLeast(1), AtMost(NEVER)] | None = None

    label = "schedule"

    def ends(self, prompt_len: int, context_len: int | None = None) -> list[int]:
        """Tokens before each prefill event, ascending; without a context, those of the prompt."""
        names = self.compress.replace("both", "context+prompt").split("+")
        ends = sorted({(name == "context" and context_len) or prompt_len for name in names})
        n = self.prefill_chunk or max(1, prompt_len)
        chunks = ((start, end) for x, end in pairwise((0, *ends)) for start in range(x, end, n))
        return [min(start + n, end) for start, end in chunks]

    def rows(
        self, prompt_len: int, n_pos: int, context_len: int | None = None, questions: Spans = ()
    ) -> list[int]:
        """Rows after which an event fires in a trace of n_pos tokens."""
        prompt = self.ends(prompt_len, context_len) if self.prefill else []
        asked = questions if self.compress.endswith("questions") else ()
        rows = {end - 1 for end in (*prompt, *(stop for _, stop in asked if stop <= n_pos))}
        if self.interval is not None:
            rows.update(range(prompt_len - 1 + self.interval, n_pos, self.interval))
        return sorted(rows)

    def longest(self, prompt_len: int, budget: int, n: int, context_len: int | None = None) -> int:
        """Largest cache of a head just before any event in n tokens, with cuts to the budget.

        Ignores later events and turns, so that a plan does not depend on the future.
        """
        ends = self.ends(prompt_len, context_len) if self.prefill else []
        sizes = [min(end, budget + end - start) for start, end in pairwise((0, *ends)) if end <= n]
        first = prompt_len + (step := self.interval or 0)
        if first <= n and step:
            last = n - (n - prompt_len) % step
            sizes += [min(first, budget + first - max(ends, default=0)), min(last, budget + step)]
        return max(sizes, default=min(n, prompt_len if self.prefill else first))

    def override(
        self, interval: int | None = None, prefill: bool | None = None, *more: Any
    ) -> Schedule:
        """Return this schedule with each field replaced whose value is not None."""
        given = zip(fields(self), (interval, prefill, *more), strict=False)
        return replace(self, **{x.name: value for x, value in given if value is not None})


class Scorer(Piece, ABC):
    """Scores of entries.

    Subclasses override these defaults; a scorer without parameters, state or protection is one
    function, `score`.
    """

    #: columns of each entry: name -> value of an entry without history
    columns: ClassVar[Mapping[str, float]] = {}
    #: scores depend only on the last row and columns: rows can run in blocks with evicted entries
    #: as holes
    per_row: ClassVar[bool] = False

    @property
    def scale(self) -> Literal["positive", "signed", "log"]:
        """Whether scores are 0 or more, of any sign, or logarithms (parameter `log`)."""
        return "log" if getattr(self, "log", False) else "positive"

    @property
    def across_layers(self) -> bool:
        """Whether a score depends on other layers; then an event acts on all of them or none."""
        return False

    @abstractmethod
    def score(self, view: View) -> Tensor | Scores:
        """Scores of the view's entries, [L, H, n]."""

    def protection(self, budget: int) -> Protection:
        """Entries that the scorer cannot score; by default the protection by parameters."""
        return _named(self)


class Wrapper(Scorer):
    """A scorer around another, with its needs; subclasses add `score` and parameters."""

    scorer: Scorer

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scorer.scale == "log":  # they have no ratios, and -inf no differences
            raise PolicyError(
                f"{self.label}: log is True for {self.scorer.label} inside; expected False, "
                "because a wrapper computes with the scores themselves"
            )

    #: columns in addition to those of the inner scorer
    adds: ClassVar[Mapping[str, float]] = {}

    #: those of the inner scorer and `adds`
    columns: ClassVar[Any] = property(lambda self: {**self.scorer.columns, **self.adds})
    reads: ClassVar[Any] = property(attrgetter("scorer.reads"))
    across_layers: ClassVar[Any] = property(attrgetter("scorer.across_layers"))
    check: ClassVar[Any] = property(attrgetter("scorer.check"))
    protection: ClassVar[Any] = property(attrgetter("scorer.protection"))

    def inner(self, view: View) -> Scores:
        """The scores of the inner scorer."""
        return view.scored(self.scorer)


@dataclass(frozen=True)
class Plan:
    """Quotas of an event, by head or group.

    Attributes:
        quotas: int [L, H], or [L, H, S] for a choice within each of S groups.
        groups: the group of each entry, int [L, H, n].
        eligible: bool [L, H, n]; other entries leave unless they are protected.
        columns: new values of the allocator's columns, [L, H, n].
        notes: arrays for figures, by name; [L, H, ...].
    """

    quotas: Tensor
    groups: Tensor | None = None
    eligible: Tensor | None = None
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    notes: Mapping[str, Tensor] = field(default_factory=dict)


class Sizing(Piece, ABC):
    """Base of allocators and budgets of layers."""

    @property
    def effect(self) -> Effect:
        """Effect of the budget over all layers."""
        return "exact"

    @property
    def shared(self) -> Shared:
        """Heads that share a budget; an event acts on all layers that share one, or on none."""
        return "none"


class Allocator(Sizing, ABC):
    """Allocates quotas to heads, or to groups of entries."""

    #: columns of each entry, as a scorer's
    columns: ClassVar[Mapping[str, float]] = {}

    @property
    def enforces(self) -> bool:
        """False if protection only marks the plan and is not enforced."""
        return True

    def protection(self, budget: int) -> Protection:
        """The allocator's protection, as a scorer's."""
        return _named(self)

    @abstractmethod
    def plan(self, view: View, scores: Tensor, protected: Tensor) -> Plan:
        """Quotas for scores [L, H, n]; together at least the head's protected entries."""


@final
class Uniform(Allocator):
    """Every head keeps the budget of its layer."""

    def plan(self, view: View, scores: Tensor, protected: Tensor) -> Plan:
        """Return the same quota for every head."""
        return Plan(view.budget.expand_as(view.count))


@final
class Everything(Allocator):
    """Every head keeps all its entries at any budget."""

    effect = "none"

    def plan(self, view: View, scores: Tensor, protected: Tensor) -> Plan:
        """The number of entries that each head holds."""
        return Plan(view.count)


class LayerBudgets(Sizing, ABC):
    """Budgets by layer, in entries per head."""

    def planned(self, budget: int, n_layers: int, longest: int) -> Sequence[int]:
        """Fixed budgets of layers for caches of at most `longest` entries per head.

        One for each layer, one for all, or an empty tuple.
        """
        return (budget,)

    def unbounded_size(self, prompt_len: int, n_pos: int) -> int | None:
        """Entries of a head after n_pos tokens if the budget is ignored; None if unknown."""
        return None

    @abstractmethod
    def budgets(self, view: View, budget: int) -> Tensor:
        """The budget of each layer at an event, int [L]; `budget` is the policy's."""


@final
class Even(LayerBudgets):
    """Every layer gets the budget."""

    def budgets(self, view: View, budget: int) -> Tensor:
        """Return the same budget for all layers."""
        return torch.full_like(view.layers, budget)
