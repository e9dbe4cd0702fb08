"""Sentences below charts: what they say is in the numbers, and changes with them."""

import numpy as np
import polars as pl
import pytest

from apps.dashboard import readings
from kvsim.analysis.kept.states import TokenStates


def means(*rows, **columns):
    """Means of policies at budgets; rows: policy, budget, mean."""
    frame = pl.DataFrame(rows, ["policy", "requested", "mean"], orient="row")
    return frame.with_columns(**{name: pl.Series(values) for name, values in columns.items()})


def test_texts_count_what_each_policy_keeps_and_misses():
    """Of all tokens so far, and of the needle."""
    codes = np.array([1, 1, 0, 3, 3, 1, 2])
    state = TokenStates(5, codes, list("abcdefg"))

    assert readings.texts({"tova": state}, (1, 4)) == (
        "tova keeps 3 of 6 tokens and misses 2 that later rows would attend to. "
        "Of the needle's 3 tokens, tova keeps 1 and misses 1."
    )
    state.codes[0] = 3
    assert "keeps 2 of 6 tokens and misses 3" in readings.texts({"tova": state})


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        (
            "output_error",
            (
                "Lowest mean: at budget 64 b (0.3), then a (0.5); at budget 128 a (0.1), "
                "then b (0.2)."
            ),
        ),
        (
            "retained_mass",
            (
                "Highest mean: at budget 64 a (0.5), then b (0.3); at budget 128 b "
                "(0.2), then a (0.1)."
            ),
        ),
        (
            "unheard_of",
            (
                "Lowest and highest: at budget 64 b (0.3), to a (0.5); at budget 128 a (0.1), to b "
                "(0.2)."
            ),
        ),
    ],
)
def test_over_budgets_names_the_best_at_both_ends(metric, said):
    """In the metric's better direction; budgets between the ends are left to the chart."""
    rows = (("a", "64", 0.5), ("b", "64", 0.3), ("a", "96", 0.0), ("a", "128", 0.1))

    assert readings.over_budgets(means(*rows, ("b", "128", 0.2)), metric) == said
