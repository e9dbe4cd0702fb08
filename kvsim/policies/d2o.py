"""D2O (Wan et al. 2024, arXiv 2406.13035): what is evicted merges where it is similar enough."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from kvsim.core.lazy import Tensor, torch
from kvsim.core.merging import Merger, Shares
from kvsim.core.parameters import Between


@dataclass(frozen=True)
class D2O(Merger):
    """Evicted entries whose nearest kept key has a large enough cosine merge into it.

    The threshold of a KV head is the mean of these cosines at its first event, and then `decay`
    times itself plus 1 - `decay` times their mean at each event. The weight of a merging entry is
    exp(cosine), that of the kept one e, divided by their sum; keys, after RoPE, and values merge
    alike. Others are lost.

    Deviations: budgets of layers by the variance of their attention are not part of a merger. The
    release has one threshold for all heads, to which it compares the mean over heads of entries of
    the same rank; weights are cosines, and it divides by the number of entries. Its `decay` is 0.5.
    """

    decay: Annotated[float, Between(0, 1)] = 0.5

    own = math.e

    def threshold(self, before: Tensor, mean: Tensor) -> Tensor:
        """The moving average of mean cosines, [H]."""
        moved = self.decay * before + (1 - self.decay) * mean
        return torch.where(before.isnan(), mean, moved)

    def shares(self, cosines: Tensor) -> Shares:
        """Return exponentials of cosines."""
        weight = cosines.exp()
        return Shares(weight, 0 * weight, weight)
