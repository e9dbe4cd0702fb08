"""Sentences below charts: what they say is in the numbers, and changes with them."""

from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from apps.dashboard import readings
from apps.dashboard.tiles import Tile
from kvsim.analysis.kept.states import TokenStates
from kvsim.studies.layers.ranking import RankPattern
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


def test_texts_count_what_a_row_does_not_read():
    """It is kept, for the text and for the needle."""
    state = TokenStates(5, np.array([1, 4, 4, 3, 0, 1, 2]), list("abcdefg"))

    assert readings.texts({"quest": state}, (1, 4)) == (
        "quest keeps 4 of 6 tokens, of which the next row does not read 2, and misses 1 that later "
        "rows would attend to. Of the needle's 3 tokens, quest keeps 2 and misses 1."
    )


def test_reading_counts_a_row_and_all_rows_and_heads():
    """Of the head that is shown, and the mean of the layer."""
    held = np.array([[10, 20], [30, 40]])
    read = np.array([[1, 5], [15, 24]])

    assert readings.reading(held, read, 0, 7, 6) == (
        "Row 7 reads 5 of the 20 entries that this head holds (25%); the mean over rows after the "
        "prompt and heads of this layer is 11 of 25 (45%)."
    )


def test_attention_names_the_commonest_and_the_largest_cell():
    """With its token where a cell is one position; a pooled cell is a range."""
    values = np.array([[0.9, 0.0], [0.6, 0.4], [0.2, 0.95]], dtype=np.float32)
    tile = Tile(values, np.array([4, 5, 6, 7]), np.array([0, 1, 2]))

    assert readings.attention(tile, ["<bos>", "a"]) == (
        "The largest weight of 2 of 3 rows is at position 0 (“<bos>”). The largest of all, 0.95, "
        "is at position 1 (“a”), of row 6."
    )
    pooled = Tile(values, np.array([4, 6, 8, 10]), np.array([0, 2, 4]))
    values[2, 1] = 0.1
    assert readings.attention(pooled, None) == (
        "The largest weight of 3 of 3 lines of cells is at positions 0 to 1. The largest of all, "
        "0.9, is at positions 0 to 1, of rows 4 to 5."
    )


def test_retention_says_what_an_event_leaves():
    """Counts of the event's row; regions where there are any."""
    row = {"event": 99, "kept": 25, "share": 0.25, "wipeout": 0.5, "longest": 40.0}

    assert readings.retention(pl.DataFrame([row])) == (
        "After row 99 this head has 25 of 100 positions (25%); 50% of its regions are wiped out, "
        "and the longest evicted run has 40."
    )
    other = pl.DataFrame([{**row, "wipeout": None, "longest": 7.0}])
    assert readings.retention(other).endswith("(25%); the longest evicted run has 7.")


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


def test_over_budgets_calls_a_tie_a_tie():
    """Policies that differ by no more than rounding are best together."""
    rows = (("a", "64", 0.3), ("b", "64", 0.3 * (1 - 1e-8)), ("c", "64", 0.5))

    best = readings.over_budgets(means(*rows), "output_error")

    assert "at budget 64 b and a (0.3), then c (0.5)" in best


def test_the_full_cache_is_no_rival():
    """It loses nothing; alone it is named, and an end where neither direction is better."""
    rows = (("full", "64", 0.0), ("a", "64", 0.5), ("b", "64", 0.3))

    best = readings.over_budgets(means(*rows), "output_error")
    assert "at budget 64 b (0.3), then a (0.5)" in best
    assert "full (0)" in readings.over_budgets(means(*rows), "unheard_of")
    assert "full (0)" in readings.over_budgets(means(rows[0]), "output_error")


