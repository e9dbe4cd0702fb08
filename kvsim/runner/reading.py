"""Sparse attention on a running model: the entries that each row reads."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvsim.core.reading import Reads, SparseAttention
from kvsim.core.trace import Trace
from kvsim.engine.reading import Period, account, choose, note, reads_all


class LiveReads:
    """Which pages the rows after the prompt read, chosen when they run, and the account of it.

    sketch: the sequence to be run; layers: those that evict or read. Raises MemoryLimitError where
    the account of all rows would take more than 2 GiB.
    """

    def __init__(
        self, sketch: Trace, sparse: SparseAttention, budget: int, layers: Sequence[int]
    ) -> None:
        self._sketch, self._budget, self._layers = sketch, budget, tuple(layers)
        self._sparse = sparse.at(sketch, budget)
        self._bits = account(sketch, self._sparse, layers)
        #: values of each layer that are computed once
        self._of_layer = {layer: dict[Hashable, Any]() for layer in layers}

    def chooses(self, layer: int, stop: int) -> bool:
        """Whether one of the rows before `stop` may read a part of a layer."""
        first, sparse = self._sketch.prompt_len, self._sparse
        return stop > first and not reads_all(self._sketch, sparse, layer)

    def entries(
        self, layer: int, start: int, query: Tensor, keys: Tensor, values: Tensor, resident: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Which entries the rows from `start` on read, bool [qhead, w, n], and with which weights.

        query [qhead, w, d] of these rows, which are the last of keys and values [H, n, d]; resident
        [H, n]: False on pads. Rows of the prompt read everything, and none is causal yet. Weights
        are logarithms; None without them.
        """
        sparse, heads, first = self._sparse, len(keys), self._sketch.prompt_len
        period = Period(keys, values, resident, sparse.page)
        of_layer = self._of_layer[layer]
        pages = period.pages(self._sketch, layer, sparse, self._budget, of_layer)
        out = torch.ones(*query.shape[:2], keys.shape[1], dtype=torch.bool, device=query.device)
        skip = max(0, first - start)
        q = query[:, skip:].unflatten(0, (heads, -1))
        slots = period.slots[:, keys.shape[1] - q.shape[2] :]
        chosen = choose(sparse, q, pages, slots, self._budget)
        note(self._bits[self._layers.index(layer)], chosen, start + skip - first)
        chosen = chosen.repeat_interleave(len(query) // len(chosen), 0)
        page = (period.slots.clamp(min=0) // sparse.page).repeat_interleave(q.shape[1], 0)
        out[:, skip:] = chosen.gather(-1, page.unsqueeze(1).expand_as(out[:, skip:]))
        if sparse.weights is None:
            return out, None
        new = q.shape[2]
        seen = torch.ones_like(out[0, skip:]).tril(keys.shape[1] - new) & resident.unsqueeze(1)
        weights = sparse.weights.log_weights(q, keys, seen, self._of_layer[layer]["learned"])
        return out, torch.nn.functional.pad(weights.flatten(0, 1), (0, 0, skip, 0))

    def record(self, n: int) -> Reads:
        """The account of the first n rows of the text."""
        sparse, first = self._sparse, self._sketch.prompt_len
        size = -(-n // sparse.page) // 8 + 1
        bits = np.ascontiguousarray(self._bits[:, :, : max(0, n - first), :size])
        return Reads.of(sparse, bits, first, self._sketch.dim)
