"""The set of the best holds what it says on prompts drawn from our own pages, whose truth is known.

Limits are four standard errors of so many independent draws from the rates in `docs/compare.md`.
"""

import math

import numpy as np
import pytest
from test_benchmarks import load

rates = load("verdict_rates")


def above(rate, draws):
    """Four standard errors above a rate."""
    return rate + 4 * math.sqrt(rate * (1 - rate) / draws)


@pytest.mark.parametrize(
    "draws", [pytest.param(8, id="few"), pytest.param(200, marks=pytest.mark.deep)]
)
def test_sets_hold_a_best_policy_and_ignore_bad_ones(draws):
    """In 95 % of draws of 12 prompts with three policies of equal means; three more change few."""
    found = rates.sets(draws, (12,), "three best equal")

    columns = ("coverage", "size", "changed by bad")
    coverage, size, changed = (np.mean([of[0][x] for of in found.values()]) for x in columns)
    assert len(found) == 8
    assert 1 - coverage <= above(0.05, 8 * draws)
    assert 3 < size < 7
    assert changed <= above(0.1, 8 * draws)


def test_intervals_of_means_hold_less_than_they_say():
    """In 0.82 of draws of 6 prompts, as the page says."""
    right = np.mean([of[0]["holds it"] for of in rates.intervals(4, (6,)).values()])
    assert 0.72 < right < 0.92
    assert "interval of a mean holds it | 0.82 (" in (rates.DOCS / "compare.md").read_text("utf-8")


@pytest.mark.deep
@pytest.mark.parametrize("prompts", rates.PROMPTS)
def test_other_rates_are_those_of_the_page(prompts):
    """Bounds and ranks, at each number of prompts."""
    margins = rates.margins(300, (prompts,))
    ordinary = [of[0] for name, of in margins.items() if "extreme" not in name]
    assert np.mean([of["false at the margin"] for of in ordinary]) <= above(0.05, 300)
    ranked = rates.ranked(60, (prompts,)).items()
    right = [of[0]["right"] for name, of in ranked if name.startswith("as measured")]
    assert 1 - np.mean(right) <= above(0.05, 60)
