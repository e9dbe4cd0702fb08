"""DropKV: keeps the entries without which the output of the last rows would move most.

Zhang et al., "DropKV: Decoupling Residual-Output Perturbation for Near-Optimal KV-Cache Eviction",
NeurIPS 2026, openreview UVbaJoD3Qa. A row attends to entry j with weight p and has the output y.
Without j the other weights are normalised again and the output is (y - p v_j) / (1 - p). So the
output moves by p / (1 - p) (y - v_j). The score of an entry is the squared length of this move,

    s_j = mean over the group of sum over the window of (p_r(j) / (1 - p_r(j)))^2 ||v_j - y_r||^2

smoothed by an average over `pool_kernel` neighbours. The entries with the highest scores stay, and
the window.

Deviations. Formula and defaults are those of the released code (AozhongZhang/DropKV,
`dropkv_scores_reference` and `DropKVCache`). The text of the paper has not been checked; it may
smooth differently. As in the code, the window's own entries count in the average of their
neighbours. Smoothing is meant for long prompts. It divides the score of an isolated entry, such as
the sink, by pool_kernel, so a budget of a few dozen entries can lose this entry. `pool_kernel=1`
ranks by s_j itself. Weights and outputs are in float64. The release adds 1e-6 to 1 - p. Where p is
nearly 1, both 1 - p and y - v are differences of nearly equal numbers, so in the release the rank
of an entry that takes all attention depends on the floating-point precision. Here the output
without the entry of the largest weight is computed from the other entries. Budgets are in entries
instead of a share of the prompt. The release evicts after the prompt only; with an interval, kvsim
uses the same score in decoding, over the remaining entries.
"""

from __future__ import annotations

from typing import Annotated

from kvsim.core.lazy import Tensor, torch
from kvsim.core.parameters import AtLeast, Odd
from kvsim.core.view import View
from kvsim.policies.window import Windowed, before_window, smooth


class DropKV(Windowed):
    """How far the output of a window of rows moves without an entry, smoothed over neighbours."""

    window: Annotated[int, AtLeast(1)] = 8
    pool_kernel: Annotated[int, AtLeast(1), Odd()] = 11

    copies = 5  # one more for its attention

    def score(self, view: View) -> Tensor:
        """The average over neighbours of s_j, on candidates; [L, H, n]."""
        rows = view.attn(self.window, log=True)  # [L, H, G, w, n]
        log_p, values = rows.flatten(2, 3), view.values.double()
        # for each row, the entry with the largest weight and the output without it
        first = log_p.argmax(-1, keepdim=True)
        most = log_p.gather(-1, first)
        log_rest = log_p.scatter(-1, first, -torch.inf)
        rest, remainder = most.expm1().neg_(), log_rest.logsumexp(-1, keepdim=True)
        if view.formula.sinks:  # they take a share, with a value of 0
            z = view.logits(self.window).double()
            sink = view.formula.sink(z, z.shape[1])[..., None, None]  # [H, G, 1, 1]
            total = z.flatten(2, 3).gather(-1, first) - most
            remainder = remainder.logaddexp(sink.expand(*z.shape[1:4], 1).flatten(1, 2) - total)
        without = (log_rest - remainder).exp_().nan_to_num_(0.0) @ values  # [L, H, G * w, d]
        largest = values.gather(2, first.expand(-1, -1, -1, values.shape[-1]))
        y = most.exp() * largest + rest * without
        p = log_rest.exp_()
        moved = (y @ values.mT).mul_(-2)
        moved += y.square().sum(-1, keepdim=True) + values.square().sum(-1).unsqueeze(2)
        lost = moved.clamp_(min=0).mul_((p / (1 - p)).square_())
        apart = (largest - without).square_().sum(-1, keepdim=True)
        lost = lost.scatter_(-1, first, most.mul(2).exp_().mul_(apart)).sum(2)
        score = smooth(lost / rows.shape[2], "avg", self.pool_kernel)
        return score.where(before_window(view, self.window), 0.0)
