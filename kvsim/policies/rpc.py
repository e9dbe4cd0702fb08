"""RPC: a cache that grows by a fraction of the generated tokens.

Song et al., "Reasoning Path Compression: Compressing Generation Trajectories for Efficient LLM
Reasoning", NeurIPS 2025, arXiv 2505.13866, algorithm 1. The prompt stays. Every `interval` rows,
the generated tokens before the window are scored by their attention from the `window` most recent
rows: softmax over only the scored tokens, summed over the window, averaged over all query heads of
the layer, average-pooled. One set serves all heads. Prompt, window and one of every `compression`
generated tokens stay, so `budget` is ignored.

Deviations. kvsim counts generated tokens from the end of the prompt up to the event, those of the
window included; the authors count only the tokens before the window. Inside AMS, AdaKV and
CriticalKV, one slot holds different tokens in different heads, so each KV head is ranked by its own
query heads, `heads="group"`. `rpc@ams` is AMS's baseline with a plain budget: softmax over the
whole cache, mean over the group, pooling over all slots; it protects the first `sink` entries
instead of the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from kvsim.core.lazy import Tensor, torch
from kvsim.core.parameters import AtLeast, Odd
from kvsim.core.pieces import LayerBudgets, Protection
from kvsim.core.view import View
from kvsim.policies.window import Windowed, before_window, shares, smooth


class RPC(Windowed):
    """Attention of a window on the generated text before it, averaged over heads, pooled."""

    pool_kernel: Annotated[int, AtLeast(1), Odd()] = 7
    heads: Literal["all", "group"] = "all"

    def score(self, view: View) -> Tensor:
        """pool_j(mean over query heads of the sum over the window of j's share); [L, H, n]."""
        generated = before_window(view, self.window) & (view.pos >= view.setting.prompt_len)
        share = shares(view.logits(self.window), generated[:, :, None, None])
        vote = share.sum(3).mean(2)
        if self.heads == "all":
            vote = vote.mean(1, keepdim=True).expand_as(vote)
        return smooth(vote, "avg", self.pool_kernel).where(generated, 0.0)

    def protection(self, budget: int) -> Protection:
        """The prompt and the window."""
        return Protection(recent=self.window, prompt=True)


class Growing(LayerBudgets):
    """Prompt, window, and one of every `compression` tokens generated so far."""

    window: Annotated[int, AtLeast(1)] = 32
    compression: Annotated[int, AtLeast(1)] = 4

    effect = "none"

    def planned(self, budget: int, n_layers: int, longest: int) -> Sequence[int]:
        """Nothing: the budget is ignored, and prompt and window always fit."""
        return ()

    def budgets(self, view: View, budget: int) -> Tensor:
        """prompt_len + window + generated // compression, int [L]."""
        size = self.unbounded_size(view.setting.prompt_len, view.row + 1)
        return torch.full_like(view.layers, max(size, view.setting.protected))

    def unbounded_size(self, prompt_len: int, n_pos: int) -> int:
        """prompt_len + window + generated // compression."""
        return prompt_len + self.window + (n_pos - prompt_len) // self.compression


class AmsRPC(Windowed):
    """Attention of a window on the whole cache, averaged over the group, pooled (AMS's RPC)."""

    pool_kernel: Annotated[int, AtLeast(1), Odd()] = 7
    sink: Annotated[int, AtLeast(0)] = 4

    def score(self, view: View) -> Tensor:
        """pool_j(sum over the window of the group's mean a_r(j)); [L, H, n]."""
        return smooth(view.attn(self.window, group="mean").sum(2), "avg", self.pool_kernel)
