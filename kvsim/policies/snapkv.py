"""SnapKV: keeps the entries that the last rows attend to, smoothed over neighbours.

Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation", NeurIPS 2024, arXiv
2404.14469, listing 1. The score of an entry is its softmax attention from the `window` most recent
rows, averaged over these rows and pooled over neighbouring entries. The entries with the highest
scores stay, and the window.

Deviations. kvsim keeps one set per KV head, which the cache of a model with grouped queries can
store: scores are averaged over the query heads of the group, after pooling. The published code
repeats K and V and keeps one set per query head: `snapkv@original`. The defaults are those of the
published configurations (window 32, max-pool of 7); `snapkv@kvpress` has kvpress's (window 64,
average-pool of 5). The paper sums over the window; the mean gives the same ranking. A window row
attends to the entries that are still in the cache, up to its own position, also when the window is
longer than the interval.
"""

from __future__ import annotations

from typing import Annotated, Literal

from kvsim.core.lazy import Tensor
from kvsim.core.parameters import AtLeast, Odd
from kvsim.core.view import View
from kvsim.policies.window import Windowed, before_window, over_heads, smooth


class SnapKV(Windowed):
    """Attention of a window of rows, pooled over neighbouring entries."""

    pool: Literal["max", "avg"] | None = "max"
    pool_kernel: Annotated[int, AtLeast(1), Odd()] = 7

    def score(self, view: View) -> Tensor:
        """s_j = mean over the group of pool_j(mean over the window of a_r(j)); [L, H, n].

        The window's own columns are cut before pooling, score 0 and are protected (`Windowed`).
        """
        older = before_window(view, self.window)  # [L, H, n]
        vote = view.attn(self.window).mean(3)  # [L, H, G, n]
        vote = vote.masked_fill_(~older.unsqueeze(2), 0.0)
        pooled = smooth(vote, self.pool, self.pool_kernel)
        return over_heads(pooled, 2).div_(pooled.shape[2]).masked_fill_(~older, 0.0)
