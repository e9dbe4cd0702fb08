"""LagKV: keeps entries that vary most relative to the range of the following entries.

Liang et al., "LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are Important",
arXiv 2504.04704. After the sinks the cache is cut into partitions of `lag` entries. Each channel of
a partition's keys and values is scaled by its minimum and maximum in the next partition. The
standard deviation of an entry over its channels goes through a softmax inside the partition, once
for keys and once for values. The mean of the two ranks the entry inside its partition; this rank is
its score. With `cross_scoring` the mean itself is the score, so that partitions compete. The last
full partition and the entries after it have no next partition, and score 1.

Deviations. Partitions consist of the remaining entries, in the order of their positions. A channel
that does not vary in the next partition counts as 0, where the formula divides by zero. Of equal
means in a partition, the later position ranks higher. While a head holds fewer than sink + 2 lag
entries (260 at the defaults), later entries score higher, as in kvpress; the paper does not
compress yet.
"""

from __future__ import annotations

from typing import Annotated

from kvsim.core.lazy import Tensor, torch
from kvsim.core.parameters import AtLeast
from kvsim.core.pieces import Scorer
from kvsim.core.view import View


class LagKV(Scorer):
    """Spread of keys and values relative to the following entries, ranked within `lag` of them.

    cross_scoring: keep the softmax scores instead of ranks, so that partitions compete.
    """

    sink: Annotated[int, AtLeast(0)] = 4
    lag: Annotated[int, AtLeast(1)] = 128
    cross_scoring: bool = False

    def score(self, view: View) -> Tensor:
        """Rank / lag of (softmax std k' + softmax std v') / 2 in its partition; [L, H, n].

        x' = (x - min) / (max - min), min and max over the next partition of each channel.
        """
        count = view.count.unsqueeze(-1)  # [L, H, 1]
        place = view.slot - self.sink  # [L, H, n], negative on sinks and pads
        recency = place.to(view.keys.dtype) / (count - self.sink).clamp(min=1)
        out = recency.where(count < self.sink + 2 * self.lag, 1.0).where(place >= 0, 1.0)
        whole = (int(count.max()) - self.sink) // self.lag  # the most full partitions
        if whole < 2:
            return out
        slots = self.sink + torch.arange(whole * self.lag, device=out.device)
        keys, values = (self._spread(_at(x, view, slots)) for x in (view.keys, view.values))
        score = (keys + values) / 2  # [L, H, whole - 1, lag]
        if not self.cross_scoring:
            order = score.sort(dim=-1, stable=True).indices
            score = order.argsort(dim=-1).to(out.dtype) / self.lag
        score = score.flatten(2)
        # where a head has a partition after the entry's
        measured = (place >= 0) & (place < ((count - self.sink) // self.lag - 1) * self.lag)
        return score.gather(-1, place.clamp(0, score.shape[-1] - 1)).where(measured, out)

    def _spread(self, x: Tensor) -> Tensor:
        """Softmax over each partition of the channels' deviation; [L, H, partitions - 1, lag]."""
        parts = x.unflatten(2, (-1, self.lag))  # [L, H, partitions, lag, d]
        # torch's own `aminmax` and `std` take twenty times as long
        low, high = (of(parts[:, :, 1:], 3, keepdim=True) for of in (torch.amin, torch.amax))
        span = high - low
        flat = span < torch.finfo(span.dtype).tiny  # nothing to scale by
        scaled = ((parts[:, :, :-1] - low) / span).masked_fill_(flat, 0.0)
        gap = scaled.sub_(scaled.mean(-1, keepdim=True))
        variance = gap.square_().sum(-1).div_(x.shape[-1] - 1)
        return torch.softmax(variance.sqrt_(), -1)


def _at(x: Tensor, view: View, slots: Tensor) -> Tensor:
    """Rows of x [L, H, n, d] at each head's slots [s]; undefined past the last slot."""
    layers, heads, n, dim = x.shape
    column = (slots + n - view.count.unsqueeze(-1)).clamp(max=n - 1)  # [L, H, s]
    base = torch.arange(layers * heads, device=x.device).mul_(n).view(layers, heads, 1)
    flat = x.reshape(-1, dim).index_select(0, (column + base).flatten())
    return flat.view(*column.shape, dim)
