"""Intermittent attention: keys that a window of rows does without, and a later one wants again.

G-KV, arXiv 2512.00504, remembers scores because keys are attended to, then not, then again. The
paper gives no measure of it. The one here leaves nothing open:

* Windows are blocks of `window` rows one after the other, from row `start` on. Every window ranks
  the same keys, those before `start`, by G-KV's score (eq. 2), in each KV head.
* A key is in a window's top if it is among the max(1, round(share x keys)) highest scores there,
  the lower position first among equals.
* A key that is in m >= 2 tops returns m - 1 times; the gap of a return is the number of windows
  between two consecutive tops of the key, 0 where the windows are neighbours.

Chance is the mean over all orders of the windows. It keeps how many tops each key has and is exact:
by combinatorics, nothing is drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

import numpy as np

from kvsim.analysis.arrays import Floats, Ints, share
from kvsim.analysis.attention.windows import WINDOW, row_blocks, window_scores
from kvsim.core.trace import Trace
from kvsim.errors import TraceError

#: Share of the keys that is a window's top.
SHARE = 0.1


@dataclass(frozen=True)
class Gaps:
    """Gaps of one layer; W windows. All counts are per KV head.

    gaps [H, W - 1]: returns after g = 0, 1, ... windows without the key. keys [H]: keys in at least
    one top. back [H]: those that returned after a gap of at least one window.
    """

    gaps: Ints | Floats
    keys: Ints
    back: Ints | Floats

    @property
    def mean_gap(self) -> Floats:
        """Windows without the key before it returns, mean over returns; [H], NaN without one."""
        return share((self.gaps * np.arange(self.gaps.shape[-1])).sum(-1), self.gaps.sum(-1))

    @property
    def after_gap(self) -> Floats:
        """Share of the returns that the window just before did without; [H]."""
        return share(self.gaps[:, 1:].sum(-1), self.gaps.sum(-1))

    @property
    def keys_back(self) -> Floats:
        """Share of the keys in any top that came back after a gap; [H]."""
        return share(self.back, self.keys)


@dataclass(frozen=True)
class GapsAndChance(Gaps):
    """Gaps, next to the means of the counts over all orders of the windows."""

    chance: Gaps


def default_windows(trace: Trace) -> tuple[int, int]:
    """Return the row from which windows are taken, and their width; 0 if the trace is too short.

    From the end of the prompt, or from the middle of a trace whose prompt is shorter than half of
    it; 16 rows, G-KV's window, or an eighth of the rows from there on.
    """
    start = max(trace.prompt_len, trace.n_pos // 2)
    return start, min(WINDOW, (trace.n_pos - start) // 8)


def attention_gaps(
    trace: Trace,
    layer: int,
    *,
    start: int | None = None,
    window: int | None = None,
    share: float = SHARE,
    device: str = "cpu",
) -> GapsAndChance:
    """Gaps of the keys before row `start` over whole windows from there on.

    Raises TraceError where there are no keys or not two windows.
    """
    keys, width = default_windows(trace)
    keys, width = keys if start is None else start, width if window is None else window
    count = (trace.n_pos - keys) // width if width > 0 else 0
    if keys < 1 or count < 2:
        raise TraceError(
            f"{trace.name} has {trace.n_pos} rows: two windows of {width} rows from row {keys} on "
            "do not fit, or no key is before them; give a smaller window or a longer trace"
        )
    windows = row_blocks(keys, keys + count * width, width)
    n_top = max(1, round(share * keys))
    shape = trace.n_heads, keys
    gaps = np.zeros((trace.n_heads, count - 1), np.int64)
    tops = np.zeros(shape, np.int64)
    last = np.full(shape, -1)  # the latest window with the key in its top
    apart = np.zeros(shape, bool)
    for at, scores in enumerate(window_scores(trace, layer, windows, keys, device=device)):
        best = np.argsort(-scores, axis=-1, kind="stable")[:, :n_top]
        head = np.arange(len(best))[:, None]
        before = last[head, best]
        again = before >= 0
        gap = at - before - 1
        np.add.at(gaps, (np.broadcast_to(head, best.shape)[again], gap[again]), 1)
        apart[head, best] |= again & (gap > 0)
        tops[head, best] += 1
        last[head, best] = at
    expected, broken = _orders(count)
    numbers = np.stack([(tops == m).sum(-1) for m in range(count + 1)], axis=-1)  # [H, W + 1]
    keys_in_top = (tops > 0).sum(-1)
    chance = Gaps(numbers @ expected, keys_in_top, numbers @ broken)
    return GapsAndChance(gaps, keys_in_top, apart.sum(-1), chance)


def _orders(count: int) -> tuple[Floats, Floats]:
    """Of a key in m of `count` windows in random order, by m: returns by gap, and any gap at all.

    [count + 1, count - 1] and [count + 1]. Two tops g windows apart with none between can start at
    count - g - 1 places; the other m - 2 are outside. Without any gap the tops are one run.
    """
    returns = np.zeros((count + 1, count - 1))
    broken = np.zeros(count + 1)
    for m in range(2, count + 1):
        ways = comb(count, m)
        for gap in range(count - 1):
            returns[m, gap] = (count - gap - 1) * comb(count - gap - 2, m - 2) / ways
        broken[m] = 1 - (count - m + 1) / ways
    return returns, broken
