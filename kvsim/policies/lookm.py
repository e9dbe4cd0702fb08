"""LOOK-M (Wan et al. 2024, arXiv 2406.18139): evicted entries merge into kept ones."""

from __future__ import annotations

from typing import Literal

from kvsim.core.lazy import Tensor, torch
from kvsim.core.merging import Merger, Shares


class LookM(Merger):
    """Each evicted entry merges into the kept one of its KV head with the largest cosine of keys.

    Of the evicted entries and the kept one, `averaged` is the mean; `pivotal` first takes the mean
    of each evicted one with the kept one, then the mean of these and the kept one; `weighted` is
    the mean with each evicted one times its cosine. Keys, after RoPE, and values merge alike, at
    every event. The definition rests on the abstract and the released code.

    Deviations: caches of text alone have no priority of text over images; behind another eviction,
    kept are the entries that it keeps. Of KVCache-Factory, `weighted` has other weights: (1 +
    cosine) / 2, and their sum in the divisor.
    """

    merge: Literal["averaged", "pivotal", "weighted"] = "pivotal"

    def shares(self, cosines: Tensor) -> Shares:
        """Return halves, cosines or ones."""
        ones = torch.ones_like(cosines)
        if self.merge == "pivotal":
            return Shares(ones / 2, ones / 2, ones)
        return Shares(cosines if self.merge == "weighted" else ones, 0 * ones, ones)
