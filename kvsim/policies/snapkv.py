"""SnapKV: what the last rows of the prompt attend to, smoothed over neighbours.

Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation", NeurIPS 2024,
arXiv 2404.14469, listing 1. The `window` most recent rows vote: their softmax attention, averaged
over the window, pooled over neighbouring entries; the best stay, and the window itself.

Deviations. One set per KV head (mean over the query heads of the group, after pooling), which a
grouped cache can store; the published code repeats K and V and keeps one per query head:
`snapkv@original`. The defaults are those of the published configurations (window 32, max-pool of
7); `snapkv@kvpress` has kvpress's (window 64, average-pool of 5). Mean over the window where the
paper sums: the same ranking. A window row sees the live entries up to its own position, also when
the window is longer than the interval.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from kvsim.composition import Protection, Scorer
from kvsim.errors import PolicyError
from kvsim.view import View


@dataclass(frozen=True)
class SnapKV(Scorer):
    """Attention of a window of rows, pooled over neighbouring entries."""

    window: int = 32
    pool: Literal["max", "avg"] | None = "max"
    pool_kernel: int = 7

    def __post_init__(self) -> None:
        if self.window < 1:
            raise PolicyError(f"snapkv: window is {self.window}; expected at least 1 row")
        if self.pool not in ("max", "avg", None):
            raise PolicyError(f"snapkv: pool is {self.pool!r}; expected 'max', 'avg' or None")
        if self.pool_kernel < 1 or self.pool_kernel % 2 == 0:
            raise PolicyError(
                f"snapkv: pool_kernel is {self.pool_kernel}; expected an odd width, so that a "
                "pooled score belongs to one entry"
            )

    @property
    def rows(self) -> int:
        """The window."""
        return self.window

    def score(self, view: View) -> Tensor:
        """s_j = mean over the group of pool_j(mean over the window of a_r(j)); [L, H, n].

        The window's own columns are cut before pooling, score 0 and are protected.
        """
        attention = view.attn(self.window)  # [L, H, G, w, n]
        candidates = attention.shape[-1] - attention.shape[-2]
        vote = attention[..., :candidates].mean(3)  # [L, H, G, n - w]
        out = view.keys.new_zeros(view.pos.shape)
        if candidates > 0:
            out[..., :candidates] = self._smooth(vote).mean(2)
        return out

    def _smooth(self, vote: Tensor) -> Tensor:
        """Pooling over slots, same length; averages count the zero padding (torch's default)."""
        if self.pool is None:
            return vote
        flat, half = vote.flatten(0, 2), self.pool_kernel // 2
        if self.pool == "max":
            pooled = max_pool1d(flat, self.pool_kernel, stride=1, padding=half)
        else:
            pooled = avg_pool1d(flat, self.pool_kernel, stride=1, padding=half)
        out: Tensor = pooled.unflatten(0, vote.shape[:3])
        return out

    def protection(self, budget: int) -> Protection:
        """The window."""
        return Protection(recent=self.window)
