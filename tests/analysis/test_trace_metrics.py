"""What a trace says before any policy evicts: the arrays behind it, replay, chance."""

import itertools
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvsim
from kvsim.analysis.registry import METRICS
from kvsim.analysis.subject import Analysis
from kvsim.errors import PolicyError
from kvsim.policies.asl import ASL
from kvsim.studies.expectation.expectation import (
    STEPS,
    expected_and_observed,
    key_gaps,
    ks_by_chance,
    state_normality,
)
from kvsim.studies.layers.metrics import TAUS
from kvsim.studies.layers.ranking import curves, ranking
from kvsim.testing.strategies import cases
from traces import changed, settling_trace

#: Metrics of a trace alone that the loops below define.
DEFINED = (
    *("expectation", "expectation_steps", "projection_gap", "normal_distance", "rank_variance"),
    *("rank_relative", "rank_union", "layer_entropy", "selection_layer", "score_decline"),
)
KEY = ("metric", "variant", "layer", "head", "qhead")


def measured(trace, names=DEFINED, progress=None, **more):
    """A Table of metrics of a trace alone."""
    analysis = Analysis(trace, given={curves: curves(Analysis(trace), **more)})
    return kvsim.measure(analysis, metrics=names, progress=progress)


def values(table):
    """The value of each row by its name, variant and place."""
    rows = table.select(*KEY, "value").rows()
    assert len(rows) == len({row[:-1] for row in rows})
    return {row[:-1]: row[-1] for row in rows}


def rank_correlation(a, b):
    """Pearson correlation of the ranks, equal numbers at the mean of theirs."""
    ranked = [
        [sum(y < x for y in one) + sum(y == x for y in one) / 2 for x in one] for one in (a, b)
    ]
    return float(np.corrcoef(*ranked)[0, 1])


def naive_decline(trace, layer, head):
    """Windows of 16 rows after the prompt: their number beside their largest score of its keys."""
    weights = trace.attention(layer, range(trace.n_pos))
    of_group = weights[head * trace.group : (head + 1) * trace.group].amax(0)  # [row, pos]
    starts = range(trace.prompt_len, trace.n_pos - 15, 16)
    scores = [of_group[start : start + 16, : trace.prompt_len].mean(0) for start in starts]
    return rank_correlation([float(one.max()) for one in scores], range(len(scores)))


def values_of_arrays(trace, ks, rule):
    """Every metric but the steps of the expectation, by `KEY`.

    The arrays have loops as their witness in test_expectation, test_normality, test_diagnostics.
    """
    layers, out = range(trace.n_layers), {}
    ranks, first = ranking(trace, rule), trace.n_layers // 3
    expected = expected_and_observed(trace, trace.prompt_len).spearman[-1]
    distance = state_normality(trace, skip=4).mean(-1)
    for layer in layers:
        out["layer_entropy", "", layer, None, None] = ranks.entropy()[layer]
        for qhead in range(trace.n_qheads):
            out["expectation", "", layer, None, qhead] = expected[layer, qhead]
            out["normal_distance", "", layer, None, qhead] = distance[layer, qhead]
        if trace.n_pos - trace.prompt_len >= 32:
            for head in range(trace.n_heads):
                decline = naive_decline(trace, layer, head)
                out["score_decline", "", layer, head, None] = decline
    for skip in (0, 4):
        gap = np.abs(np.median(key_gaps(trace, skip=skip), axis=(1, 2)))
        for layer in layers:
            out["projection_gap", f"skip={skip}", layer, None, None] = gap[layer]
    for k in ks:
        curve = ranks.curve(k + rule.window, rule)
        for layer in layers[first:]:
            at = (f"k={k}", layer, None, None)
            out["rank_variance", *at] = curve.variance[layer]
            out["rank_union", *at] = curve.union[layer] / k
            out["rank_relative", *at] = curve.relative[layer]
        for tau in TAUS:
            at = f"k={k},tau={tau:g}", None, None, None
            out["selection_layer", *at] = curve.selected(tau=tau)
    return out


@settings(max_examples=10)
@given(case=cases(kinds=("normal",), min_n=20, max_n=50, max_heads=2), data=st.data())
def test_every_metric_is_that_of_its_arrays(case, data):
    """All rows there are, and no other, in traces of up to three layers and 14 query heads."""
    cut = data.draw(st.integers(10, case.n - 2))
    case = replace(case, prompt_len=cut)
    window = data.draw(st.integers(1, 4))
    ks = (1, data.draw(st.integers(2, cut - window - 1)))

    trace, rule = case.trace(), ASL(window=window, pool_kernel=3)
    found = measured(trace, ks=ks, rule=rule)
    expected = values_of_arrays(trace, ks, rule)

    other = pl.col("metric").eq("expectation_steps") | pl.col("variant").str.contains(
        "layer=|back="
    )
    got = values(found.filter(~other))
    assert set(got) == set(expected)
    for key, value in expected.items():
        assert got[key] == (None if value is None else pytest.approx(value, abs=1e-6)), key


