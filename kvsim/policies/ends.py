"""Sparse attention whose rows read the first and the last entries, and choose between them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

from kvsim.core.lazy import Tensor, torch
from kvsim.core.reading import SparseAttention, highest, shared
from kvsim.core.trace import Trace


class Ends(SparseAttention, ABC):
    """The first `sink` entries, the last `local` ones and the row's own are read, in whole pages.

    `share` of the budget, these entries included, is what a row reads; it chooses at least one
    page. Subclasses declare these three as fields.
    """

    sink = 0
    local: int | None = None
    share = 1.0

    def at(self, trace: Trace, budget: int) -> SparseAttention:
        """With the local window of the budget."""
        changes: dict[str, Any] = {"local": self._window(budget)}
        return replace(self, **changes)

    @abstractmethod
    def usual(self, entries: int) -> int:
        """How many of the entries that a row reads are the last ones, where `local` is None."""

    def _window(self, budget: int) -> int:
        return self.local or max(1, self.usual(int(self.share * budget)))

    def between(self, visible: Tensor, budget: int) -> Tensor:
        """The pages that are no first and no last ones of visible [..., P], bool."""
        number = torch.arange(visible.shape[-1], device=visible.device)
        local = visible.sum(-1, keepdim=True) - 1 - -(-self._window(budget) // self.page)
        return (number >= -(-self.sink // self.page)) & (number < local)

    def chosen(self, scores: Tensor, entries: Tensor, budget: int) -> Tensor:
        """The first and the last pages, and of those between them the ones with high scores."""
        scores, visible = shared(self.heads, scores, entries)
        between = self.between(visible, budget)
        rest = int(self.share * budget) - self.sink - self._window(budget)
        count = max(1, rest // self.page)
        far = highest(scores.masked_fill(~between, -torch.inf), count) & between
        return visible & (far | ~between)
