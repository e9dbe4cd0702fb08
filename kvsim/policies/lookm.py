"""LOOK-M (Wan et al. 2024, arXiv 2406.18139): merges evicted entries into kept ones."""

from __future__ import annotations

from typing import Literal

from kvsim.core.lazy import Tensor, torch
from kvsim.core.merging import Merger, Shares


class LookM(Merger):
    """Each evicted entry merges into the kept one of its KV head with the largest cosine of keys.

    `averaged` is the mean of the evicted entries and the kept one. `pivotal` takes the mean of each
    evicted entry with the kept one, then the mean of these and the kept one. `weighted` is the mean
    with each evicted entry times its cosine. Keys, after RoPE, and values merge alike, at every
    event. The definition follows the abstract and the released code.

    Deviations: without images there is no priority of text over images; another eviction in front
    decides which entries stay. KVCache-Factory's `weighted` has the weights (1 + cosine) / 2, and
    their sum in the divisor.
    """

    merge: Literal["averaged", "pivotal", "weighted"] = "pivotal"

    def shares(self, cosines: Tensor) -> Shares:
        """Return halves, cosines or ones."""
        ones = torch.ones_like(cosines)
        if self.merge == "pivotal":
            return Shares(ones / 2, ones / 2, ones)
        return Shares(cosines if self.merge == "weighted" else ones, 0 * ones, ones)
