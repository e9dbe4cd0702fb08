"""D2O (Wan et al. 2024, arXiv 2406.13035): merges evicted entries that are similar enough."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from kvsim.core.lazy import Tensor, torch
from kvsim.core.merging import TIE, Merger, Shares
from kvsim.core.parameters import Between


class D2O(Merger):
    """Evicted entries whose nearest kept key has a large enough cosine merge into it.

    The threshold of a KV head is the mean of these cosines at its first event, and then `decay`
    times itself plus 1 - `decay` times their mean at each event. The weight of a merging entry is
    exp(cosine), the weight of the kept one is e, both divided by their sum. Keys, after RoPE, and
    values merge alike. Other entries are lost. The definition follows the abstract and the released
    code.

    Deviations: the paper's budgets of layers, by the variance of their attention, are left out. The
    release (`d2o@release`) weighs by cosines, the kept entry by 1, and divides by the number of
    entries. All heads share one threshold, which it compares to means over heads of entries of the
    same rank. Its `decay` is the default.
    """

    decay: Annotated[float, Between(0, 1)] = 0.5

    weights: Literal["softmax", "cosine"] = "softmax"
    across_heads: bool = False

    @property
    def own(self) -> float:  # type: ignore[override]  # of a parameter
        """The exponential of the largest cosine, or the largest cosine."""
        return math.e if self.weights == "softmax" else 1.0

    def merging(self, cosines: Tensor, leaves: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """Entries at or above the moving average of mean cosines."""
        cosines, before = cosines.where(leaves, 0.0), before.unsqueeze(-1)
        sums, counts = cosines.sum(-1, keepdim=True), leaves.sum(-1, keepdim=True)
        if self.across_heads:
            sums, counts = sums.sum(0), counts.sum(0)
            cosines = cosines.sum(0) / leaves.sum(0).clamp(min=1)
        mean = sums / counts.clamp(min=1)
        moved = self.decay * before + (1 - self.decay) * mean
        least = mean.where(before.isnan(), moved).where(counts > 0, before)
        return leaves & (cosines >= least - TIE), least.squeeze(-1)

    def shares(self, cosines: Tensor) -> Shares:
        """Return exponentials of cosines, or the cosines."""
        if self.weights == "cosine":
            return Shares(cosines, 0 * cosines, torch.ones_like(cosines))
        weight = cosines.exp()
        return Shares(weight, 0 * weight, weight)
