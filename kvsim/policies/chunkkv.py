"""ChunkKV: whole chunks of neighbouring entries are kept or evicted together.

Liu et al., "ChunkKV: Semantic-Preserving KV Cache Compression for Efficient Long-Context LLM
Inference", arXiv 2502.00299. Entries are cut into chunks of `chunk` slots. The scorer's scores are
summed over the KV heads, and a chunk's score is the mean of these sums over its slots. The best
chunks stay, the same in all heads. Every event cuts the remaining entries into new chunks.

Deviations. The budget is exact: chunks fill it in the order of their scores, and the last chunk,
which may not fit whole, keeps its best entries. Protected entries come first and count in the
budget, but not in the means, because a scorer may have no score for them. `chunkkv@kvpress`
(`exact=False`) keeps only whole chunks, floor(chunks x budget / entries) of them: its size is less
than one chunk above the budget, or less than two below. It has no protection; as in kvpress,
entries to protect get the largest score of the layer + 1.
"""

from __future__ import annotations

from typing import Annotated

from kvsim.core.lazy import Tensor, torch
from kvsim.core.parameters import AtLeast
from kvsim.core.pieces import Allocator, Effect, Plan
from kvsim.core.select import select
from kvsim.core.view import View


class ChunkKV(Allocator):
    """The best chunks of a layer, one set for all its heads."""

    chunk: Annotated[int, AtLeast(1)] = 20
    exact: bool = True

    @property
    def effect(self) -> Effect:
        """Whole chunks seldom fill the budget."""
        return "exact" if self.exact else "near"

    @property
    def enforces(self) -> bool:
        """With whole chunks protection is a matter of scores."""
        return self.exact

    def plan(self, view: View, scores: Tensor, protected: Tensor) -> Plan:
        """Mark the chosen entries as eligible, [L, H, n], and count them, [L, H]."""
        chunks = (view.slot // self.chunk).clamp(min=0)[:, :1]  # [L, 1, n], the same in all heads
        live, always = view.live[:, :1], protected[:, :1]
        if self.exact:
            shared = scores.double().sum(1, keepdim=True)
            order = _best_first(shared, chunks, live & ~always)
            chosen = filled(shared, chunks, order, view.budget, always, live)
        else:
            top = scores.masked_fill(~view.live, -torch.inf).amax((1, 2), keepdim=True) + 1
            padded = torch.where(protected, top, scores)
            order = _best_first(padded.double().sum(1, keepdim=True), chunks, live)
            chosen = self._whole(view, chunks, order)
            few = view.count[:, :1] < self.chunk  # no whole chunk: kvpress selects without chunks
            nothing = torch.zeros_like(protected)
            plain = select(padded, view.budget.expand_as(view.count), nothing, view.live)
            chosen = torch.where(few.unsqueeze(-1), plain, chosen)
        chosen = chosen.expand_as(view.live)
        return Plan(chosen.sum(-1), eligible=chosen)

    def _whole(self, view: View, chunks: Tensor, order: Tensor) -> Tensor:
        """The best floor(chunks x budget / entries) chunks, at least one, [L, 1, n]."""
        count = view.count[:, :1]
        number = -(-count // self.chunk)
        # in the arithmetic of kvpress, which goes through a ratio: the share may round down
        ratio = 1 - view.budget.double() / count
        wanted = (number * (1 - ratio)).long().clamp(min=1)
        place = order.argsort(-1).gather(-1, chunks)  # of each entry's chunk
        return (place < wanted.unsqueeze(-1)) & view.live[:, :1]


def _best_first(shared: Tensor, chunks: Tensor, among: Tensor) -> Tensor:
    """Chunks by the mean of shared [L, 1, n] over their slots in `among`, best first; [L, 1, C]."""
    number = int(chunks.max()) + 1
    mean = sums(shared.masked_fill(~among, 0.0), chunks, number) / sums(among, chunks, number)
    return mean.nan_to_num(nan=-torch.inf).argsort(dim=-1, descending=True, stable=True)


def filled(
    scores: Tensor, chunks: Tensor, order: Tensor, budget: Tensor, always: Tensor, live: Tensor
) -> Tensor:
    """Take chunks in their order [L, h, C] until the budget [L, h] is used; bool [L, h, n].

    The last chunk, if it does not fit whole, keeps the entries with the best scores [L, h, n].
    """
    size, kept = (sums(mask, chunks, order.shape[-1]) for mask in (live, always))
    room = (size - kept).gather(-1, order)
    spare = (budget - kept.sum(-1)).unsqueeze(-1)
    share = (spare - (room.cumsum(-1) - room)).clamp(min=0).minimum(room)
    quotas = kept + torch.zeros_like(kept).scatter(-1, order, share)
    return select(scores, quotas, always, live, groups=chunks)


def sums(values: Tensor, chunks: Tensor, number: int) -> Tensor:
    """Sums over the chunks of values [L, 1, n]; [L, 1, C]."""
    values = values if values.is_floating_point() else values.long()
    zero = values.new_zeros(*values.shape[:-1], number)
    return zero.scatter_add(-1, chunks, values)
