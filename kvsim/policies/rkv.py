"""R-KV: attention of a window, less the redundancy of keys.

Cai et al., "R-KV: Redundancy-aware KV Cache Compression for Reasoning Models", arXiv 2505.24133:

    s_j = mix_lambda I_j - (1 - mix_lambda) R_j

with I the attention of the `window` most recent rows on the candidates before it, max-pooled, and R
the softmax of the mean similarity of keys (see redundancy.py). Three implementations differ in both
terms:

              I                                                  R
    gkv       softmax over all, largest of the group,            all keys
              mean over the window
    original  largest logit of the group, softmax over the       all keys; a row without a similar
              candidates, mean over the window                   key leaves out the first slot
    ams       softmax over the candidates,                       the candidates' keys alone; as
              mean over the group and the window                 the original for the rest

`rkv` (= `rkv@gkv`) is G-KV's baseline (window 16, max-pool of 5), `rkv@original` the authors' code
(window 8, pool 7), `rkv@ams` AMS's baseline, which also keeps `sink` first entries.

Deviations. Candidates stay in the order of their positions, which pooling and "last" refer to; the
original leaves them in the order of their scores, from the second event on. Its events are counted
from row 0 of the first sample; here from the end of the prompt. AMS's code turns the window's
queries to slots of the compacted cache; here rows keep their own positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from torch import Tensor

from kvsim.core.flops import Event, Flops
from kvsim.core.parameters import AtLeast, Between, Odd
from kvsim.core.policy import Protection, Scorer
from kvsim.core.view import View
from kvsim.policies.gkv import local_flops, local_score
from kvsim.policies.pooling import smooth
from kvsim.policies.redundancy import mean_similarity, similarity_flops
from kvsim.policies.window import before_window, shares


@dataclass(frozen=True)
class RKV(Scorer):
    """Pooled attention of a window less redundancy, as one of three implementations has them."""

    window: Annotated[int, AtLeast(1)] = 16
    pool: Literal["max", "avg"] | None = "max"
    pool_kernel: Annotated[int, AtLeast(1), Odd()] = 5
    mix_lambda: Annotated[float, Between(0, 1)] = 0.1
    threshold: Annotated[float, Between(0, 1)] = 0.5
    sink: Annotated[int, AtLeast(0)] = 0
    variant: Literal["gkv", "original", "ams"] = "gkv"

    @property
    def rows(self) -> int:
        """The window."""
        return self.window

    @property
    def signed(self) -> bool:
        """Where redundancy is subtracted."""
        return self.mix_lambda < 1

    def score(self, view: View) -> Tensor:
        """mix_lambda pool_j(I_j) - (1 - mix_lambda) R_j of the candidates; [L, H, n]."""
        older = before_window(view, self.window)
        attention = smooth(self._attention(view, older), self.pool, self.pool_kernel)
        among = older if self.variant == "ams" else view.live
        alike = mean_similarity(
            view.keys,
            among,
            threshold=self.threshold,
            epsilon=1e-6 if self.variant == "gkv" else 1e-8,
            else_first=self.variant != "gkv",
        )
        repeated = shares(alike, among)
        return (self.mix_lambda * attention - (1 - self.mix_lambda) * repeated).where(older, 0.0)

    def _attention(self, view: View, older: Tensor) -> Tensor:
        """I_j before pooling, 0 but on candidates; [L, H, n]."""
        if self.variant == "gkv":
            return local_score(view, self.window)
        logits = view.logits(self.window)  # [L, H, G, w, n]
        if self.variant == "original":
            return shares(logits.amax(2), older.unsqueeze(2)).mean(2)
        return shares(logits, older[:, :, None, None]).mean((2, 3))

    def flops(self, event: Event) -> Flops:
        """The local score, and the redundancy of all keys, or of the candidates'."""
        _, _, _, n = event.sizes
        among = n - event.window(self.window) if self.variant == "ams" else n
        score = local_flops(event, self.window, self.pool, self.pool_kernel)
        return score + similarity_flops(event, among)

    def protection(self, budget: int) -> Protection:
        """The window, and sinks where asked for."""
        return Protection(sink=self.sink, recent=self.window)
