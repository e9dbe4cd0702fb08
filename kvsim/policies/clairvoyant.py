"""Bounds of reading: the entries with the most attention, chosen by reading every key."""

from __future__ import annotations

from typing import Annotated, ClassVar

from kvsim.core.lazy import Tensor, torch
from kvsim.core.parameters import Above, AtLeast, AtMost
from kvsim.core.pieces import Inputs
from kvsim.core.reading import Heads, Pages, SparseAttention, shared


class TopK(SparseAttention):
    """Every row reads the entries that it attends to most: a bound, since all keys are read.

    No other choice of as many held entries has more of the row's attention. The error of its output
    can still be larger than another's. With `heads` kv or layer, the mean of the attention of these
    query heads decides.

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
    """Every row reads the fewest entries that have a share p of its attention; all keys are read.

    Their number differs by row and head, and the budget is ignored. The nearest rule of a paper is
    Twilight (arXiv 2502.02770), which estimates the attention. With `heads` kv or layer, the mean
    of the attention of these query heads decides.
    """

    label: ClassVar[str] = "topp"
    reads = Inputs(future=True)
    effect = "none"

    p: Annotated[float, Above(0), AtMost(1)] = 0.95
    heads: Heads = "query"
    dense_layers: Annotated[int, AtLeast(0)] = 0

    def score(self, queries: Tensor, pages: Pages, visible: Tensor) -> Tensor:
        """Attention over what is resident [H, G, w, n]."""
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
