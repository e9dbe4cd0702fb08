"""The full cache: the reference in which nothing is evicted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvsim.composition import Protection
from kvsim.view import View


@dataclass(frozen=True)
class Full:
    """Nothing leaves, whatever the budget: no event of its own, and an allocator that keeps all."""

    columns: ClassVar[Mapping[str, float]] = {}
    per_row: ClassVar[bool] = False

    def score(self, view: View) -> Tensor:
        """All alike, [L, H, n]."""
        return torch.zeros(view.pos.shape, device=view.pos.device)

    def protection(self, budget: int) -> Protection:
        """Nothing is at risk."""
        return Protection()
