"""Comparison of policies over prompts, against plain loops, scipy and simulated tables."""

import itertools

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvsim
from kvsim.analysis.comparison import compare
from kvsim.analysis.registry import METRICS
from kvsim.analysis.significance import sign_flip
from kvsim.analysis.summaries import Interval
from kvsim.analysis.table import COLUMNS as OF_TABLE
from kvsim.errors import PolicyError
from tests.facts import facts
from traces import random_trace


def table(values, metric="output_error", budget=64, traces=None, **more):
    """A Table of values by policy, one per prompt."""
    rows = []
    for policy, of_policy in values.items():
        for place, value in enumerate(of_policy):
            row = dict.fromkeys(OF_TABLE) | {"params": "{}", "layer": 0, "fidelity": "open"}
            row |= {"trace": traces[place] if traces else f"t{place}", "policy": policy}
            row |= {"metric": metric, "variant": METRICS[metric].main, "unit": "relative"}
            row |= {"interval": 32, "prefill": True, "budget": budget, "value": value}
            rows.append(row | facts(policy) | more)
    return pl.DataFrame(rows, schema=OF_TABLE)


@pytest.fixture(scope="module")
def real():
    """A sweep over eight random traces, with events after the prompt and every 16 rows."""
    from kvsim.sweeps import replay_all

    o_proj = torch.ones(2, 4, 8, 6)
    traces = [
        random_trace(n=140 + 2 * seed, prompt_len=110, seed=seed, name=f"t{seed}", o_proj=o_proj)
        for seed in range(8)
    ]
    policies = [kvsim.policy(name) for name in ("tova", "streaming_llm", "h2o", "oracle", "full")]
    metrics = ["output_error", "wipeout", "entries_seen", "layer_error", "retained_mass"]
    return replay_all(traces, policies, [24, "40%"], interval=16, metrics=metrics).table


@given(
    st.lists(
        st.lists(st.sampled_from([-2.0, -0.7, 0.0, 0.1, 0.3, 1.5]), min_size=6, max_size=6),
        min_size=1,
        max_size=5,
    )
)
@settings(max_examples=40)
def test_p_values_are_shares_of_all_flips(rows):
    """They equal a loop over every choice of signs, ties and zeros included."""
    gaps = np.array(rows)

    for gap, p in zip(gaps, sign_flip(gaps), strict=True):
        flips = list(itertools.product((1, -1), repeat=6))
        sums = [abs(sum(s * x for s, x in zip(signs, gap, strict=True))) for signs in flips]
        assert p == sum(total >= abs(gap.sum()) - 1e-9 for total in sums) / 64


NAMES, BUDGETS = ("tova", "streaming_llm", "h2o"), ("24", "40%")


def means_of(table, metric, traces):
    """The mean of a metric in each prompt, as a list by (policy, budget)."""
    values = {}
    for row in table.to_dicts():
        if (row["metric"], row["variant"]) == (metric, METRICS[metric].main) and row["policy"]:
            key = row["policy"], row["share"] or str(row["budget"]), row["trace"]
            values.setdefault(key, []).append(row["value"])
    return {
        (name, asked): [np.mean(values[name, asked, trace]) for trace in traces]
        for name in NAMES
        for asked in BUDGETS
    }


