"""RaaS: evicts the entry with the oldest attention.

Hu et al., "RaaS: Reasoning-Aware Attention Sparsity for Efficient LLM Reasoning", ACL 2025
(findings), arXiv 2502.11147. In long reasoning, milestone tokens (like lemmas of a proof) receive
attention for a while and then never again. Each entry has a timestamp: the latest row whose
attention on it is at least `alpha`, at first its own row. The entry with the oldest timestamp
is evicted. All tokens of the prompt stay, because a few of them receive attention again much later.

    t_j = max(j, the latest row r with a_r(j) >= alpha)

`share` replaces alpha: a row stamps that share of the entries that it sees, those with the largest
weights. At short lengths nearly every weight exceeds the default alpha, so use a share there.

Deviations. Only the abstract of the paper and summaries could be read; the default of alpha, and
the reported share of 0.5 of a later version, are unchecked. The weight of an entry is the mean over
the query heads of the group, and each KV head has a set of its own. Of equal timestamps, for which
these sources give no order, the entry with the smallest weight of the last row is evicted first:
s_j = t_j + a_e(j) / 2. At an event, every row since the last one stamps, the `query_buffer` most
recent ones at most; they see the entries still in the cache. With `protect_prompt=False` the prompt
competes, and the rows at its end stamp it. The paper stamps pages by an estimate from one key for
each page; here weights are exact, and `paged+raas` with `reduction="max"` evicts the page that was
attended to least recently.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import nan
from typing import Annotated, ClassVar

from kvsim.core.lazy import Tensor, torch
from kvsim.core.parameters import AtLeast, Between
from kvsim.core.pieces import Inputs, Scorer, Scores
from kvsim.core.view import View
from kvsim.policies.window import first_of

# Rows whose stamps are computed at once.
_ROWS = 16


class RaaS(Scorer):
    """The last row that attended to an entry, carried as `stamp`."""

    alpha: Annotated[float, Between(0, 1)] = 1e-4
    share: Annotated[float, Between(0, 1)] | None = None
    query_buffer: Annotated[int, AtLeast(1)] = 256
    protect_prompt: bool = True

    columns: ClassVar[Mapping[str, float]] = {"stamp": nan}
    per_row: ClassVar[bool] = True

    @property
    def reads(self) -> Inputs:
        """Attention of the buffer."""
        return Inputs(rows=self.query_buffer)

    def score(self, view: View) -> Scores:
        """t_j, then the weight of the last row, which is at most 1; float64 [L, H, n]."""
        last = min(self.query_buffer, view.row - int(view.since.min()))
        attention, first = view.attn(last), first_of(view, last)  # [L, H, G, w, n]
        stamp = view["stamp"].double().nan_to_num(nan=-1.0).maximum(view.pos.double())
        for start in range(0, attention.shape[3], _ROWS):
            weights = attention[..., start : start + _ROWS, :].mean(2)
            rows = torch.arange(weights.shape[2], device=stamp.device).unsqueeze(-1) + first + start
            stamp = stamp.maximum(self._latest(view, weights, rows).double())
        return Scores(stamp + weights[..., -1, :].double() / 2, {"stamp": stamp})

    def _latest(self, view: View, weights: Tensor, rows: Tensor) -> Tensor:
        """The last of rows [w, 1], with weights [L, H, w, n], that stamps an entry, or -1."""
        visible = view.live.unsqueeze(2) & (view.pos.unsqueeze(2) <= rows)
        if self.share is None:
            least = torch.full_like(weights[..., :1], self.alpha)
        else:
            number = (visible.sum(-1, keepdim=True).double() * self.share).ceil().long()
            ranked = weights.sort(-1, descending=True).values
            least = ranked.gather(-1, (number - 1).clamp(min=0)).masked_fill(number == 0, torch.inf)
        stamped = visible & (weights >= least) & (rows > view.since.view(-1, 1, 1, 1))
        return torch.where(stamped, rows, -1).amax(2)
