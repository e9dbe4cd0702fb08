"""Attention-window overlap: do the keys that matter now matter later?

G-KV, arXiv 2512.00504, Fig. 1.

A property of a trace, no policy involved. Four blocks of `window` rows at the end of the trace; the
score of a key in a block is its full attention, maximum over the group and mean over the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from kvsim.analysis.arrays import Floats
from kvsim.analysis.attention.agreement import places
from kvsim.analysis.attention.windows import row_blocks, window_scores
from kvsim.core.trace import Trace
from kvsim.errors import TraceError

#: G-KV names the smallest and, for the union of earlier windows, 55 %.
SHARES = (0.05, 0.1, 0.25, 0.5, 0.55)

#: Shares of the keys that count as top.
TOPS = tuple(place / 20 for place in range(1, 21))


@dataclass(frozen=True)
class WindowOverlap:
    """Overlap of the last block's top keys with those of the three before; [share] or [3, share].

    chance: top keys / keys, the expected overlap of two independent sets; a little above the share,
    because a set of keys has a whole size.

    before: each earlier block, the oldest first. union: all three together, whose size is
    `union_size` of the keys. equal_budget: as many keys as in one top set, by the largest of the
    three blocks' scores. Means over heads.
    """

    shares: Floats
    before: Floats
    union: Floats
    union_size: Floats
    equal_budget: Floats
    chance: Floats

    @property
    def chance_union(self) -> Floats:
        """Expected share that three independent sets cover."""
        return 1.0 - (1.0 - self.chance) ** 3


def default_window(n_pos: int) -> int:
    """128 rows, as in the paper, or an eighth of a shorter trace; 0 if too short."""
    return min(128, n_pos // 8)


def window_overlap(
    trace: Trace, layer: int, *, window: int | None = None, shares: Sequence[float] = SHARES
) -> WindowOverlap:
    """Overlap of the top ceil(share x keys) keys, among keys before the first of the four blocks.

    Keys later than that are left out, so that all blocks rank the same set. Raises TraceError where
    four windows leave no key.
    """
    width = default_window(trace.n_pos) if window is None else window
    domain = trace.n_pos - 4 * width
    if width < 1 or domain < 1:
        raise TraceError(
            f"{trace.name} has {trace.n_pos} rows: four windows of {width} leave no keys before "
            "them; give a smaller window or a longer trace"
        )
    if layer % trace.n_layers in trace.windowed:
        raise TraceError(
            f"layer {layer} of {trace.name} has a sliding window, so later rows cannot attend to "
            "most keys; expected a layer that sees the whole text"
        )
    blocks = row_blocks(domain, trace.n_pos, width)
    scores = np.stack(list(window_scores(trace, layer, blocks, domain)))  # [4, H, D]
    each = np.asarray(shares, dtype=np.float64)
    top = np.ceil(each * domain - 1e-9).astype(np.int64)  # 0.1 * 30 is a little above 3
    peak = scores[:3].max(-1, keepdims=True)
    merged = places((scores[:3] / np.where(peak > 0, peak, 1.0)).max(0))  # [H, D]
    inside = places(scores)[..., None] < top  # [4, H, D, share]
    last, earlier = inside[3], inside[:3]
    union = earlier.any(0)
    return WindowOverlap(
        shares=each,
        before=(last & earlier).sum(2).mean(1) / top,
        union=(last & union).sum(1).mean(0) / top,
        union_size=union.mean((0, 1)),
        chance=top / domain,
        equal_budget=(last & (merged[..., None] < top)).sum(1).mean(0) / top,
    )


def overlap_table(
    trace: Trace, layer: int, *, window: int | None = None, shares: Sequence[float] = TOPS
) -> pl.DataFrame:
    """Return the numbers of `window_overlap`, a row for each share.

    share, then means over heads: `oldest`, `second`, `third` window, `union` of the three,
    `equal_budget` (as many keys as one set has), `chance` of one set and `chance_union`.
    """
    overlap = window_overlap(trace, layer, window=window, shares=shares)
    oldest, second, third = overlap.before
    windows = {"share": overlap.shares, "oldest": oldest, "second": second, "third": third}
    names = ("union", "equal_budget", "chance", "chance_union")
    return pl.DataFrame(windows | {name: getattr(overlap, name) for name in names})
