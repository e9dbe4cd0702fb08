"""Sparse-vLLM: H2O, SnapKV and R-KV with one set for all heads of a layer.

github.com/CURRENTF/Sparse-vLLM (commit 18d3104), an engine on vLLM that evicts. Heads of a layer
have one block table, so they share a set. The vote of `window` rows for the candidates C is the
mean over these rows, maximised over all query heads of a layer:

    I_j(C) = max over heads of mean over rows of softmax over C of q.k / sqrt(d)

    h2o     sums of w I_j over all entries, w the number of rows: after the prompt of its last 128
            rows, then of each row softmax over the entries of its largest logit. Half of the
            budget are recent entries.
    snapkv  I_j of 32 rows, over the entries between 64 first and 512 last ones, which stay;
            max-pooled if `pool_kernel` is larger than 1. After the prompt; at later events its
            largest logit of the last row.
    rkv     mix_lambda I_j - (1 - mix_lambda) R_j of 8 rows, over the same entries. The keys of all
            heads of an entry are one vector, C_ij the cosine of two of them, 0 on the diagonal and
            below `threshold`. In each row i the last similar entry after i is set to 0, and R is
            the softmax of the row means. It does not evict after the prompt.

Deviations. The engine reads a prompt in chunks, whose last rows vote each, and after which H2O cuts
to a budget of its own; here it is read at once, and with `prefill_chunk` each chunk is cut to the
budget. The engine's events come when the cache exceeds the budget by the interval; SnapKV's when it
holds twice the competing entries. With default sizes its R-KV stops: 4,224 entries compete, of at
most 4,096.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, ClassVar

from kvsim.core.lazy import Tensor, torch
from kvsim.core.parameters import AtLeast, Between, Odd
from kvsim.core.pieces import Inputs, Protection, Scorer, Scores, protected_by
from kvsim.core.view import LOGIT_BYTES, View
from kvsim.core.weights import row_grid
from kvsim.policies.union import check_alike
from kvsim.policies.window import shares, smooth


class LayerH2O(Scorer):
    """Votes added up over all rows; half of the budget are recent entries by default.

    window: last rows of the prompt that vote.
    """

    recent: Annotated[int, AtLeast(1)] | None = None
    window: Annotated[int, AtLeast(1)] = 128

    columns: ClassVar[Mapping[str, float]] = {"acc": 0.0}

    @property
    def reads(self) -> Inputs:
        """Attention of the window, and of each row since the last event."""
        return Inputs(rows=self.window, copies=0)

    def score(self, view: View) -> Scores:
        """acc_j + w I_j of each chunk of the prompt + softmax_j of largest logits; [L, H, n]."""
        check_alike("sparse_vllm: heads", view.pos, view.pos[:, :1], "no ams, adakv, criticalkv")
        acc, live = view["acc"].clone(), view.live[:, :1, None]
        first, prompt = int(view.since.min()) + 1, view.setting.prompt_len
        ends = [end for end in view.setting.ends if first < end <= prompt]
        for start, end in pairwise((first, *ends)):  # chunks of the prompt
            rows = range(max(start, end - self.window), end)
            votes = len(rows) * vote(view.logits(rows), live)
            acc += votes.where((view.since < end - 1)[:, None, None], 0.0)
        for start, stop in row_grid(max(first, prompt), view.row + 1, view.keys[..., 0, 0].nbytes):
            largest = view.logits(range(start, stop)).amax((1, 2)).unsqueeze(1)  # [L, 1, w, n]
            row = torch.arange(start, stop, device=acc.device).view(-1, 1)
            new = row > view.since.view(-1, 1, 1, 1)
            acc += shares(largest, live).where(new, 0.0).sum(2)
        return Scores(acc, {"acc": acc})

    def protection(self, budget: int) -> Protection:
        """Protect the recent entries."""
        return Protection(recent=max(1, budget // 2) if self.recent is None else self.recent)


class Middle(Scorer):
    """A scorer of the entries between the first and the last ones, which stay."""

    window: Annotated[int, AtLeast(1)] = 32
    sink: Annotated[int, AtLeast(0)] = 64
    recent: Annotated[int, AtLeast(0)] = 512

    copies: ClassVar[int] = 0

    @property
    def reads(self) -> Inputs:
        """Attention of the window."""
        return Inputs(rows=self.window, copies=self.copies)

    def middle(self, view: View) -> Tensor:
        """Competing entries, the same in each head; bool [L, 1, n]."""
        check_alike("sparse_vllm: heads", view.pos, view.pos[:, :1], "no ams, adakv, criticalkv")
        return (view.live & ~protected_by(self.protection, view))[:, :1]


class LayerSnapKV(Middle):
    """Vote of the prompt's last rows; in decoding the largest logit of the last row."""

    pool_kernel: Annotated[int, AtLeast(1), Odd()] = 1

    scale = "signed"

    def score(self, view: View) -> Tensor:
        """pool_j(I_j), or max over heads of q.k_j; [L, H, n]."""
        among = self.middle(view)
        if view.is_prompt:
            votes = vote(view.logits(self.window), among.unsqueeze(2))
            votes = smooth(votes, "max", self.pool_kernel)
        else:
            votes = view.logits(1).amax((1, 2, 3)).unsqueeze(1)
        return votes.where(among, 0.0).expand(view.pos.shape)


class LayerRKV(Middle):
    """Vote of the last rows less the redundancy of the keys of all heads together."""

    window: Annotated[int, AtLeast(1)] = 8
    mix_lambda: Annotated[float, Between(0, 1)] = 0.1
    threshold: Annotated[float, Between(0, 1)] = 0.8

    scale = "signed"
    copies = 4

    def score(self, view: View) -> Tensor:
        """mix_lambda I_j - (1 - mix_lambda) R_j of the entries that compete; [L, H, n]."""
        among = self.middle(view)
        votes = vote(view.logits(self.window), among.unsqueeze(2))
        alike = self._similarity(view.keys, among[:, 0])
        redundant = shares(alike.unsqueeze(1), among)
        mixed = self.mix_lambda * votes - (1 - self.mix_lambda) * redundant
        return mixed.where(among, 0.0).expand(view.pos.shape)

    def _similarity(self, keys: Tensor, among: Tensor) -> Tensor:
        """Mean similarity of each entry of a layer to the others, keys [L, H, n, d]; [L, n]."""
        unit = torch.nn.functional.normalize(keys.transpose(1, 2).flatten(2), dim=-1, eps=1e-6)
        unit = unit * among.unsqueeze(-1)
        slot = torch.arange(unit.shape[1], device=unit.device)
        means = []
        for rows in slot.split(max(1, LOGIT_BYTES // max(1, unit[..., 0].nbytes))):
            cosine = unit[:, rows] @ unit.mT
            if self.threshold:
                cosine = cosine.masked_fill(cosine < self.threshold, 0.0)
            cosine = cosine.masked_fill(slot == rows.unsqueeze(-1), 0.0)
            later = (cosine > 0) & (slot > rows.unsqueeze(-1))
            last = (later * (slot + 1)).amax(-1, keepdim=True) - 1  # -1: none
            means.append(cosine.masked_fill(slot == last, 0.0).sum(-1))
        return torch.cat(means, 1) / among.sum(-1, keepdim=True).clamp(min=1)


def vote(logits: Tensor, among: Tensor) -> Tensor:
    """max over all query heads of the mean over the rows of their softmax; [L, 1, n].

    logits [L, H, G, w, n]. among: the entries that the softmax is over, bool [L, 1, 1, n].
    """
    return shares(logits, among.unsqueeze(2)).mean(3).amax((1, 2)).unsqueeze(1)
