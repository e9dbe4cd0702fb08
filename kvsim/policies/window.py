"""A window of recent rows, and the candidates before it, as scorers see them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from kvsim.core.parameters import AtLeast
from kvsim.core.policy import Protection, Scorer
from kvsim.core.view import View


@dataclass(frozen=True)
class Windowed(Scorer):
    """A scorer that reads attention of the `window` most recent rows, and protects their entries.

    Subclasses define `score`, and give the window their own default.
    """

    window: Annotated[int, AtLeast(1)] = 32

    @property
    def rows(self) -> int:
        """The window."""
        return self.window

    def protection(self, budget: int) -> Protection:
        """The window."""
        return Protection(recent=self.window)


def before_window(view: View, window: int) -> Tensor:
    """The candidates: live entries older than the window's rows; bool [L, H, n]."""
    return view.live & (view.pos < view.first(window))


def shares(logits: Tensor, among: Tensor) -> Tensor:
    """Softmax of logits [..., n] over the slots marked in `among`, 0 elsewhere.

    `among` broadcasts over the logits, which are overwritten.
    """
    z = logits.masked_fill_(~among, -torch.inf)
    return z.softmax(-1).masked_fill_(z.amax(-1, keepdim=True) == -torch.inf, 0.0)
