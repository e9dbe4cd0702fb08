"""LU-KV: a plan of long-horizon utility sets the size of each head over all layers.

Tang et al., "Predicting Future Utility: Global Combinatorial Optimization for Task-Agnostic KV
Cache Eviction", ICML 2026, arXiv 2602.08585. Where c per cent of all entries leave, a plan gives
the share r of its entries that each KV head loses, for c = 1..99. After a prompt of n tokens, at a
budget of B entries, c is 100 (1 - B / n), rounded, and a head keeps (1 - r) n entries: its first
`sink`, its last, then those that a scorer ranks highest, by default Expected Attention with epsilon
0.02. The policy is called `lukv:FILE`, after the file of its plan, as `duo:FILE` is.

`kvsim heads --policy lukv` builds a plan, the mean over traces. The utility of an entry is the
largest product, over the rows after the prompt and the query heads of the group, of attention and
w, where w is the query head's norm of W_o v relative to the sum over all query heads and positions
of the layer. In each head entries leave from the lowest score upwards, and the utility lost so far
is replaced by its lower convex hull. The entry with the smallest step on its hull in all layers
leaves first; a head keeps its sinks and last entry, and 1 % of the prompt. `lukv:FILE` takes files
of the authors, too, `.npy` of shares [99, layer, KV head].

Source. Only the abstract of the paper was read. The rules follow public code: LUKVPress of kvpress
(04af3dc), and the copy in SketchAlloc-KV (9393ad6) of the authors' release (baidu-baige/LU-KV).

Deviations. The sum over all heads is exactly the budget. Sinks and the last entry are protected;
one factor for all heads scales the other entries, with rounding over all layers together.
`exact=False` is the release: the kept share is a whole per cent, each layer rounds by itself, and a
head may have fewer entries than are protected, of which it keeps the first. At events in decoding n
counts all tokens so far. A plan is measured at the end of the prompt; the release scores after the
context, without the question, and draws the response at temperature 0.7. Its other option, one
budget for each layer, is left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from kvsim.core.lazy import Tensor, torch
from kvsim.core.pieces import Effect, Plan, Protection
from kvsim.core.select import select
from kvsim.core.view import View
from kvsim.policies.duo import HeadPlan, Planned

#: Whole per cents at which a plan has shares.
PERCENTS = 99
#: Protected first positions, if the plan does not state a number.
SINK = 4
#: The scorer of plans without one, and its parameters.
SCORER, PARAMS = "expected_attention", {"epsilon": 0.02}


class LUKV(Planned):
    """Each head keeps the plan's share at the evicted share of all entries."""

    exact: bool = True

    percents: ClassVar[int] = PERCENTS
    shared = "all"

    @classmethod
    def scoring(cls, file: str) -> tuple[Any, Any, Any]:
        """The scorer of a plan by name, its parameters, and the protected first positions."""
        training = HeadPlan.open(Path(file), cls.label, cls.percents).training
        defaults = {"scorer": SCORER, "params": PARAMS, "sink": SINK, **training}
        return defaults["scorer"], defaults["params"], defaults["sink"]

    @property
    def effect(self) -> Effect:
        """The release rounds in each layer by itself."""
        return "exact" if self.exact else "near"

    @property
    def enforces(self) -> bool:
        """In the release a head may have fewer entries than are protected."""
        return self.exact

    def protection(self, budget: int) -> Protection:
        """The sinks of the plan, and the last entry."""
        return Protection(sink=self._plan.training.get("sink", SINK), recent=1)

    def plan(self, view: View, scores: Tensor, protected: Tensor) -> Plan:
        """Quotas [L, H]; layers x heads x budget in all, or as in the release."""
        count, tokens = view.count, view.row + 1
        budget = float(view.budget.double().mean())
        percent = min(max(round(100 * (tokens - budget) / tokens), 1), PERCENTS)
        shares = torch.tensor(self._plan.scores[percent - 1], device=view.pos.device)
        ideal = (1 - shares[view.layers]) * tokens  # float32, as in the release
        if not self.exact:
            quotas = _rounded(ideal, tokens).minimum(count)
            first = scores.masked_fill(protected, torch.inf)
            kept = select(first, quotas, torch.zeros_like(protected), view.live)
            return Plan(quotas, eligible=kept)
        floor = protected.sum(-1).maximum(count.clamp(max=1))
        return self._shared(view, (ideal.double() - floor).clamp(min=0), floor)


def _rounded(ideal: Tensor, tokens: int) -> Tensor:
    """Whole numbers [L, H] with the rounded sum of each layer, by largest remainder; at least 1."""
    heads, whole = ideal.shape[-1], ideal.floor()
    total = ideal.sum(-1, keepdim=True).round().clamp(heads, heads * tokens)
    order = (ideal - whole).argsort(dim=-1, descending=True, stable=True)
    more = order.argsort(dim=-1) < total - whole.sum(-1, keepdim=True)
    return (whole + more).long().clamp(1, tokens)
