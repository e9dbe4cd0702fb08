"""AdaKV: the heads of a layer compete for its entries.

Feng et al., "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM
Inference", arXiv 2407.11550, algorithm 1. The layer keeps heads x budget entries. Each head is
guaranteed its best entries, a share `floor` of its budget (by default a fifth). The best other
entries of all heads together get the remaining places. This compares scores of different heads, so
the scores of the scorer must share one scale, as attention does. Expected Attention does, too; its
paper calls adakv+expected_attention its strongest variant.

Deviations. Evicted entries are gone, and heads hold different numbers of entries. kvpress masks
entries and frees nothing; in decoding its Expected Attention brings them back as damaged keys,
which no option here reproduces. Protected entries come on top of the guaranteed ones, together at
most the head's uniform budget. `adakv@kvpress` counts them among the guaranteed ones
(`protected_in_floor=True`), of which every head has at least one.
"""

from __future__ import annotations

from typing import Annotated

from kvsim.core.lazy import Tensor
from kvsim.core.parameters import Between
from kvsim.core.pieces import Allocator, Plan
from kvsim.core.select import compete
from kvsim.core.view import View


class AdaKV(Allocator):
    """Quotas from a competition of the heads; `floor` is each head's safe share of its budget."""

    floor: Annotated[float, Between(0, 1)] = 0.2
    protected_in_floor: bool = False

    shared = "heads"

    def plan(self, view: View, scores: Tensor, protected: Tensor) -> Plan:
        """Entries of each head, [L, H]; together heads x budget."""
        budget = view.budget.expand_as(view.count)
        always = protected.sum(-1)
        best = (budget.double() * self.floor).long()
        if self.protected_in_floor:
            safe = always.maximum(best.clamp(min=int(self.floor > 0)))
        else:
            safe = budget.minimum(always + best)
        total = budget.sum(-1).minimum(view.count.sum(-1))
        return Plan(compete(scores, safe, total, protected, view.live, view.pos))
