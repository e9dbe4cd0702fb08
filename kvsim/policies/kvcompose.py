"""KVCompose: each head ranks its own entries; layers share a budget by mean scores of ranks.

Akulov et al., "KVCompose: Efficient Structured KV Cache Compression with Composite Tokens",
arXiv 2509.05165. After the prompt the model reads it once more. The score of an entry is its
largest weight from any of these rows, averaged over the query heads of the group, plus the mean of
that over the KV heads of the layer. In each head the entries are sorted by their scores. Those of
one rank in all heads of a layer are a composite token, whose score is the mean of theirs,

    c_l(r) = mean over the KV heads h of the r-th largest score of h

and all layers share one budget: the composite tokens with the highest scores stay. So heads of a
layer hold different entries, but equally many. For the first layer, c is the largest of all layers.

Deviations. Only the abstract of the paper could be read; the definition is that of kvpress
(KVComposePress, structured). The rows are those of `kvzip`: its request, then the repeated context,
in chunks with a softmax each if it is long. Entries after the context rank above it, as in `kvzip`.
"""

from __future__ import annotations

from kvsim.core.lazy import Tensor, torch
from kvsim.core.pieces import Allocator, Plan
from kvsim.core.select import compete
from kvsim.core.view import View
from kvsim.policies.kvzip import KVzip, largest_weights


class KVCompose(KVzip):
    """Largest weight from rows that repeat a chunk, averaged over the group, plus the layer's."""

    def importance(self, view: View) -> Tensor:
        """mean over the group of max_i, plus its mean over the heads; [L, H, n]."""
        weights = largest_weights(view, self.sink).mean(2)
        return weights + weights.mean(1, keepdim=True)


class Composed(Allocator):
    """Layers share one budget by their composite tokens; heads of a layer hold equal numbers."""

    shared = "layers"

    def plan(self, view: View, scores: Tensor, protected: Tensor) -> Plan:
        """The same number for each head of a layer, [L, H], layers x heads x budget in all."""
        count, always = view.count[:, 0], protected.sum(-1).amax(-1)  # equal in a layer
        rank = torch.arange(scores.shape[-1], device=scores.device).expand(len(count), -1)
        first = scores.masked_fill(protected, torch.inf).masked_fill(~view.live, -torch.inf)
        ranked = first.sort(dim=-1, descending=True).values
        kept = rank < always.unsqueeze(-1)
        live = rank < count.unsqueeze(-1)
        composite = ranked.mean(1).masked_fill(kept | ~live, 0.0)
        composite = composite.where((view.layers > 0).unsqueeze(-1), composite.amax(0))
        total = view.budget.sum().minimum(count.sum()).unsqueeze(0)
        floor = always.clamp(min=1).minimum(count)
        places = (x.unsqueeze(0) for x in (kept, live, rank))
        won = compete(composite.unsqueeze(0), floor.unsqueeze(0), total, *places)
        return Plan(won.view(-1, 1).expand_as(view.count))
