"""A window of recent rows, and the candidates before it, as scorers see them."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsim.core.view import View


def before_window(view: View, window: int) -> Tensor:
    """The candidates: live entries older than the window's rows; bool [L, H, n]."""
    return view.live & (view.pos < view.first(window))


def shares(logits: Tensor, among: Tensor) -> Tensor:
    """Softmax of logits [..., n] over the slots marked in `among`, 0 elsewhere.

    `among` broadcasts over the logits, which are overwritten.
    """
    z = logits.masked_fill_(~among, -torch.inf)
    return z.softmax(-1).masked_fill_(z.amax(-1, keepdim=True) == -torch.inf, 0.0)
