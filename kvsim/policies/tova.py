"""TOVA: drop what the latest token attends to least.

Oren et al., "Transformers are Multi-State RNNs", EMNLP 2024, arXiv 2401.06104, section 4. After
each row the entry with the lowest attention weight of that row, averaged over all query heads of
the layer, leaves: one ranking for all heads, nothing protected, not even the current token.

Deviations. `tova@kvpress` keeps the last token whatever its score and acts after the prompt only.
Where heads keep sets of their own (inside AMS, AdaKV, CriticalKV), entries at one slot are
different tokens and an average over all heads means nothing: there each KV head is ranked by its
own group of query heads, `heads="group"`. `ams@release` averages by slot all the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from kvsim.core.flops import Event, Flops
from kvsim.core.policy import Protection, Scorer
from kvsim.core.view import View


@dataclass(frozen=True)
class TOVA(Scorer):
    """Attention of the last row, averaged over the query heads of the layer or of each KV head."""

    protect_last: bool = False
    heads: Literal["all", "group"] = "all"

    per_row: ClassVar[bool] = True

    def score(self, view: View) -> Tensor:
        """s_j = mean over query heads of a_e(j); [L, H, n]."""
        attention = view.attn(1, group="mean")[..., 0, :]
        if self.heads == "group":
            return attention
        return attention.mean(1, keepdim=True).expand_as(attention)

    def flops(self, event: Event) -> Flops:
        """Attention of the last row, and its mean over the heads."""
        h, _, _, n = event.sizes
        return event.attention(1) + Flops(0, h * n)

    def protection(self, budget: int) -> Protection:
        """The last token where asked for."""
        return Protection(recent=int(self.protect_last))
