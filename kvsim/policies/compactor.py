"""Compactor: keeps entries with outlying keys, and those that neighbours attend to.

Chari and Van Durme, "Compactor: Calibrated Query-Agnostic KV Cache Compression with Approximate
Leverage Scores", arXiv 2507.08143. Two scores, each standardised over all heads of the layer, are
added up, s_j = z(o_j) + blending z(l_j). With X the keys before the rotary embedding less their
mean, the leverage of an entry and its part in attention without a causal mask are

    l_j = x_j . (X^T X + 0.01 I)^-1 x_j
    o_j = ||v_j|| (mean over the group of (c - m) / c + sum over r in C of a_r(j))

smoothed by an average over three neighbours; a_r is the softmax of q_r . k_j, not scaled, over the
chunk C of j, and c - m the rows that a last chunk lacks to the `chunk` = c of the others. The first
`sink` and the last `recent` entries stay. `parts` chooses only one of the two scores.

Deviations. The paper and its code sketch X by a Gaussian matrix of 48 columns; here X itself is
taken, which the sketch approximates. `blending` is that of the released code
(vnchari/compactor-vllm at 48d9f65); kvpress takes the share of evicted entries. Formulas follow
kvpress (CompactorPress, LeverageScorePress, NonCausalAttnPress), by the same author. The release
leaves out ||v_j|| and the smoothing, and takes leverage among 512 neighbours and chunks of 128. In
a last chunk, kvpress adds padding with a logit of 0 to each softmax. It leaves the protected
entries out of both scores; here, as in the release, both scores include them. Both implementations
cover only the prompt. Here each event scores the entries of the rows since the last one, as it does
the prompt, and these scores stay with the entries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from kvsim.core.lazy import Tensor, torch
from kvsim.core.parameters import AtLeast, Finite
from kvsim.core.pieces import Scorer, Scores
from kvsim.core.view import LOGIT_BYTES, View
from kvsim.core.weights import by_heads
from kvsim.policies.window import smooth

# Added to the diagonal of X^T X.
_RIDGE = 0.01
# Least deviation by which a score is divided.
_LEAST_DEVIATION = 1e-6
# Neighbours that the attention is averaged over.
KERNEL = 3


class Compactor(Scorer):
    """Leverage of keys and attention within chunks, scored once for each entry."""

    scale = "signed"

    chunk: Annotated[int, AtLeast(1)] = 256
    blending: Annotated[float, AtLeast(0), Finite()] = 0.5
    sink: Annotated[int, AtLeast(0)] = 8
    recent: Annotated[int, AtLeast(0)] = 4
    parts: Literal["both", "leverage", "attention"] = "both"

    columns: ClassVar[Mapping[str, float]] = {"importance": math.nan}

    def score(self, view: View) -> Scores:
        """z(o_j) + blending z(l_j), computed when the entry was new; [L, H, n]."""
        importance, n = view["importance"].clone(), view.pos.shape[-1]
        for last in view.since.unique().tolist():  # layers may have acted at different events
            start, layers = last + 1, view.since == last
            first = n - (view.row + 1 - start)  # new entries are the last ones of every head
            importance[layers, :, first:] = self._new(view, start)[layers].to(importance)
        return Scores(importance.where(view.live, 0.0), {"importance": importance})

    def _new(self, view: View, start: int) -> Tensor:
        """Scores of the entries of rows `start` to the last; [L, H, m]."""
        first = view.pos.shape[-1] - (view.row + 1 - start)
        keys, values = view.keys[:, :, first:], view.values[:, :, first:]
        both = []
        if self.parts != "leverage":
            received = attention(view, start, keys, self.chunk)
            size = torch.linalg.vector_norm(values.double(), dim=-1)
            both.append(standardised(smooth(received * size, "avg", KERNEL)))
        if self.parts != "attention":
            plain = view.rope.unrotate(keys, view.positions[start:])
            factor = self.blending if self.parts == "both" else 1.0
            both.append(factor * standardised(leverage(plain)))
        return torch.stack(both).sum(0)


def leverage(keys: Tensor) -> Tensor:
    """x . (X^T X + 0.01 I)^-1 x of keys [L, H, m, d] less their mean; float64 [L, H, m]."""

    def of_heads(x: Tensor) -> Tensor:
        x = x.double()
        x = x - x.mean(2, keepdim=True)
        gram = x.mT @ x
        gram.diagonal(dim1=-2, dim2=-1).add_(_RIDGE)
        out: Tensor = ((x @ torch.linalg.inv(gram)) * x).sum(-1)
        return out

    return by_heads(of_heads, keys)


def attention(view: View, start: int, keys: Tensor, chunk: int) -> Tensor:
    """Attention that keys [L, H, m, d] receive from all rows of their chunk; float64 [L, H, m].

    start: the row of the first key. Averaged over the group. Rows that the last chunk lacks attend
    equally to `chunk` entries.
    """
    layers, heads, m, _ = keys.shape
    out = keys.new_zeros(layers, heads, m, dtype=torch.float64)
    for low in range(0, m, chunk):
        part = slice(low, min(low + chunk, m))
        k = keys[:, :, part].double().unsqueeze(2)
        q = view.queries(range(start + part.start, start + part.stop))  # [L, H, G, w, d]
        step = max(1, LOGIT_BYTES // (q[..., 0, 0].numel() * min(chunk, m) * 8))
        for rows in q.split(step, dim=3):
            weights = (rows.double() @ k.mT).softmax(-1)
            out[:, :, part] += weights.sum(3).mean(2)
        out[:, :, part] += 1 - q.shape[3] / chunk
    return out


def standardised(scores: Tensor) -> Tensor:
    """z-scores over the heads and entries of a layer, of the unbiased deviation; [L, H, m]."""
    centred = scores - scores.mean((1, 2), keepdim=True)
    count = max(1, centred[0].numel() - 1)
    deviation = (centred.square().sum((1, 2), keepdim=True) / count).sqrt()
    return centred / deviation.clamp(min=_LEAST_DEVIATION)
