"""Bounds for sparse attention: the entries with the most attention, from all keys."""

from __future__ import annotations

from typing import Annotated, ClassVar

from kvsim.core.lazy import Tensor, torch
from kvsim.core.parameters import Above, AtLeast, AtMost
from kvsim.core.pieces import Inputs
from kvsim.core.reading import Heads, Pages, SparseAttention, shared


class TopK(SparseAttention):
    """Each row reads the entries with its largest attention: a bound, because it needs all keys.

    No other choice of as many held entries has more of the row's attention. Another choice can
    still have a smaller output error. With `heads` kv or layer, entries rank by the mean attention
    of these query heads.

    `share`: the part of the budget that a row reads.
    """

    label: ClassVar[str] = "topk"
    reads = Inputs(future=True)

    share: Annotated[float, Above(0), AtMost(1)] = 1.0
    heads: Heads = "query"
    dense_layers: Annotated[int, AtLeast(0)] = 0

    def score(self, queries: Tensor, pages: Pages, visible: Tensor) -> Tensor:
        """Logits of a query head by itself, else attention; [H, G, w, n]."""
        z = logits(queries, pages)
        if self.heads == "query":
            return z  # they do not underflow
        return z.masked_fill_(~visible, -torch.inf).softmax(-1)


class TopP(SparseAttention):
    """Each row reads the fewest entries with a share p of its attention; it needs all keys.

    Their number differs by row and head, and the budget is ignored. The nearest rule of a paper is
    Twilight (arXiv 2502.02770), which estimates the attention. With `heads` kv or layer, entries
    rank by the mean attention of these query heads.
    """

    label: ClassVar[str] = "topp"
    reads = Inputs(future=True)
    effect = "none"

    p: Annotated[float, Above(0), AtMost(1)] = 0.95
    heads: Heads = "query"
    dense_layers: Annotated[int, AtLeast(0)] = 0

    def score(self, queries: Tensor, pages: Pages, visible: Tensor) -> Tensor:
        """Attention over the resident entries [H, G, w, n]."""
        return logits(queries, pages).masked_fill_(~visible, -torch.inf).softmax(-1)

    def chosen(self, scores: Tensor, entries: Tensor, budget: int) -> Tensor:
        """The highest scores, down to the first whose sum reaches p."""
        scores, visible = shared(self.heads, scores, entries)
        value, order = scores.masked_fill(~visible, 0.0).sort(dim=-1, descending=True, stable=True)
        before = value.cumsum(-1) - value
        return torch.zeros_like(visible).scatter_(-1, order, before < self.p) & visible


def logits(queries: Tensor, pages: Pages) -> Tensor:
    """Logits [H, G, w, P] of queries [H, G, w, d] over pages of one entry."""
    keys = pages.keys.flatten(1, 2)
    q = queries.flatten(1, 2) * pages.formula.scale
    out: Tensor = pages.formula.capped(q @ keys.mT).unflatten(1, queries.shape[1:3])
    return out
