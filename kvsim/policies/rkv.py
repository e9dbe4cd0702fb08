"""R-KV: attention of a window, less the redundancy of keys.

Cai et al., "R-KV: Redundancy-aware KV Cache Compression for Reasoning Models", arXiv 2505.24133:

    s_j = mix_lambda I_j - (1 - mix_lambda) R_j

I is the attention from the `window` most recent rows on the candidates (the entries before the
window), max-pooled. R is the softmax of the mean similarity of keys (kvsim/policies/redundancy.py).
Three implementations differ in both terms:

              I                                                  R
    gkv       softmax over all, largest of the group,            all keys
              mean over the window
    original  largest logit of the group, softmax over the       all keys; a row without a similar
              candidates, mean over the window                   key leaves out the first slot
    ams       softmax over the candidates,                       the candidates' keys; otherwise
              mean over the group and the window                 as the original

`rkv` (= `rkv@gkv`) is G-KV's baseline (window 16, max-pool of 5), `rkv@original` the authors' code
(window 8, pool 7), `rkv@ams` AMS's baseline, which also keeps the first `sink` entries.

Deviations. Entries stay in the order of their positions; pooling refers to this order, and so do
the "first" and "last" slots of the redundancy. In the code of the original and of AMS, the entries
that top-k kept stay in the order of their scores, followed by the window and newer entries. So from
the second event on, pooling there mixes entries of similar score instead of neighbours in the
sequence. `slot_order="topk"` scores in that order; positions, windows and ties do not change. The
original counts events from row 0 of the first sample; kvsim counts from the end of the prompt.
AMS's code rotates the window's queries to slots of the compacted cache; here rows keep their own
positions. A softmax over the candidates leaves out the attention sinks that a model has learned.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import nan
from typing import Annotated, Literal

from kvsim.core.lazy import Tensor, torch
from kvsim.core.parameters import AtLeast, Between, Odd
from kvsim.core.pieces import Scores, protected_by
from kvsim.core.view import View
from kvsim.policies.gkv import local_score
from kvsim.policies.redundancy import mean_similarity
from kvsim.policies.window import Windowed, before_window, shares, smooth


class RKV(Windowed):
    """Pooled attention of a window less redundancy, as one of three implementations has them."""

    window: Annotated[int, AtLeast(1)] = 16
    pool: Literal["max", "avg"] | None = "max"
    pool_kernel: Annotated[int, AtLeast(1), Odd()] = 5
    mix_lambda: Annotated[float, Between(0, 1)] = 0.1
    threshold: Annotated[float, Between(0, 1)] = 0.5
    sink: Annotated[int, AtLeast(0)] = 0
    variant: Literal["gkv", "original", "ams"] = "gkv"
    slot_order: Literal["position", "topk"] = "position"

    copies = 4

    @property
    def columns(self) -> Mapping[str, float]:  # type: ignore[override]  # depends on a parameter
        """The slot of an entry after top-k, NaN for entries that it did not choose."""
        return {"slot": nan} if self.slot_order == "topk" else {}

    @property
    def scale(self) -> Literal["positive", "signed"]:
        """Whether redundancy is subtracted."""
        return "signed" if self.mix_lambda < 1 else "positive"

    def score(self, view: View) -> Tensor | Scores:
        """mix_lambda pool_j(I_j) - (1 - mix_lambda) R_j of the candidates; [L, H, n]."""
        older = before_window(view, self.window)
        attention = self._attention(view, older)
        among = older if self.variant == "ams" else view.live
        if self.slot_order == "position":
            return self._mixed(attention, view.keys, among, view).where(older, 0.0)
        order = self._slots(view, older)
        keys = view.keys.take_along_dim(order.unsqueeze(-1), dim=2)
        mixed = self._mixed(attention.gather(-1, order), keys, among.gather(-1, order))
        values = torch.empty_like(mixed).scatter_(-1, order, mixed).where(older, 0.0)
        return Scores(values, {"slot": self._left_in(view, values, older)})

    def _mixed(
        self, attention: Tensor, keys: Tensor, among: Tensor, view: View | None = None
    ) -> Tensor:
        """The score of entries in the cache's order; view: if the order is its own."""
        alike = mean_similarity(
            keys,
            among,
            threshold=self.threshold,
            epsilon=1e-6 if self.variant == "gkv" else 1e-8,
            else_first=self.variant != "gkv",
            view=view,
        )
        pooled = smooth(attention, self.pool, self.pool_kernel)
        return self.mix_lambda * pooled - (1 - self.mix_lambda) * shares(alike, among)

    def _slots(self, view: View, older: Tensor) -> Tensor:
        """Entries in the order of the released cache: pads, entries chosen by top-k, the others."""
        slot = view["slot"]
        behind = view.pos + view.row + 1  # every slot is below
        key = torch.where(older & ~slot.isnan(), slot.nan_to_num(0.0).long(), behind)
        return key.masked_fill(~view.live, -1).argsort(dim=-1, stable=True)

    def _left_in(self, view: View, values: Tensor, older: Tensor) -> Tensor:
        """The slots of entries after top-k, best first; in AMS's code, protected entries lead."""
        ranked = older
        if self.variant == "ams":
            ranked = view.live
            first = protected_by(self.protection, view)
            values = values.masked_fill(first, torch.inf)
        values = values.masked_fill(~ranked, -torch.inf)
        order = values.argsort(dim=-1, descending=True, stable=True)
        place: Tensor = order.argsort(dim=-1)
        return place.to(values.dtype).masked_fill(~ranked, nan)

    def _attention(self, view: View, older: Tensor) -> Tensor:
        """I_j before pooling, 0 off candidates; [L, H, n]."""
        if self.variant == "gkv":
            return local_score(view, self.window)
        logits = view.logits(self.window)  # [L, H, G, w, n]
        if self.variant == "original":
            return shares(logits.amax(2), older.unsqueeze(2)).mean(2)
        return shares(logits, older[:, :, None, None]).mean((2, 3))
