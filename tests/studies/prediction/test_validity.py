"""Rank correlations at one budget, errors and kept sets of replay and live run."""

import itertools
import json
import statistics

import numpy as np
import polars as pl
import pytest
from scipy.stats import spearmanr

import kvsim
from kvsim.analysis.registry import METRICS
from kvsim.analysis.significance import rank_correlation
from kvsim.analysis.table import in_order
from kvsim.errors import PolicyError
from kvsim.studies.prediction.validity import (
    correlation,
    errors_by_layer,
    kept_agreement,
    rank_correlations,
)
from kvsim.sweeps.driver import replay_all

POLICIES, BUDGETS = ("tova", "knorm", "h2o", "snapkv", "keydiff"), (16, 32)
CELLS = list(itertools.product(POLICIES, BUDGETS))


def table(values, fidelity):
    """A Table of {(trace, policy, budget, metric, layer): value}."""
    names = ("trace", "policy", "budget", "metric", "layer")
    rows = []
    for key, value in values.items():
        row = dict(zip(names, key, strict=True))
        entry = METRICS[row["metric"]]
        row |= {"params": "{}", "interval": 8, "prefill": True, "variant": entry.main}
        rows.append(row | {"unit": entry.unit, "value": value, "fidelity": fidelity})
    return in_order([pl.DataFrame(rows)])


def loops(replayed, live, prompts):
    """Tables of functions of prompt and cell, by metric."""
    out = []
    for values, fidelity in ((replayed, "open"), (live, "closed")):
        entries = {
            (f"p{prompt}", *cell, metric, 0): value(prompt, at)
            for metric, value in values.items()
            for prompt in range(prompts)
            for at, cell in enumerate(CELLS)
            if value(prompt, at) is not None
        }
        out.append(table(entries, fidelity))
    return out


def test_each_budget_has_its_own_correlation():
    """Orders are opposite at the two budgets, whatever the budget adds to both sides; no mean."""
    order = dict(zip(POLICIES, (0, 2, 1, 4, 3), strict=True))  # by hand: 1 - 6 * 4 / (5 * 24)

    def place(at):
        policy, budget = CELLS[at]
        return (1 if budget == 16 else -1) * POLICIES.index(policy) + (100 if budget == 16 else 10)

    replayed, live = loops(
        {
            "output_error": lambda _, at: float(place(at)),
            "retained_mass": lambda _, at: float(place(at)),
            "layer_error": lambda _, at: 1.0 + order[CELLS[at][0]],
        },
        {"response_kl": lambda prompt, at: 1.0 + POLICIES.index(CELLS[at][0]) + prompt / 9},
        prompts=6,
    )
    out = rank_correlations(replayed, live, ["response_kl"])
    found = {(row["budget"], row["metric"]): row for row in out.to_dicts()}

    for name in ("between", "within"):
        assert found["16", "output_error"][name] == pytest.approx(1)
        assert found["32", "output_error"][name] == pytest.approx(-1)
        assert found["16", "retained_mass"][name] == pytest.approx(-1)
        assert found["16", "layer_error"][name] == pytest.approx(0.8)
    assert out["policies"].to_list() == [5] * len(out)
    assert out["prompts"].to_list() == [6] * len(out)
    assert {*out["budget"]} == {"16", "32"}


def test_correlations_equal_a_plain_loop():
    """Prompts without all values are left out; without differences they count in means alone."""
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(2, 9, len(CELLS))) + 5
    x += y  # correlated
    y[2, :] = 1.0  # nothing varies in this prompt
    replayed, live = loops(
        {"output_error": lambda prompt, at: float(x[prompt, at])},
        {"response_kl": lambda p, at: None if (p, at) == (4, 2) else float(y[p, at])},
        prompts=9,
    )
    worst = [
        pl.concat([each, each.with_columns(policy=pl.lit("random"), value=pl.lit(99.0)).unique()])
        for each in (replayed, live)
    ]
    row = rank_correlations(*worst, ["response_kl"]).row(0, named=True)
    assert CELLS[2][1] == 16
    places = [at for at, (_, budget) in enumerate(CELLS) if budget == 16]
    prompts = [prompt for prompt in range(9) if prompt != 4]
    within = [spearmanr(x[p, places], y[p, places]).statistic for p in prompts if p != 2]
    means = [(x[prompts, at].mean(), y[prompts, at].mean()) for at in places]

    assert row["budget"] == "16"
    assert row["within"] == pytest.approx(statistics.fmean(within))
    assert row["between"] == pytest.approx(spearmanr(*zip(*means, strict=True)).statistic)
    assert (row["prompts"], row["policies"]) == (8, 5)


