"""Windows of rows of full attention: scores of keys, overlap of top keys, gaps between them.

A layer is read once, with one block of rows by keys in memory at a time.

Overlap (G-KV, arXiv 2512.00504, Fig. 1): whether keys with a high score keep it in later windows.
Four blocks of `window` rows at the end of the trace; no policy is involved.

Intermittence: G-KV remembers scores because keys are attended to, then not, then again. The paper
defines no measure of it. Here:

* Windows are consecutive blocks of `window` rows from row `start` on. Every window ranks the same
  keys, the ones before `start`, by G-KV's score (eq. 2), in each KV head.
* A key is in a window's top if it is among the max(1, round(share x keys)) highest scores there,
  the lower position first among equals.
* A key that is in m >= 2 tops returns m - 1 times; the gap of a return is the number of windows
  between two consecutive tops of the key, 0 for neighbouring windows.

Chance is the mean over all orders of the windows, with the number of tops of each key fixed. It is
computed exactly, by combinatorics.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import comb

import numpy as np

from kvsim.analysis.arrays import Floats, Ints, share
from kvsim.analysis.attention.agreement import places
from kvsim.analysis.axes import trace_layer
from kvsim.core.attention import sees
from kvsim.core.lazy import Tensor, torch
from kvsim.core.trace import Trace
from kvsim.errors import TraceError

#: Rows of G-KV's observation window.
WINDOW = 16


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
    """Yield (rows, log of their full attention [H, G, w, n]) of every block, in the order given.

    keys: only positions 0..keys-1; by default all up to the block's last row. A position that the
    row does not see has -inf. Exact through the log-sum-exp of each row.
    """
    if not blocks:
        return
    layer = trace_layer(trace, layer)
    part, formula = slice(layer, layer + 1), trace.formulas[layer]
    start, stop = min(b.start for b in blocks), max(b.stop for b in blocks)
    q = trace.read("q", part, slice(start, stop))[0].to(device).unflatten(0, (trace.n_heads, -1))
    k = trace.read("k", part, slice(0, stop if keys is None else keys))[0].to(device).mT
    at = slice(start, stop)
    of_rows = trace.read("lse", part, at) if trace.has("lse") else trace.full(part, at)[1]
    lse = of_rows[0].to(device).unflatten(0, (trace.n_heads, -1))
    for rows in blocks:
        here = slice(rows.start - start, rows.stop - start)
        n = rows.stop if keys is None else keys
        queries = q[:, :, here] * formula.scale
        # the rows of a group share their keys: one product per KV head
        z = (queries.flatten(1, 2) @ k[..., :n]).unflatten(1, queries.shape[1:3])
        z = formula.capped(z).sub_(lse[:, :, here, None])
        hides = 0 if formula.reach is not None else rows.start  # only where a key may be masked out
        if n > hides:
            row, pos = (
                torch.arange(*x, device=z.device) for x in ((rows.start, rows.stop), (hides, n))
            )
            z[..., hides:].masked_fill_(~sees(row, pos, formula), -torch.inf)
        yield rows, z


def window_scores(
    trace: Trace, layer: int, windows: Sequence[slice], keys: int, *, device: str = "cpu"
) -> Iterator[Floats]:
    """Scores [H, keys] of the first keys, for each window of rows.

    The score of a key is its full attention, maximum over the group and mean over the rows (G-KV,
    arXiv 2512.00504, eq. 2).
    """
    for _, z in log_attention(trace, layer, windows, keys=keys, device=device):
        yield mean_of_rows(z.exp_())


def mean_of_rows(attention: Tensor) -> Floats:
    """Maximum over the group and mean over the rows of attention [H, G, w, n]; [H, n]."""
    return attention.amax(1).double().mean(1).cpu().numpy()


#: G-KV names the smallest and, for the union of earlier windows, 55 %.
SHARES = (0.05, 0.1, 0.25, 0.5, 0.55)


def default_window(n_pos: int) -> int:
    """128 rows, as in the paper, or an eighth of a shorter trace; 0 if too short."""
    return min(128, n_pos // 8)


def window_overlap(
    trace: Trace, layer: int, *, window: int | None = None, shares: Sequence[float] = SHARES
) -> dict[str, tuple[Floats, Floats]]:
    """Overlap of the top ceil(share x keys) keys, among keys before the first of the four blocks.

    Variants: "block=1" to "block=3", each earlier block, the oldest first; "union", all three
    together; "equal_budget", as many keys as in one top set, by the largest of the three blocks'
    scores. Means over heads. Chance is the expected overlap of independent sets: top keys / keys, a
    little above the share, because a set of keys has a whole size.

    Later keys are left out, so that all blocks rank the same set. Raises TraceError where four
    windows leave no key, PolicyError for a layer that the trace does not have.
    """
    layer = trace_layer(trace, layer)
    width = default_window(trace.n_pos) if window is None else window
    domain = trace.n_pos - 4 * width
    if width < 1 or domain < 1 or layer in trace.windowed:
        raise TraceError(
            f"{trace.name}, layer {layer}: expected keys that four windows of {width} rows see; "
            "give a smaller window, a longer trace, or a layer that sees the whole text"
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
    blocks_alone = (last & earlier).sum(2).mean(1) / top
    merged_top = (last & (merged[..., None] < top)).sum(1).mean(0) / top
    chance = top / domain
    return {
        **{f"block={i}": (values, chance) for i, values in enumerate(blocks_alone, 1)},
        "union": ((last & union).sum(1).mean(0) / top, 1.0 - (1.0 - chance) ** 3),
        "equal_budget": (merged_top, chance),
    }


#: Share of the keys that is a window's top.
GAP_SHARE = 0.1


#: Shares [H] of one layer: of returns after a gap, and of keys in at least one top that returned
#: after a gap.
Gaps = tuple[Floats, Floats]


def gap_windows(trace: Trace) -> tuple[int, int]:
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
    top: float = GAP_SHARE,
) -> tuple[Gaps, Gaps]:
    """Gaps of the keys before row `start` over whole windows from there on, and by chance.

    Chance is the mean of the counts over all orders of the windows. Two windows have to fit
    (`gap_windows`). Raises PolicyError for a layer that the trace does not have.
    """
    layer = trace_layer(trace, layer)
    keys, width = gap_windows(trace)
    keys, width = keys if start is None else start, width if window is None else window
    count = (trace.n_pos - keys) // width
    windows = row_blocks(keys, keys + count * width, width)
    n_top = max(1, round(top * keys))
    shape = trace.n_heads, keys
    gaps = np.zeros((trace.n_heads, count - 1), np.int64)
    tops = np.zeros(shape, np.int64)
    last = np.full(shape, -1)  # the latest window with the key in its top
    apart = np.zeros(shape, bool)
    for number, scores in enumerate(window_scores(trace, layer, windows, keys)):
        best = np.argsort(-scores, axis=-1, kind="stable")[:, :n_top]
        head = np.arange(len(best))[:, None]
        before = last[head, best]
        again = before >= 0
        gap = number - before - 1
        np.add.at(gaps, (np.broadcast_to(head, best.shape)[again], gap[again]), 1)
        apart[head, best] |= again & (gap > 0)
        tops[head, best] += 1
        last[head, best] = number
    expected, broken = _orders(count)
    numbers = np.stack([(tops == m).sum(-1) for m in range(count + 1)], axis=-1)  # [H, W + 1]
    keys_in_top = (tops > 0).sum(-1)

    def shares(gaps: Ints | Floats, back: Ints | Floats) -> Gaps:
        return share(gaps[:, 1:].sum(-1), gaps.sum(-1)), share(back, keys_in_top)

    return shares(gaps, apart.sum(-1)), shares(numbers @ expected, numbers @ broken)


def _orders(count: int) -> tuple[Floats, Floats]:
    """Expected returns by gap, and the chance of any gap, of a key in m of `count` random windows.

    [count + 1, count - 1] and [count + 1]. Two consecutive tops with a gap of g windows can start
    at count - g - 1 places; the other m - 2 are outside. Without any gap the tops are one run.
    """
    returns = np.zeros((count + 1, count - 1))
    broken = np.zeros(count + 1)
    for m in range(2, count + 1):
        ways = comb(count, m)
        for gap in range(count - 1):
            returns[m, gap] = (count - gap - 1) * comb(count - gap - 2, m - 2) / ways
        broken[m] = 1 - (count - m + 1) / ways
    return returns, broken
