"""The optimum on the terms of a record: no policy retains more, and what metrics say of it."""

import numpy as np
import polars as pl
import pytest
import torch

import kvsim
from kvsim.analysis.output.error import output_error
from kvsim.analysis.output.metrics import REGRET
from kvsim.analysis.output.optimum import optimum
from kvsim.core.policy import Even
from kvsim.errors import KvsimError, PolicyError
from kvsim.policies import names
from kvsim.policies.fit import fitted
from kvsim.sweeps.driver import replay_all
from kvsim.testing.strategies import make_case

CASE = make_case("normal", layers=2, heads=2, group=2, n=70, prompt_len=50, seed=3)
TERMS = [
    ({"interval": 5, "prefill": True}, 30),
    ({"interval": None, "prefill": True}, 20),
    ({"interval": 7, "prefill": True, "compress": "context"}, 40),
    ({"interval": 1, "prefill": False}, 34),
]
#: What some names need: another scorer, calibration queries, a selection layer.
NEEDS = ({}, {"calibration": "prefix:30"}, {"layer": 0})


@pytest.fixture(scope="module")
def trace():
    """Two layers of two KV heads in float64, with a context of 45 of its 50 prompt tokens."""
    return CASE.trace(45)


@pytest.fixture(scope="module")
def attention(trace):
    """Attention of the rows after the prompt, [layer, qhead, row, pos]."""
    layers = [trace.attention(layer, range(trace.n_pos)) for layer in range(trace.n_layers)]
    out = torch.stack(layers).double().numpy()
    out[:, :, : trace.prompt_len] = 0.0
    return out


def retained_by(attention, record, pools):
    """Attention on what rows of the record see, [layer, pool]."""
    heads = record.evicted_at.shape[1]
    of_heads = attention.reshape(len(attention), heads, -1, *attention.shape[2:]).sum(2)
    seen = np.arange(record.n_pos)[:, None] <= record.evicted_at[:, :, None]
    return (of_heads * seen).sum((-1, -2)).reshape(len(attention), pools, -1).sum(-1)


def built(name):
    """The policy of this name, with lengths scaled to the budget."""
    for label in (name, f"{name}+tova"):
        for params in NEEDS:
            try:
                return fitted(kvsim.policy(label, **params))
            except KvsimError:
                continue
    raise AssertionError(name)


def cells(trace):
    """(policy, record) of every policy that a budget binds: at all terms, or at one in turn."""
    for number, name in enumerate(names()):
        policy = built(name)
        plain = policy.layer_budgets == Even() and policy.propagation is None
        chosen = TERMS[number % 4 :: 4] if plain and policy.allocator.shared == "none" else TERMS
        for terms, budget in chosen if policy.bounded else ():
            try:
                yield policy, kvsim.replay(trace, policy, budget, **terms)
            except KvsimError:
                continue


def test_no_policy_retains_more(trace, attention):
    """Every policy of the library on its own terms: schedules, budgets of layers, protection."""
    checked = set()
    for policy, record in cells(trace):
        best = optimum(trace, policy, record, device="auto")
        notes = best.internals[0].notes
        pools = notes["places"].shape[1]
        most, retained = (retained_by(attention, x, pools) for x in (best, record))

        assert (retained <= most * (1 + 1e-9)).all(), (policy.name, record.schedule)
        assert notes["bound"] == pytest.approx(notes["retained"], rel=1e-12), policy.name
        checked.add((policy.name, record.schedule))
    assert len(checked) > 50


def test_chance_is_what_random_sets_retain(trace):
    """The mean of 200 random policies, within four standard errors, in every layer and head."""
    rules = [kvsim.policy("random", seed=seed) for seed in range(200)]
    records = [kvsim.replay(trace, rule, 20, interval=5, prefill=True) for rule in rules]
    best = optimum(trace, rules[0], records[0])
    notes = best.internals[0].notes
    errors = output_error(trace, [best, *records])
    missing = np.stack([each.missing[:, :, trace.prompt_len :].mean(-1) for each in errors])
    of_heads = missing.reshape(len(missing), 2, 2, 2).mean(-1).astype(np.float64)
    lead = of_heads[1:] - of_heads[0]  # what random sets retain less than the optimum

    distance = lead.mean(0) - (notes["retained"] - notes["chance"])
    assert (np.abs(distance) < 4 * lead.std(0) / np.sqrt(len(records))).all()


def test_regret_of_the_optimum_is_0(trace):
    """And its proof leaves nothing open; tova and random sets retain less."""
    policies = [kvsim.policy("oracle", by="optimum"), kvsim.policy("tova"), kvsim.policy("random")]
    run = replay_all([trace], policies, [20], interval=5, metrics=["missing_mass", *REGRET])

    means = run.table.group_by("policy", "metric").agg(pl.col("value").mean())
    value = {(row["policy"], row["metric"]): row["value"] for row in means.to_dicts()}
    assert value["oracle", "regret"] == pytest.approx(0.0, abs=1e-6)
    assert value["tova", "regret_gap"] == pytest.approx(0.0, abs=1e-12)
    assert 1e-3 < value["tova", "regret"] < value["random", "regret"]


def test_a_record_without_a_certificate_is_no_optimum(trace):
    """`measure` takes records of `optimum` beside those that it measures, and no others."""
    record = kvsim.replay(trace, kvsim.policy("tova"), 20, interval=5)

    with pytest.raises(PolicyError, match="expected for each record None or a Record of"):
        kvsim.measure(trace, record, ["regret"], optima=[record])
    with pytest.raises(PolicyError, match="regret compares with the optimum, which was not"):
        kvsim.measure(trace, record, ["regret"])
