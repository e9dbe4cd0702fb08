"""PQCache (Zhang et al. 2024, arXiv 2407.12820): reads entries by product-quantized keys."""

from __future__ import annotations

from typing import Annotated

from kvsim.core.lazy import Tensor, torch
from kvsim.core.parameters import Above, AtLeast, AtMost
from kvsim.core.pieces import Run
from kvsim.core.reading import Heads, Pages
from kvsim.core.storing import check_channels
from kvsim.policies.ends import Ends

#: Entries whose distances are computed together.
_CHUNK = 4096


class PQCache(Ends):
    """Each row reads the first and the last entries, and those with the largest coded logits.

    The channels of a key are cut into `subspaces` parts. In each head and part, k-means over the
    resident keys after the prompt, without the first ones, finds 2^bits centroids. The code of an
    entry, also of the response, names the nearest centroid of each part (section 3.2). The product
    of a query with the centroids of a key's code is its coded logit. Query heads of a KV head read
    the same entries, by the mean of their softmax over coded logits of the middle entries, as in
    the authors' code (vq_method/retrieval_based/pq_search.py).

    `sink`, `local`: first and last entries, which every row reads next to its own; local None is
    half of the entries that a row reads after the first (the code's recent_ratio of 0.5). `share`:
    the part of the budget that a row reads. `iterations`: of k-means, at most.

    `@release` has the code's 32 first entries. Deviations: k-means begins with evenly spaced keys,
    the code's with random ones. A centroid without a key stays unchanged, and if there are fewer
    keys than centroids, each key is one. Centroids, 2^bits keys for each head, do not count as
    bytes, because accounts count bits per entry. Softcaps do not enter the softmax.
    """

    subspaces: Annotated[int, AtLeast(1)] = 2
    bits: Annotated[int, AtLeast(1), AtMost(12)] = 6
    iterations: Annotated[int, AtLeast(0)] = 25
    sink: Annotated[int, AtLeast(0)] = 4
    local: Annotated[int, AtLeast(1)] | None = None
    share: Annotated[float, Above(0), AtMost(1)] = 1.0
    heads: Heads = "kv"
    dense_layers: Annotated[int, AtLeast(0)] = 0

    def usual(self, entries: int) -> int:
        """Half of the entries that are read after the first ones."""
        return (entries - self.sink) // 2

    def check(self, run: Run) -> None:
        """Raise PolicyError if the parts of a key differ in size."""
        check_channels(self.label, run.trace.dim, self.subspaces)

    def score(self, queries: Tensor, pages: Pages, visible: Tensor) -> Tensor:
        """Coded logits [H, G, w, n]."""
        keys = pages.keys.flatten(1, 2).unflatten(-1, (self.subspaces, -1)).transpose(1, 2).double()
        # the first row that reads sees the resident prompt and itself
        held = visible[:, 0, 0].sum(-1, keepdim=True) - 1
        learned = pages.once("centroids", lambda: self._learned(keys, held), of_layer=True)
        coded = pages.once("coded", lambda: _coded(keys, *learned))
        return queries @ coded.to(queries).unsqueeze(1).mT * pages.formula.scale

    def _learned(self, keys: Tensor, held: Tensor) -> tuple[Tensor, Tensor]:
        """Centroids [H, m, c, s] of the first held [H, 1] keys [H, m, n, s]; existence [H, c]."""
        first = held.sub(1).clamp(max=self.sink)
        count = held - first  # [H, 1]
        number = torch.arange(2**self.bits, device=keys.device)
        exists = number < count
        begin = first + number * count // count.clamp(max=2**self.bits)
        begin = begin.where(exists, first)[:, None, :, None]
        centroids = keys.gather(2, begin.expand(-1, keys.shape[1], -1, keys.shape[3]))
        entry = torch.arange(keys.shape[2], device=keys.device)
        used = ((entry >= first) & (entry < held))[:, None, :, None]
        for _ in range(self.iterations):
            member = torch.nn.functional.one_hot(_nearest(keys, centroids, exists), len(number))
            member = (member * used).to(keys).mT  # [H, m, c, n]
            size = member.sum(-1, keepdim=True)
            moved = ((member @ keys) / size.clamp(min=1)).where(size > 0, centroids)
            if torch.equal(moved, centroids):
                break
            centroids = moved
        return centroids, exists

    def chosen(self, scores: Tensor, entries: Tensor, budget: int) -> Tensor:
        """Choose by the softmax over the middle entries where heads read the same."""
        if self.heads != "query":
            between = self.between(entries > 0, budget)
            scores = scores.masked_fill(~between, -torch.inf).softmax(-1).nan_to_num(0.0)
        return super().chosen(scores, entries, budget)

    def summary_bits(self, dim: int) -> tuple[float, float]:
        """A code, which a row reads."""
        both = float(self.subspaces * self.bits)
        return both, both


def _nearest(keys: Tensor, centroids: Tensor, exists: Tensor) -> Tensor:
    """The nearest centroid of each key [H, m, n], ties to the first."""
    out = []
    for part in keys.split(_CHUNK, dim=2):
        distance = torch.zeros(*part.shape[:3], centroids.shape[2]).to(part)
        for x, c in zip(part.unbind(-1), centroids.unbind(-1), strict=True):
            distance += (x.unsqueeze(-1) - c.unsqueeze(2)) ** 2
        out.append(distance.masked_fill_(~exists[:, None, None], torch.inf).argmin(-1))
    return torch.cat(out, dim=2)


def _coded(keys: Tensor, centroids: Tensor, exists: Tensor) -> Tensor:
    """Decode keys [H, m, n, s] to [H, n, d]."""
    code = _nearest(keys, centroids, exists).unsqueeze(-1)
    coded = centroids.gather(2, code.expand(-1, -1, -1, keys.shape[-1]))
    return coded.transpose(1, 2).flatten(2)
