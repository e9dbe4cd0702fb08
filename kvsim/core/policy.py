"""A policy is composed of pieces: what is scored, how many stay, when, and what is protected.

Some propagate a part of the prompt to deeper layers (a propagation), or read or store what stays in
another way (a reader, a codec, a merger). Pieces are defined in `kvsim.core.pieces`, which can be
imported from here, `propagation`, `reading`, `storing` and `merging`.
"""

from __future__ import annotations

import reprlib
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, reduce
from operator import or_
from typing import Annotated, Any, Literal

from kvsim.core.merging import Merger
from kvsim.core.parameters import Between, Length, check_fields, parameters
from kvsim.core.pieces import (
    Allocator,
    Even,
    Everything,
    Inputs,
    LayerBudgets,
    Plan,
    Protection,
    Schedule,
    Scorer,
    Scores,
    Uniform,
    Wrapper,
    protected_by,
)
from kvsim.core.propagation import Propagation
from kvsim.core.reading import Reader
from kvsim.core.storing import Codec
from kvsim.errors import BudgetError, PolicyError
from kvsim.schema import NEVER, schedule

__all__ = [
    "Allocator",
    "Even",
    "Everything",
    "Inputs",
    "LayerBudgets",
    "Plan",
    "Policy",
    "PolicyLike",
    "Protection",
    "Schedule",
    "Scorer",
    "Scores",
    "Uniform",
    "Wrapper",
    "protected_by",
]


#: Parameters that the text of a policy shows.
_SHOWN = 8


