"""CapKV: keeps the entries that add most to the information capacity of the values.

"Rethinking KV Cache Eviction via a Unified Information-Theoretic Objective", arXiv 2604.25975. The
information capacity of a cache is log det A, with values weighted by the relevance of their keys.
The score of an entry is its contribution, its leverage: per query head,

    w_j = exp(tau (c_j - max_i c_i)),    c_j = cos(R' mu, k_j)
    A   = I + sum over j of (w_j + 1e-6) v_j v_j^T,    s_j = w_j v_j . A^-1 v_j

with mu the mean of the queries before the rotary embedding and R' the mean rotation over the next
`n_future` positions. The score of a KV head is the mean over its group. The first `sink` entries
stay, and mu, A and the maximum leave them out.

Deviations. Only the abstract of the paper could be read. The definition is kvpress's (CapPress).
According to kvpress, the paper takes the product of key and query without normalising them, and
does not rotate mu. At events in decoding, mu comes from the last 256 rows, as in
`expected_attention`.
"""

from __future__ import annotations

from typing import Annotated

from kvsim.core.lazy import Tensor, torch
from kvsim.core.parameters import AtLeast, Finite
from kvsim.core.pieces import Inputs, Scorer
from kvsim.core.view import View
from kvsim.policies.expected_attention import quadratic

#: Most recent rows whose queries an event in decoding reads.
BUFFER = 256
# Added to each weight in A.
_LEAST = 1e-6


class CapKV(Scorer):
    """Leverage of the values, weighted by the cosine of their keys with the mean query."""

    tau: Annotated[float, AtLeast(0), Finite()] = 5.0
    n_future: Annotated[int, AtLeast(1)] = 512
    sink: Annotated[int, AtLeast(0)] = 4

    @property
    def reads(self) -> Inputs:
        """Recent queries, and one row after the sinks."""
        return Inputs(last=BUFFER, least=self.sink + 1)

    def score(self, view: View) -> Tensor:
        """w_j v_j . A^-1 v_j, averaged over the group; [L, H, n]."""
        stop = view.row + 1
        start = self.sink if view.is_prompt else max(self.sink, stop - BUFFER)
        _, mu, _ = view.moments(range(start, stop), covariance=False)
        future = int(view.positions[-1]) + 1
        anchor = view.rope.rotate_mean(mu, future, self.n_future)  # [L, H, G, d]
        direction, keys = (torch.nn.functional.normalize(x, dim=-1) for x in (anchor, view.keys))
        cosine = (direction @ keys.mT).double()  # [L, H, G, n]
        scored = (view.live & (view.pos >= self.sink)).unsqueeze(2)
        cosine.masked_fill_(~scored, -torch.inf)
        weight = (self.tau * (cosine - cosine.amax(-1, keepdim=True))).exp_()
        weight.masked_fill_(~scored, 0.0)
        values = view.values.double()
        counted = (weight + _LEAST).masked_fill_(~scored, 0.0)
        capacity = torch.stack(
            [(values * each.unsqueeze(-1)).mT @ values for each in counted.unbind(2)], 2
        )
        capacity.diagonal(dim1=-2, dim2=-1).add_(1.0)
        leverage = quadratic(values, torch.linalg.inv(capacity))
        return (weight * leverage).mean(2).to(view.keys.dtype)
