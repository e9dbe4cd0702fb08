"""Quest (Tang et al. 2024, arXiv 2406.10774): reads the pages with the largest possible logits."""

from __future__ import annotations

from typing import Annotated

from kvsim.core.lazy import Tensor, torch
from kvsim.core.parameters import Above, AtLeast, AtMost
from kvsim.core.reading import Heads, Pages, SparseAttention, best


class Quest(SparseAttention):
    """Each row reads the pages whose keys could have the largest logit with its query.

    Of each page the smallest and the largest value of every channel of its keys are stored. An
    upper bound of q . k over a page is the sum over channels of max(q_i min_i, q_i max_i)
    (Algorithm 1, section 3.3). A row reads the budget / page pages with the highest bounds
    (section 3.4), its own page among the candidates. The first two layers read everything (section
    4.1).

    `page`: entries of a page. `share`: the part of the budget that a row reads. `heads`: by default
    each query head reads its own pages; the paper's models have a KV head for every query head.
    `least`: the fewest pages that a row reads.

    `@release` reads at least three pages (evaluation/quest_attention.py of the authors' code).
    Deviations: while there are fewer entries than the budget, that code counts entries / page
    pages, and so omits one if the last is not full; kvsim reads all. The authors' kernels always
    read a row's own page; the paper and the evaluation do not.
    """

    page: Annotated[int, AtLeast(1)] = 16
    share: Annotated[float, Above(0), AtMost(1)] = 1.0
    heads: Heads = "query"
    least: Annotated[int, AtLeast(1)] = 1
    dense_layers: Annotated[int, AtLeast(0)] = 2

    def score(self, queries: Tensor, pages: Pages, visible: Tensor) -> Tensor:
        """Upper bounds of q . k over each page [H, G, w, P]."""
        low, high = pages.once("box", lambda: box(pages))
        q, shape = queries.flatten(1, 2), queries.shape[1:3]
        # the larger product takes the largest key where the query is positive, else the smallest
        bound = torch.baddbmm(q.clamp(min=0) @ high.mT, q.clamp(max=0), low.mT)
        out: Tensor = bound.unflatten(1, shape)
        return out

    def chosen(self, scores: Tensor, entries: Tensor, budget: int) -> Tensor:
        """The pages of the highest bounds, as many as fit the budget."""
        count = max(self.least, int(self.share * budget) // self.page)
        return best(self.heads, scores, entries, count)

    def summary_bits(self, dim: int) -> tuple[float, float]:
        """Two 16-bit numbers per channel, all of which a row reads."""
        return 32.0 * dim, 32.0 * dim


def box(pages: Pages) -> tuple[Tensor, Tensor]:
    """Smallest and largest value of each channel over the keys of each page, [H, P, d] each."""
    pad = ~pages.live.unsqueeze(-1)
    low = pages.keys.masked_fill(pad, torch.inf).amin(2)
    high = pages.keys.masked_fill(pad, -torch.inf).amax(2)
    empty = ~pages.live.any(-1, keepdim=True)
    return low.masked_fill_(empty, 0.0), high.masked_fill_(empty, 0.0)
