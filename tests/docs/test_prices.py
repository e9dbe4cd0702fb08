"""docs/prices.py: summaries of planted values, and policies that obey constraints."""

import polars as pl

from kvsim.studies.price.constraints import CONSTRAINTS
from prices import POLICIES, prices, summary
from traces import random_trace

#: Scorers of policies.
SOME = ("h2o", "snapkv", "keydiff")


def test_a_summary_has_costs_and_gaps():
    """Means over prompts; the best policy of each constraint, and of all where kept sets are free.

    A policy without a value on every prompt is not compared.
    """
    values = [
        ("a", "free", "optimum", 1.0),
        ("b", "free", "optimum", 3.0),
        ("a", "layer_sets", "optimum", 2.0),
        ("b", "layer_sets", "optimum", 6.0),
        ("a", "layer_sets", "union+x", 5.0),
        ("b", "layer_sets", "union+x", 6.0),
        ("a", "layer_sets", "union+y", 0.0),
        ("a", "head_plan", "optimum", 2.0),
    ]
    table = pl.DataFrame(values, ["trace", "constraint", "policy", "value"], orient="row")
    rows = summary(table.with_columns(metric=pl.lit("missing_mass")), "missing_mass").to_dicts()

    free, sets, plan = rows
    assert [*free.values()] == ["free", 2.0, "union+x", 5.5, 0.0, 3.5]
    assert (sets["cost"], sets["policy"], sets["gap"]) == (2.0, "union+x", 1.5)
    assert (plan["policy"], plan["gap"]) == (None, None)


def test_no_policy_that_obeys_retains_more():
    """Every policy that is built for a constraint is within the mass of its optimum, on a trace."""
    trace = random_trace(n=100, seed=4, dim=8)
    table, remarks = prices([trace], 36, 8, SOME)
    table = table.filter(metric="missing_mass")
    for name in CONSTRAINTS:
        rows = dict(table.filter(constraint=name).select("policy", "value").rows())

        assert min(rows.values()) == rows["optimum"]
        assert len(rows) == 1 + len(SOME) * (name in POLICIES), remarks
