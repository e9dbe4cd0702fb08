"""Common parts of scorers with a window of recent rows: candidates, shares, smoothing."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from kvsim.core.lazy import Tensor, torch
from kvsim.core.parameters import AtLeast
from kvsim.core.pieces import Inputs, Protection, Scorer
from kvsim.core.view import LOGIT_BYTES, View

Pooling = Literal["max", "avg"] | None


class Windowed(Scorer):
    """A scorer that reads attention of the `window` most recent rows, and protects their entries.

    Subclasses define `score` and the default window; a parameter `sink` protects first entries.
    """

    window: Annotated[int, AtLeast(1)] = 32

    #: copies of the keys in a score (`Inputs`)
    copies: ClassVar[int] = 0

    @property
    def reads(self) -> Inputs:
        """Attention of the window."""
        return Inputs(rows=self.window, copies=getattr(self, "copies", 0))

    def protection(self, budget: int) -> Protection:
        """The window, and the sinks."""
        return Protection(sink=getattr(self, "sink", 0), recent=self.window)


def first_of(view: View, window: int) -> int:
    """The first of the `window` most recent rows, 0 at the earliest."""
    return max(0, view.row + 1 - window)


def before_window(view: View, window: int) -> Tensor:
    """The candidates: live entries older than the window's rows; bool [L, H, n]."""
    return view.live & (view.pos < first_of(view, window))


def shares(logits: Tensor, among: Tensor) -> Tensor:
    """Softmax of logits [..., n] over the slots marked in `among`, 0 elsewhere.

    `among` broadcasts over the logits, which are overwritten.
    """
    rows = logits.masked_fill_(~among, -torch.inf).flatten(0, -2)
    for z in rows.split(max(1, LOGIT_BYTES // max(1, rows[:1].nbytes))):
        blind = z.amax(-1, keepdim=True) == -torch.inf
        z.copy_(z.softmax(-1)).masked_fill_(blind, 0.0)
    return rows.view(logits.shape)


def smooth(scores: Tensor, pool: Pooling, kernel: int) -> Tensor:
    """Scores [..., n] pooled over slots, for a max-pool of 0 or more; the same length.

    Slots to ignore hold 0, like positions outside. Averages always divide by the kernel; its width
    is odd, so that a pooled score belongs to one entry.
    """
    if pool is None or scores.shape[-1] == 0:
        return scores
    flat, half = scores.flatten(0, -2), kernel // 2
    of_torch = torch.nn.functional
    pooling = of_torch.max_pool1d if pool == "max" else of_torch.avg_pool1d
    pooled = pooling(flat, kernel, stride=1, padding=half)
    out: Tensor = pooled.view(scores.shape)
    return out


def over_heads(pooled: Tensor, first: int) -> Tensor:
    """Sum of pooled scores [..., n] over the axes from `first` to the slots; [..., n].

    The order is the same for every slot: max-pooling gives neighbours equal scores, and slots equal
    in every head need equal sums, or rounding would decide between them.
    """
    out: Tensor = pooled.flatten(first, -2).mT.contiguous().sum(-1)
    return out
