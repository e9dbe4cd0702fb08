"""Recall and wipe-out of a needle: how many of its entries the rows after the prompt still see.

A needle is a token span of the prompt (`Trace.spans`): needle in a haystack, Kamradt 2023,
github.com/gkamradt/LLMTest_NeedleInAHaystack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvsim.analysis.arrays import EvictedAt, Floats, Ints


@dataclass(frozen=True)
class Needle:
    """Visibility of needles in one layer, mean over the rows after the prompt; [H].

    recall: share of the needles' entries that a row sees. chance: share of all entries of the
    prompt that it sees, the expected recall of random sets of the same size. wipeout: share of the
    needles of which it sees no entry. All are NaN without a row after the prompt.
    """

    recall: Floats
    chance: Floats
    wipeout: Floats


def needle_visibility(
    evicted_at: EvictedAt, prompt_len: int, spans: Sequence[tuple[int, int]]
) -> Needle:
    """Return how much of the needles at `spans` [start, end) the rows after the prompt see.

    evicted_at [H, T] of one layer. Spans that share positions count these once in `recall`.
    """
    heads, total = evicted_at.shape
    rows = total - prompt_len
    if not rows:
        return Needle(*(np.full(heads, np.nan) for _ in range(3)))
    # rows after the prompt that see each of its entries
    seen: Ints = np.clip(evicted_at[:, :prompt_len].astype(np.int64) - prompt_len + 1, 0, rows)
    marked = np.zeros(prompt_len, dtype=np.bool_)
    for start, end in spans:
        marked[start:end] = True
    # a needle is visible until its last entry leaves
    visible = np.stack([seen[:, start:end].max(-1) for start, end in spans])  # [n, H]
    return Needle(
        recall=seen[:, marked].mean(-1) / rows,
        chance=seen.mean(-1) / rows,
        wipeout=1.0 - visible.mean(0) / rows,
    )


def global_eviction(
    evicted_at: EvictedAt, prompt_len: int, spans: Sequence[tuple[int, int]]
) -> float:
    """Share of the needles' tokens that have left every head of every layer.

    evicted_at [L, H, T]. Mean over the rows after the prompt; NaN without one.
    """
    rows = evicted_at.shape[-1] - prompt_len
    if not rows:
        return np.nan
    marked = sorted({pos for start, end in spans for pos in range(start, end)})
    last = evicted_at[:, :, marked].astype(np.int64).max((0, 1))  # row that sees a token last
    seen = np.clip(last - prompt_len + 1, 0, rows)
    return float(1.0 - seen.mean() / rows)
