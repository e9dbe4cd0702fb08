"""A policy is composed of pieces: scorer, allocator, schedule, protection, budgets of layers.

It may also have a propagation, sparse attention, a quantizer or a merger. Pieces are defined in
`pieces`, `propagation`, `reading`, `storing` and `merging`; those of `pieces` can be imported from
here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, reduce
from operator import or_
from typing import Annotated, Any, Literal

from kvsim.core.merging import Merger
from kvsim.core.parameters import Between, Length, check_fields, parameters
from kvsim.core.pieces import (
    ACROSS_LAYERS,
    BOUNDED,
    EFFECTS,
    Allocator,
    Effect,
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
from kvsim.core.reading import SparseAttention
from kvsim.core.storing import Quantizer
from kvsim.errors import PolicyError
from kvsim.schema import schedule

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


def chain_of(scorer: Any) -> tuple[Scorer, ...]:
    """The scorers from the outside in: wrappers, and the innermost."""
    return (scorer, *(chain_of(scorer.scorer) if hasattr(scorer, "scorer") else ()))


def keyed(levels: Iterable[Iterable[str]]) -> Iterator[tuple[int, str, str]]:
    """Map depth and name of each parameter to its key; `scorer__` reaches a hidden one.

    levels: the names of the parameters, from the outside in.
    """
    hidden: dict[str, int] = {}
    for depth, names in enumerate(map(dict.fromkeys, levels)):
        for name in names:
            yield depth, name, "scorer__" * hidden.get(name, 0) + name
        hidden |= dict.fromkeys(names, depth + 1)


def keys_of(policy: Policy) -> Iterator[tuple[int, str, str]]:
    """`keyed` of the pieces of a policy."""
    pieces = ((parameters(type(piece)) for piece in level) for level in policy.levels)
    return keyed([x for names in level for x in names if x != "scorer"] for level in pieces)


@dataclass(frozen=True)
class Policy:
    """A policy, ready to replay: named pieces, no state.

    Attributes:
        name: for tables and errors.
        scorer: scores entries.
        allocator: sets quotas of heads or groups.
        schedule: the rows after which events fire.
        protect: entries protected in addition to those of scorer and allocator.
        layer_budgets: budgets by layer.
        positions: "slot" to rotate keys to their slot in the cache instead of their position in the
            sequence; changes attention output, not kept sets.
        per_query_head: keep one set per query head, which a grouped cache cannot store.
        propagation: selects rows of the prompt for deeper layers; None for all rows.
        sparse: selects the resident entries that a row reads; None for all.
        storage: quantizer or merger; None to store entries as recorded.
        so_far: budget as a share of the tokens before an event; None for one fixed budget.
        lengths: parameters that are lengths; scaled ones shrink to fit the budget.
        default: the policy of this name with default parameters, if known.

    Raises:
        PolicyError: a field out of its bounds, or incompatible pieces.
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
    sparse: SparseAttention | None = None
    storage: Quantizer | Merger | None = None
    so_far: Annotated[float, Between(0, 1)] | None = None
    lengths: tuple[Length, ...] = field(default=(), compare=False, repr=False)
    default: Policy | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_fields(self, self.name)
        drops, merges = self.propagation is not None, isinstance(self.storage, Merger)
        accesses = self.sparse is not None or self.storage is not None
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
            "pruning, sparse attention or scaled lengths have no rule for a budget that grows": (
                self.so_far is not None and (drops or self.sparse is not None or self.scaled)
            ),
            "sparse attention, quantizers need keys at their positions, a set for each KV head": (
                accesses and (self.positions == "slot" or self.per_query_head)
            ),
            "a merger changes keys, which pruning, sparse attention or a bound needs as recorded": (
                merges and (drops or self.sparse is not None or self.scorer.reads.future)
            ),
        }
        for conflict, applies in conflicts.items():
            if applies:
                raise PolicyError(
                    f"{self.name}: {conflict}; expected one of the two without the other"
                )

    def __repr__(self) -> str:
        params = [f"{name}={value!r}" for name, value in self.params.items()]
        if len(params) > 8:
            params[8:] = [f"{len(params) - 8} more"]
        after = f"after {schedule(**vars(self.schedule))!r}"
        return f"Policy({', '.join([repr(self.name), *params, after])})"

    @property
    def scaled(self) -> list[Length]:
        """Lengths that shrink to fit the budget."""
        return [each for each in self.lengths if each.scaled]

    @property
    def columns(self) -> Mapping[str, float]:
        """Columns that each entry carries, with the value of an entry without history."""
        return {**self.scorer.columns, **self.allocator.columns}

    @property
    def reads(self) -> Inputs:
        """The union of its pieces' inputs."""
        inner = self.scorer, self.allocator, self.layer_budgets
        pieces = *inner, self.propagation, self.sparse, self.storage
        return reduce(or_, (piece.reads for piece in pieces if piece is not None))

    @property
    def effect(self) -> Effect:
        """Effect of the budget: the weakest over the pieces."""
        if self.propagation is not None and self.propagation.caches != "chosen":
            return self.propagation.effect
        effects = [self.allocator.effect, self.layer_budgets.effect]
        effects += [] if self.propagation is None else [self.propagation.effect]
        return max(effects, key=EFFECTS.index)

    @property
    def bounded(self) -> bool:
        """Whether the budget bounds every layer's cache."""
        return self.effect in BOUNDED

    @property
    def across_layers(self) -> bool:
        """Whether layers share a budget or a ranking, so that events act on all or none."""
        shares = self.layer_budgets.shared, self.allocator.shared
        return self.scorer.across_layers or not {*shares}.isdisjoint(ACROSS_LAYERS)

    @property
    def rounds(self) -> bool:
        """Whether entries are rounded when they leave an exact window."""
        return isinstance(self.storage, Quantizer)

    def protection(self, budget: int, *, enforced: bool = True) -> Protection:
        """Return the union of the protections of the policy, its scorer and its allocator.

        Args:
            budget: of a layer. Scaled lengths are those of the whole budget: call `at` first.
            enforced: return no protection if the allocator only marks it (`Allocator.enforces`).
        """
        if enforced and not self.allocator.enforces:
            return Protection()
        union = self._requests.get(budget)
        if union is None:
            union = self.protect | self.scorer.protection(budget)
            union |= self.allocator.protection(budget)
            self._requests[budget] = union
        return union

    @cached_property
    def _requests(self) -> dict[int, Protection]:
        """Cached protection by budget: read at every event, and the policy is frozen."""
        return {}

    def at(self, budget: int) -> Policy:
        """Return the policy with its lengths scaled to a budget."""
        if not self.scaled:
            return self
        depths = {id(piece): depth for depth, level in enumerate(self.levels) for piece in level}

        def fitted(piece: Any) -> Any:
            depth, names = depths.get(id(piece)), parameters(type(piece))
            of_piece = (x for x in self.scaled if x.depth == depth and x.name in names)
            changes = {x.name: x.at(budget) for x in of_piece}
            if "scorer" in names:
                changes["scorer"] = fitted(piece.scorer)
            return replace(piece, **changes) if changes else piece

        outer = ("scorer", "allocator", "layer_budgets", "propagation")
        return replace(self, **{name: fitted(getattr(self, name)) for name in outer})

    @property
    def levels(self) -> tuple[tuple[Any, ...], ...]:
        """The pieces from the outside in: propagation, allocator, wrapped scorers, the innermost.

        Then sparse attention and quantizer. Pieces of one level share parameters; an allocator with
        the innermost scorer's label is at its level.
        """
        *wrappers, innermost = chain_of(self.scorer)
        outer: list[Any] = [] if self.propagation is None else [self.propagation]
        inside: list[Any] = [innermost]
        if self.allocator.label == innermost.label:
            inside.append(self.allocator)
        elif not isinstance(self.allocator, Uniform | Everything):
            outer.append(self.allocator)
        return (
            *((piece,) for piece in (*outer, *wrappers)),
            (*inside, self.layer_budgets),
            *((piece,) for piece in (self.sparse, self.storage) if piece is not None),
        )

    @property
    def params(self) -> dict[str, Any]:
        """The parameters of all pieces, by their keys in `kvsim.policy`."""
        scaled = {(each.depth, each.name): each.share for each in self.scaled}
        levels = self.levels
        out = {}
        for depth, name, key in keys_of(self):
            piece = next(x for x in levels[depth] if name in parameters(type(x)))
            out[key] = scaled.get((depth, name), getattr(piece, name))
        if self.protect != Protection():
            out["protect"] = asdict(self.protect)
        return out


#: A policy, its name, or a bare scorer.
PolicyLike = Policy | Scorer | str
