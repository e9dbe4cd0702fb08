"""Attention of each query head of a layer, in a few numbers."""

from __future__ import annotations

import numpy as np
import polars as pl

from kvsim.analysis.arrays import Ints
from kvsim.analysis.attention.windows import row_blocks
from kvsim.analysis.kept.retention import SINK
from kvsim.core.trace import Trace

_BLOCK = 64


def head_table(
    trace: Trace, layer: int, *, sink: int = SINK, local: int = 32, least: float = 0.01
) -> pl.DataFrame:
    """Return where the attention of the query heads of a layer rests, a row each.

    qhead, head, then means over the rows after the prompt, or over all where nothing comes after
    it: sink, attention on the first `sink` positions; local, on the `local` most recent ones, the
    row's own among them; entropy, in nats; sparsity, the share of the visible positions that get
    less than `least` of the row's largest weight. First and recent positions overlap in short rows,
    so that shares can add up to more than 1.
    """
    start = trace.prompt_len if trace.prompt_len < trace.n_pos else 0
    sums = np.zeros((4, trace.n_qheads))
    for rows in row_blocks(start, trace.n_pos, _BLOCK):
        # no key behind the block's last row is seen
        weights = trace.attention(layer, rows, slice(0, rows.stop)).double().numpy()
        row, pos = np.arange(rows.start, rows.stop)[:, None], np.arange(rows.stop)
        seen = pos <= row
        small = (weights < least * weights.max(-1, keepdims=True)) & seen
        with np.errstate(divide="ignore", invalid="ignore"):
            surprise = np.where(weights > 0, -weights * np.log(weights), 0.0)
        sums += [
            weights[..., :sink].sum((1, 2)),
            (weights * (seen & (pos > row - local))).sum((1, 2)),
            surprise.sum((1, 2)),
            (small.sum(-1) / seen.sum(-1)).sum(1),
        ]
    qhead = np.arange(trace.n_qheads)
    means = zip(("sink", "local", "entropy", "sparsity"), sums / (trace.n_pos - start), strict=True)
    return pl.DataFrame({"qhead": qhead, "head": qhead // trace.group, **dict(means)})


def last_needed(trace: Trace, layer: int, head: int, *, least: float) -> Ints:
    """Return the last row whose full attention on each position is at least `least`; [pos].

    For some query head of the KV head's group; -1 where there is no such row. An entry that a
    policy evicted after an earlier row than this is missed.
    """
    heads = slice(head * trace.group, (head + 1) * trace.group)
    last = np.full(trace.n_pos, -1, dtype=np.int64)
    for rows in row_blocks(0, trace.n_pos, _BLOCK):
        weights = trace.attention(layer, rows, slice(0, rows.stop))[heads].amax(0)
        row, pos = (weights >= least).numpy().nonzero()
        np.maximum.at(last, pos, rows.start + row)
    return last
