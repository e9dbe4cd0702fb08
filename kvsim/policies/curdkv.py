"""CurDKV: keeps entries whose key and value have large norms among their neighbours.

Sengupta, Chaudhary and Chakraborty, "Value-Guided KV Compression for LLMs via Approximated CUR
Decomposition", NeurIPS 2025, arXiv 2509.15038. Leverage scores of the keys and of the values
choose the rows of a CUR decomposition; the squared norms of rows stand for them. The cache is cut
into segments of `segment` entries. The share of entry j in a segment S is, for keys and for values,

    l_k(j) = ||k_j||^2 / sum over i in S of ||k_i||^2,    l_v(j) likewise

and its score is the product of both (`leverage`: "mean" of both, or only "key" or "value"), divided
by the sum of these over the head. `segment=None` takes the norms as they are. The first `sink`
entries stay.

Deviations. Only the abstract of the paper could be read; formula and defaults are those of the
released class, which kvpress has (CURPress). Its Gaussian projection of keys and values, off by
default, is left out. Segments consist of the remaining entries, in the order of their positions.
"""

from __future__ import annotations

from typing import Annotated, Literal

from kvsim.core.lazy import Tensor, torch
from kvsim.core.parameters import AtLeast
from kvsim.core.pieces import Scorer
from kvsim.core.view import View
from kvsim.policies.chunkkv import sums


class CurDKV(Scorer):
    """Squared norms of key and value, each relative to the sum over the segment."""

    sink: Annotated[int, AtLeast(0)] = 4
    segment: Annotated[int, AtLeast(1)] | None = 16
    leverage: Literal["product", "mean", "key", "value"] = "product"

    def score(self, view: View) -> Tensor:
        """l_k(j) l_v(j) / sum over the head; [L, H, n]."""
        key, value = (self._share(x.square().sum(-1), view) for x in (view.keys, view.values))
        each = {"product": key * value, "mean": (key + value) / 2, "key": key, "value": value}
        return _divided(each[self.leverage], each[self.leverage].sum(-1, keepdim=True))

    def _share(self, norms: Tensor, view: View) -> Tensor:
        """Norms [L, H, n], 0 on pads, relative to the sum over the segment."""
        if self.segment is None:
            return norms
        segments = view.slot.clamp(min=0) // self.segment
        return _divided(norms, sums(norms, segments, int(segments.max()) + 1).gather(-1, segments))


def _divided(x: Tensor, by: Tensor) -> Tensor:
    return x / by.clamp(min=torch.finfo(x.dtype).tiny)
