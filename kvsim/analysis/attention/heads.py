"""What each query head of a layer does with its attention, in a few numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from kvsim.analysis.kept.retention import SINK
from kvsim.core.trace import Trace

Floats = NDArray[np.float64]

#: Most recent positions, the row's own among them, that count as local.
LOCAL = 32
#: An entry with less than this share of a row's largest weight gets next to nothing.
LEAST = 0.01
_BLOCK = 64


@dataclass(frozen=True)
class HeadProfile:
    """Means over the rows of the response for each query head; [qhead] each.

    sink: attention on the first 4 positions. local: on the 32 most recent ones. entropy: in nats.
    sparsity: share of the positions seen that get less than 1 % of the row's largest weight.
    """

    sink: Floats
    local: Floats
    entropy: Floats
    sparsity: Floats


def head_table(trace: Trace, layer: int) -> pl.DataFrame:
    """Return `head_profile` as a table with a row for each query head: qhead, head, the means."""
    profile = head_profile(trace, layer)
    heads = range(trace.n_qheads)
    return pl.DataFrame(
        {"qhead": heads, "head": [qhead // trace.group for qhead in heads], **vars(profile)}
    )


def head_profile(
    trace: Trace, layer: int, *, sink: int = SINK, local: int = LOCAL, least: float = LEAST
) -> HeadProfile:
    """Where the attention of every query head of a layer rests; one walk over the layer.

    Rows are those after the prompt, or all of them where nothing comes after it. First and recent
    positions overlap in short rows, so that shares can add up to more than 1.
    """
    start = trace.prompt_len if trace.prompt_len < trace.n_pos else 0
    sums = np.zeros((4, trace.n_qheads))
    for first in range(start, trace.n_pos, _BLOCK):
        rows = slice(first, min(first + _BLOCK, trace.n_pos))
        # no key behind the block's last row is seen
        a = trace.attention(layer, rows, slice(0, rows.stop)).double()
        at = np.arange(rows.start, rows.stop)
        seen = np.arange(rows.stop) <= at[:, None]
        weights = a.numpy()
        recent = seen & (np.arange(rows.stop) > at[:, None] - local)
        small = (weights < least * weights.max(-1, keepdims=True)) & seen
        with np.errstate(divide="ignore", invalid="ignore"):
            surprise = np.where(weights > 0, -weights * np.log(weights), 0.0)
        sums += [
            weights[..., :sink].sum((1, 2)),
            (weights * recent).sum((1, 2)),
            surprise.sum((1, 2)),
            (small.sum(-1) / seen.sum(-1)).sum(1),
        ]
    return HeadProfile(*(sums / (trace.n_pos - start)))
