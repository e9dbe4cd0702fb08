"""Attention sparsity: the share of keys with a small score, relative to the largest one.

G-KV, arXiv 2512.00504, Fig. 9: the share of keys with a score (eq. 2) below p times the maximum,
over the last 512 tokens of the full cache and over a compressed cache, in a window of the last 16
rows.

The paper says "maximum in a sequence" and leaves open over which keys it is taken. The first
positions (the sink) usually hold it, which all but guarantees a high sparsity, so a variant leaves
them out. Keys inside the window are not counted: only some rows of the window see them, which
lowers their mean.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvsim.analysis.arrays import Bools, Floats, share
from kvsim.analysis.attention.windows import (
    WINDOW,
    log_attention,
    mean_of_rows,
    row_blocks,
    window_scores,
)
from kvsim.analysis.axes import trace_layer
from kvsim.analysis.kept.retention import SINK
from kvsim.analysis.subject import by_layer
from kvsim.core.lazy import Tensor, torch
from kvsim.core.record import Record
from kvsim.core.trace import Trace

#: p, the shares of the maximum; the paper names 0.01 and 0.05.
SHARES = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5)

#: Keys before the window that are counted in the full cache.
DOMAIN = 512


#: Shares [H] of the keys, by variant of the metric, p and the keys of the maximum; NaN without
#: keys.
Sparsity = dict[str, Floats]


def attention_sparsity(
    trace: Trace,
    layer: int,
    *,
    shares: Sequence[float] = SHARES,
    window: int = WINDOW,
    domain: int = DOMAIN,
    sink: int = SINK,
) -> Sparsity:
    """Sparsity of full attention: the last `window` rows and at most `domain` keys before them.

    NaN where the trace is not longer than the window. Raises PolicyError for a layer that it does
    not have.
    """
    layer = trace_layer(trace, layer)
    start = max(0, trace.n_pos - window)
    rows = [slice(start, trace.n_pos)] if start else []
    scores = next(window_scores(trace, layer, rows, start), np.empty((trace.n_heads, 0)))
    counted = np.broadcast_to(np.arange(start) >= start - domain, scores.shape)
    return _sparsity(scores, np.ones_like(counted), counted, shares, sink)


def compressed_sparsity(
    trace: Trace,
    records: Sequence[Record],
    device: str = "cpu",
    *,
    shares: Sequence[float] = SHARES,
    window: int = WINDOW,
    sink: int = SINK,
) -> list[list[Sparsity]]:
    """Sparsity of attention over visible entries, for each record and each of its layers.

    Rows are the last `window` after the prompt, each with its attention over its visible entries,
    which sums to 1. Counted keys, over which the maximum is also taken, are those before the window
    that the last row sees: the compressed cache. Rows are the recorded ones, so that the value can
    be compared with that of the full cache; the paper's own window ends at an event.

    NaN for records with keys rotated to slots, whose attention differs. Attention of a layer is
    computed once for all records.
    """
    start = max(trace.prompt_len, trace.n_pos - window)
    rows = row_blocks(start, trace.n_pos, window)  # no block without rows after the prompt

    def attention(layer: int) -> list[Tensor]:
        return [z for _, z in log_attention(trace, layer, rows, device=device)]

    def sparsity(record: Record, index: int, blocks: list[Tensor]) -> Sparsity:
        gone = record.gone_after[index]
        if record.positions == "slot" or not blocks:
            none = np.empty((len(gone), 0))
            return _sparsity(none, none > 0, none > 0, shares, sink)
        (z,) = blocks
        by_head = z if len(gone) == len(z) else z.flatten(0, 1).unsqueeze(1)
        row = torch.arange(start, trace.n_pos, device=z.device)[:, None]
        hidden = torch.from_numpy(gone).to(z.device)[:, None, None] < row  # later ones are -inf
        weights = by_head.masked_fill(hidden, -torch.inf).softmax(-1)
        retained = gone[:, :start] >= trace.n_pos - 1
        return _sparsity(mean_of_rows(weights[..., :start]), retained, retained, shares, sink)

    return by_layer(records, attention, sparsity)


def _sparsity(
    scores: Floats, measured: Bools, counted: Bools, shares: Sequence[float], sink: int
) -> Sparsity:
    """Sparsity of scores [H, n]: maxima over the keys `measured`, shares of the keys `counted`."""
    behind = np.arange(scores.shape[-1]) >= sink
    out: Sparsity = {}
    for p in shares:
        for name, keys in (("sequence", slice(None)), ("behind_sink", behind)):
            among, of = (x[:, keys] for x in (measured, counted))
            peak = np.where(among, scores[:, keys], 0.0).max(-1, initial=0.0)
            low = scores[:, keys] < p * peak[:, None]
            out[f"p={p:g},max={name}"] = share((low & of).sum(-1), of.sum(-1))
    return out
