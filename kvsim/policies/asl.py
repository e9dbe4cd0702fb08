"""ASL: selects tokens at the layer at which their ranking has settled.

Taniguchi et al., "Adaptive Layer Selection for Layer-Wise Token Pruning in LLM Inference", Findings
of ACL 2026, arXiv 2601.07667, section 4 and algorithms 1 and 2. At the end of a prompt of n tokens,
each layer ranks the tokens before the window. The score of a token is its softmax attention from
the last `window` rows, summed over them, average-pooled over neighbours and summed over all query
heads. R are the ranks; rank 1 has the largest score. Let B be the last `look_back` layers up to
layer l, k = min(budget, n) - window, and U the tokens that rank among the first k in at least one
of these layers. V_l measures how much ranks still change, and rho_l is relative to the first layer
tested:

    V_l = mean over U of the variance over B of R,    rho_l = V_l / V_first_layer.

At the first layer l >= first_layer (by default L // 3 of L layers) with rho_l < tau, the first k
tokens of this layer's ranking and the window propagate to deeper layers, at their own positions.
The caches up to layer l keep the choice of a scorer (SnapKV from the same window), or everything
(`kv_before="full"`); deeper layers keep all propagated tokens. If no layer is below tau, every
layer processes all tokens. `asl_2pass` stops after l and runs the selected tokens through all
layers again, at positions 0, 1, 2, ...; if no layer is below tau, it takes the selection of the
last layer.

Deviations. Where paper and released code differ, kvsim follows the code: eight layers (algorithm 2;
the formula has nine), ranks of the score of all heads (algorithm 1 ranks per KV head), the
population variance. Ties rank by position. If fewer than `look_back` layers lie before first_layer
(models with L < 21 layers at the defaults), the number of layers is min(look_back, first_layer + 1)
throughout; there the released code reads its list from the end, or fails. If V_first_layer is 0 the
ranking has settled: rho is 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from kvsim.core.lazy import Tensor, torch
from kvsim.core.parameters import AtLeast, Odd
from kvsim.core.pieces import Run
from kvsim.core.propagation import Forecast, Propagation, Step, check_layer, dropped_after
from kvsim.core.view import View
from kvsim.policies.window import Pooling, Windowed, over_heads, smooth

# Mean selection layer by number of layers, and as a share of the depth, (L_sel + 1) / L:
# Llama-3.1-8B-UL and Qwen2.5-7B on RULER at 128k (appendix B.1).
_MEANS = {32: 23.9, 28: 21.6}
_MEAN_DEPTH = sum((at + 1) / n for n, at in _MEANS.items()) / len(_MEANS)


def pooled_scores(view: View, window: int, pool: Pooling, kernel: int) -> Tensor:
    """p: attention of the window on the tokens before it, pooled, over all heads; [L, n - w]."""
    before = view.pos.shape[-1] - window
    vote = view.attn(window)[..., :before].sum(3)  # [L, H, G, n - w]
    return over_heads(smooth(vote, pool, kernel), 1)


def ranks(scores: Tensor) -> Tensor:
    """Ranks of scores [..., m], int64: 1 for the largest, m for the smallest; ties by place."""
    order = scores.argsort(dim=-1, descending=True, stable=True)
    places = torch.arange(1, scores.shape[-1] + 1, device=scores.device)
    return torch.empty_like(order).scatter_(-1, order, places.expand_as(order))


def best_and_rest(ranked: Tensor, k: int, n: int) -> Tensor:
    """Ascending places of the first k of ranks [m], followed by m..n-1."""
    older = (ranked <= k).nonzero()[:, 0]
    return torch.cat([older, torch.arange(len(ranked), n, device=older.device)])


def rank_variance(ranked: Tensor, k: int) -> float:
    """V: mean variance over layers of ranks [w, m], for tokens among the first k of any layer."""
    if k < 1:
        return 0.0
    union = (ranked <= k).any(0)
    return float(ranked[:, union].double().var(0, correction=0).mean())


class AtLayer(Propagation):
    """Selection after a fixed layer: the published one, in other models one at the same depth.

    published: by number of layers (Llama-3.1-8B and Qwen2.5-7B, appendix C.2). depth: as a share.
    """

    published: ClassVar[Mapping[int, int]]
    depth: ClassVar[float]

    layer: Annotated[int, AtLeast(0)] | None = None

    def check(self, run: Run) -> None:
        """The layer must exist."""
        check_layer(self.label, self.layer, run.n_layers)

    def at(self, n_layers: int) -> int:
        """The layer after which tokens are selected."""
        if self.layer is not None:
            return self.layer
        return self.published.get(n_layers, max(0, round(self.depth * n_layers) - 1))

    def facts(self, n_layers: int) -> dict[str, Any]:
        """Return the selection layer by its name."""
        return {"layer": self.at(n_layers)}


class Selecting(Propagation):
    """The test of ASL and the tokens it selects."""

    tau: Annotated[float, AtLeast(0)] = 0.3
    window: Annotated[int, AtLeast(1)] = 32
    pool: Pooling = "avg"
    pool_kernel: Annotated[int, AtLeast(1), Odd()] = 7
    first_layer: Annotated[int, AtLeast(0)] | None = None
    look_back: Annotated[int, AtLeast(1)] = 8

    reads = Windowed.reads

    @property
    def least_budget(self) -> int:
        """The window, which always propagates, and one selected token."""
        return self.window + 1

    def check(self, run: Run) -> None:
        """The first layer must exist."""
        check_layer("asl (first_layer)", self.first_layer, run.n_layers)

    def rule(self, n_layers: int) -> tuple[int, int]:
        """L_min and L_obs of a model: the first layer tested, and the layers of a variance."""
        first = n_layers // 3 if self.first_layer is None else self.first_layer
        return first, min(self.look_back, first + 1)

    def facts(self, n_layers: int) -> Mapping[str, Any]:
        """Return the parameters of the rule."""
        return dict(zip(("first_layer", "look_back"), self.rule(n_layers), strict=True))

    def after(self, view: View, memory: Any) -> Step:
        """Compare the ranks of this layer with those of the layers before it.

        memory: ranks of the most recent layers, and the variance at the first layer tested.
        """
        n, budget = view.row + 1, view.setting.budget
        if n <= max(budget, self.window):
            return Step(done=True)
        recent, base = memory or ((), None)
        layer = int(view.layers[0])
        first, back = self.rule(view.setting.n_layers)
        k = budget - self.window
        ranked = ranks(pooled_scores(view, self.window, self.pool, self.pool_kernel)[0])
        recent = (*recent, ranked)[-back:]
        if layer < first:
            return Step(memory=(recent, None))
        variance = rank_variance(torch.stack(recent), k)
        base = variance if base is None else base
        relative = variance / base if base > 0 else 0.0
        notes = {"variance": variance, "relative_variance": relative}
        if relative < self.tau or (self.caches == "again" and layer == view.setting.n_layers - 1):
            return Step(best_and_rest(ranked, k, n), done=True, notes=notes)
        return Step(memory=(recent, base), notes=notes)

    def forecast(
        self, budget: int, prompt_len: int, n_layers: int, layer: int | None = None
    ) -> Forecast:
        """All rows up to `layer`, the budget in deeper layers; expected: a mean of appendix B.1."""
        last = n_layers - 1 if layer is None else layer
        again = self.caches == "again"
        rows = dropped_after(last, budget, prompt_len, n_layers, again=again)
        scored = range(last + 1 if again else min(last + 1, n_layers - 1))
        expected, source = max(0.0, _MEAN_DEPTH * n_layers - 1), "as deep as the means"
        if n_layers in _MEANS:
            expected, source = _MEANS[n_layers], "the mean"
        whole = prompt_len <= budget
        return rows._replace(
            scored=() if whole else scored,
            layer=expected,
            source=f"{source} in ASL's appendix B.1 (RULER at 128k)",
            whole=whole,
        )


class ASL(Selecting):
    """Selected tokens propagate; `kv_before`: contents of the caches up to the selection."""

    kv_before: Literal["budget", "full"] = "budget"


class TwoPass(Selecting):
    """Selected tokens run through all layers again."""

    caches = "again"
