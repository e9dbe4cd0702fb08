"""TOVA: drop what the latest token attends to least.

Oren et al., "Transformers are Multi-State RNNs", EMNLP 2024, arXiv 2401.06104, section 4. After
each row the entry with the lowest attention weight of that row, averaged over all query heads of
the layer, leaves: one ranking for all heads, nothing protected, not even the current token.

Deviations. `tova@kvpress` keeps the last token whatever its score and acts after the prompt only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvsim.composition import Protection
from kvsim.view import View


@dataclass(frozen=True)
class TOVA:
    """Attention of the last row, averaged over the query heads of the layer."""

    protect_last: bool = False

    columns: ClassVar[Mapping[str, float]] = {}
    per_row: ClassVar[bool] = True

    def score(self, view: View) -> Tensor:
        """s_j = mean over query heads of a_e(j), the same for every KV head; [L, H, n]."""
        attention = view.attn(1, group="mean")[..., 0, :]
        return attention.mean(1, keepdim=True).expand_as(attention)

    def protection(self, budget: int) -> Protection:
        """The last token where asked for."""
        return Protection(recent=int(self.protect_last))
