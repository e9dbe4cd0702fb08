"""Pareto fronts of tables of means."""

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.analysis.summaries import against_entries, front

KEYS = {"params": "{}", "requested": "8", "interval": 4, "prefill": None}


def means(rows):
    """A table of (policy, metric, mean)."""
    return pl.DataFrame(
        [
            {"policy": policy, "metric": metric, "mean": mean, **KEYS}
            for policy, metric, mean in rows
        ],
        schema_overrides={"prefill": pl.Boolean},
    )


SIZES = [("a", "entries_seen", 10.0), ("b", "entries_seen", 20.0), ("c", "entries_seen", 20.0)]


@pytest.mark.parametrize(
    ("metric", "best"),
    [
        ("output_error", {"a", "b"}),  # lower is better
        ("retained_mass", {"a", "c"}),  # higher is better
        ("key_similarity", set()),  # neither
    ],
)
def test_the_front_follows_the_direction_of_the_metric(metric, best):
    """No other result is better with as few entries."""
    values = {"a": 0.5, "b": 0.4, "c": 0.6, "d": 0.0}  # d has no cost
    sizes = [*SIZES, ("d", "entries_seen", None)]
    table = means([*sizes, *((name, metric, value) for name, value in values.items())])

    points = against_entries(table, metric)

    assert points["seen"].to_list() == [10.0, 20.0, 20.0]
    assert {*points.filter("best")["policy"]} == best


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=9), st.booleans()
)
def test_the_front_is_what_no_point_dominates(points, higher):
    """As a loop over all pairs says, ties included."""
    seen, mean = np.array(points, dtype=float).T
    loss = -mean if higher else mean
    n = range(len(seen))
    expected = [
        not any(
            seen[j] <= seen[i] and loss[j] <= loss[i] and (seen[j] < seen[i] or loss[j] < loss[i])
            for j in n
        )
        for i in n
    ]

    assert front(pl.DataFrame({"seen": seen, "mean": mean}), higher=higher).to_list() == expected
