"""TOVA: evicts the entry that the latest token attends to least.

Oren et al., "Transformers are Multi-State RNNs", EMNLP 2024, arXiv 2401.06104, section 4. After
each row it evicts the entry with the lowest attention weight of that row, averaged over all query
heads of the layer. All heads share this ranking. Nothing is protected, not even the current token.

Deviations. `tova@kvpress` protects the last token and evicts after the prompt only; `ams@release`
protects it, too. Inside AMS, AdaKV and CriticalKV, each head keeps its own set. One slot then holds
different tokens in different heads, and an average over all heads has no meaning. There each KV
head is ranked by its own query heads (`heads="group"`). Only `ams@release` averages over all heads
by slot, as the released code does. In heads with sharp attention, weights underflow to 0 and ties
decide. `log=True` ranks by the logarithm of the average instead. AMS uses it, because in a segment
far from the peak every weight can be 0.
"""

from __future__ import annotations

import math
from typing import Literal

from kvsim.core.lazy import Tensor
from kvsim.core.pieces import Protection, Scorer
from kvsim.core.view import View


class TOVA(Scorer):
    """Attention of the last row, averaged over the query heads of the layer or of each KV head."""

    protect_last: bool = False
    heads: Literal["all", "group"] = "all"
    log: bool = False

    @property
    def per_row(self) -> bool:  # type: ignore[override]  # a block of rows has no logarithms
        """Whether rows can be replayed in blocks."""
        return not self.log

    def score(self, view: View) -> Tensor:
        """s_j = mean over query heads of a_e(j), or its logarithm; [L, H, n]."""
        if self.log:
            weights = view.attn(1, log=True)[..., 0, :]  # [L, H, G, n]
            heads = weights if self.heads == "group" else weights.flatten(1, 2).unsqueeze(1)
            mean = heads.logsumexp(2) - math.log(heads.shape[2])
            return mean.expand(-1, weights.shape[1], -1)
        attention = view.attn(1, group="mean")[..., 0, :]
        if self.heads == "group":
            return attention
        return attention.mean(1, keepdim=True).expand_as(attention)

    def protection(self, budget: int) -> Protection:
        """The last token on request."""
        return Protection(recent=int(self.protect_last))
