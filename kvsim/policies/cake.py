"""CAKE: more entries for layers with spread and shifting attention; keeps those that shift most.

Qin et al., "CAKE: Cascading and Adaptive KV Cache Eviction with Layer Preferences", ICLR 2025,
arXiv 2503.12491. a_r(j) is the attention of row r, one of the `window` most recent rows, on a
candidate j, an entry before the window. The score of an entry is the mean of its attention plus how
much it shifts from row to row,

    s_j = mean_r a_r(j) + gamma Var_r a_r(j)

average-pooled, and averaged over the group. The preference of a layer is computed from the entropy
of this attention and its shift, each summed over query heads and candidates,

    P_l = (- sum a ln a)^(1 / tau1) (sum Var_r a)^(1 / tau2)

and the layers share one budget in proportion to P.

Deviations. The paper fixes the layers' shares during the prefill, layer by layer. Here every event
that evicts divides the total again, so that the sum is exact. As in the authors' code, events after
the prefill score by the mean alone (`decoding=False`). The authors' tau1 and tau2 come from a table
of models; here both are 1. If only some layers are replayed, they share the sum of their budgets.
`cake@gkv` is the score in G-KV's code: the largest of the group (`group="max"`), the standard
deviation instead of the variance (`dispersion="std"`), no pooling, the same at every event
(`decoding=True`), the same budget in each layer.
"""

from __future__ import annotations

from typing import Annotated, Literal

from kvsim.core.lazy import Tensor, torch
from kvsim.core.parameters import Above, AtLeast, Finite, Odd
from kvsim.core.pieces import LayerBudgets
from kvsim.core.select import apportion
from kvsim.core.view import View
from kvsim.core.weights import by_heads
from kvsim.policies.window import Windowed, before_window, over_heads, smooth


class Cake(Windowed):
    """Mean attention of a window and its dispersion, pooled over neighbouring entries.

    group: reduction over the query heads, "max" before anything else, "mean" after pooling.
    decoding: whether the dispersion counts at events after the prefill, too.
    """

    gamma: Annotated[float, AtLeast(0), Finite()] = 200.0
    dispersion: Literal["var", "std"] = "var"
    pool: Literal["max", "avg"] | None = "avg"
    pool_kernel: Annotated[int, AtLeast(1), Odd()] = 5
    group: Literal["mean", "max"] = "mean"
    decoding: bool = False

    def score(self, view: View) -> Tensor:
        """mean over the group of pool_j(mean_r a + gamma Var_r a); [L, H, n]."""
        older = before_window(view, self.window)
        attention = view.attn(self.window)  # [L, H, G, w, n]
        if self.group == "max":
            attention = attention.amax(2, keepdim=True)
        vote = attention.mean(3)
        if view.is_prompt or self.decoding:
            shift = variance(attention)
            vote += self.gamma * (shift.sqrt() if self.dispersion == "std" else shift)
        vote = vote.masked_fill_(~older.unsqueeze(2), 0.0)
        pooled = smooth(vote, self.pool, self.pool_kernel)
        return over_heads(pooled, 2).div_(pooled.shape[2]).where(older, 0.0)


class CakeBudgets(LayerBudgets):
    """The layers share n_layers x budget by preference; every head of a layer keeps the same."""

    window: Annotated[int, AtLeast(1)] = 32
    tau1: Annotated[float, Above(0), Finite()] = 1.0
    tau2: Annotated[float, Above(0), Finite()] = 1.0

    shared = "layers"
    reads = Windowed.reads

    def budgets(self, view: View, budget: int) -> Tensor:
        """Between the protected and the present entries; together len(layers) x budget."""
        cap = view.count.sum(-1) // view.count.shape[-1]  # entries of a head
        floor = cap.clamp(max=view.setting.protected)
        total = torch.full_like(cap[0], len(cap) * budget).clamp(max=cap.sum())
        shape = self.window, self.tau1, self.tau2
        weights = torch.cat([preferences(part, *shape) for part in view.parts()])
        return apportion(total, weights, floor, cap)


def preferences(view: View, window: int, tau1: float, tau2: float) -> Tensor:
    """P_l = H_l^(1 / tau1) V_l^(1 / tau2), float64 [L]."""
    older = before_window(view, window).unsqueeze(2)
    attention = view.attn(window)  # [L, H, G, w, n]
    entropy = by_heads(lambda x: torch.special.entr(x).sum(3), attention).where(older, 0.0)
    shift = variance(attention).where(older, 0.0)
    spread, shifts = (x.sum((1, 2, 3), dtype=torch.float64) for x in (entropy, shift))
    out: Tensor = spread ** (1 / tau1) * shifts ** (1 / tau2)
    return out


def variance(attention: Tensor) -> Tensor:
    """Unbiased variance over the rows of [L, H, G, w, n], 0 for a single row; [L, H, G, n]."""

    def squares(x: Tensor) -> Tensor:
        gap = x - x.mean(3, keepdim=True)
        return gap.square_().sum(3)

    # torch's own is slow
    return by_heads(squares, attention).div_(max(1, attention.shape[3] - 1))
