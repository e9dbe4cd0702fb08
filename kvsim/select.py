"""Choosing, in one place: which entries stay, given scores, quotas and protection."""

from __future__ import annotations

import torch
from torch import Tensor


def select(values: Tensor, quotas: Tensor, protected: Tensor, live: Tensor) -> Tensor:
    """The kept set of every head: protected first, then score descending, then the lower position.

    values [L, H, n] scores, higher = keep; quotas [L, H] entries to keep, at least the protected
    ones; protected, live bool [L, H, n]; entries are in position order. Returns bool [L, H, n].
    A head with fewer live entries than its quota keeps them all.

    Linear in n apart from one partial sort: the score at the cut is found first, what lies above it
    stays, and the entries tied at the cut stay from the lowest position up to the quota.
    """
    candidate = live & ~protected
    need = quotas - (protected & live).sum(-1)  # [L, H]
    score = values.masked_fill(~candidate, -torch.inf)
    most = min(int(need.max()), score.shape[-1])
    if most <= 0:
        return protected & live
    best = score.topk(most, dim=-1).values
    at = (need - 1).clamp(min=0, max=most - 1).unsqueeze(-1)
    cut = best.gather(-1, at).masked_fill((need <= 0).unsqueeze(-1), torch.inf)
    above = candidate & (score > cut)
    tied = candidate & (score == cut)
    room = (need - above.sum(-1)).unsqueeze(-1)
    return (protected & live) | above | (tied & (tied.cumsum(-1) <= room))