def drawn(rng, count):
    """Numbers of as many prompts as there are, with replacement."""
    times = rng.multinomial(count, np.full(count, 1 / count), 1000)
    return [np.repeat(np.arange(count), each) for each in times]


@pytest.mark.parametrize("rows", [12, 20])
def test_intervals_are_over_prompts_and_policies(rows):
    """Ends are those of a loop; prompts of other texts are drawn on their own."""
    rng = np.random.default_rng(5)
    means = np.arange(9.0)
    x, y = (means + rng.integers(0, 6, (n, 9)) for n in (12, rows))
    y[:, :4] = y[:, 3::-1]
    rng = np.random.default_rng(0)
    prompts = drawn(rng, 12)
    others = prompts if rows == 12 else drawn(rng, rows)
    policies = rng.integers(0, 9, (1000, 9))
    own, both = [], []
    for a, b, c in zip(prompts, others, policies, strict=True):
        of = x[a].sum(0), y[b].sum(0)
        pairs = of, (of[0][c], of[1][c])
        for out, pair in zip((own, both), pairs, strict=True):
            out.append(np.arctanh(np.clip(spearmanr(*pair).statistic, -0.999, 0.999)))
    rho = spearmanr(x.mean(0), y.mean(0)).statistic
    ends = np.tanh(np.quantile(both, [0.025, 0.975]) + np.arctanh(rho) - np.median(own))

    found = rank_correlation(x, y, same=rows == 12)

    assert found == pytest.approx((rho, *ends), abs=1e-3)  # means of products round otherwise
    assert ends[0] < rho < ends[1]


def test_few_policies_few_prompts_and_noise_have_no_interval():
    """The correlation is a number alone."""
    x = np.arange(8.0) + np.random.default_rng(0).random((12, 8))
    noise = x + 200 * np.random.default_rng(1).random((12, 8))
    assert not np.isnan(rank_correlation(x, x)).any()
    for a, b in ((x[:, 1:], x[:, 1:]), (x[1:], x[1:]), (x, noise), (noise, x)):
        assert list(np.isnan(rank_correlation(a, b))) == [False, True, True]
    alone = {"between": pytest.approx(1), "low": None, "high": None, "within": pytest.approx(1)}
    assert correlation(x[1:], x[1:]) == alone


@pytest.mark.parametrize(("prompts", "policies", "enough"), [(5, 9, 0), (6, 4, 0), (12, 8, 1)])
def test_few_prompts_or_policies_have_no_number(prompts, policies, enough):
    """Neither a correlation nor an interval, and none where nothing varies."""
    x = np.random.default_rng(0).random((prompts, policies)) + np.arange(policies)

    assert [value is not None for value in correlation(x, x).values()] == [enough] * 4
    assert set(correlation(x, np.ones_like(x)).values()) == {None}


def test_cells_that_evict_nothing_are_left_out():
    """Where the replay has no error, and of the policy full, there is nothing to predict."""
    replayed, live = loops(
        {"output_error": lambda _, at: 0.0 if CELLS[at] == ("tova", 16) else at + 1.0},
        {"response_kl": lambda _, at: float(at)},
        prompts=6,
    )
    full = replayed.with_columns(policy=pl.lit("full"), value=pl.lit(9.0))
    out = rank_correlations(pl.concat([replayed, full]), live, ["response_kl"])

    rows = {row["budget"]: (row["policies"], row["between"]) for row in out.to_dicts()}
    assert rows == {"16": (4, None), "32": (5, pytest.approx(1))}
    with pytest.raises(PolicyError, match="no cell of both Tables evicts anything"):
        rank_correlations(full, live)