def test_over_budgets_of_a_split_names_the_best_of_each_part():
    """At the largest budget."""
    rows = [("a", "64", 0.5), ("a", "128", 0.1), ("b", "128", 0.2), ("a", "128", 0.4)]
    split = means(*rows, stage=["early", "early", "early", "late"])

    assert readings.over_budgets(split, "output_error", "stage") == (
        "Lowest mean at budget 128: stage early a (0.1), then b (0.2); stage late a (0.4)."
    )


def test_the_front_is_listed():
    """In the order of the entries that rows see."""
    points = means(("a", "64", 1.0), ("b", "64", 2.0), ("a", "32", 3.0), seen=[60.0, 61.0, 30.0],
                   best=[True, False, True])  # fmt: skip

    assert readings.front({"error": points}) == "On the front of error: a at 32, a at 64."
    all_best = points.with_columns(best=True)
    assert readings.front({"error": all_best}).endswith("a at 32, a at 64, b at 64.")


def test_regret_names_both_ends():
    """Of all policies and budgets."""
    rows = means(("a", "64", 0.2), ("b", "64", 0.1), ("a", "128", 0.05))

    assert readings.regret(rows) == (
        "Least is left to gain for a at budget 128 (0.05), most for a at budget 64 (0.2)."
    )
    assert "most for b" in readings.regret(rows[1:])


def test_ends_of_a_curve_stand_next_to_their_reference():
    """Layers without a value are left out."""
    curve = [None, 0.4, 0.9, 0.1]

    assert readings.ends("overlap", curve, "chance", [0.2, 0.2, 0.3, 0.2]) == (
        "Overlap is highest at layer 2 (0.9; chance 0.3) and lowest at layer 3 (0.1; chance 0.2)."
    )
    assert readings.ends("overlap", [None], "chance", [0.2]) == "No layer has a value of overlap."


def test_sparsity_names_the_layers_at_both_ends():
    """Of the least share of the maximum."""
    table = pl.DataFrame(
        {"layer": [0, 1, 0, 1], "p": [0.01, 0.01, 0.05, 0.05], "sequence": [0.6, 0.2, 0.9, 0.8]}
    )

    assert readings.sparsity(table) == (
        "Below 0.01 of the row's maximum are 20% of all keys in layer 1 and 60% of all keys in "
        "layer 0."
    )
    assert readings.sparsity(table.with_columns(sequence=None)) == "No layer has a share."


def test_a_pattern_counts_the_tokens_that_all_layers_rank_first():
    """In the last layers that are compared."""
    ranks = np.array([[9.0, 9.0, 9.0], [1.0, 3.0, 2.0], [2.0, 1.0, 5.0]])
    pattern = RankPattern(np.array([4, 7, 9]), np.arange(4), ranks)

    assert readings.pattern(pattern, 3, 2) == (
        "3 tokens are among the first 3 in one of the last 2 layers; 2 tokens are in all of them."
    )
    assert "0 tokens are in all" in readings.pattern(pattern, 3, 3)


def test_overlap_is_read_at_a_tenth_of_the_keys():
    """The nearest share that was measured."""
    table = pl.DataFrame(
        {"share": [0.01, 0.12], "oldest": [0.9, 0.5], "union": [1.0, 0.75], "chance": [0.0, 0.12]}
    )

    assert readings.overlap(table) == (
        "At 12% of the keys the oldest window had 50% of the last window's top keys among its own, "
        "and three windows together 75%; one set by chance has 12%."
    )
    assert "At 1% of the keys the oldest window had 90%" in readings.overlap(table[:1])


def test_shares_count_exact_values():
    """And bars that are exact throughout."""
    counted = pl.DataFrame(
        {"metric": ["a", "a", "b"], "fidelity": ["exact", "open", "exact"], "values": [1, 3, 2],
         "share": [0.25, 0.75, 1.0]}
    )  # fmt: skip

    assert readings.shares(counted, "metric") == (
        "3 of 6 values are exact; 1 of 2 bars have exact values alone."
    )
    assert readings.shares(counted[:2], "metric").startswith("1 of 4 values")
