"""What constraints cost: summaries of planted values, and `kvsim price`."""

import json

import polars as pl
import pytest

from kvsim.studies.price.constraints import CONSTRAINTS
from kvsim.studies.price.prices import summary
from traces import random_trace


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


def test_the_command_shows_every_constraint(run, tmp_path):
    """With text and JSON alike; what has no rule for the budget is a note."""
    random_trace(n=80, dim=8, prompt_len=30).save(tmp_path / "x.zarr")
    arguments = ["price", tmp_path / "x.zarr", "--budget", "20", "--interval", "8"]
    arguments += ["--policy", "snapkv"]
    status, text = run(*arguments)[:2]
    document = json.loads(run(*arguments, "--json")[1])

    assert status == 0
    (note,) = document["remarks"]
    assert "one_event: budget 20 is less than rows see of the response alone" in note
    assert note in text
    costs = {row["constraint"]: row for row in document["costs"]["missing_mass"]}
    assert costs.keys() == CONSTRAINTS.keys() - {"one_event"}
    assert f"{costs['layer_pages']['gap']:.4f}" in text
    assert costs["layer_pages"]["policy"] == "paged+snapkv@scaled"
    assert costs["model_sets"]["cost"] == pytest.approx(
        costs["model_sets"]["optimum"] - costs["free"]["optimum"]
    )