def test_means_and_differences_equal_a_plain_loop(real):
    """Ranks, means, intervals, leads, paired differences to a policy and corrected p-values."""
    comparison = compare(real, "output_error", against="tova")
    rows = {(row["policy"], row["requested"]): row for row in comparison.table.to_dicts()}
    values = means_of(real, "output_error", comparison.traces)
    seen = means_of(real, "entries_seen", comparison.traces)
    gaps = {
        (name, asked): np.subtract(values[name, asked], values["tova", asked])
        for asked in BUDGETS
        for name in NAMES[1:]
    }
    p = {
        key: sum(
            abs(np.dot(signs, gap)) >= abs(sum(gap)) - 1e-12
            for signs in itertools.product((1, -1), repeat=8)
        )
        / 2**8
        for key, gap in gaps.items()
    }
    corrected, worst = {}, 0.0
    for step, key in enumerate(sorted(p, key=p.get)):
        worst = corrected[key] = max(worst, min(1, p[key] * (4 - step)))

    assert set(rows) == {(name, asked) for name in (*NAMES, "oracle", "full") for asked in BUDGETS}
    for asked in BUDGETS:
        order = sorted(NAMES, key=lambda name: sum(values[name, asked]))
        for rank, name in enumerate(order, start=1):
            row, of_policy = rows[name, asked], values[name, asked]
            (interval,) = Interval.of_each([np.array(of_policy)])
            assert (row["rank"], row["n"]) == (rank, 8)
            assert row["mean"] == pytest.approx(sum(of_policy) / 8)
            assert row["seen"] == pytest.approx(sum(seen[name, asked]) / 8)
            assert (row["low"], row["high"]) == pytest.approx((interval.low, interval.high))
            assert row["leads"] == sum(
                of_policy[at] == min(values[other, asked][at] for other in NAMES) for at in range(8)
            )
            if name == "tova":
                assert row["against"] is None
                continue
            gap = sum(gaps[name, asked]) / 8
            assert row["against"] == "tova"
            assert row["difference"] == pytest.approx(gap)
            assert row["p"] == pytest.approx(p[name, asked])
            assert row["p_holm"] == pytest.approx(corrected[name, asked])
            decided = "worse" if gap > 0 else "better"
            assert (row["verdict"] == decided) == (corrected[name, asked] <= 0.05)


def test_references_have_no_rank(real):
    """The full cache and the oracle are listed and compared with nothing, and a remark says why."""
    comparison = compare(real, "output_error")
    references = comparison.table.filter(pl.col("policy").is_in(["oracle", "full"]))

    assert references["mean"].null_count() == 0
    assert references["rank"].null_count() == references.height
    assert references["against"].null_count() == references.height
    assert references["could_be_best"].null_count() == references.height
    assert any(remark.startswith("oracle, full: listed without") for remark in comparison.remarks)
    named = compare(real, "output_error", against="oracle").table
    assert named.filter(policy="tova")["against"].unique().to_list() == ["oracle"]


def test_higher_is_better_where_the_metric_says_so():
    """The ranking, the set of the best, the shortfall and the leads."""
    rng = np.random.default_rng(6)
    values = {"tova": 0.6 + 0.02 * rng.normal(size=12), "h2o": 0.8 + 0.02 * rng.normal(size=12)}
    named = compare(table(values, "retained_mass"), "retained_mass", against="h2o")
    rows = named.table

    assert rows["policy"].to_list() == ["h2o", "tova"]
    assert rows["could_be_best"].to_list() == [True, False]
    assert rows["verdict"].to_list() == [None, "worse"]
    assert rows["leads"].to_list() == [12, 0]
    assert rows["worse_by"][0] == 0
    assert 0.25 < rows["worse_by"][1] < 0.3


@pytest.mark.parametrize("metric", ["output_error", "retained_mass"])
def test_rounding_leads_on_no_prompt_and_decides_nothing(metric):
    """Values of one set, added up in another order, are equal; a thousandth is a difference."""
    first = np.linspace(0.1, 0.9, 12)
    sign = -1 if metric == "retained_mass" else 1  # where higher is better
    values = {"tova": first * (1 + sign * 1e-8), "h2o": first, "snapkv": first * (1 + sign * 1e-3)}

    comparison = compare(table(values, metric), metric, against="h2o")

    rows = {row["policy"]: row for row in comparison.table.to_dicts()}
    assert [rows[name]["rank"] for name in values] == [1, 1, 3]
    assert [rows[name]["leads"] for name in values] == [12, 12, 0]
    assert [rows[name]["could_be_best"] for name in values] == [True, True, False]
    assert rows["snapkv"]["verdict"] == "worse"
    assert rows["tova"]["verdict"] == "equal"


