"""Sentences below charts: what they say is in the numbers, and changes with them."""

from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from apps.dashboard import readings
from kvsim.analysis.kept.states import TokenStates
from kvsim.studies.segments.segmentation import Segmented


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


def test_segments_say_what_they_are_and_where_ams_and_its_scorer_differ_most():
    """Segments with most and least mass per held entry, what stays, and what the scorer has."""
    pos = np.array([0, 1, 2, 5, 6, 7])
    kept = np.array([True, True, True, False, False, True])
    mass = np.array([0.2, 0.1, 0.0, 0.1, 0.5, 0.1])
    event = Segmented(
        *(7, pos, mass, mass, mass, np.zeros(6, bool), kept),
        *(np.array([0, 0, 0, 0, 1, 1]), np.array([3, 1])),
    )
    texts = [*"abcd", " the", " \n", "<b>", "x" * 10**6]

    assert readings.segments(event, np.array([0, 6, 7]), "tova", texts) == (
        "The 2 segments are stretches of the text of which this head keeps 1 to 3 entries each: "
        "attention mass per held entry is highest, 30.00% of all, at positions 6 to 7 "
        "(“<b>xxxxxxxxxxxxxxxxxxxx…”), where 1 of 2 stay, and lowest, 10.00%, at positions 0 to 5 "
        "(“abcd the”), where 3 of 4 stay. AMS differs most from tova alone at positions 0 to 5: 3 "
        "entries against 1."
    )
    one = replace(event, segment=np.zeros(6, int), quota=np.array([4]))
    assert readings.segments(one, pos[kept], "tova", None) == (
        "All 6 entries of this head are one segment, so no part has a quota. AMS differs most from "
        "tova alone at positions 0 to 7: 4 entries against 4."
    )


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
