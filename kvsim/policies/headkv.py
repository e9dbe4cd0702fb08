"""HeadKV: important heads hold more entries, by a plan of the model.

Fu et al., "Not All Heads Matter: A Head-Level KV Cache Compression Method with Integrated Retrieval
and Reasoning", ICLR 2025, arXiv 2410.19258. A plan gives each KV head a score. With b the budget
less the window, every head gives b / beta entries to a pool, which all heads of all layers share
in proportion to their scores:

    entries of head h = window + (b - b / beta) + score_h / (sum of all scores) x pool

SnapKV decides which entries stay. The policy is called `headkv:FILE`, after the file of its plan,
as `duo:FILE` is.

Deviations. Formula and defaults are those of the released code (FYYFU/HeadKV at 0862a09; beta is
1.5 in its scripts), whose scores are of query heads: how often a head attends to the answer that a
prompt asks to repeat. `kvsim heads` measures instead the error of a KV head's output if it streams.
Places that a head cannot fill go to the others, so that the sum is exactly the budget. The release
rounds each head by itself.
"""

from __future__ import annotations

from typing import Annotated

from kvsim.core.lazy import Tensor, torch
from kvsim.core.parameters import AtLeast, Finite
from kvsim.core.pieces import Plan
from kvsim.core.view import View
from kvsim.policies.duo import Planned


class HeadKV(Planned):
    """A base for every head, and a share of the pool by its score."""

    beta: Annotated[float, AtLeast(1), Finite()] = 1.5

    shared = "all"

    def plan(self, view: View, scores: Tensor, protected: Tensor) -> Plan:
        """Quotas [L, H], layers x heads x budget in all."""
        weight = torch.tensor(self._plan.scores, dtype=torch.float64, device=view.pos.device)
        always = protected.sum(-1)
        rest = view.budget - always
        floor = always + (rest - (rest / self.beta).ceil().long())
        return self._shared(view, weight[view.layers], floor)
