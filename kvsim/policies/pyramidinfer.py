"""PyramidInfer: every layer of the prefill drops some of its tokens.

Yang et al., "PyramidInfer: Pyramid KV Cache Compression for High-throughput LLM Inference",
arXiv 2405.12532, in the configuration that ASL compares with. Of n tokens, the last 1 + R are
recent, R = int(recent n), and always propagate. The c tokens before them that reach layer l of L
are its candidates. They are ranked by the attention of the recent rows, averaged over query heads
and rows, with weights from 1 for the oldest row to 1.2 for the newest; the first `sink`
tokens rank before all others. The first int(c rho_l) of them propagate,

    rho_l = ratio + (1 - ratio) (cos(pi l / L) + 1) / 2,

if these are more than min(least, n - 1 - R), and otherwise all of them. In layer 0, rho_l is 1,
so it drops nothing. The budget is ignored: the caches hold the tokens that each layer processes, at
their own positions.

Deviations. The paper chooses tokens by a share of the attention; the released code, and kvsim, by a
share of the tokens. `ratio` is 0.9, and 0.8 in the configuration of Qwen2.5-14B. In decoding the
release trims segments by a rule whose trigger compares unrelated lengths; kvsim keeps everything in
decoding.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Annotated

from kvsim.core.lazy import Tensor, torch
from kvsim.core.parameters import AtLeast, Below, Between
from kvsim.core.propagation import Forecast, Propagation, Step
from kvsim.core.view import LOGIT_BYTES, View
from kvsim.policies.asl import best_and_rest, ranks

# Weight of the newest recent row; the oldest weighs 1.
_NEWEST = 1.2


class PyramidInfer(Propagation):
    """A share of the context, by the attention of recent rows, after every layer."""

    caches = "all"
    effect = "none"

    recent: Annotated[float, AtLeast(0), Below(1)] = 0.2
    ratio: Annotated[float, Between(0, 1)] = 0.9
    sink: Annotated[int, AtLeast(0)] = 4
    least: Annotated[int, AtLeast(0)] = 64

    def after(self, view: View, memory: int | None) -> Step:
        """Select the best of the context, and the recent rows; `memory` is the prompt's length."""
        count = view.row + 1
        n = count if memory is None else memory
        recent = 1 + int(self.recent * n)
        context = count - recent
        kept = self._kept(context, n, int(view.layers[0]), view.setting.n_layers)
        if kept == context:
            return Step(memory=n)
        scores = self._scores(view, recent)
        scores[: self.sink] = torch.inf  # before all others, in their order
        return Step(best_and_rest(ranks(scores), kept, count), memory=n)

    def _scores(self, view: View, recent: int) -> Tensor:
        """Attention of the recent rows on the context, weighted towards the newest; [c]."""
        count = view.row + 1
        weight = torch.linspace(1.0, _NEWEST, recent, dtype=view.keys.dtype)
        weight = weight.to(view.keys.device)
        total = view.keys.new_zeros(count - recent)
        queries = view.queries(1)
        per_row = queries.shape[1] * queries.shape[2] * count * total.element_size()
        step = max(1, LOGIT_BYTES // per_row)
        for start in range(count - recent, count, step):
            stop = min(start + step, count)
            rows = view.attn(range(start, stop))[0, ..., : count - recent].mean((0, 1))  # [w, c]
            total += weight[start - count + recent : stop - count + recent] @ rows
        return total

    def _kept(self, context: int, n: int, layer: int, n_layers: int) -> int:
        rho = self.ratio + (1 - self.ratio) * (math.cos(math.pi * layer / n_layers) + 1) / 2
        kept = int(context * rho)
        return kept if kept > min(self.least, n - 1 - int(self.recent * n)) else context

    def forecast(
        self, budget: int, prompt_len: int, n_layers: int, layer: int | None = None
    ) -> Forecast:
        """Rows by the cosine; the budget and `layer` have no effect.

        Layers without drops have no scores: by their number all rows propagate.
        """
        recent = 1 + int(self.recent * prompt_len)
        rows, count = [], prompt_len
        for at in range(n_layers):
            rows.append(count)
            count = recent + self._kept(count - recent, prompt_len, at, n_layers)
        return Forecast(rows, scored=[at for at, (n, m) in enumerate(pairwise(rows)) if m < n])
