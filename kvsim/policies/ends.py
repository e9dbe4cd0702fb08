"""Sparse attention over the first, the last, and chosen middle entries."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

from kvsim.core.lazy import Tensor, torch
from kvsim.core.reading import SparseAttention, highest, shared
from kvsim.core.trace import Trace


class Ends(SparseAttention, ABC):
    """Rows read the first `sink` entries, the last `local` ones and their own, in whole pages.

    A row reads `share` of the budget, these entries included, and chooses at least one page.
    Subclasses declare these three as fields.
    """

    sink = 0
    local: int | None = None
    share = 1.0

    def at(self, trace: Trace, budget: int) -> SparseAttention:
        """Return the piece with the budget's local window."""
        changes: dict[str, Any] = {"local": self._window(budget)}
        return replace(self, **changes)

    @abstractmethod
    def usual(self, entries: int) -> int:
        """The number of last entries that a row reads where `local` is None."""

    def _window(self, budget: int) -> int:
        return self.local or max(1, self.usual(int(self.share * budget)))

    def between(self, visible: Tensor, budget: int) -> Tensor:
        """The pages between the first and the last ones of visible [..., P], bool."""
        number = torch.arange(visible.shape[-1], device=visible.device)
        local = visible.sum(-1, keepdim=True) - 1 - -(-self._window(budget) // self.page)
        return (number >= -(-self.sink // self.page)) & (number < local)

    def chosen(self, scores: Tensor, entries: Tensor, budget: int) -> Tensor:
        """The first and the last pages, and the middle pages with the highest scores."""
        scores, visible = shared(self.heads, scores, entries)
        between = self.between(visible, budget)
        rest = int(self.share * budget) - self.sink - self._window(budget)
        count = max(1, rest // self.page)
        far = highest(scores.masked_fill(~between, -torch.inf), count) & between
        return visible & (far | ~between)
