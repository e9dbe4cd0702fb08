"""MorphKV: keeps the distant tokens that recent tokens attend to.

Ghadia et al., "Dialogue Without Limits: Constant-Sized KV Caches for Extended Responses in LLMs",
ICML 2025, arXiv 2503.00979. At every decoded token, the `window` most recent rows attend to the
candidates, the entries before the window. The score of a candidate is its weight in a softmax over
only the candidates: the largest of the group, then the sum or the maximum over the window
(`fusion`). The entries with the highest scores stay, and the window.

Deviations. The rule above is that of `morphkv@original`. Plain `morphkv` (= `morphkv@gkv`) is the
baseline of the G-KV paper. kvsim evicts after a row has attended. The authors' code evicts before
it and leaves the current row out of the window, a difference of one row. Their later variant, which
merges dropped entries into one, is not an eviction policy and is left out. The softmax of
`morphkv@original` leaves out the attention sinks that a model has learned.
"""

from __future__ import annotations

from typing import Literal

from kvsim.core.lazy import Tensor
from kvsim.core.view import View
from kvsim.policies.window import Windowed, before_window, shares


class MorphKV(Windowed):
    """Attention of a window over only the candidates, fused over the window."""

    fusion: Literal["sum", "max"] = "sum"

    def score(self, view: View) -> Tensor:
        """s_j = sum or max over the window of the group's largest share of j; [L, H, n]."""
        older = before_window(view, self.window)[:, :, None, None]
        share = shares(view.logits(self.window), older).amax(2)  # [L, H, w, n]
        return share.sum(2) if self.fusion == "sum" else share.amax(2)
