"""Union: one set of entries for all heads of a layer, or for all layers.

Serving engines keep one block table for the heads of a layer, most of them one for all layers. So
an entry is freed in all heads or in none, and heads must be ranked together. Any scorer's scores
are reduced over the KV heads of a layer (`across="heads"`) or over the KV heads of all layers
(`across="layers"`), and the reduced score ranks the entries of each head. `reduction` says how:

    max    the largest score: an entry stays if any head wants it
    mean   the mean score
    rank   the mean over the heads of how many of the head's candidates have a smaller score

"max" and "mean" compare scores of different heads, which must share one scale, as attention does.
"rank" compares only orders. TOVA, RPC and (for chunks) ChunkKV already average over the heads of a
layer.

Sources and deviations. No paper defines this wrapper. Single methods share sets in the same way:
TOVA (arXiv 2401.06104, mean over the heads of a layer), CAM in kvpress (mean over the KV heads),
and PagedEviction (arXiv 2509.04377), whose pages hold the entries of all heads. A set for all
layers needs scores of all layers at once, which an engine has only after the last layer; a replay
of some of the layers ranks by those. Inside an allocator that gives heads different sets (`ams`,
`adakv`) there is no common set, and the replay stops with an error.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from kvsim.core.lazy import Tensor, torch
from kvsim.core.pieces import Scores, Wrapper, protected_by
from kvsim.core.view import View
from kvsim.errors import PolicyError


class Union(Wrapper):
    """The scores of any scorer, reduced over the heads of a layer or of all layers."""

    across: Literal["heads", "layers"] = "heads"
    reduction: Literal["max", "mean", "rank"] = "max"

    across_layers: ClassVar[Any] = property(
        lambda self: self.across == "layers" or self.scorer.across_layers
    )

    @property
    def scale(self) -> Literal["positive", "signed", "log"]:
        """The scorer's scale; ranks are 0 or more."""
        return "positive" if self.reduction == "rank" else self.scorer.scale

    def score(self, view: View) -> Scores:
        """The reduced score, the same in every head that shares the set; [L, H, n]."""
        inner = self.inner(view)
        axes = (0, 1) if self.across == "layers" else (1,)
        first = view.pos[: 1 if len(axes) > 1 else None, :1]
        check_alike(f"union: {self.across}", view.pos, first, "no ams, adakv, pyramidkv, cake")
        scores = inner.values
        if self.reduction == "rank":
            scores = _ranks(scores, view.live & ~protected_by(self.scorer.protection, view))
        if self.reduction == "max":
            shared = scores.amax(axes, keepdim=True)
        else:
            shared = scores.double().mean(axes, keepdim=True)
        return Scores(shared.expand_as(scores), inner.columns)


def check_alike(which: str, marks: Tensor, first: Tensor, cure: str) -> None:
    """Raise PolicyError if heads or layers that share a set hold different entries.

    marks [L, H, n] of entries; first: marks of the first head or layer.
    """
    if bool((marks != first).any()):
        raise PolicyError(f"{which} hold different entries; expected one set for all: {cure}")


def _ranks(scores: Tensor, among: Tensor) -> Tensor:
    """Number of entries in `among` with a smaller score in the same head; [L, H, n]."""
    candidates = scores.masked_fill(~among, torch.inf)
    ranks = torch.searchsorted(candidates.sort(-1).values, candidates)
    return ranks.where(among, 0).double()
