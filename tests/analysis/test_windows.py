"""Gaps of attention against loops over windows, and chance against every order of the windows."""

from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.analysis.attention.windows import attention_gaps
from kvsim.testing.strategies import cases
from reference import metrics


def tops(case, layer, start, width, share):
    """For each KV head and window, the set of keys in its top."""
    out = []
    weights = metrics.attention(case.q[layer], case.k[layer], case.scale)
    of_heads = weights.reshape(*case.shape[1:3], case.n, case.n).max(1)  # [head, row, pos]
    for attention in of_heads:
        of_head = []
        for first in range(start, case.n - width + 1, width):
            scores = attention[first : first + width, :start].mean(0)
            order = sorted(range(start), key=lambda p: (-scores[p], p))
            of_head.append(set(order[: max(1, round(share * start))]))
        out.append(of_head)
    return out


def gaps(windows, n_keys):
    """Counts of returns by gap, keys in any top, keys that came back after a gap."""
    counts = [0] * (len(windows) - 1)
    keys = back = 0
    for key in range(n_keys):
        at = [i for i, top in enumerate(windows) if key in top]
        found = [b - a - 1 for a, b in pairwise(at)]
        keys += bool(at)
        back += any(gap > 0 for gap in found)
        for gap in found:
            counts[gap] += 1
    return counts, keys, back


@settings(max_examples=40)
@given(
    case=cases(kinds=("normal", "sharp", "sink"), min_n=4, max_n=40),
    width=st.integers(1, 4),
    share=st.sampled_from((0.1, 0.5)),
    data=st.data(),
)
def test_gaps_equal_loops_over_windows(case, width, share, data):
    """Counts of every gap and key, every layer and head."""
    if case.n < 2 * width + 1:
        width = 1
    start = data.draw(st.integers(1, case.n - 2 * width))
    for layer in range(case.shape[0]):
        found, _ = attention_gaps(case.trace(), layer, start=start, window=width, top=share)
        for head, windows in enumerate(tops(case, layer, start, width, share)):
            counts, keys, back = gaps(windows, start)
            total = sum(counts)
            after = sum(counts[1:]) / total if total else np.nan
            got = [values[head] for values in found]
            assert got == pytest.approx([after, back / keys], nan_ok=True)


@settings(max_examples=15)
@given(
    case=cases(kinds=("normal", "sharp"), min_n=16, max_n=30, max_layers=1),
    count=st.integers(2, 5),
)
def test_chance_is_the_mean_over_every_order(case, count):
    """Counts and shares, with all orders of up to five windows tried."""
    width = 2
    start = case.n - count * width
    _, chance = attention_gaps(case.trace(), 0, start=start, window=width, top=0.3)

    for head, windows in enumerate(tops(case, 0, start, width, 0.3)):
        every = [gaps(order, start) for order in permutations(windows)]
        counts = np.mean([one[0] for one in every], axis=0)
        after = sum(counts[1:]) / (sum(counts) or np.nan)
        expected = after, np.mean([one[2] / one[1] for one in every])
        np.testing.assert_allclose([values[head] for values in chance], expected)
