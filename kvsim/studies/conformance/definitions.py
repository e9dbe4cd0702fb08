"""Definitions with a deviation: scorers around another one that see or rank otherwise."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any, ClassVar, Literal

from kvsim.core.attention import reduce_group
from kvsim.core.lazy import Tensor, torch
from kvsim.core.policy import Protection, Scorer, Scores, Wrapper
from kvsim.core.view import View
from kvsim.errors import PolicyError
from kvsim.policies.window import first_of

#: Attention of the last rows of a view, [L, H, G, w, n].
Weigh = Callable[[View, int], Tensor]


class Unprotected(Wrapper):
    """The scorer inside, without a part of its protection."""

    part: Literal["sink", "recent"]

    def score(self, view: View) -> Scores:
        """The scores of the scorer inside."""
        return self.inner(view)

    def protection(self, budget: int) -> Protection:
        """All but the part."""
        nothing: dict[str, Any] = {self.part: 0}
        return replace(self.scorer.protection(budget), **nothing)


class _Seen:
    """A view for the scorer inside of a wrapper: other attributes, and attention by a formula.

    weigh: of the view and its last rows, [L, H, G, w, n].
    """

    def __init__(self, view: View, weigh: Weigh, **changed: Any) -> None:
        self._view, self._weigh = view, weigh
        vars(self).update(changed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)

    def __getitem__(self, column: str) -> Tensor:
        return self._view[column]

    def scored(self, scorer: Scorer) -> Scores:
        return Scores.of(scorer.score(self))  # type: ignore[arg-type]  # not what the plain view knows

    def attn(self, rows: int | range, group: Any = None, *, log: bool = False) -> Tensor:
        if isinstance(rows, range):  # no window of recent rows, which deviations change
            return self._view.attn(rows, group, log=log)
        weights = self._weigh(self._view, rows).nan_to_num(0.0)
        return reduce_group(weights.double().log() if log else weights, group)

    def logits(self, last: int) -> Tensor:
        return self.attn(last, log=True)


def _rows(view: View, last: int) -> Tensor:
    return torch.arange(first_of(view, last), view.row + 1)


def products(view: View, queries: Tensor, keys: Tensor | None = None) -> Tensor:
    """Scaled products of queries [L, H, G, w, d] and keys, 0 on pads; [L, H, G, w, n]."""
    keys = view.keys if keys is None else keys
    products = torch.einsum("lhgwd,lhnd->lhgwn", queries, keys) * view.formula.scale
    return products.masked_fill(~view.live[:, :, None, None], -torch.inf)


def _causal(view: View, products: Tensor) -> Tensor:
    """Softmax over the entries that each of the last rows sees."""
    later = view.pos[:, :, None, None] > _rows(view, products.shape[3])[:, None]
    return products.masked_fill(later, -torch.inf).softmax(-1)


def rotated(view: View, last: int) -> Tensor:
    """Queries of the window at the position of the last row (kvpress's SnapKV in decoding)."""
    if view.is_prompt:  # there every query has its position
        return view.attn(last)
    rows = _rows(view, last)
    plain = view.queries(range(int(rows[0]), view.row + 1), rotated=False)
    return _causal(view, products(view, view.rope.rotate(plain, torch.full_like(rows, view.row))))


def unrotated(view: View, last: int) -> Tensor:
    """Queries and keys before RoPE."""
    keys = view.rope.unrotate(view.keys, view.pos.clamp(min=0))
    return _causal(view, products(view, view.queries(last, rotated=False), keys))


def interleaved(view: View, last: int) -> Tensor:
    """Query head i with KV head i % H, not with i // G."""
    queries = view.queries(last)
    heads = queries.flatten(1, 2).unflatten(1, queries.shape[2:0:-1]).transpose(1, 2)
    return _causal(view, products(view, heads))


def regrouped(weights: Tensor) -> Tensor:
    """Weights [L, H, G, w, n] of query head g * H + h at (h, g), as of head h * G + g."""
    return torch.unflatten(weights.transpose(1, 2).flatten(1, 2), 1, weights.shape[1:3])


def over_heads(view: View, last: int) -> Tensor:
    """Softmax over all query heads of the layer."""
    logits = view.logits(last)
    out: Tensor = logits.flatten(1, 2).softmax(1).unflatten(1, logits.shape[1:3])
    return out


def neighbour(by: int, view: View, last: int) -> Tensor:
    """Attention of each entry moved to its neighbour, 0 at the end."""
    weights = view.attn(last).roll(by, -1)
    weights[..., 0 if by > 0 else -1] = 0
    return weights


class Seeing(Wrapper):
    """The scorer inside on another view of the window; pooled: with the window's own columns."""

    weigh: Weigh
    pooled: bool = False

    scale: ClassVar[Any] = property(attrgetter("scorer.scale"))
    reads: ClassVar[Any] = property(
        lambda x: replace(
            x.scorer.reads, rows=x.scorer.reads.rows + 1, last=x.scorer.reads.last + 1
        )
    )

    def __post_init__(self) -> None:
        """Take logarithms, too: nothing is computed with the scores."""

    def score(self, view: View) -> Scores:
        """The scores of the scorer inside, of the other view."""
        size = getattr(self.scorer, "window", 0)
        older = {"pos": view.pos.clamp(max=first_of(view, size) - 1)} if self.pooled else {}
        seen: Any = _Seen(view, self.weigh, **older)
        return self.inner(seen)


class Rescored(Wrapper):
    """Other scores, of those of the scorer inside and the view."""

    change: Callable[[Tensor, View], Tensor]

    def score(self, view: View) -> Scores:
        """Scores by `change`, and the columns."""
        scores = self.inner(view)
        return Scores(self.change(scores.values, view), scores.columns)


class Reduced(Wrapper):
    """The scorer inside for each query head, and another reduction over them."""

    over: Literal["max", "first", "all"]

    def score(self, view: View) -> Tensor:
        """Of each query head by itself, then over them; [L, H, n]."""
        group = view.queries(1).shape[2]
        names = ("pos", "live", "keys", "values", "count")
        heads = {name: getattr(view, name).repeat_interleave(group, 1) for name in names}
        seen: Any = _Seen(view, lambda x, last: x.attn(last).flatten(1, 2).unsqueeze(2), **heads)
        each: Tensor = self.inner(seen).values.unflatten(1, (-1, group))  # [L, H, G, n]
        if self.over == "max":
            return each.amax(2)
        if self.over == "first":
            return each[:, :, 0]
        return each.mean((1, 2)).unsqueeze(1).expand_as(each[:, :, 0])


class Scrambled(Wrapper):
    """Entries stand in the order in which top-k returned them (kvpress in decoding).

    recent: how many are padded with the largest score + 1. by_slot: the first slots are the sinks,
    whatever they hold.
    """

    recent: int = 0
    by_slot: int = 0

    columns: ClassVar[Mapping[str, float]] = {"place": math.inf}

    def score(self, view: View) -> Scores:
        """Minus the place in the top-k, so that its choice stays; [L, H, n]."""
        budgets = set(view.budget.flatten().tolist())
        if len(budgets) > 1 or not bool(view.live.all()):
            raise PolicyError("heads hold different numbers of entries, which top-k cannot return")
        budget = min(budgets.pop(), view.pos.shape[-1])
        order = view["place"].argsort(dim=-1, stable=True)
        rows = {
            name: x.gather(2, order.unsqueeze(-1).expand_as(x))
            for name, x in (("keys", view.keys), ("values", view.values))
        }

        def weigh(view: View, last: int) -> Tensor:
            weights = view.attn(last)
            return weights.gather(-1, order[:, :, None, None].expand_as(weights))

        seen: Any = _Seen(view, weigh, pos=view.pos.gather(-1, order), **rows)
        if self.by_slot:
            scores = torch.ones_like(view.keys[..., 0])
            scores[..., self.by_slot : self.by_slot + scores.shape[-1] - budget] = 0
        else:
            scores = self.inner(seen).values
        scores = scores.masked_fill(seen.pos > view.row - self.recent, float(scores.max()) + 1)
        top = order.gather(-1, scores.topk(budget, dim=-1).indices)
        place = torch.arange(budget, dtype=view["place"].dtype).expand_as(top)
        place = torch.full_like(view["place"], torch.inf).scatter(-1, top, place)
        return Scores(-place, {"place": place})

    def protection(self, budget: int) -> Protection:
        """Protect no entries: the score itself protects the window, whose entries are padded."""
        return Protection()
