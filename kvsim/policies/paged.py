"""PagedEviction: evicts whole pages of a fixed size.

Chitty-Venkata et al., "PagedEviction: Structured Block-wise KV Cache Pruning for Efficient Large
Language Model Inference", EACL 2026 (findings), arXiv 2509.04377. An engine with paged attention
frees memory only in pages of `page` tokens. After the prompt the best single entries stay and are
written into pages without gaps. In decoding, tokens are appended to the newest page; when it is
full, the page with the lowest score is evicted. The score of a page is the mean of those of its
tokens. The paper scores a token by s_j = ||v_j|| / ||k_j||, which needs no attention weights:
`norm_ratio`, the scorer of bare `paged`. Any other scorer can take its place.

Here a budget is a number of entries, and an event may fire after any row (the policy's own schedule
fires every 16 rows, whenever a page of the default size is full). An event keeps whole pages as
long as they fit the budget: first the newest page while it is not full, then pages with protected
entries, then the others by their score. So between 0 and page - 1 places of the budget stay empty.
Entries are never moved between pages after the prompt.

Deviations. Scores are summed over the KV heads of a layer, which share their pages
(`heads="group"`: each KV head has pages of its own). The paper does not say how it combines heads.
Protected entries stay even if their page does not fit, and are left out of the mean because a
scorer may have no score for them. If not even the first page fits, its best entries stay.
`prompt="pages"` evicts whole pages after the prompt, too. `reduction="max"` scores a page by its
best token. ||k|| is at least 1e-6.

`@release` is the public port to vLLM (`KVCachePruner`, method "global"). `reduction="norms"`
averages norms over heads first: a page scores the sum of its ||v|| over that of its ||k||, for any
scorer. `prompt="heads"`: each head chooses its own entries of the prompt, which share cells.
`ends=True`: the first page, the newest full one and the entries after it stay; after the prompt
both pages follow the prompt's order. The port keeps as many entries beyond the budget as follow the
prompt's last full page; here the budget is exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import nan
from typing import Annotated, ClassVar, Literal

from kvsim.core.lazy import Tensor, torch
from kvsim.core.parameters import AtLeast
from kvsim.core.pieces import Allocator, Plan, Scorer
from kvsim.core.select import select
from kvsim.core.view import View
from kvsim.policies.chunkkv import filled, sums
from kvsim.policies.union import check_alike

#: Norms of keys count as at least this.
_LEAST_NORM = 1e-6


class NormRatio(Scorer):
    """The norm of a value relative to that of its key."""

    label: ClassVar[str] = "norm_ratio"

    def score(self, view: View) -> Tensor:
        """s_j = ||v_j|| / ||k_j||; [L, H, n]."""
        key, value = (torch.linalg.vector_norm(x, dim=-1) for x in (view.keys, view.values))
        ratio: Tensor = value / key.clamp(min=_LEAST_NORM)
        return ratio


class Paged(Allocator):
    """The best whole pages; `cell` is an entry's place in the pages."""

    page: Annotated[int, AtLeast(1)] = 16
    heads: Literal["all", "group"] = "all"
    reduction: Literal["mean", "max", "norms"] = "mean"
    prompt: Literal["entries", "pages", "heads"] = "entries"
    ends: bool = False

    columns: ClassVar[Mapping[str, float]] = {"cell": nan}
    effect = "near"  # whole pages seldom fill the budget

    def plan(self, view: View, scores: Tensor, protected: Tensor) -> Plan:
        """Mark the chosen entries as eligible, [L, H, n], and count them, [L, H]."""
        heads = slice(None, 1 if self.heads == "all" else None)  # heads that choose
        written = view.is_prompt and self.prompt != "pages"
        if written and self.prompt == "heads":
            heads = slice(None)
        live, always = view.live[:, heads], protected[:, heads]
        shared = scores.double()
        if self.heads == "all":
            alike = view.live if self.prompt == "heads" else view.pos
            check_alike("paged: heads", alike, alike[:, :1], "they share pages; set heads=group")
            if heads.stop:
                shared = shared.sum(1, keepdim=True)
        if written:
            chosen = self._entries(view, shared, live, always)
            cell = chosen.cumsum(-1) - 1.0  # written without gaps
        else:
            cell = _cells(view["cell"][:, heads].double(), live)
            chosen = self._whole(view, shared, cell.long(), live, always)
        chosen, cell = chosen.expand_as(view.live), cell.expand_as(view.live)
        return Plan(chosen.sum(-1), eligible=chosen, columns={"cell": cell})

    def _entries(self, view: View, shared: Tensor, live: Tensor, always: Tensor) -> Tensor:
        """Single entries: first those of the end pages that fit, then the best; [L, h, n]."""
        budget = view.budget.expand(live.shape[:2])
        if not self.ends:
            return select(shared, budget, always, live)
        place = live.cumsum(-1) - 1
        count = view.count[:, : live.shape[1]].unsqueeze(-1)
        last = place >= (count // self.page - 1) * self.page
        part = torch.where(last, 0, torch.where(place < self.page, 1, 2)).where(live, 2)
        order = torch.arange(3, device=part.device).expand(*budget.shape, -1)
        return filled(shared, part, order, budget, always & live, live)

    def _whole(
        self, view: View, shared: Tensor, cell: Tensor, live: Tensor, always: Tensor
    ) -> Tensor:
        """Entries of the best pages that fit; [L, h, n] for heads h that choose."""
        pages = cell // self.page
        number = int(pages.max()) + 1
        size, kept = (sums(mask, pages, number) for mask in (live, always & live))
        free = live & ~always
        if self.reduction == "max":
            score = shared.new_full(size.shape, -torch.inf)
            score.scatter_reduce_(-1, pages, shared.masked_fill(~free, -torch.inf), "amax")
        elif self.reduction == "norms":
            key, value = (self._norms(x).masked_fill(~free, 0.0) for x in (view.keys, view.values))
            score = sums(value, pages, number) / sums(key, pages, number).clamp(min=_LEAST_NORM)
            score = score.masked_fill(sums(free, pages, number) == 0, -torch.inf)
        else:
            score = sums(shared.masked_fill(~free, 0.0), pages, number) / sums(free, pages, number)
            score = score.nan_to_num(nan=-torch.inf)
        last = cell[..., -1:]  # of the newest entry
        newest = torch.arange(number, device=cell.device) == last // self.page
        unfilled = newest & ((last + 1) % self.page != 0)
        first = kept > 0
        if self.ends:
            page = torch.arange(number, device=cell.device)
            first = first | (page == 0) | (page == (last + 1) // self.page - 1)
        tier = torch.where(unfilled, 2, first.long())
        order = score.argsort(dim=-1, descending=True, stable=True)
        order = order.gather(
            -1, tier.gather(-1, order).argsort(dim=-1, descending=True, stable=True)
        )
        room = (size - kept).gather(-1, order)
        budget = view.budget.expand(live.shape[:2])
        remaining = (budget - kept.sum(-1)).unsqueeze(-1)
        share = room.where(room.cumsum(-1) <= remaining, 0)
        share[..., :1] = torch.minimum(room[..., :1], remaining)
        quotas = kept + torch.zeros_like(share).scatter(-1, order, share)
        return select(shared, quotas, always, live, groups=pages)

    def _norms(self, x: Tensor) -> Tensor:
        """Norms of keys or values [L, H, n, d], summed over heads that share pages; [L, h, n]."""
        norm: Tensor = torch.linalg.vector_norm(x.double(), dim=-1)
        return norm.sum(1, keepdim=True) if self.heads == "all" else norm


def _cells(cell: Tensor, live: Tensor) -> Tensor:
    """The cells of all entries, 0 on pads; new ones, the last of each head, follow the others."""
    new = cell.isnan() & live
    last = cell.masked_fill(~live | new, -1.0).amax(-1, keepdim=True)
    return torch.where(new, last + new.cumsum(-1), cell).where(live, 0.0)
