"""H2O: keeps heavy hitters, the entries that have received most attention so far.

Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language
Models", NeurIPS 2023, arXiv 2306.14048, algorithm 1. Every entry accumulates the attention that it
receives, also from rows of the prompt. After each row the `recent` newest entries stay; the rest of
the budget goes to the entries that have accumulated most.

Deviations. Budgets are numbers of entries, half of them recent by default (`recent=None`), as in
the authors' cache that drops entries. With grouped queries the accumulator sums over the heads of
the group. The authors' masking variant, in which an entry can come back, is not an eviction policy
and is left out. `h2o@kvpress` is kvpress's ObservedAttention: the *average* attention from the rows
that can see the entry, after the prompt only. At later events, if there are any, it uses only the
current row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from kvsim.core.lazy import Tensor, torch
from kvsim.core.parameters import AtLeast
from kvsim.core.pieces import Inputs, Protection, Scorer, Scores
from kvsim.core.view import View


class H2O(Scorer):
    """Accumulated attention; keeps the `recent` newest entries, half the budget by default."""

    recent: Annotated[int, AtLeast(0)] | None = None

    columns: ClassVar[Mapping[str, float]] = {"acc": 0.0}
    per_row: ClassVar[bool] = True

    def score(self, view: View) -> Scores:
        """acc_j = sum over rows t and heads of the group of a_t(j); [L, H, n]."""
        acc = view["acc"] + view.received()
        return Scores(acc, {"acc": acc})

    def protection(self, budget: int) -> Protection:
        """Protect the recent entries."""
        return Protection(recent=budget // 2 if self.recent is None else self.recent)


class ObservedAttention(Scorer):
    """kvpress's average: attention received in this forward / number of rows that see the entry.

    With a prompt in chunks, a forward has the rows since the last event that evicted.
    """

    reads = Inputs(copies=0)

    def score(self, view: View) -> Tensor:
        """[L, H, n]; like kvpress, counts n - i rows that see slot i of n."""
        group = view.queries(1).shape[2]
        got = view.received() if view.is_prompt else view.attn(1, group="sum")[..., 0, :]
        n = view.pos.shape[-1]
        return got / group / (n - torch.arange(n, device=got.device))