@dataclass(frozen=True)
class Policy:
    """A policy, ready to replay: named pieces, no state.

    Attributes:
        name: for tables and errors.
        scorer: which entries matter.
        allocator: how many stay, and from where.
        schedule: after which rows it acts.
        protect: entries protected beside those that scorer and allocator protect by definition.
        layer_budgets: how much each layer gets.
        positions: "slot" where keys are rotated to their slot in the cache instead of their
            position in the sequence; the kept sets stay, the attention output changes.
        per_query_head: keep one set per query head, which a grouped cache cannot store.
        propagation: which rows of the prompt reach deeper layers; None for all of them.
        reader: which resident entries a row reads; None for all of them.
        storage: as what entries are stored, or how others merge into them; None for as recorded.
        so_far: the share of the tokens before an event that is its budget; None: the same for all.
        scaled: lengths that shrink with the budget where they do not fit it.
        lengths: all lengths that may shrink.
        default: the policy of this name with default parameters; None where it is not known.

    Raises:
        PolicyError: a field out of its bounds, or pieces that do not go together.
    """

    name: str
    scorer: Scorer
    allocator: Allocator = Uniform()  # noqa: RUF009  frozen
    schedule: Schedule = Schedule()  # noqa: RUF009  frozen
    protect: Protection = Protection()  # noqa: RUF009  frozen
    layer_budgets: LayerBudgets = Even()  # noqa: RUF009  frozen
    positions: Literal["absolute", "slot"] = "absolute"
    per_query_head: bool = False
    propagation: Propagation | None = None
    reader: Reader | None = None
    storage: Codec | Merger | None = None
    so_far: Annotated[float, Between(0, 1)] | None = None
    scaled: tuple[Length, ...] = ()
    lengths: tuple[Length, ...] = field(default=(), compare=False, repr=False)
    default: Policy | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_fields(self, self.name)
        drops, merges = self.propagation is not None, isinstance(self.storage, Merger)
        accesses = self.reader is not None or self.storage is not None
        shared = set(self.scorer.columns) & set(self.allocator.columns)
        conflicts = {
            f"scorer and allocator both carry a column {''.join([*shared][:1])!r}": shared,
            "it drops rows of the prompt, and entries are to be protected (sink, recent, prompt)": (
                drops and self.protect != Protection()
            ),
            "it drops rows of the prompt, and its layers share one budget or ranking": (
                drops and self.across_layers
            ),
            "it drops rows of the prompt, and its scores are of rows that repeat all of it": (
                drops and self.scorer.reads.context_again
            ),
            "its propagation, reader or scaled lengths have no rule for a budget that grows": (
                self.so_far is not None and (drops or self.reader is not None or self.scaled)
            ),
            "a reader, codec or merger needs keys at their positions, one set for each KV head": (
                accesses and (self.positions == "slot" or self.per_query_head)
            ),
            "a merger changes keys, which a propagation, a reader or a bound needs as recorded": (
                merges and (drops or self.reader is not None or self.scorer.reads.future)
            ),
        }
        for conflict, applies in conflicts.items():
            if applies:
                raise PolicyError(
                    f"{self.name}: {conflict}; expected one of the two without the other"
                )

    def __repr__(self) -> str:
        params = [f"{name}={value!r}" for name, value in self.params.items()]
        more = [f"{len(params) - _SHOWN} more"] * (len(params) > _SHOWN)
        after = f"after {schedule(**vars(self.schedule))!r}"
        return f"Policy({', '.join([repr(self.name), *params[:_SHOWN], *more, after])})"

    @classmethod
    def of(cls, given: Policy | Scorer) -> Policy:
        """Return a policy; a scorer alone becomes one that evicts every 128 rows.

        Raises PolicyError for anything else.
        """
        if isinstance(given, Scorer):
            return cls(given.label, given, schedule=Schedule(interval=128))
        if not isinstance(given, Policy):
            raise PolicyError(
                f"policy is {reprlib.repr(given)}; expected a name, a Scorer, or a Policy as "
                "kvsim.policy(NAME) returns"
            )
        return given

    @property
    def columns(self) -> Mapping[str, float]:
        """Columns that each entry carries, with the value of an entry without history."""
        return {**self.scorer.columns, **self.allocator.columns}

    @property
    def reads(self) -> Inputs:
        """What its pieces read."""
        inner = self.scorer, self.allocator, self.layer_budgets
        pieces = *inner, self.propagation, self.reader, self.storage
        return reduce(or_, (piece.reads for piece in pieces if piece is not None))

    @property
    def bounded(self) -> bool:
        """Whether the budget bounds what every layer holds."""
        if self.propagation is not None and self.propagation.effect in ("some", "none"):
            return False
        if self.propagation is not None and self.propagation.caches != "chosen":
            return True
        return self.allocator.bounded and self.layer_budgets.bounded

    @property
    def across_layers(self) -> bool:
        """Whether layers share a budget or a ranking, so that events act on all of them or none."""
        shared = self.layer_budgets.across_layers or self.allocator.across_layers
        return shared or self.scorer.across_layers

    @property
    def apart(self) -> bool:
        """Whether layers that share a budget are scored apart, and no more than numbers of each."""
        within = not self.scorer.across_layers and isinstance(self.allocator, Uniform)
        return within and self.storage is None and self.layer_budgets.across_layers

    @property
    def rounds(self) -> bool:
        """Whether entries are rounded once they leave an exact window."""
        return isinstance(self.storage, Codec)

    @property
    def bounds(self) -> frozenset[str]:
        """What the budget bounds; empty where it has no effect.

        "held": the entries of all heads, or the rows that propagate to deeper layers. "heads": the
        entries of some heads. "read": the entries that a row reads.
        """
        propagates = self.propagation is not None and self.propagation.caches == "chosen"
        bounds = {
            "held": self.bounded or propagates,
            "heads": self.allocator.bounds_some,
            "read": self.reader is not None and self.reader.effect != "none",
        }
        return frozenset(name for name, bound in bounds.items() if bound)

    @property
    def exact(self) -> bool:
        """Whether exactly the budget stays after an event, over the heads of a layer."""
        all_rows = self.propagation is None or self.propagation.effect == "exact"
        return self.bounded and all_rows and self.allocator.exact and self.layer_budgets.exact

    def budget_at(self, tokens: int, budget: int) -> int:
        """Return the budget of an event after so many tokens, of a policy whose budget is given."""
        return budget if self.so_far is None else max(1, int(tokens * self.so_far + 1e-9))

    def requested(self, budget: int) -> Protection:
        """Return the union of what the policy, its scorer and its allocator ask to protect.

        Args:
            budget: of a layer. Scaled lengths are those of the whole budget: call `at` first.
        """
        union = self._requests.get(budget)
        if union is None:
            union = self.protect | self.scorer.protection(budget)
            union |= self.allocator.protection(budget)
            self._requests[budget] = union
        return union

    @cached_property
    def _requests(self) -> dict[int, Protection]:
        """Requested protection by budget: read at every event, and the policy is frozen."""
        return {}

    def protection(self, budget: int) -> Protection:
        """Protected entries: all that are requested, if the allocator enforces that."""
        return self.requested(budget) if self.allocator.enforces else Protection()

    def check_budget(
        self,
        budget: int,
        *,
        prompt_len: int = 0,
        n_pos: int = NEVER,
        n_layers: int = 1,
        schedule: Schedule | None = None,
        context_len: int | None = None,
        end: int | None = None,
    ) -> None:
        """Raise BudgetError where the policy has no rule for the budget.

        Args:
            budget: entries per head.
            prompt_len: tokens of the prompt.
            n_pos: tokens of the trace.
            n_layers: layers of the trace.
            schedule: replaces the policy's own.
            context_len: tokens before the question; None without one.
            end: tokens that an event takes for the prompt; None for the prompt.
        """
        across = self.at(budget).propagation
        least = 1 if across is None else across.least_budget
        if budget < least:
            raise BudgetError(
                f"{self.name}: budget is {budget}; the smallest budget that works is {least}"
            )
        events = schedule or self.schedule

        def exceeded(total: int) -> tuple[int, int] | None:
            """The first budget of a layer below the size of its protection, and that size."""
            longest = events.longest(prompt_len, total, n_pos, context_len)
            fit = self.at(total)
            planned = fit.layer_budgets.planned(total, n_layers, longest)
            sizes = ((b, fit.protection(b).size(end or prompt_len)) for b in dict.fromkeys(planned))
            return next(((b, size) for b, size in sizes if size > b), None)

        first = exceeded(budget) if self.allocator.bounded else None
        if first is None:
            return
        totals = range(NEVER + 1)  # all above one that works do, too
        smallest = bisect_left(totals, x=True, lo=budget, key=lambda total: exceeded(total) is None)
        works = f"the smallest budget that works is {smallest}"
        way_out = works if smallest in totals else "no budget works"
        share, protected = first
        where = f"budget {budget}" if share == budget else f"budget {share} of a layer"
        raise BudgetError(
            f"{self.name}: {where} is below the {protected} entries that it protects; {way_out}"
        )

    def at(self, budget: int) -> Policy:
        """The policy with the values that its scaled lengths have at a budget."""
        if not self.scaled:
            return self
        pieces: dict[int, Any] = {}
        for depth in {each.depth for each in self.scaled}:
            values = {each.name: each.at(budget) for each in self.scaled if each.depth == depth}
            for piece in self.levels[depth]:
                names = values.keys() & parameters(type(piece))
                pieces[id(piece)] = replace(piece, **{name: values[name] for name in names})

        def scorer(outer: Any) -> Any:
            new = pieces.get(id(outer), outer)
            return replace(new, scorer=scorer(outer.scorer)) if hasattr(outer, "scorer") else new

        outer = ("allocator", "layer_budgets", "propagation")
        fitted = {name: pieces.get(id(x), x) for name in outer for x in [getattr(self, name)]}
        return replace(self, scorer=scorer(self.scorer), **fitted)

    def fitted(self) -> Policy:
        """The policy with lengths that fit the budget, called NAME@scaled; else itself."""
        if not self.lengths or self.scaled == self.lengths:
            return self
        parts = self.name.split("+")
        for depth in {each.depth for each in self.lengths} & set(range(len(parts))):
            parts[depth] = parts[depth].removesuffix("@scaled") + "@scaled"
        default = self.default and self.default.fitted()
        return replace(self, name="+".join(parts), scaled=self.lengths, default=default)

    def remark(self, budget: int) -> str:
        """Say which lengths are scaled to this budget, or exceed half of it; empty for none."""
        if not self.bounded:
            return ""
        changed = [x for x in self.scaled or self.lengths if x.at(budget) != x.value]
        if self.scaled:
            values = (f"{self._key(x)}={x.at(budget)} instead of {x.value}" for x in changed)
            text = ", ".join(values) or "all lengths fit"
            return f"{self.name}: scaled to budget {budget}: {text}"
        inner = {x._replace(depth=0): x for x in reversed(self.lengths)}.values()  # not taken over
        large = " ".join(
            f"--set {self.name}.{self._key(x)}={x.at(budget)}"
            for x in changed
            if x in inner and x.name in ("window", "recent") and 2 * x.value > budget
        )
        return large and (
            f"{self.name}: lengths exceed half of budget {budget}; compare with {large}, or all "
            "lengths with --set fit=true"
        )

    def _key(self, length: Length) -> str:
        """The name under which `--set` takes a length."""
        hidden = sum(
            length.name in parameters(type(piece))
            for level in self.levels[: length.depth]
            for piece in level
        )
        return "scorer." * hidden + length.name

    @property
    def scorers(self) -> tuple[Scorer, ...]:
        """The scorers from the outside in: wrappers, and the innermost."""
        chain = [self.scorer]
        while hasattr(chain[-1], "scorer"):
            chain.append(chain[-1].scorer)
        return tuple(chain)

    @property
    def levels(self) -> tuple[tuple[Any, ...], ...]:
        """The pieces from the outside in: propagation, allocator, wrapped scorers, the innermost.

        Then reader and codec. Pieces of one level share their parameters; an allocator that belongs
        to the innermost scorer (`Allocator.yields`) is of its level.
        """
        *wrappers, innermost = self.scorers
        outer: list[Any] = [] if self.propagation is None else [self.propagation]
        inside: list[Any] = [innermost]
        if self.allocator.yields:
            inside.append(self.allocator)
        elif not isinstance(self.allocator, Uniform | Everything):
            outer.append(self.allocator)
        return (
            *((piece,) for piece in (*outer, *wrappers)),
            (*inside, self.layer_budgets),
            *((piece,) for piece in (self.reader, self.storage) if piece is not None),
        )

    @property
    def params(self) -> dict[str, Any]:
        """The parameters of all pieces, by the names under which `kvsim.policy` takes them."""
        out: dict[str, Any] = {}
        seen: dict[str, int] = {}
        scaled = {(each.depth, each.name): each.share for each in self.scaled}
        levels = enumerate(self.levels)
        for depth, piece in ((depth, piece) for depth, level in levels for piece in level):
            for name in parameters(type(piece)):
                if name == "scorer" or seen.get(name) == depth:  # pieces of one level share it
                    continue
                value = scaled.get((depth, name), getattr(piece, name))
                out["scorer__" * (seen.get(name, -1) + 1) + name] = value
                seen[name] = depth
        if self.protect != Protection():
            out["protect"] = asdict(self.protect)
        return out


#: A policy, its name, or a scorer alone.
PolicyLike = Policy | Scorer | str
