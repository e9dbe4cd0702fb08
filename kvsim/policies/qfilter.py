"""Q-Filters: keeps the keys along the common direction of a head's queries.

Godey et al., "Q-Filters: Leveraging QK Geometry for Efficient KV Cache Compression", arXiv
2503.02812. The queries of a head are far from centred: their common part lies mostly along the
first right singular vector u of the matrix of queries, whose sign makes their mean positive. The
projection of a key on u estimates the attention that the key receives: s_j = k_j . u, with u
averaged over the query heads of the group. u is computed once, from calibration queries.

Deviations. Queries and keys are both taken after the rotary embedding, as the keys are cached. The
paper calibrates on many texts; here the queries come from `calibration`. The authors' script
chooses the sign of u by the majority of the queries, kvsim by their mean. kvpress downloads
filters, with the opposite sign, that were computed for a few models.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from kvsim.core.attention import Rope
from kvsim.core.lazy import Tensor, torch
from kvsim.core.view import View
from kvsim.policies.calibration import Calibrated


class QFilter(Calibrated):
    """Projection of a key on the main direction of the queries."""

    rotated: ClassVar[bool] = True
    scale = "signed"

    def learn(self, blocks: Iterator[Tensor], rope: Rope) -> tuple[Tensor, ...]:
        """The filter of each query head: unit vectors [L, H, G, d], float64."""
        gram, total = torch.zeros(()), torch.zeros(())
        for block in blocks:
            q = block.double()
            gram = gram.to(q) + q.mT @ q
            total = total.to(q) + q.sum(-2)
        # right singular vectors of a matrix are eigenvectors of its Gram matrix, largest last
        u = torch.linalg.eigh(gram).eigenvectors[..., -1]
        side = (u * total).sum(-1, keepdim=True)
        return (u.where(side >= 0, -u),)

    def score(self, view: View) -> Tensor:
        """s_j = k_j . mean over the group of u; [L, H, n]."""
        (u,) = self.learned(view)
        filters = u.mean(2).to(view.keys)  # [L, H, d]
        return (view.keys @ filters.unsqueeze(-1)).squeeze(-1)
