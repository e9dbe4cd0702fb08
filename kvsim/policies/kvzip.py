"""KVzip: keeps the entries that the model attends to while it repeats the context.

Kim et al., "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction", NeurIPS 2025,
arXiv 2505.23416, section 3. After the prefill the model reads the probe over the full cache: for
each chunk C of the context, a request to repeat the context, then the chunk itself. These rows are
not part of the sequence (`kvsim capture --probe repeat`). With queries q_i and keys k_p of its rows
P, the score of an entry j of the chunk is the largest weight that any row and any query head of the
group gives it in a softmax over the chunk and the rows up to its own,

    s_j = max_(i in P) exp(q_i . k_j) / Z_i
    Z_i = sum_(c in C) exp(q_i . k_c) + sum_(p in P, p <= i) exp(q_i . k_p)

with logits scaled as the model scales them. All heads of all layers share one budget and keep the
best of all their entries; `kvzip@uniform` keeps the same number in each head.

Deviations. The paper evicts before the question; later entries have no score. Here they rank above
the context, the newest first, and count in the budget, so events in decoding leave little of the
context. Scores of the context are computed once and stay with the entries. The whole context is
repeated, chat template and system message included, in chunks of 2,048 tokens. Without a `context`,
which the paper's setting needs, the whole prompt is repeated; in a chat the request then follows
the start of the assistant's turn. The released code keeps the tokens before the user's text, and
adds them to the softmax of each chunk: `sink` is the number of first entries treated so, 4 in
`kvzip@kvpress`. The release cuts at a threshold, so that one entry less may stay. Learned attention
sinks are left out. In `adakv+kvzip` and other combinations, the outer part decides how many entries
a head keeps.

The probe costs a second prefill: a row for each token of the context, which attends to the whole
context and to the earlier rows of its chunk. `kvsim study cost` counts its FLOPs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar

from kvsim.core.lazy import Tensor, torch
from kvsim.core.parameters import AtLeast
from kvsim.core.pieces import Allocator, Inputs, Plan, Scorer, Scores
from kvsim.core.select import compete
from kvsim.core.view import LOGIT_BYTES, View

#: Tokens of a chunk, for estimates of cost.
CHUNK = 2048


def chunk_lengths(n: float) -> list[float]:
    """Return the tokens of each chunk of a context of n tokens."""
    return [min(CHUNK, n - start) for start in range(0, int(n), CHUNK)]


class KVzip(Scorer):
    """Largest attention weight from rows that repeat a chunk.

    sink: first entries, which are protected and join the softmax of later chunks.
    """

    sink: Annotated[int, AtLeast(0)] = 0

    #: the score of an entry of the context
    columns: ClassVar[Mapping[str, float]] = {"importance": math.nan}
    reads = Inputs(arrays=frozenset({"probe_q", "probe_k"}))

    def score(self, view: View) -> Scores:
        """s_j of the context, at most 1; 2 + position after it; [L, H, n]."""
        chunks = view.array("chunks").tolist()
        inside = view.live & (view.pos < chunks[-1][1])
        importance = view["importance"]
        missing = inside & importance.isnan()
        if bool(missing.any()):  # in layers without evictions
            importance = self.importance(view).where(missing, importance)
        values = importance.where(inside, 2.0 + view.pos)
        return Scores(values, {"importance": importance})

    def importance(self, view: View) -> Tensor:
        """The largest weight of any row and any query head of the group; [L, H, n]."""
        return largest_weights(view, self.sink).amax(2)


def largest_weights(view: View, sink: int) -> Tensor:
    """max_i of the weights of a chunk's entries from the rows that repeat it; [L, H, G, n].

    In layers without evictions, where slots are positions. 0 if there are none.
    """
    queries, probe_keys = view.array("probe_q"), view.array("probe_k")
    keys, formula = view.keys, view.formula
    layers, heads, n, _ = keys.shape
    group, end = queries.shape[2], 0
    out = keys.new_zeros(layers, heads, group, n)
    for start, stop, rows in view.array("chunks").tolist() if n > view.row else ():
        begin, end = end, end + rows
        sinks = min(sink, start)
        parts = (keys[:, :, :sinks], keys[:, :, start:stop], probe_keys[:, :, begin:end])
        subset = torch.cat(parts, 2)  # [L, H, m, d]
        m = subset.shape[2]
        last = torch.arange(m - rows, m, device=keys.device)  # its own entry
        slot, into = torch.arange(m, device=keys.device), out[..., start:stop]
        step = max(1, LOGIT_BYTES // (layers * heads * group * m * subset.element_size()))
        for row in range(0, rows, step):
            part = slice(row, row + step)
            q = queries[:, :, :, begin:end][:, :, :, part].flatten(2, 3)  # [L, H, G * w, d]
            z = formula.capped((q @ subset.mT).mul_(formula.scale)).unflatten(2, (group, -1))
            z.masked_fill_(slot > last[part].unsqueeze(-1), -torch.inf)  # [L, H, G, w, m]
            best = z.softmax(-1)[..., sinks : sinks + stop - start].amax(3)
            torch.maximum(into, best, out=into)
    return out


class Pooled(Allocator):
    """All heads of all layers together keep their best entries, the sum of all budgets."""

    shared = "all"

    def plan(self, view: View, scores: Tensor, protected: Tensor) -> Plan:
        """Allocate to each head, [L, H], layers x heads x budget in all."""
        everything = (
            x.flatten(0, 1).unsqueeze(0) for x in (scores, protected, view.live, view.pos)
        )
        values, always, live, pos = everything
        total = view.budget.expand_as(view.count).sum().minimum(view.count.sum())
        won = compete(values, always.sum(-1), total.unsqueeze(0), always, live, pos)
        return Plan(won.view_as(view.count))
