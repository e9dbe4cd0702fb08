"""The full cache: the reference in which nothing is evicted."""

from __future__ import annotations

from kvsim.core.lazy import Tensor, torch
from kvsim.core.pieces import Scorer
from kvsim.core.view import View


class Full(Scorer):
    """Keeps everything at any budget: no event of its own, and an allocator that keeps all."""

    def score(self, view: View) -> Tensor:
        """Return equal scores, [L, H, n]."""
        return torch.zeros(view.pos.shape, device=view.pos.device)
