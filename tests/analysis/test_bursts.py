"""Bursts of evicted entries against plain loops, every arrangement, and cases done by hand."""

import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings

from kvsim.analysis.arrays import event_rows
from kvsim.analysis.kept.bursts import dropped_bursts
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
    found = dropped_bursts(last, lengths=(2, 5))

    assert found.rows.tolist() == event_rows(last).tolist()
    for j, row in enumerate(found.rows.tolist()):
        for head in range(len(last)):
            runs = runs_of([last[head, p] <= row for p in range(row + 1)])
            at = head, j
            assert found.total[at] == row + 1
            assert found.evicted[at] == sum(runs)
            assert found.runs[at] == len(runs)
            assert found.longest[at] == max(runs, default=0)
            np.testing.assert_equal(found.mean[at], np.mean(runs) if runs else np.nan)
            for i, least in enumerate((2, 5)):
                inside = sum(length for length in runs if length >= least)
                assert found.inside[i][at] == inside
                share = inside / sum(runs) if runs else np.nan
                np.testing.assert_equal(found.shares[i][at], share)


@pytest.mark.parametrize(("total", "kept"), [(9, 0), (9, 1), (9, 4), (9, 8), (1, 0)])
def test_chance_is_the_mean_over_all_sets_of_the_size(total, kept):
    """Number and mean of runs and shares in long ones, over every choice of what is kept."""
    choices = list(itertools.combinations(range(total), kept))
    last = np.full((len(choices), total), total - 1, np.int32)
    for one, choice in zip(last, choices, strict=True):
        one[list(choice)] = NEVER

    found = dropped_bursts(last, lengths=(1, 2, 4, 9))

    for name in ("mean", "shares"):
        chance = getattr(found, f"{name}_chance")
        everywhere = getattr(found, name).mean(-2, keepdims=True)
        np.testing.assert_allclose(chance, np.broadcast_to(everywhere, chance.shape), rtol=1e-12)
