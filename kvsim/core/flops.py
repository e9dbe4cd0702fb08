"""FLOPs of scoring: what a piece of a policy computes at one event, in one layer.

With H query heads, G KV heads, head dimension d, hidden size D, n entries of a head before the
event and w rows of a window. `products` are multiply-adds of matrix products, 2 FLOPs each, and
follow the formulas of the policies' files exactly; a test counts them while the real scorers run.
`pointwise` is the rest to leading order: 3 per softmax weight, 1 per number that is added, compared
or scaled, the kernel's width per pooled number, 2 per number of a norm. Comparisons that sort or
select count nothing.

Nothing is shared: attention weights that a scorer uses are computed anew, as they must be where a
fused kernel returns none, and once for each piece that uses them. Calibration happens once per
model and is left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from kvsim.errors import PolicyError


def attention_flops(pairs: float, n_qheads: int, entry_size: int) -> float:
    """FLOPs of one layer's attention over so many pairs of a row and an entry.

    entry_size: numbers of a key and its value. Per query head and pair: 2 d for the logit, 3 for
    the softmax, 2 d of the value for it.
    """
    return pairs * n_qheads * (2 * entry_size + 3)


def causal_pairs(rows: float, before: float = 0) -> float:
    """Pairs of a row and an entry: row i of those after `before` sees before + i + 1 entries."""
    return rows * before + rows * (rows + 1) / 2


@dataclass(frozen=True)
class Flops:
    """Of matrix products, and of everything else."""

    products: float = 0.0
    pointwise: float = 0.0

    @property
    def total(self) -> float:
        """Products and other operations together."""
        return self.products + self.pointwise

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.products + other.products, self.pointwise + other.pointwise)

    def __mul__(self, times: float) -> Flops:
        return Flops(self.products * times, self.pointwise * times)


class Shape(Protocol):
    """The sizes of a model that formulas need, such as those of a Trace."""

    @property
    def n_qheads(self) -> int:
        """Number of query heads, H."""

    @property
    def n_heads(self) -> int:
        """Number of KV heads, G."""

    @property
    def dim(self) -> int:
        """Dimensions of a head, d."""

    @property
    def hidden(self) -> int:
        """Hidden size of the model, D."""

    def per_query_head(self) -> Shape:
        """As a model in which every query head has keys and values of its own."""


@dataclass(frozen=True)
class Event:
    """One event of one layer, as sizes.

    entries: of a KV head, before the event. seen: tokens so far. since: rows since the last event
    that acted, whose attention a score may add up. later: rows still to come, for the clairvoyant.
    """

    model: Shape
    entries: float
    seen: int
    since: int
    budget: int
    prompt: bool = False
    later: float = 0

    @property
    def sizes(self) -> tuple[int, int, int, float]:
        """H, G, d, n."""
        return self.model.n_qheads, self.model.n_heads, self.model.dim, self.entries

    def window(self, rows: int) -> int:
        """So many recent rows, if there are."""
        return min(rows, self.seen)

    def attention(self, rows: float) -> Flops:
        """Softmax attention of so many rows over all entries: 2 H w n d, and 3 H w n."""
        h, _, d, n = self.sizes
        return Flops(2 * h * rows * n * d, 3 * h * rows * n)

    def received(self) -> Flops:
        """Attention of the rows since the last event, each over what it saw, added up."""
        h, _, d, n = self.sizes
        pairs = self.since * (n - (self.since - 1) / 2)
        return Flops(2 * h * pairs * d, 4 * h * pairs)


def unknown(policy: Any, event: Event) -> list[str]:
    """Return the names of the pieces that return no FLOPs of such an event."""
    pieces = _pieces(policy)
    if policy.propagation is not None:
        pieces.append(policy.propagation)
    return [type(piece).__name__ for piece in pieces if piece.flops(event) is None]


def event_flops(policy: Any, event: Event) -> Flops:  # a Policy, whose module imports this one
    """FLOPs of one event in one layer. Raises PolicyError where a piece's are unknown."""
    if policy.per_query_head:
        event = replace(event, model=event.model.per_query_head())
    return total_flops(policy.name, _pieces(policy), event)


def _pieces(policy: Any) -> list[Any]:
    """Return the pieces that compute at an event; scorers from the outside in."""
    return [*policy.scorers, policy.allocator, policy.layer_budgets]


def total_flops(policy: str, pieces: Iterable[Any], event: Event) -> Flops:
    """FLOPs of some pieces of a policy at an event; raises as `event_flops`."""
    total = Flops()
    for piece in pieces:
        flops = piece.flops(event)
        if flops is None:
            raise PolicyError(
                f"{policy}: the FLOPs of {type(piece).__name__} are unknown; expected a "
                "method flops(event) that returns kvsim.core.flops.Flops"
            )
        total += flops
    return total