def test_steps_are_those_of_expected_attention():
    """The Spearman correlations of `expected_and_observed` behind the prompt; the last is alone."""
    trace = kvsim.open_trace(kvsim.sample_trace())
    found = expected_and_observed(trace, trace.prompt_len)
    got = values(measured(trace, ["expectation_steps", "expectation"]))

    for (step, name), layer, qhead in itertools.product(enumerate(STEPS), range(3), range(8)):
        value = got["expectation_steps", name, layer, None, qhead]
        assert value == found.spearman[step, layer, qhead]
        if name == METRICS["expectation_steps"].main:
            assert got["expectation", "", layer, None, qhead] == value


@pytest.mark.parametrize(
    ("layers", "others"),
    [
        (3, {}),
        (12, {"look_back=2": 2, "first_layer=2": 2, "first_layer=6": 6}),
        (24, {"look_back=2": 2, "look_back=4": 4, "look_back=9": 9, "first_layer=12": 12}),
    ],
)
def test_the_selection_layer_is_where_replay_selects(layers, others):
    """At every threshold, look-back and first layer, and none where it never does."""
    trace = settling_trace(layers)
    got = values(measured(trace, ["selection_layer"], ks=(40,), rule=ASL(window=8)))
    at = {key[1]: value for key, value in got.items()}
    names = {f"k=40,tau={tau:g}": {"tau": tau} for tau in TAUS}
    names |= {f"k=40,tau=0.3,{name}": {name[: name.index("=")]: x} for name, x in others.items()}

    assert set(names) <= set(at)
    for name, parameters in names.items():
        policy = kvsim.policy("asl", window=8, **parameters)
        assert at[name] == kvsim.replay(trace, policy, 48).selection.layer, name
    assert (set(at.values()) == {None}) == (layers == 3)


def test_normal_samples_are_no_farther_from_normal_than_chance():
    """Chance falls with the root of their number, and queries that are normal have it."""
    assert ks_by_chance(400) == pytest.approx(ks_by_chance(100) / 2, rel=0.1)
    rng = np.random.default_rng(1)
    q = rng.standard_normal((1, 16, 404, 8))
    k = rng.standard_normal((1, 16, 404, 8))
    still = kvsim.Rope((0.0,) * 4)
    found = measured(
        kvsim.Trace.from_arrays(q, k, k, prompt_len=300, rope=still), ["normal_distance"]
    )

    assert found.height == 16
    assert found["value"].mean() == pytest.approx(ks_by_chance(400), rel=0.05)
    assert set(found["chance"]) == {ks_by_chance(400)}


def test_a_trace_alone_has_all_of_its_metrics():
    """Those that records have too are the same; one of records is refused."""
    sample = kvsim.open_trace(kvsim.sample_trace())
    record = kvsim.replay(sample, kvsim.policy("tova"), 64)
    table = kvsim.measure(sample)
    of_record = kvsim.measure(sample, record).filter(pl.col("policy").is_null())

    of_trace = {name for name, entry in METRICS.items() if entry.kind == "trace"}
    assert set(table["metric"]) == of_trace
    both = table.filter(pl.col("metric").is_in(of_record["metric"].unique()))
    assert both.equals(of_record)
    assert set(of_record["metric"]) == {name for name in of_trace if METRICS[name].default}
    asked = kvsim.measure(sample, record, ["output_error", "layer_entropy"])
    assert asked.filter(metric="layer_entropy").equals(table.filter(metric="layer_entropy"))
    with pytest.raises(PolicyError, match=r"output_error is about a record, and only a trace"):
        kvsim.measure(sample, metrics=["layer_entropy", "output_error"])


@pytest.mark.parametrize(
    ("n", "prompt_len", "missing"),
    [
        (1, 1, set(DEFINED)),
        (2, 1, set(DEFINED) - {"projection_gap"}),
        (40, 40, {"expectation", "expectation_steps", "score_decline"}),
        (40, 5, set(DEFINED) - {"projection_gap", "normal_distance", "score_decline"}),
        (71, 40, {"score_decline"}),
        (72, 40, set()),
        (72, 32, {*(name for name in DEFINED if name.startswith("rank")), "layer_entropy",
                  "selection_layer"}),
    ],
)  # fmt: skip
def test_what_a_trace_is_too_short_for_has_no_rows(n, prompt_len, missing):
    """A prompt behind the sinks, rows after it, two windows, more tokens than ASL's window."""
    whole = settling_trace(3, n=80)
    arrays = {name: whole.read(name)[:, :, :n] for name in "qkv"}
    trace = changed(whole, **arrays, prompt_len=prompt_len)

    assert set(DEFINED) - set(measured(trace)["metric"]) == missing
