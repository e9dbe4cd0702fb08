"""Rules of releases that no preset has: what explains a dump where kvsim's definition does not."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from heapq import heapify, heapreplace

import torch
from torch import Tensor

from kvsim.core.policy import Plan, Policy
from kvsim.core.select import compete
from kvsim.core.view import View
from kvsim.policies.adakv import AdaKV
from kvsim.policies.openvino import Blocks
from kvsim.policies.pyramidkv import Pyramid
from kvsim.studies.conformance.definitions import Deviating


@dataclass(frozen=True)
class Blended(AdaKV):
    """Quotas of a competition without a floor, blended with equal ones in the share `floor`."""

    effect = "near"

    def plan(self, view: View, scores: Tensor, protected: Tensor) -> Plan:
        """Round to (1 - floor) competed + whole(floor even), and the protected entries."""
        budget, always = view.budget.expand_as(view.count), protected.sum(-1)
        total = budget.sum(-1).minimum(view.count.sum(-1))
        won = compete(scores, always, total, protected, view.live, view.pos) - always
        even = ((budget - always) * self.floor).long()
        return Plan((won * (1 - self.floor) + even).round().long() + always)


@dataclass(frozen=True)
class Stairs(Pyramid):
    """Steps of whole entries without the window, which comes on top; even in short prompts."""

    effect = "near"

    def budgets(self, view: View, budget: int) -> Tensor:
        """Entries of each layer, int [L]."""
        count, free = int(view.count.max()), budget - self.window
        low = free // int(self.beta)
        high = min(2 * free - low, count - self.window)
        step = (2 * high - 2 * free) // (view.setting.n_layers - 1)
        if count < 2 * free:
            return torch.full_like(view.layers, budget)
        return high - view.layers * step + self.window


class PartialSort(Blocks):
    """KVCrush whose bits of entries with equal sums follow the heap of C++'s partial_sort."""

    def _crushed(
        self, value: Tensor, inside: Tensor, block: Tensor, place: Tensor, leaves: Tensor
    ) -> Tensor:
        value = value.clone()
        for numbers, entries in zip(value, inside, strict=True):
            candidates = [Entry(float(numbers[slot]), int(slot)) for slot in entries.nonzero()]
            above = candidates[: len(candidates) // 2]
            heapify(above)  # moves entries as the heap of libstdc++ does
            for entry in candidates[len(above) :]:
                if above[0] < entry:
                    heapreplace(above, entry)
            numbers[[entry.slot for entry in above]] = torch.inf
        return super()._crushed(value, inside, block, place, leaves)


@dataclass(order=True)
class Entry:
    """The score and the slot of an entry, compared by the score alone."""

    score: float
    slot: int = field(compare=False)


def blended(policy: Policy) -> Policy:
    """AdaKV as its authors released it."""
    return replace(policy, allocator=Blended(policy.allocator.floor))


def stairs(policy: Policy) -> Policy:
    """PyramidKV as its authors released it."""
    of = policy.layer_budgets
    return replace(policy, layer_budgets=Stairs(of.window, of.beta, "event"))


def grouped(policy: Policy) -> Policy:
    """SnapKV whose heads are averaged before pooling (mean-before-pool)."""
    scorer = Deviating(policy.scorer, lambda view, rows: view.attn(rows, "mean").unsqueeze(2))
    return replace(policy, scorer=scorer)


def heaped(policy: Policy) -> Policy:
    """OpenVINO's blocks with the order of its C++ library."""
    return replace(policy, allocator=PartialSort(**vars(policy.allocator)))


#: What `kvsim conform` tries where none of its deviations explains a dump.
RULES: dict[str, tuple[str, Callable[[Policy], Policy]]] = {
    "blended quotas": ("adakv", blended),
    "blended quotas, mean-before-pool": ("adakv", lambda policy: grouped(blended(policy))),
    "stairs and a window on top": ("pyramidkv", stairs),
    "order of partial_sort": ("openvino", heaped),
}
