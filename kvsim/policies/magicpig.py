"""MagicPIG (Chen et al. 2024, arXiv 2410.16179): samples entries by hashing, and weights them."""

from __future__ import annotations

from math import pi
from typing import Annotated, ClassVar

import numpy as np

from kvsim.core.lazy import Tensor, torch
from kvsim.core.parameters import AtLeast, AtMost
from kvsim.core.reading import Pages, SparseAttention


class MagicPIG(SparseAttention):
    """Each row reads the first and the last entries, and those whose keys hash like its query.

    A table hashes a vector to the signs of its products with `bits` random directions (SimHash);
    there are `tables` of them. Of the other entries a row reads those that share its bucket in at
    least two tables. Before hashing, the mean of their keys at the first reading row is subtracted,
    which shifts all logits of a row equally; queries are hashed as they are.

    Over random directions, a key at the angle a to the query shares a bucket with the probability p
    = (1 - a / pi)^bits, and is read with u = 1 - (1 - p)^tables - tables p (1 - p)^(tables - 1).
    Its logit becomes z - ln u (Algorithm 1); first and last entries keep theirs. Then numerator and
    denominator of the output are unbiased estimates; the output has a small bias.

    `collisions`: number of tables in which a key must share the bucket; with 1, u = 1 - (1 -
    p)^tables. `epsilon` is added to u. `sink`, `local`: first and last entries, which every row
    reads next to its own. `seed`: of the directions, which the heads of a layer share.

    The defaults are the authors' (K = 10, L = 150). `@release` adds 1e-4 to u, as their code does
    (sparse_attention.cc). Deviations: the code reads layers 0 and 16 of 32 whole, here the first
    `dense_layers`. It reads all entries of the response; here an entry is hashed when it leaves the
    local ones. Its KV heads have different directions, shared by 16 layers. Rounded entries are
    hashed as recorded. Here a row scans the codes, bits times tables for each entry; the authors'
    tables take 32 bits for each entry and table, and a row reads only its buckets.

    sparse-attention-hub (magic_pig.py) reads entries that share one bucket, subtracts the mean from
    queries too, and lifts both vectors so that their angle ranks products (SimpleLSH).
    """

    label: ClassVar[str] = "magicpig"

    bits: Annotated[int, AtLeast(1), AtMost(30)] = 10
    tables: Annotated[int, AtLeast(2)] = 150
    collisions: Annotated[int, AtLeast(1), AtMost(2)] = 2
    epsilon: Annotated[float, AtLeast(0)] = 0.0
    sink: Annotated[int, AtLeast(0)] = 4
    local: Annotated[int, AtLeast(0)] = 64
    seed: Annotated[int, AtLeast(0)] = 0
    dense_layers: Annotated[int, AtLeast(0)] = 1

    effect = "none"

    @property
    def weights(self) -> MagicPIG:
        """1 / u of sampled entries."""
        return self

    def score(self, queries: Tensor, pages: Pages, visible: Tensor) -> Tensor:
        """Number of tables in which a key shares the query's bucket [H, G, w, n]."""
        keys = pages.keys.flatten(1, 2)
        mean = pages.once("learned", lambda: self.learned(keys, visible[:, 0, 0]), of_layer=True)
        rng = np.random.default_rng([self.seed, pages.trace.layer_ids[pages.layer]])
        directions = rng.standard_normal((self.tables, keys.shape[-1], self.bits))
        planes = torch.from_numpy(directions).to(keys.device)
        shared = keys.new_zeros(*queries.shape[:3], keys.shape[1], dtype=torch.int16)
        for table in planes:  # in float64, so that no sign depends on the shape of a product
            of_keys = _bucket(keys.double() - mean, table).unsqueeze(1).unsqueeze(2)
            shared += _bucket(queries.double(), table).unsqueeze(-1) == of_keys
        return shared

    def chosen(self, scores: Tensor, entries: Tensor, budget: int) -> Tensor:
        """The first and the last entries, and middle entries that share enough buckets."""
        visible = (entries > 0).expand_as(scores)
        return visible & (~self._between(visible) | (scores >= self.collisions))

    def learned(self, keys: Tensor, held: Tensor) -> Tensor:
        """The mean [H, 1, d] of held [H, n] keys [H, n, d] between the ends; float64."""
        between = self._between(held).unsqueeze(-1)
        total = keys.double().where(between, 0.0).sum(1, keepdim=True)
        return total / between.sum(1, keepdim=True).clamp(min=1)

    def log_weights(
        self, queries: Tensor, keys: Tensor, visible: Tensor, learned: Tensor
    ) -> Tensor:
        """-ln u of entries between the ends, 0 for the others, to add to logits [H, G, w, n].

        queries [H, G, w, d], keys [H, n, d]; visible [H, w, n]: the entries that rows have.
        """
        q, k = queries.double(), (keys.double() - learned).unsqueeze(1)
        size = q.norm(dim=-1, keepdim=True) * k.norm(dim=-1).unsqueeze(2)
        # a vector of length 0 is in the bucket of non-positive signs: as at a right angle
        cos = (q @ k.mT / size).where(size > 0, 0.0).clamp_(-1.0, 1.0)
        p = (1 - cos.acos_() / pi) ** self.bits
        others = self.tables - 1
        last = torch.log1p(-p if self.collisions == 1 else others * p)
        u = -torch.expm1(others * torch.log1p(-p) + last) + self.epsilon
        weights = -u.clamp_(min=torch.finfo(u.dtype).tiny).log_()
        return weights.where(self._between(visible).unsqueeze(1), 0.0).to(queries)

    def _between(self, visible: Tensor) -> Tensor:
        """Entries of visible [..., n] that are neither first, last nor a row's own."""
        number = visible.cumsum(-1)  # from 1 on
        last = number[..., -1:] - 1 - self.local
        return visible & (number > self.sink) & (number <= last)

    def summary_bits(self, dim: int) -> tuple[float, float]:
        """The code of an entry, which a row reads."""
        code = float(self.bits * self.tables)
        return code, code


def _bucket(x: Tensor, table: Tensor) -> Tensor:
    """The bucket of vectors x [..., d] in a table of directions [d, bits], int32."""
    power = 2 ** torch.arange(table.shape[-1], device=x.device, dtype=torch.int32)
    return ((x @ table > 0) * power).sum(-1, dtype=torch.int32)
