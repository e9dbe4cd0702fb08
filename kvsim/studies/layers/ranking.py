"""Ranks of the tokens of a prompt in each layer, from one pass over a trace.

Scores and ranks are those of ASL (`kvsim.policies.asl`), of every layer of the prefill with full
attention, also after the selection layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from kvsim.analysis.arrays import Floats, Ints, share
from kvsim.analysis.results import task_of
from kvsim.analysis.subject import Analysis
from kvsim.core.arguments import resolve_budget
from kvsim.core.lazy import Tensor, torch
from kvsim.core.pieces import Run
from kvsim.core.trace import Trace
from kvsim.core.view import Setting
from kvsim.engine.depth import Look, recorded
from kvsim.errors import BudgetError, PolicyError
from kvsim.policies.asl import ASL, Selecting, pooled_scores, rank_variance
from kvsim.policies.asl import ranks as ranks_of


@dataclass(frozen=True)
class Curve:
    """ASL's test of one trace at one budget, in all layers.

    k: tokens next to the window that would propagate. first_layer, look_back: the rule as it was
    applied. variance [L]: V, in squared ranks, NaN before layer look_back - 1. relative [L]: rho,
    NaN before first_layer. union [L]: tokens that V is a mean over, 0 where it is NaN.
    """

    ranking: Ranking
    rule: Selecting
    budget: int
    k: int
    first_layer: int
    look_back: int
    variance: Floats
    relative: Floats
    union: Ints

    @property
    def trace(self) -> str:
        """The trace's name."""
        return self.ranking.trace

    @property
    def n_layers(self) -> int:
        """Layers of the model."""
        return len(self.variance)

    @property
    def union_share(self) -> Floats:
        """Tokens that the variance is a mean over, over k; [L], NaN as the variance."""
        return np.where(np.isnan(self.variance), np.nan, self.union / self.k)

    @property
    def union_chance(self) -> float:
        """The union of so many independent random rankings, over k."""
        ranked = self.ranking.ranked
        # a token is in none of the first k of independent random rankings with this probability
        absent: float = (1 - self.k / ranked) ** self.look_back
        return ranked * (1 - absent) / self.k

    @cached_property
    def jaccard(self) -> Floats:
        """|A and B| / |A or B| [L] of first k tokens and the layer before's; NaN without any."""
        top = (self.ranking.ranks <= self.k).numpy()
        both, either = (top[1:] & top[:-1]).sum(-1), (top[1:] | top[:-1]).sum(-1)
        return np.concatenate([[np.nan], share(both, either)])

    @property
    def jaccard_chance(self) -> float:
        """The index of two sets of k tokens that share as many as expected, k * k / m."""
        shared = self.k * self.k / self.ranking.ranked
        return shared / (2 * self.k - shared) if self.k else float("nan")

    @property
    def tested(self) -> range:
        """Layers whose rho is compared with tau; the last one has nothing to drop."""
        return range(self.first_layer, self.n_layers - (self.rule.caches != "again"))

    @property
    def fits(self) -> bool:
        """The prompt is no longer than the budget, so there is no test."""
        return self.ranking.prompt_len <= self.budget

    def selected(self, tau: float | None = None) -> int | None:
        """The selection layer, at the rule's tau or another one; None where nothing is dropped."""
        if self.fits:
            return None
        settled = self.relative[self.tested] < (self.rule.tau if tau is None else tau)
        if settled.any():
            return self.first_layer + int(settled.argmax())
        return self.n_layers - 1 if self.rule.caches == "again" else None

    def verdict(self) -> str:
        """The outcome in words."""
        tau, layer = self.rule.tau, self.selected()
        if self.fits:
            return (
                f"nothing to select: the prompt of {self.ranking.prompt_len} tokens fits the budget"
            )
        if layer is None:
            least = min(self.relative[self.tested].tolist(), default=np.nan)
            return f"never selects: relative variance {least:.3g} at the least, and tau is {tau:g}"
        variance = f"relative variance {self.relative[layer]:.2f}, tau {tau:g}"
        return f"selects after layer {layer} of {self.n_layers}: {variance}"


