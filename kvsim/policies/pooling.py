"""Smoothing of scores over neighbouring slots, as SnapKV and its heirs do."""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

Pool = Literal["max", "avg"] | None


def smooth(scores: Tensor, pool: Pool, kernel: int) -> Tensor:
    """Scores [..., n] pooled over slots, for a max-pool of 0 or more; the same length.

    Slots that are to count as nothing hold 0: so does what lies outside. The divisor of an average
    is always the kernel, an odd width, so that a pooled score belongs to one entry.
    """
    if pool is None or scores.shape[-1] == 0:
        return scores
    flat, half = scores.flatten(0, -2), kernel // 2
    pooled = (max_pool1d if pool == "max" else avg_pool1d)(flat, kernel, stride=1, padding=half)
    out: Tensor = pooled.view(scores.shape)
    return out


def over_heads(pooled: Tensor, first: int) -> Tensor:
    """Sum of pooled scores [..., n] over the axes from `first` to the slots; [..., n].

    In the same order for every slot: a max-pool gives neighbours equal scores, and slots that are
    equal in every head must have equal sums, or rounding would decide between them.
    """
    out: Tensor = pooled.flatten(first, -2).mT.contiguous().sum(-1)
    return out


def pooling_flops(pool: Pool, kernel: int) -> int:
    """FLOPs of `smooth` for each number that it returns."""
    return 0 if pool is None else int(kernel)
