"""Policies without a budget at the size of others."""

import json

import numpy as np
import polars as pl
import pytest

import kvsim
from kvsim.analysis.overview import summarise
from kvsim.cli import show
from kvsim.errors import PolicyError
from kvsim.studies.price.sizes import at_equal_size, seen, threshold_of_size
from traces import random_trace

SMALL = {"dms+h2o": {"window": 8}}
TERMS = {"budget": 24, "interval": 8}


@pytest.fixture(scope="module")
def traces():
    """Five prompts."""
    return [random_trace(n=90, dim=8, seed=seed, name=f"p{seed}") for seed in range(5)]


@pytest.mark.parametrize("scorer", ["h2o", "keydiff"])  # above 0, and of both signs
def test_a_threshold_has_the_wanted_size(traces, scorer):
    """Rows of the policy with it see as many entries as wanted, by counting them."""
    name, params = f"dms+{scorer}", {"window": 8}
    threshold = threshold_of_size(name, params, traces[:2], 40.0, **TERMS)
    policy = kvsim.policy(name, threshold=threshold, **params).fitted()
    sizes = []
    for trace in traces[:2]:
        record = kvsim.replay(trace, policy, 24, interval=8, prefill=True)
        visible = [record.kept(row).sum(-1).mean() for row in range(trace.prompt_len, trace.n_pos)]
        assert seen(record) == pytest.approx(np.mean(visible))
        sizes.append(np.mean(visible))

    assert np.mean(sizes) == pytest.approx(40, abs=0.5)


def test_sizes_are_equal_on_prompts_held_out(traces):
    """Thresholds are of the prompts searched on; the others have nearly the size of the budget."""
    table = at_equal_size(traces, SMALL, ["h2o"], [30, 40], interval=8)
    values = table.filter(metric="entries_seen").group_by("policy", "budget")
    seen = values.agg(pl.col("value").mean())
    sizes = {(row["policy"], row["budget"]): row["value"] for row in seen.to_dicts()}

    assert table["trace"].n_unique() == 2
    for budget in (30, 40):
        assert sizes["dms+h2o", budget] == pytest.approx(sizes["h2o", budget], rel=0.1)


def test_the_command_measures_what_it_did_not_search_on(run, traces, tmp_path):
    """The Table of the same call in Python, as text and JSON, of the traces of --test."""
    for trace in traces[:2]:
        trace.save(tmp_path / f"{trace.name}.zarr")
    arguments = ["match", tmp_path / "p0.zarr", "--test", tmp_path / "p1.zarr", "--interval", "8"]
    arguments += ["--policy", "dms+h2o", "--set", "dms.window=8", "--budget", "30"]
    document = json.loads(run(*arguments, "--json")[1])
    first, second = traces[:2]
    table = at_equal_size([first], SMALL, ["h2o", "snapkv"], [30], interval=8, test=[second])

    assert [row["policy"] for row in document["averages"]] == ["h2o", "snapkv@scaled", "dms+h2o"]
    assert document["averages"] == json.loads(json.dumps(show.cells(summarise(table))))
    threshold = document["averages"][-1]["params"]["threshold"]
    assert run(*arguments[:-1], "30,40", "--set", "dms.window=8,9")[0] == 2
    assert f"dms+h2o, budget 30: threshold={threshold}\n" in (text := run(*arguments)[1])
    alone = [*arguments[:2], *arguments[4:]]
    note = "Note: thresholds are searched and measured on the same trace."
    assert (note in text, note in run(*alone)[1]) == (False, True)


def test_what_has_no_such_size_is_refused(traces):
    """A size beyond the text or below the window, a threshold that is given or that is none."""
    for name, wanted, message in [
        ("dms+h2o", 500, "expected 500.0 between them"),
        ("dms+h2o", 5, "such as a window"),
        ("h2o", 30, "has no parameter 'threshold'"),
    ]:
        with pytest.raises(PolicyError, match=message):
            threshold_of_size(name, {}, traces[:1], wanted, **TERMS)
    with pytest.raises(PolicyError, match="its threshold is searched"):
        threshold_of_size("dms+h2o", {"threshold": 0.1}, traces[:1], 30, **TERMS)
