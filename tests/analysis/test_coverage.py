"""Where kept entries lie and how many there are, against plain loops and closed forms."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvsim.analysis.arrays import event_rows
from kvsim.analysis.kept.coverage import kept_coverage, position_variants, retained_positions
from kvsim.analysis.kept.retention import retention_ratio
from kvsim.schema import NEVER
from reference.strategies import evictions

THIRDS = Fraction(1, 3), Fraction(2, 3)
HALVES = Fraction(1, 4), Fraction(3, 4)


@given(evictions(), st.integers(1, 25), st.sampled_from([THIRDS, HALVES]))
@example(np.array([[5, 3, 3, NEVER, 5, 5, NEVER]], np.int32), 3, THIRDS)
def test_coverage_equals_a_loop_over_positions(last, bins, middle):
    """Positions and kept entries of every bin, and the middle, by x = (p + 1/2) / N."""
    rows, curve, overall, middles = kept_coverage(last, bins, middle)

    assert rows.tolist() == event_rows(last).tolist()
    for j, row in enumerate(rows.tolist()):
        x = [Fraction(2 * p + 1, 2 * (row + 1)) for p in range(row + 1)]
        bin_of = np.array([int(bins * one) for one in x])
        mid = np.array([middle[0] <= one < middle[1] for one in x])
        for head in range(len(last)):
            kept = last[head, : row + 1] > row
            of_bins = [kept[bin_of == b] for b in range(bins)]
            expected = [of.mean() if of.size else np.nan for of in of_bins]
            np.testing.assert_allclose(curve[head, :, j], expected)
            share = kept[mid].mean() if mid.any() else np.nan
            np.testing.assert_allclose(middles[head, j], share)
            assert overall[head, j] == pytest.approx(kept.mean())


@given(evictions(), st.integers(0, 30))
def test_retained_positions_equal_a_loop_over_entries(last, recent):
    """Places after the last event, their mean, tail and Kolmogorov distance, and older ones."""
    _, found = position_variants(last, recent)

    rows = event_rows(last)
    if not len(rows):
        assert found == {}
        return
    row, (heads, relative) = rows[-1], retained_positions(last)
    old = row + 1 - recent
    for head in range(len(last)):
        held = [p for p in range(row + 1) if last[head, p] > row]
        x = [(p + 0.5) / (row + 1) for p in held]
        steps = [max((i + 1) / len(x) - at, at - i / len(x)) for i, at in enumerate(x)]
        tail, older = last.shape[1] - row - 1, [(p + 0.5) / old for p in held if p < old]
        np.testing.assert_allclose(relative[heads == head], x)
        expected = {
            "": np.mean(x) if x else np.nan,
            "tail": tail / (tail + len(x)) if tail + len(x) else np.nan,
            "distance": max(steps) if steps else np.nan,
            "older": np.mean(older) if older else np.nan,
        }
        for name, number in expected.items():
            np.testing.assert_allclose(found[name][0][head], number)


@given(evictions(), st.data())
def test_the_retention_ratio_equals_a_loop_over_rows(last, data):
    """What is held after the last row, and what each row sees of those before it."""
    total = last.shape[1]
    prompt_len = data.draw(st.integers(1, total))

    rows, final = retention_ratio(last, prompt_len)

    for head in range(len(last)):
        seen = [
            sum(p <= row <= last[head, p] for p in range(total)) / (row + 1)
            for row in range(prompt_len, total)
        ]
        held = sum(last[head, p] > total - 1 for p in range(total))
        assert final[head] == pytest.approx(held / total)
        np.testing.assert_allclose(rows[head], np.mean(seen) if seen else np.nan)
