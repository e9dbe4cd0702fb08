"""Full attention of a layer in blocks of rows: scores of keys in windows, and of heads in numbers.

A layer is read once, and no more than one block of rows by keys stands in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import polars as pl
import torch
from torch import Tensor

from kvsim.analysis.arrays import Floats, Ints
from kvsim.analysis.kept.retention import SINK
from kvsim.core.attention import sees
from kvsim.core.trace import Trace

#: Rows of G-KV's observation window.
WINDOW = 16
#: Rows of a block of `head_table` and `last_needed`.
_BLOCK = 64


def row_blocks(start: int, stop: int, width: int) -> list[slice]:
    """Rows start..stop-1 in blocks of `width`, the last one shorter where they do not divide."""
    return [slice(a, min(a + width, stop)) for a in range(start, stop, width)]


def log_attention(
    trace: Trace,
    layer: int,
    blocks: Sequence[slice],
    *,
    keys: int | None = None,
    device: str = "cpu",
) -> Iterator[tuple[slice, Tensor]]:
    """(rows, log of their full attention [H, G, w, n]) of every block, in the order given.

    keys: positions 0..keys-1 alone; by default all up to the block's last row. A position that the
    row does not see has -inf. Exact through the log-sum-exp of each row.
    """
    if not blocks:
        return
    one, formula = slice(layer, layer + 1), trace.formulas[layer]
    first, stop = min(b.start for b in blocks), max(b.stop for b in blocks)
    q = trace.read("q", one, slice(first, stop))[0].to(device).unflatten(0, (trace.n_heads, -1))
    k = trace.read("k", one, slice(0, stop if keys is None else keys))[0].to(device).mT
    known = trace.read("lse", one)[0] if trace.has("lse") else trace.full(one)[1][0]
    lse = known[:, first:stop].to(device).unflatten(0, (trace.n_heads, -1))
    for rows in blocks:
        own = slice(rows.start - first, rows.stop - first)
        n = rows.stop if keys is None else keys
        queries = q[:, :, own] * formula.scale
        # the rows of a group share their keys: one product per KV head
        z = (queries.flatten(1, 2) @ k[..., :n]).unflatten(1, queries.shape[1:3])
        z = formula.capped(z).sub_(lse[:, :, own, None])
        hides = 0 if formula.window is not None else rows.start  # where something may be hidden
        if n > hides:
            row, pos = (
                torch.arange(*x, device=z.device) for x in ((rows.start, rows.stop), (hides, n))
            )
            z[..., hides:].masked_fill_(~sees(row, pos, formula.window), -torch.inf)
        yield rows, z


def window_scores(
    trace: Trace, layer: int, windows: Sequence[slice], keys: int, *, device: str = "cpu"
) -> Iterator[Floats]:
    """For each window of rows the score [H, keys] of the first keys.

    The score of a key is its full attention, maximum over the group and mean over the rows (G-KV,
    arXiv 2512.00504, eq. 2).
    """
    for _, z in log_attention(trace, layer, windows, keys=keys, device=device):
        yield mean_of_rows(z.exp_())


def mean_of_rows(attention: Tensor) -> Floats:
    """Maximum over the group and mean over the rows of attention [H, G, w, n]; [H, n]."""
    return attention.amax(1).double().mean(1).cpu().numpy()


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
