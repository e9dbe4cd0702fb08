"""RocketKV (Behnam et al. 2025, arXiv 2502.14051): evicts after the prompt, then reads by page.

The first stage evicts with SnapKV, pooled over 63 neighbours; bare `rocketkv` is `snapkv+rocketkv`.
The second stage, hybrid sparse attention, reads from the kept entries.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil, log2, sqrt
from typing import Annotated, Literal

from kvsim.core.lazy import Tensor
from kvsim.core.parameters import AtLeast
from kvsim.core.reading import Pages, SparseAttention, best, highest
from kvsim.core.trace import Trace
from kvsim.policies.quest import box
from kvsim.schema import NEVER


class RocketKV(SparseAttention):
    """Each row reads the pages with the largest attention, estimated from a few channels.

    Of each page the smallest and the largest value of every channel of its keys are stored, as in
    Quest. A row takes the channels with the largest mean |q_c| over the query heads of a group,
    and of each the largest value of a page where the queries' sum is positive, else the smallest.
    The products with a head's query, divided by sqrt(d |q of these channels|_1 / |q|_1), are the
    estimated logits of all entries of a page; the attention from them is averaged over the group,
    and the pages with the most are read (hybrid sparse attention).

    The paper's budget of t of S tokens is a compression by c = S / t, split over the stages
    (adaptive compression decomposition): S / c^r entries stay, r = min(0.2 + 0.06 log2 c, 0.8), so
    the second stage compresses by C = c^(1 - r). Half of t covers the entries that are read, half
    the estimate: pages of ceil(sqrt C) entries, and d page / C of the d channels. Here the budget
    is the kept part of the prompt, S / c^r, which determines c. A prompt that fits into the budget
    is read whole: nothing is estimated, and there are no summaries. A page of one entry is its own
    summary, and takes no memory.

    `tokens`: the paper's t; None computes it from the split. `page`: entries of a page. `channels`:
    channels that the estimate uses. None computes both from C.

    Deviations. Pages are read whole: as many as t / 2 entries fill, at least one. The paper
    includes tokens to be generated in S and in the budget; here they are added to it. SnapKV pools
    before it averages over a group, where the authors' code pools the sum. A model's scale of the
    logits, where it is not 1 / sqrt d, replaces it.
    """

    tokens: Annotated[int, AtLeast(1)] | None = None
    page: Annotated[int, AtLeast(1)] | None = None  # type: ignore[assignment]  # until `at`
    channels: Annotated[int, AtLeast(1)] | None = None
    heads = "kv"

    @property
    def effect(self) -> Literal["exact", "none"]:
        """The budget determines the reads, unless `tokens` does."""
        return "exact" if self.tokens is None else "none"

    def at(self, trace: Trace, budget: int) -> SparseAttention:
        """Return the piece with missing values computed from the split of the budget."""
        tokens = self.tokens
        if tokens is None:
            fits = budget >= trace.prompt_len
            tokens = NEVER if fits else split(trace.prompt_len, budget)
        ratio = max(1.0, min(budget, trace.prompt_len) / tokens)
        side = ceil(sqrt(ratio))
        page = self.page or (side if side <= ratio else 1)
        channels = min(self.channels or max(1, int(trace.dim * page / ratio)), trace.dim)
        return replace(self, tokens=tokens, page=page, channels=channels)

    def score(self, queries: Tensor, pages: Pages, visible: Tensor) -> Tensor:
        """Estimated logits of the entries of each page [H, G, w, P]."""
        low, high = pages.once("box", lambda: box(pages))
        size = queries.abs()
        used = highest(size.mean(1, keepdim=True), self.channels or size.shape[-1])
        positive = queries.sum(1, keepdim=True) > 0
        estimate = queries.where(used & positive, 0.0) @ high.unsqueeze(1).mT
        estimate += queries.where(used & ~positive, 0.0) @ low.unsqueeze(1).mT
        share = size.where(used, 0.0).sum(-1, keepdim=True) / size.sum(-1, keepdim=True)
        return estimate * (pages.formula.scale / share.where(share > 0, 1.0).sqrt())

    def chosen(self, scores: Tensor, entries: Tensor, budget: int) -> Tensor:
        """The pages with the most attention, with all values of `at`."""
        total = (scores + entries.to(scores).log()).logsumexp(-1, keepdim=True)
        count = round((self.tokens or 1) / 2) // (self.page or 1)
        return best("kv", (scores - total).exp(), entries, count)

    def summary_bits(self, dim: int) -> tuple[float, float]:
        """Two 16-bit numbers per channel; a row reads one, of the channels that it uses."""
        if self.tokens == NEVER:
            return 0.0, 0.0
        held = 0.0 if self.page == 1 else 32.0 * dim
        return held, 16.0 * (self.channels or dim)


def split(prompt: int, budget: int) -> int:
    """The paper's t for a prompt that keeps `budget` tokens after the first stage."""
    evicted = log2(prompt / budget)  # r log2 c
    x = (sqrt(0.04 + 0.24 * evicted) - 0.2) / 0.12  # log2 c, from r = 0.2 + 0.06 log2 c
    return max(1, round(prompt / 2 ** (x if x < 10 else evicted / 0.8)))
