"""InfLLM (Xiao et al. 2024, arXiv 2402.04617): blocks are read by their representative entries."""

from __future__ import annotations

from typing import Annotated

from kvsim.core.lazy import Tensor, torch
from kvsim.core.parameters import Above, AtLeast, AtMost
from kvsim.core.pieces import Inputs
from kvsim.core.reading import Heads, Pages, highest
from kvsim.policies.ends import Ends


class InfLLM(Ends):
    """Each row reads the first entries, the last ones, and the blocks that resemble its query.

    An entry that leaves the local window has the representative score sum q_(m+j) . k_m over the
    `local` rows m + j that follow it (the paper has their mean, which ranks alike). The entries of
    a block with the highest scores represent it. A block's relevance is the product of the query
    with the representatives' keys, added up over all heads, and all heads read the same blocks.

    `page`: entries of a block. `representatives`: number of entries that represent it. `sink`,
    `local`: first and last entries, which every row reads; local None is two thirds of the entries
    that a row reads, as in the paper's setting (4,096 of 6,272). `share`: the part of the budget
    that a row reads, these entries included; a row chooses at least one block.

    Deviations. Sinks and local window are read in whole blocks of the cache, which exceeds `share`
    where blocks are large relative to the budget. Rows of the prompt read everything. The paper
    gives all distant entries the same position; here queries and keys stay as the model computed
    them. Representatives are chosen for each KV head. As in the authors' code a block stores the
    mean of their keys; the code chooses them by summed attention of the window, not by products.
    `@release` has the code's sizes (config/llama-3-inf-llm.yaml), which are meant for budgets of
    thousands.
    """

    page: Annotated[int, AtLeast(1)] = 16
    representatives: Annotated[int, AtLeast(1)] = 4
    sink: Annotated[int, AtLeast(0)] = 4
    local: Annotated[int, AtLeast(1)] | None = None
    share: Annotated[float, Above(0), AtMost(1)] = 1.0
    heads: Heads = "layer"
    dense_layers: Annotated[int, AtLeast(0)] = 0

    reads = Inputs(trace=True)  # the entries of voting rows need not be resident

    def usual(self, entries: int) -> int:
        """Two thirds."""
        return 2 * entries // 3

    def score(self, queries: Tensor, pages: Pages, visible: Tensor) -> Tensor:
        """Products with the mean representative of each block [H, G, w, P]."""
        mean = pages.once("mean", lambda: self._mean(pages))
        return queries @ mean.unsqueeze(1).mT

    def _mean(self, pages: Pages) -> Tensor:
        votes = pages.once("votes", lambda: self._votes(pages), of_layer=True)
        of_entry = votes.gather(1, pages.pos.flatten(1)).view_as(pages.pos)
        of_entry = of_entry.masked_fill(~pages.live, -torch.inf)
        chosen = (highest(of_entry, self.representatives) & pages.live).to(pages.keys)
        total = (pages.keys * chosen.unsqueeze(-1)).sum(2)
        return total / chosen.sum(-1, keepdim=True).clamp_(min=1)

    def _votes(self, pages: Pages) -> Tensor:
        """Representative scores of all entries of the layer [H, T]."""
        trace, only = pages.trace, slice(pages.layer, pages.layer + 1)
        q, k = (trace.read(name, only)[0].to(pages.keys.device) for name in ("q", "k"))
        of_group = q.unflatten(0, (len(k), -1)).double().sum(1)  # [H, T, d]
        upto = torch.nn.functional.pad(of_group.cumsum(1), (0, 0, 1, 0))
        after = torch.arange(1, trace.n_pos + 1, device=k.device)  # the row after an entry
        last = (after + self._window(pages.budget)).clamp_(max=trace.n_pos)
        return ((upto[:, last] - upto[:, after]) * k).sum(-1)

    def summary_bits(self, dim: int) -> tuple[float, float]:
        """A key of 16-bit numbers, which a row reads."""
        return 16.0 * dim, 16.0 * dim