@dataclass(frozen=True)
class Ranking:
    """Pooled scores and ranks of the tokens before the window, in every layer.

    scores [L, m], ranks int64 [L, m], 1 the best; m = prompt_len - window. rule: its window, pool
    and kernel are those of the scores; its other parameters are defaults of the methods. task: the
    group of traces.
    """

    trace: str
    prompt_len: int
    rule: Selecting
    scores: Tensor = field(repr=False)
    ranks: Tensor = field(repr=False)
    task: str = ""
    _computed: dict[tuple[int, int], tuple[Floats, Ints]] = field(
        default_factory=dict, repr=False, compare=False
    )

    @property
    def n_layers(self) -> int:
        """Layers of the model."""
        return int(self.ranks.shape[0])

    @property
    def ranked(self) -> int:
        """m: tokens before the window."""
        return int(self.ranks.shape[1])

    def curve(self, budget: int, rule: Selecting | None = None) -> Curve:
        """The test in all layers, under another first layer, look-back or tau if `rule` is given.

        Raises BudgetError for a budget below the window, PolicyError for another window.
        """
        rule, ours = rule or self.rule, self.rule
        if (rule.window, rule.pool) != (ours.window, ours.pool):
            raise PolicyError(f"asl: the scores follow {ours}; make a ranking for {rule}")
        rule.check(Run(self.n_layers))
        if budget < rule.least_budget:
            raise BudgetError(
                f"asl: budget {budget} selects no token outside the window of {rule.window} rows, "
                "which always propagates; give a larger budget or a smaller window"
            )
        k = min(budget, self.prompt_len) - rule.window
        first_layer, back = rule.rule(self.n_layers)
        variance, union = self._compared(back, k)
        relative = np.full(self.n_layers, np.nan)
        base = variance[first_layer]
        relative[first_layer:] = variance[first_layer:] / base if base > 0 else 0.0
        return Curve(self, rule, budget, k, first_layer, back, variance, relative, union)

    def _compared(self, look_back: int, k: int) -> tuple[Floats, Ints]:
        """V of the `look_back` layers up to each, NaN without so many, and tokens in it; [L]."""
        if (look_back, k) not in self._computed:
            variance, union = np.full(self.n_layers, np.nan), np.zeros(self.n_layers, np.int64)
            for layer in range(look_back - 1, self.n_layers):
                recent = self.ranks[layer - look_back + 1 : layer + 1]
                variance[layer], union[layer] = rank_variance(recent, k), (recent <= k).any(0).sum()
            self._computed[look_back, k] = variance, union
        return self._computed[look_back, k]

    def entropy(self) -> Floats:
        """Entropy [L] of layers' scores over tokens, in nats: log(m) if equal, NaN if all 0."""
        scores = self.scores.double()
        share = scores / scores.sum(-1, keepdim=True)
        entropy: Floats = (-torch.special.xlogy(share, share)).sum(-1).numpy()
        return entropy


def ranking(trace: Trace, rule: Selecting | None = None, *, device: str = "cpu") -> Ranking:
    """Rank the tokens before the window in every layer, one layer in memory at a time.

    rule: ASL's parameters, as `kvsim.policy("asl", window=16).propagation` or `ASL(window=16)`; its
    defaults if none are given.

    Raises PolicyError where the prompt is no longer than the window, or layers are missing.
    """
    rule = ASL() if rule is None else rule
    rule.check(Run(trace.n_layers))
    if trace.prompt_len <= rule.window:
        raise PolicyError(
            f"{trace.name}: the prompt has {trace.prompt_len} tokens, and the window "
            f"{rule.window} rows, so no token is left to rank; give a smaller window"
        )
    look = _look(trace, device)
    scored = []
    with torch.no_grad():
        for layer in range(trace.n_layers):
            scores = pooled_scores(look(layer, None), rule.window, rule.pool, rule.pool_kernel)
            scored.append((scores[0].cpu(), ranks_of(scores)[0].cpu()))
    by_layer, ranked = (torch.stack(part) for part in zip(*scored, strict=True))
    return Ranking(trace.name, trace.prompt_len, rule, by_layer, ranked, task_of(trace))


def window_attention(
    trace: Trace, window: int = 32, *, columns: int = 1024, device: str = "cpu"
) -> Floats:
    """Attention [L, w, c] of the prompt's last rows, mean over query heads, pooled to `columns`."""
    look = _look(trace, device)
    factor = -(-trace.prompt_len // columns)
    windows = []
    with torch.no_grad():
        for layer in range(trace.n_layers):
            seen = look(layer, None).attn(window)[0].mean((0, 1)).double().cpu()  # [w, n]
            padded = torch.nn.functional.pad(seen, (0, -seen.shape[-1] % factor))
            windows.append(padded.unflatten(-1, (-1, factor)).amax(-1).numpy())
    return np.stack(windows)


def _look(trace: Trace, device: str) -> Look:
    """Layers at the end of the prefill as a replay shows them to ASL."""
    if not trace.header.whole:
        raise PolicyError(
            f"{trace.name}: the trace has layers {list(trace.layer_ids)}; expected 0, 1, 2, ... to "
            "the model's last, because ranks are compared from layer to layer"
        )
    n = trace.prompt_len
    setting = Setting(budget=n, prompt_len=n, interval=None, n_layers=trace.n_layers)
    return recorded(trace, setting, device)


def curves(
    analysis: Analysis,
    ks: Sequence[int | str] = ("10%", "25%", "50%"),
    rule: Selecting | None = None,
) -> Mapping[str, Curve]:
    """ASL's test of an analysed trace, by k as given.

    ks: tokens that propagate besides ASL's window, as numbers or shares of the tokens before it.
    rule: ASL's parameters. None where layers are missing or have sliding windows, or the prompt is
    no longer than the window of ASL.
    """
    trace, rule = analysis.trace, rule or ASL()
    if not trace.header.whole or trace.windowed or trace.prompt_len <= rule.window:
        return {}
    ranked = ranking(trace, rule, device=analysis.device)
    return {str(k): ranked.curve(resolve_budget(k, ranked.ranked) + rule.window) for k in ks}
