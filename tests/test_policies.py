"""Policies by name: presets, parameters and clear refusals."""

import pytest

import kvsim
from kvsim.errors import BudgetError, PolicyError
from kvsim.policies import CATALOGUE


def names():
    """Every policy and preset of the catalogue."""
    for name, entry in CATALOGUE.items():
        yield name
        yield from (f"{name}@{preset}" for preset in entry.presets)


@pytest.mark.parametrize("name", list(names()))
def test_every_policy_is_made_by_its_name_and_shows_it(name):
    """The name, all parameters and the schedule stand in the repr, which is what a Record keeps."""
    policy = kvsim.policy(name)

    assert policy.name == name
    assert name in repr(policy)
    assert "interval" in repr(policy)
    assert all(f"{key}=" in repr(policy) for key in policy.params)


@pytest.mark.parametrize("name", list(names()))
def test_every_scorer_names_its_source_and_its_formula(name):
    """Module docstrings hold the paper where there is one, and the score its definition."""
    import importlib

    scorer = type(kvsim.policy(name).scorer)
    entry = CATALOGUE[name.partition("@")[0]]

    assert scorer.score.__doc__
    assert entry.paper in importlib.import_module(scorer.__module__).__doc__


def test_parameters_replace_defaults_and_presets():
    """A keyword wins over the preset, the preset over the default."""
    assert kvsim.policy("snapkv").scorer.window == 32
    assert kvsim.policy("snapkv@kvpress").scorer.window == 64
    assert kvsim.policy("snapkv@kvpress", window=8).scorer.window == 8
    assert kvsim.policy("snapkv@kvpress", window=8).scorer.pool == "avg"


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("snapkw", {}, r"unknown policy 'snapkw'; did you mean 'snapkv'\?"),
        ("tova@origin", {}, "tova has no preset 'origin'.*tova@kvpress"),
        ("snapkv", {"windw": 8}, r"no parameter 'windw'; did you mean 'window'\?"),
        ("tova", {"window": 8}, "parameters: protect_last"),
        ("snapkv", {"window": 0}, "window is 0; expected at least 1"),
        ("snapkv", {"window": "many"}, "window is 'many'; expected int"),
        ("snapkv", {"window": 2.5}, "window is 2.5; expected int"),
        ("snapkv", {"pool_kernel": 4}, "pool_kernel is 4; expected an odd width"),
        ("snapkv", {"pool": "median"}, "pool is 'median'"),
        ("streaming_llm", {"sink": -1}, "sink is -1; expected 0 or more"),
        ("h2o", {"recent": -1}, "recent is -1"),
        ("no.such.module:NAME", {}, "cannot import 'no.such.module'"),
        ("math:no_such_policy", {}, "'math' has no 'no_such_policy'"),
        ("math:pi", {}, "is a float; expected a kvsim.Policy"),
    ],
)
def test_what_cannot_be_a_policy_is_refused_with_a_way_out(name, params, message):
    """The error names what was found and what was expected, with a suggestion if one is close."""
    with pytest.raises(PolicyError, match=message):
        kvsim.policy(name, **params)


@pytest.mark.parametrize(
    ("name", "params", "budget", "smallest"),
    [
        ("streaming_llm", {}, 3, 4),
        ("streaming_llm", {"sink": 9}, 1, 9),
        ("snapkv", {}, 31, 32),
        ("snapkv@kvpress", {}, 32, 64),
        ("h2o", {"recent": 10}, 9, 10),
    ],
)
def test_a_budget_below_what_is_protected_names_the_smallest_that_works(
    name, params, budget, smallest
):
    """And that budget does work."""
    policy = kvsim.policy(name, **params)

    with pytest.raises(BudgetError, match=f"smallest budget that works is {smallest}"):
        policy.check_budget(budget)
    policy.check_budget(smallest)


@pytest.mark.parametrize("name", list(names()))
def test_a_budget_below_one_entry_is_always_refused(name):
    """Nothing can be kept in no room."""
    with pytest.raises(BudgetError, match="expected at least 1 entry"):
        kvsim.policy(name).check_budget(0)
