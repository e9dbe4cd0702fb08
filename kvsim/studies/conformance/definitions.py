"""Definitions with a deviation: scorers around another one that see or rank otherwise."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any, ClassVar

from kvsim.core.attention import reduce_group
from kvsim.core.lazy import Tensor, torch
from kvsim.core.policy import Protection, Scorer, Scores, Wrapper
from kvsim.core.view import View
from kvsim.errors import PolicyError
from kvsim.policies.window import first_of

#: Rows of a block of attention that is summed.
_ROWS = 64
#: Attention of rows of a view, [L, H, G, w, n].
Weigh = Callable[[View, range], Tensor]


class _Seen:
    """A view for the scorer inside of a wrapper: other attributes, and attention by a formula."""

    def __init__(self, view: View, weigh: Weigh, **changed: Any) -> None:
        self._view, self._weigh = view, weigh
        vars(self).update(changed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)

    def __getitem__(self, column: str) -> Tensor:
        of: Any = vars(self).get("columns", self._view)
        return of[column]  # type: ignore[no-any-return]

    def scored(self, scorer: Scorer) -> Scores:
        return Scores.of(scorer.score(self))  # type: ignore[arg-type]  # not what the plain view knows

    def attn(self, rows: int | range, group: Any = None, *, log: bool = False) -> Tensor:
        if not isinstance(rows, range):
            rows = range(first_of(self._view, rows), self._view.row + 1)
        weights = self._weigh(self._view, rows).nan_to_num(0.0)
        return reduce_group(weights.double().log() if log else weights, group)

    def logits(self, rows: int | range) -> Tensor:
        return self.attn(rows, log=True)

    def received(self) -> Tensor:
        first, stop = int(self._view.since.min()) + 1, self._view.row + 1
        blocks = (range(x, min(x + _ROWS, stop)) for x in range(first, stop, _ROWS))
        return sum((self.attn(rows, "sum").sum(2) for rows in blocks), torch.zeros(()))


def products(view: View, queries: Tensor, keys: Tensor | None = None) -> Tensor:
    """Scaled products of queries [L, H, G, w, d] and keys, 0 on pads; [L, H, G, w, n]."""
    keys = view.keys if keys is None else keys
    products = torch.einsum("lhgwd,lhnd->lhgwn", queries, keys) * view.formula.scale
    return products.masked_fill(~view.live[:, :, None, None], -torch.inf)


def _causal(view: View, rows: range, products: Tensor) -> Tensor:
    """Softmax over the entries that each row sees."""
    later = view.pos[:, :, None, None] > torch.arange(rows.start, rows.stop)[:, None]
    return products.masked_fill(later, -torch.inf).softmax(-1)


def rotated(view: View, rows: range) -> Tensor:
    """Queries of the window at the position of the last row (kvpress's SnapKV in decoding)."""
    if view.is_prompt:  # there every query has its position
        return view.attn(rows)
    at = torch.full((len(rows),), view.row)
    queries = view.rope.rotate(view.queries(rows, rotated=False), at)
    return _causal(view, rows, products(view, queries))


def plain_keys(view: View) -> Tensor:
    """Keys before RoPE."""
    return view.rope.unrotate(view.keys, view.pos.clamp(min=0))


def unrotated(view: View, rows: range) -> Tensor:
    """Queries and keys before RoPE."""
    plain = view.queries(rows, rotated=False)
    return _causal(view, rows, products(view, plain, plain_keys(view)))


def interleaved(view: View, rows: range) -> Tensor:
    """Query head i with KV head i % H, not with i // G."""
    queries = view.queries(rows)
    heads = queries.flatten(1, 2).unflatten(1, queries.shape[2:0:-1]).transpose(1, 2)
    return _causal(view, rows, products(view, heads))


def regrouped(weights: Tensor) -> Tensor:
    """Weights [L, H, G, w, n] of query head g * H + h at (h, g), as of head h * G + g."""
    return torch.unflatten(weights.transpose(1, 2).flatten(1, 2), 1, weights.shape[1:3])


def over_heads(view: View, rows: range) -> Tensor:
    """Softmax over all query heads of the layer."""
    logits = view.logits(rows)
    out: Tensor = logits.flatten(1, 2).softmax(1).unflatten(1, logits.shape[1:3])
    return out


def neighbour(by: int, view: View, rows: range) -> Tensor:
    """Attention of each entry moved to its neighbour, 0 at the end."""
    weights = view.attn(rows).roll(by, -1)
    weights[..., 0 if by > 0 else -1] = 0
    return weights


def counted(row: int, times: int, view: View, rows: range) -> Tensor:
    """Attention in which the first row (0) or the row of the event (-1) counts so many times."""
    weights = view.attn(rows).clone()
    if row == 0 or rows.stop > view.row:
        weights[..., row, :] *= times
    return weights


def reduced(over: str, axes: tuple[int, ...], view: View, rows: range) -> Tensor:
    """Attention as of the heads of these axes together, or of the first; of axis 3, its mean."""
    x = view.attn(rows)
    x = x.mean(3, keepdim=True).expand_as(x) if 3 in axes else x
    if over == "first":
        return x[:, : 1 if 1 in axes else None, :1].expand(-1, view.pos.shape[1], -1, -1, -1)
    heads = (1, 2) if 1 in axes or over == "all" else (2,)
    x = x.mean(heads, keepdim=True) if over == "all" else x.amax(heads, keepdim=True)
    return x.expand(-1, view.pos.shape[1], -1, -1, -1)


class Deviating(Wrapper):
    """The scorer inside on another view, with other scores, or with another protection.

    weigh: attention of the view; other: attributes of it by name; change: of scores and the view.
    """

    weigh: Weigh = View.attn
    other: Callable[[View], dict[str, Any]] | None = None
    change: Callable[[Tensor, View], Tensor] = lambda scores, _: scores
    protects: Callable[[Protection], Protection] = lambda protection: protection

    scale: ClassVar[Any] = property(attrgetter("scorer.scale"))
    reads: ClassVar[Any] = property(
        lambda x: replace(
            x.scorer.reads, rows=x.scorer.reads.rows + 1, last=x.scorer.reads.last + 1
        )
    )

    def __post_init__(self) -> None:
        """Take logarithms, too."""

    def score(self, view: View) -> Scores:
        """The scores of the scorer inside, of the other view and changed; and the columns."""
        seen: Any = _Seen(view, self.weigh, **(self.other(view) if self.other else {}))
        scores = self.inner(seen)
        return Scores(self.change(scores.values, view), scores.columns)

    def protection(self, budget: int) -> Protection:
        """Change that of the scorer inside."""
        return self.protects(self.scorer.protection(budget))


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

        def weigh(view: View, rows: range) -> Tensor:
            weights = view.attn(rows)
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
