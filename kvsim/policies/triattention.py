"""TriAttention: which distances a head attends to, computed from the centre of its queries.

Mao et al., "TriAttention: Efficient Long Reasoning with Trigonometric KV Compression",
arXiv 2604.04921, and github.com/WeianMao/triattention. Before the rotary embedding, the queries of
a head gather around a centre. RoPE rotates pairs of dimensions; read each pair f, with frequency
w_f, as a complex number. Let q_f be the queries, k_f the keys as they are cached, t the next
position, and a_f = E[q_f] and b_f = E[|q_f|] over the calibration queries. The score of a key is

    mean over d of sum_f Re(a_f exp(i w_f (t + d)) conj(k_f)) + sum_f (b_f - |a_f|) |k_f|

over the distances d = 1, 2, 4, ..., 65536 into the future (`offsets="max"` takes their maximum).
The first sum is a trigonometric series in the distance from the key. The second is the norm of the
key, weighted by the spread of the queries. Scores of a query head are standardised over the entries
(z-score); an entry gets the largest of its group.

Deviations. One set per KV head and layer, the mode that the released code calls per_layer_perhead;
its default shares one set among the layers. kvsim adds no noise to break ties. The prompt is
protected and counts in the budget (`protect_prompt`); under an allocator or a wrapper it competes
like all other entries. Dimensions that the rotary embedding does not rotate, for which the released
code has no rule, add the product with the mean query.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import ClassVar, Literal

from kvsim.core.attention import Rope
from kvsim.core.lazy import Tensor, torch
from kvsim.core.pieces import protected_by
from kvsim.core.view import View
from kvsim.policies.calibration import Calibrated

# Distances into the future at which a key is scored.
OFFSETS = tuple(2**i for i in range(17))

# Standard deviation below which the scores of a head count as equal.
_LEAST_DEVIATION = 1e-6


class TriAttention(Calibrated):
    """Expected logit of a mean query at distances to come, and the norm of the key.

    offsets: "mean" over the distances, or the "max".
    """

    protect_prompt: bool = True
    offsets: Literal["mean", "max"] = "mean"

    rotated: ClassVar[bool] = False
    scale = "signed"

    def learn(self, blocks: Iterator[Tensor], rope: Rope) -> tuple[Tensor, ...]:
        """Mean query [L, H, G, d], and mean size of each of its pairs [L, H, G, pairs]; float64."""
        rows, total, size = 0, torch.zeros(()), torch.zeros(())
        for block in blocks:
            q = block.double()
            total = total.to(q) + q.sum(-2)
            size = size.to(q) + torch.hypot(*rope.pairs(q)).sum(-2)
            rows += q.shape[-2]
        return total / rows, size / rows

    def score(self, view: View) -> Tensor:
        """max over the group of z(trigonometric series + norm); [L, H, n]."""
        mean, size = self.learned(view)
        future = int(view.positions[-1]) + 1 + torch.tensor(OFFSETS, device=mean.device)
        # rotate and the cached keys carry the embedding's scaling, one factor each
        centre = view.rope.rotate(mean.unsqueeze(-2), future).to(view.keys)  # [L, H, G, offsets, d]
        spread = size - torch.hypot(*view.rope.pairs(mean))  # [L, H, G, pairs]
        spread = spread.to(view.keys) * view.rope.attention_scaling
        if self.offsets == "mean":
            series = centre.mean(-2) @ view.keys.mT  # [L, H, G, n]
        else:
            each = (query @ view.keys.mT for query in centre.unbind(-2))
            series = reduce(torch.maximum, each)
        scores = series + spread @ torch.hypot(*view.rope.pairs(view.keys)).mT
        candidate = view.live & ~protected_by(self.protection, view)
        return standardised(scores, candidate.unsqueeze(2)).amax(2)


def standardised(scores: Tensor, among: Tensor) -> Tensor:
    """z-scores of scores [..., n]: less their mean and over their deviation where `among` holds."""
    count = among.sum(-1, keepdim=True).clamp(min=1)
    mean = scores.where(among, 0.0).sum(-1, keepdim=True) / count
    centred = scores - mean
    variance = centred.square().where(among, 0.0).sum(-1, keepdim=True) / count
    return centred / variance.sqrt().clamp(min=_LEAST_DEVIATION)
