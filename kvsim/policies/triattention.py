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

The released code has three modes and three back ends, which differ in what they rank. Modes
(`pruning`): one set per KV head and layer (`per_layer_perhead`, the default here), one per KV head
of all layers (`per_head`, the scripts' default), one for the model (`union`, the class's default,
there without z-scores). In `union` each query head nominates as many entries as stay; these include
the best by the largest score of any head, which ranks.

                    sets       over layers   z-score over      prompt     recent
    triattention    all        -             the response      stays
    @per_head       per_head   mean          the response      stays
    @union          union      max           the response      stays
    @vllm           per_head   mean          all entries       competes   128
    @sglang         per_head   max           all entries, of   competes
                                             the group's max

With `protect_prompt=True` the prompt stays in the last two, too; it still counts in their z-scores.
Where vLLM counts the prompt beside the budget (`include_prefill_in_budget=False`), give a budget
that is larger by the prompt.

Deviations. kvsim adds no noise to break ties. The prompt counts in the budget where it is
protected; under an allocator or a wrapper it competes like all other entries. Events follow each
other at one interval from the end of the prompt; the scripts and vLLM act once the cache is longer
than the budget by that interval, SGLang once the response is. Dimensions that the rotary embedding
does not rotate, for which the released code has no rule, add the product with the mean query.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Annotated, Any, ClassVar, Literal

from kvsim.core.attention import Rope
from kvsim.core.lazy import Tensor, torch
from kvsim.core.parameters import AtLeast
from kvsim.core.pieces import protected_by
from kvsim.core.view import View
from kvsim.policies.calibration import Calibrated
from kvsim.policies.union import check_alike

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
        candidate = view.live & ~protected_by(self.protection, view)
        return standardised(self.expected(view), candidate.unsqueeze(2)).amax(2)

    def expected(self, view: View) -> Tensor:
        """Trigonometric series + norm of each query head; [L, H, G, n]."""
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
        return series + spread @ torch.hypot(*view.rope.pairs(view.keys)).mT


class EngineTriAttention(TriAttention):
    """The modes and back ends of the released code, which share sets among layers.

    pruning: which heads share a set. over_layers: how their scores are combined. normalise: each
    query head, or the largest score of a KV head's group. population: entries that the z-score is
    over.
    """

    recent: Annotated[int, AtLeast(0)] = 0
    pruning: Literal["per_layer_perhead", "per_head", "union"] = "union"
    over_layers: Literal["mean", "max"] = "max"
    normalise: Literal["query_heads", "kv_heads"] = "query_heads"
    population: Literal["candidates", "all"] = "candidates"

    across_layers: ClassVar[Any] = property(lambda self: self.pruning != "per_layer_perhead")

    def score(self, view: View) -> Tensor:
        """z(trigonometric series + norm), over the group and the heads that share; [L, H, n]."""
        among, expected = view.live, self.expected(view)
        if self.population == "candidates":
            among = among & ~protected_by(self.protection, view)
        if self.normalise == "kv_heads":
            expected = expected.amax(2, keepdim=True)
        scores = standardised(expected, among.unsqueeze(2)).amax(2)
        if not self.across_layers:
            return scores
        axes = (0, 1) if self.pruning == "union" else (0,)
        first = view.pos[:1, : 1 if self.pruning == "union" else None]
        check_alike(
            f"triattention: {self.pruning} heads", view.pos, first, "no ams, adakv, criticalkv"
        )
        if self.over_layers == "max":
            return scores.amax(axes, keepdim=True).expand_as(scores)
        return scores.double().mean(axes, keepdim=True).expand_as(scores)


def standardised(scores: Tensor, among: Tensor) -> Tensor:
    """z-scores of scores [..., n]: less their mean and over their deviation where `among` holds."""
    count = among.sum(-1, keepdim=True).clamp(min=1)
    mean = scores.where(among, 0.0).sum(-1, keepdim=True) / count
    centred = scores - mean
    variance = centred.square().where(among, 0.0).sum(-1, keepdim=True) / count
    return centred / variance.sqrt().clamp(min=_LEAST_DEVIATION)
