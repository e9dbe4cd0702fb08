"""Bursts of evicted entries against plain loops, every arrangement, and cases done by hand."""

import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings

from kvsim.analysis.arrays import event_rows
from kvsim.analysis.kept.bursts import burst_variants
from kvsim.schema import NEVER
from reference.strategies import evictions


def runs_of(flags):
    """Lengths of the runs of True."""
    return [len(list(group)) for flag, group in itertools.groupby(flags) if flag]


TIED = np.array([[5, 3, 3, NEVER, 5, 5, NEVER, NEVER]] * 2, np.int32)


@settings(deadline=None)
@given(evictions())
@example(TIED)
def test_bursts_equal_a_loop_over_positions(last):
    """Every number of every head at every event."""
    rows, found = burst_variants(last, lengths=(2, 5))

    assert rows.tolist() == event_rows(last).tolist()
    for j, row in enumerate(rows.tolist()):
        for head in range(len(last)):
            runs = runs_of([last[head, p] <= row for p in range(row + 1)])
            shares = [
                sum(x for x in runs if x >= least) / (sum(runs) or np.nan) for least in (2, 5)
            ]
            expected = [np.mean(runs) if runs else np.nan, max(runs, default=0), *shares]
            got = [values[head, j] for values, _ in found.values()]
            np.testing.assert_allclose(got, expected, rtol=1e-15)


@pytest.mark.parametrize(("total", "kept"), [(9, 0), (9, 1), (9, 4), (9, 8), (1, 0)])
def test_chance_is_the_mean_over_all_sets_of_the_size(total, kept):
    """Number and mean of runs and shares in long ones, over every choice of what is kept."""
    choices = list(itertools.combinations(range(total), kept))
    last = np.full((len(choices), total), total - 1, np.int32)
    for one, choice in zip(last, choices, strict=True):
        one[list(choice)] = NEVER

    _, found = burst_variants(last, lengths=(1, 2, 4, 9))

    for variant in found.keys() - {"longest"}:
        values, chance = found[variant]
        everywhere = values.mean(0, keepdims=True)
        np.testing.assert_allclose(chance, np.broadcast_to(everywhere, chance.shape), rtol=1e-12)