def test_errors_of_both_loops_by_layer():
    """The ratio is that of sums over cells in a prompt, its mean over prompts."""
    metric = "output_error"
    replayed = {
        (f"p{p}", *cell, metric, layer): (1.0 + at) * (1 + p)
        for p in range(2)
        for at, cell in enumerate(CELLS)
        for layer in (0, 1)
    }
    live = {key: value * (1 + int(key[0][1]) * key[-1]) for key, value in replayed.items()}
    out = errors_by_layer(table(replayed, "open"), table(live, "closed"), [metric])

    assert out["ratio"].to_list() == pytest.approx([1, 1.5])
    assert out["open"].to_list() == pytest.approx([8.25, 8.25])
    assert out["closed"].to_list() == pytest.approx([8.25, 13.75])


@pytest.fixture(scope="module")
def runs():
    """The sample trace replayed and run on its model."""
    trace = kvsim.open_trace(kvsim.sample_trace())
    policies = [kvsim.policy(name) for name in ("tova", "knorm", "streaming_llm")]
    terms = {"interval": 32, "prefill": True}
    metrics = ["layer_error", "output_error", "retained_mass"]
    metrics = [name for name in metrics if trace.has("o_proj") or name != "layer_error"]
    replayed = replay_all([trace], policies, [48, 96], metrics=metrics, **terms)
    return replayed, kvsim.live("tiny", [trace], policies, [48, 96], **terms)


def test_kept_sets_agree_as_in_a_plain_loop(runs):
    """Sets of positions, event by event; those of streaming_llm are the same ones."""
    replayed, live = runs
    out = kept_agreement(replayed.records, live.records)
    expected = []
    for a, b in zip(replayed.records, live.records, strict=True):
        for row, layer, head in itertools.product(
            sorted({*a.events, *b.events}), range(len(a.layers)), range(a.evicted_at.shape[1])
        ):
            kept = [
                {p for p in range(row + 1) if record.evicted_at[layer, head, p] > row}
                for record in (a, b)
            ]
            expected.append(len(kept[0] & kept[1]) / len(kept[0] | kept[1]))

    assert out["agreement"].to_list() == pytest.approx(expected)
    assert set(out.filter(policy="streaming_llm")["agreement"]) == {1.0}
    assert 0 < out["chance"].min() < out["chance"].max() < 1
    assert json.loads(out["params"][0]) == dict(replayed.records[0].params)


def test_chance_is_that_of_random_sets():
    """Random sets of the sizes of both agree, on average, as the column says."""
    rng = np.random.default_rng(0)
    trace = kvsim.open_trace(kvsim.sample_trace())
    policy = kvsim.policy("knorm")
    record = kvsim.replay(trace, policy, 64, interval=10_000, prefill=True)
    row = kept_agreement([record], [record])
    seen = record.events[0] + 1
    shares = []
    for _ in range(2000):
        a, b = (set(rng.choice(seen, 64, replace=False)) for _ in range(2))
        shares.append(len(a & b) / len(a | b))

    assert row["chance"][0] == pytest.approx(statistics.fmean(shares), rel=0.03)


def test_records_without_a_counterpart_are_refused(runs):
    """Another schedule has no common record."""
    replayed, live = runs

    with pytest.raises(PolicyError, match="no record of the replay has its live run"):
        kept_agreement(replayed.records[:1], live.records[1:])


def test_a_replay_and_a_live_run_of_tiny(runs):
    """The first layer has the errors of the live run; one prompt has no rank correlation."""
    replayed, live = runs
    out = rank_correlations(replayed.table, live.table, ["response_kl"])
    layers = errors_by_layer(replayed.table, live.table, ["output_error"])

    assert out.select("prompts", "policies").unique().rows() == [(1, 3)]
    assert set(out["between"]) == {None}
    assert layers["ratio"][0] == pytest.approx(1, abs=1e-3)  # knorm has ties
