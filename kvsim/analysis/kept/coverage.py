"""Positions of the kept entries in the text: AMS, Fig. 4 (a), and G-KV, arXiv 2512.00504, Fig. 7.

Also the kept share of a needle, a token span of the prompt (`Trace.spans`): needle in a haystack,
Kamradt 2023, github.com/gkamradt/LLMTest_NeedleInAHaystack.

Positions are relative to the N positions at an event, x(p) = (p + 1/2) / N. Functions take one
layer's `evicted_at` [H, T]; time is linear in H x T x edges of bins.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from kvsim.analysis.arrays import EvictedAt, Floats, Ints, Variants, event_rows, present, share
from kvsim.analysis.kept.retention import last_event, rows_that_see
from kvsim.core.lazy import torch
from kvsim.core.reading import Reads

#: Bins of the curve, and the part of the text that counts as its middle.
BINS = 20
MIDDLE = (Fraction(1, 3), Fraction(2, 3))
#: Rows of an account that are unpacked at once.
_ROWS = 64


def kept_coverage(
    evicted_at: EvictedAt, bins: int = BINS, middle: tuple[Fraction, Fraction] = MIDDLE
) -> tuple[Ints, Floats, Floats, Floats]:
    """Shares of one layer's positions that are kept at each event [E], after its row.

    Returns the rows [E]; shares [H, bins, E] of each bin of equal width in x, cut exactly by whole
    numbers, NaN for a bin without a position; shares of all positions [H, E], the value of uniform
    sets in every bin; and shares of positions with middle[0] <= x < middle[1], [H, E].
    """
    rows = event_rows(evicted_at)
    cuts = [*(Fraction(i, bins) for i in range(1, bins + 1)), *middle]
    # positions with x < cut: 2 p + 1 is at most (2 N * numerator - 1) // denominator
    below = [(2 * (rows + 1) * cut.numerator - 1) // cut.denominator for cut in cuts]
    there = (np.stack(below) + 1) // 2
    died = np.searchsorted(rows, evicted_at)
    kept = np.stack([_kept_below(cut, died, rows) for cut in cuts], axis=1)
    of_bins = np.diff(kept[:, :bins], axis=1, prepend=0)
    return (
        rows,
        share(of_bins, np.diff(there[:bins], axis=0, prepend=0)),
        of_bins.sum(1) / (rows + 1),
        share(kept[:, -1] - kept[:, -2], there[-1] - there[-2]),
    )


def _kept_below(cut: Fraction, died: Ints, rows: Ints) -> Ints:
    """Kept entries with x < cut at each event; [H, E]. died [H, T]: events at which entries leave.

    As the text grows, an entry passes the cut once: it counts from there until it leaves.
    """
    heads, total = died.shape
    length = (2 * np.arange(total) + 1) * cut.denominator // (2 * cut.numerator) + 1
    since = np.broadcast_to(np.searchsorted(rows + 1, length), died.shape)
    return present(since, died, (heads, len(rows) + 1))


def retained_positions(evicted_at: EvictedAt) -> tuple[Ints, Floats]:
    """Head and relative position in (0, 1) of each entry held after the last event; [n] each.

    By head and position; entries that came later are left out. G-KV divides by the length of the
    whole text; here the length is that at the event, so that uniform sets have mean 1/2 however
    long the tail is.
    """
    row = last_event(evicted_at)
    head, pos = np.nonzero(evicted_at[:, : row + 1] > row)
    return head, (pos + 0.5) / (row + 1)


def position_variants(evicted_at: EvictedAt, recent: int) -> Variants:
    """Positions of the entries that a layer holds after its last event; empty without an event.

    "" is their mean position, 1/2 for uniform sets; "tail" the share of the entries at the end of
    the trace that came after the event, which the other variants leave out; "distance" the largest
    distance of their distribution from uniform positions (Kolmogorov-Smirnov); "older" the mean
    position of the entries before the `recent` last positions, relative to the positions there. NaN
    for an empty head.
    """
    row, (heads, total) = last_event(evicted_at), evicted_at.shape
    if row < 0:
        return None, {}
    head, place = retained_positions(evicted_at)
    size = np.bincount(head, minlength=heads)
    tail = np.full(heads, total - row - 1)
    before = np.arange(len(head)) - (size.cumsum() - size)[head]  # entries of the head at lower x
    below, above = before / size[head], (before + 1) / size[head]
    distance = np.where(size > 0, 0.0, np.nan)
    np.maximum.at(distance, head, np.maximum(above - place, place - below))
    old = place * (row + 1) < row + 1 - recent
    count = np.bincount(head[old], minlength=heads)
    sums = np.bincount(head[old], place[old], minlength=heads)
    older = share(sums * (row + 1), count * max(1, row + 1 - recent))
    half = np.full(heads, 0.5)
    return None, {
        "": (share(np.bincount(head, place, minlength=heads), size), half),
        "tail": (share(tail, tail + size), None),
        "distance": (distance, None),
        "older": (older, half),
    }


def needle_visibility(
    evicted_at: EvictedAt,
    prompt_len: int,
    spans: Sequence[tuple[int, int]],
    reads: Reads | None = None,
    at: int = 0,
) -> tuple[Floats, Floats, Floats]:
    """Shares of the needles at `spans` [start, end) that a row after the prompt sees; [H] each.

    Recall, the share of the needles' entries that it sees (or reads); chance, the share of all
    entries of the prompt; wipe-out, the share of the needles without a visible entry. NaN without a
    row after the prompt.

    evicted_at [H, T] of one layer, at index `at` of the account `reads`, if it has one: values of a
    head are then means over the query heads that read. Positions in several spans count once in the
    recall.
    """
    rows = np.array(evicted_at.shape[-1] - prompt_len)
    if reads is None or reads.dense(at):
        seen: Ints | Floats = rows_that_see(evicted_at, prompt_len)[:, :prompt_len]
        # a needle is visible until its last entry leaves
        visible = np.stack([seen[:, start:end].max(-1) for start, end in spans])  # [n, H]
    else:
        seen, visible = _rows_that_read(evicted_at, prompt_len, spans, reads, at)
    marked = np.zeros(prompt_len, dtype=np.bool_)
    for start, end in spans:
        marked[start:end] = True
    recall, chance = (share(x.mean(-1), rows) for x in (seen[:, marked], seen))
    return recall, chance, 1.0 - share(visible.mean(0), rows)


def _rows_that_read(
    evicted_at: EvictedAt,
    prompt_len: int,
    spans: Sequence[tuple[int, int]],
    reads: Reads,
    at: int,
) -> tuple[Floats, Floats]:
    """Rows after the prompt that read each of its entries, [H, P], and part of each needle, [n, H].

    Means over the query heads of a head.
    """
    (heads, total), gone = evicted_at.shape, torch.from_numpy(evicted_at)
    seen, visible = np.zeros((heads, prompt_len)), np.zeros((len(spans), heads))
    for start in range(prompt_len, total, _ROWS):
        rows = slice(start, min(start + _ROWS, total))
        read = reads.entries(at, rows, gone)[..., :prompt_len].unflatten(0, (heads, -1)).numpy()
        seen += read.sum(2).mean(1)
        visible += np.stack([read[..., i:j].any(-1).sum(2).mean(1) for i, j in spans])
    return seen, visible
