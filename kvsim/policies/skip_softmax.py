"""Skip-softmax, BLASST (arXiv 2512.12087): does not read values of blocks with low logits."""

from __future__ import annotations

from math import log
from typing import Annotated

from kvsim.core.lazy import Tensor, torch
from kvsim.core.parameters import Above, AtLeast, AtMost
from kvsim.core.pieces import Inputs
from kvsim.core.reading import Heads, Pages, SparseAttention


class SkipSoftmax(SparseAttention):
    """Each row reads all keys, and skips blocks with all logits far below the largest so far.

    A row goes through the blocks of its cache from the first entry to the last and carries the
    maximum of their logits. A block whose largest logit lies more than ln(1 / threshold) below that
    maximum is skipped: its values are not read, and it is left out of the softmax. The maximum
    includes the block itself; for thresholds up to 1 that makes no difference. The first block is
    always read.

    `page`: entries of a block. `scale`: if given, the threshold is scale / entries (in whole
    blocks), at most 1. Releases calibrate this factor, because the threshold for a given share
    falls with the length. `heads`: by default each query head decides for itself; heads that read
    the same blocks skip a block only if all would, like kernels with a group's queries in one tile.

    The definition follows the paper's abstract and public kernels (TensorRT-LLM, FlashInfer:
    threshold_scale_factor / length; NVIDIA Model Optimizer, whose defaults for decoding `@modelopt`
    has). Deviations: kernels that split the cache carry a maximum for each part; rows of the
    prompt, which have their own threshold there, read everything here.
    """

    page: Annotated[int, AtLeast(1)] = 16
    threshold: Annotated[float, Above(0), AtMost(1)] = 0.001
    scale: Annotated[float, Above(0)] | None = None
    heads: Heads = "query"
    dense_layers: Annotated[int, AtLeast(0)] = 0

    effect = "none"
    reads = Inputs(every_key=True)

    def score(self, queries: Tensor, pages: Pages, visible: Tensor) -> Tensor:
        """The largest logit of each block [H, G, w, P]."""
        q = queries.flatten(1, 2) * pages.formula.scale
        best = q.new_full((*q.shape[:2], pages.live.shape[1]), -torch.inf)
        for keys, live in zip(pages.keys.unbind(2), pages.live.unbind(2), strict=True):
            logits = pages.formula.capped(q @ keys.mT)
            torch.maximum(best, logits.masked_fill_(~live.unsqueeze(1), -torch.inf), out=best)
        out: Tensor = best.unflatten(1, queries.shape[1:3])
        return out

    def chosen(self, scores: Tensor, entries: Tensor, budget: int) -> Tensor:
        """The blocks that at least one of the heads that read the same ones does not skip."""
        visible = entries > 0
        scores = scores.masked_fill(~visible, -torch.inf)
        gap = scores - scores.cummax(-1).values
        if self.scale is None:
            read = gap >= log(self.threshold)
        else:
            count = visible.sum(-1, keepdim=True) * self.page
            read = gap >= (self.scale / count.to(gap)).log_().clamp_(max=0.0)
        read &= visible
        if self.heads == "kv":
            read = read.any(1, keepdim=True)
        elif self.heads == "layer":
            read = read.flatten(0, 1).any(0)[None, None]
        return read
