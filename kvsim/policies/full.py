"""The full cache: the reference in which nothing is evicted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvsim.composition import Everything, Policy, Protection, Schedule
from kvsim.view import View


@dataclass(frozen=True)
class Full:
    """Nothing leaves, whatever the budget: no event of its own, and none that evicts."""

    columns: ClassVar[dict[str, float]] = {}
    per_row: ClassVar[bool] = False

    def score(self, view: View) -> Tensor:
        """All alike, [L, H, n]."""
        return torch.zeros(view.pos.shape, device=view.pos.device)

    def protection(self, budget: int) -> Protection:
        """Nothing is at risk."""
        return Protection()


def full(scorer: Full) -> Policy:
    """The full cache as a policy."""
    never = Schedule(interval=None, prefill=False)
    return Policy("full", scorer, allocator=Everything(), schedule=never)