def test_a_budget_is_judged_by_itself():
    """Another budget, a bad policy or its gaps change neither the set nor the bounds of others."""
    rng = np.random.default_rng(0)
    hard = rng.gamma(4, 0.1, 12)
    values = {
        name: hard + step + rng.normal(0, 0.02, 12)
        for step, name in ((0.0, "tova"), (0.0, "h2o"), (0.1, "knorm"))
    }
    columns = ["policy", "mean", "could_be_best", "worse_by"]
    alone = compare(table(values)).table.select(columns)

    bad = table({"random": [*(hard + 9)[:-1]]})
    more = pl.concat([table(values), bad, table(values, budget=128)])
    joined = compare(more).table.filter(pl.col("policy").is_in([*values]), requested="64")
    short = compare(pl.concat([table(values), table({"random": hard[:4]})]))

    assert alone["could_be_best"].to_list() == [True, True, False]
    assert short.table.drop_nulls("rank").select(columns).equals(alone)
    assert short.remarks[0] == (
        "random is left out at budget 64: its value is missing on t10, t11, t4 and 5 more"
    )
    assert joined["could_be_best"].to_list() == [True, True, False]


def test_a_margin_is_a_share_or_a_number_in_the_unit():
    """Of what may be below 0 there is no share; equivalent is a verdict on pairs."""
    rng = np.random.default_rng(3)
    hard = rng.gamma(9, 0.1, 24)
    values = {"tova": hard, "h2o": hard * 1.02 + rng.normal(0, 0.01, 24)}
    near = compare(table(values), against="tova", margin=0.05)
    signed = table({name: x - 1 for name, x in values.items()}, "nll_increase")

    assert near.table["as_good"].to_list() == [True, True]
    assert compare(table(values), margin=0.001).table["as_good"].to_list() == [True, False]
    (bound,) = near.table.filter(policy="h2o")["worse_by"]
    assert 0.02 < bound < 0.05
    assert near.table.filter(policy="h2o")["verdict"].item() == "worse"
    loose = {"tova": hard, "h2o": hard * rng.normal(1, 0.1, 24)}
    (verdict,) = compare(table(loose), against="tova").table["verdict"].drop_nulls()
    assert verdict == "equivalent"
    assert compare(signed).scale.margin is None
    assert compare(signed).table["as_good"].count() == 0
    in_nats = compare(signed, margin=0.05).table
    assert in_nats["as_good"].to_list() == [True, True]
    gap = values["h2o"] - hard
    expected = gap.mean() + 1.7139 * gap.std(ddof=1) / 24**0.5
    assert in_nats["worse_by"][1] == pytest.approx(expected, rel=1e-3)


def test_means_are_over_shared_prompts():
    """A prompt that one policy has no value for is left out of all means, and a remark names it."""
    values = table({"tova": [1.0, 2.0, 9.0], "h2o": [2.0, 3.0]})
    comparison = compare(values)

    assert comparison.traces == ("t0", "t1")
    assert comparison.table["mean"].to_list() == [1.5, 2.5]
    assert comparison.remarks[0] == (
        "1 prompt left out at budget 64, because not every policy has a value: t2 (h2o has none)"
    )
    short = table({"tova": [1.0], "h2o": [2.0]}, share="25%", budget=40, fidelity="exact")
    long = table({"tova": [9.0]}, share="25%", budget=4000, traces=["long"])
    both = compare(pl.concat([short, long])).table
    assert both.select("entries", "fidelity").rows() == [(40.0, "exact")] * 2
    other = table({"knorm": [1.0]}, traces=["other"])
    with pytest.raises(PolicyError, match="no prompt has a value of output_error for every"):
        compare(pl.concat([table({"tova": [1.0]}), other]))


def test_what_cannot_be_compared_is_refused(real):
    """A metric without a direction or values, an unknown policy; the message says what there is."""
    with pytest.raises(PolicyError, match="middle_coverage has no better direction"):
        compare(real, "middle_coverage")
    with pytest.raises(PolicyError, match="no value of regret for any policy; it has"):
        compare(real, "regret")
    with pytest.raises(PolicyError, match="no policy 'tov'; did you mean 'tova'"):
        compare(real, against="tov")
    with pytest.raises(PolicyError, match="it has none of any metric; finish the run"):
        compare(real.clear())
