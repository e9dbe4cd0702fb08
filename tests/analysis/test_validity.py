"""Rank correlations, errors and kept sets of replay and live run."""

from __future__ import annotations

import itertools
import json
import math
import statistics

import numpy as np
import polars as pl
import pytest
from scipy.stats import spearmanr

import kvsim
from kvsim.analysis.registry import METRICS
from kvsim.analysis.table import in_order
from kvsim.analysis.validity import errors_by_layer, kept_agreement, rank_correlations
from kvsim.errors import PolicyError
from kvsim.sweeps.run import replay_all

POLICIES, BUDGETS = ("tova", "knorm", "h2o"), (16, 32)
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


def test_a_planted_order_has_its_correlation():
    """A metric that orders cells as the model does has 1, the opposite order -1, between 0.6."""
    order = [0, 1, 2, 5, 4, 3]  # of six ranks; by hand: 1 - 6 (4 + 0 + 4) / (6 * 35)
    replayed, live = loops(
        {
            "output_error": lambda _, at: 1.0 + at,
            "retained_mass": lambda _, at: 1.0 + at,
            "layer_error": lambda _, at: 1.0 + order[at],
        },
        {"response_kl": lambda prompt, at: math.exp(at + prompt)},
        prompts=4,
    )
    out = rank_correlations(replayed, live, ["response_kl"])
    found = {row["metric"]: row for row in out.to_dicts()}

    assert found["output_error"]["between"] == pytest.approx(1)
    assert found["retained_mass"]["between"] == pytest.approx(-1)
    assert found["layer_error"]["between"] == pytest.approx(1 - 6 * 8 / (6 * 35))
    assert found["layer_error"]["within"] == pytest.approx(1 - 6 * 8 / (6 * 35))
    assert found["layer_error"]["cells"] == 6
    assert found["layer_error"]["prompts"] == 4


def test_correlations_equal_a_plain_loop():
    """Between cells and within prompts, with missing values and a constant prompt, as in a loop."""
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(2, 7, len(CELLS))) + 5
    x += y  # correlated
    y[2] = 1.0  # nothing varies in this prompt
    missing = {(0, 1), (4, 5)}
    replayed, live = loops(
        {"output_error": lambda prompt, at: float(x[prompt, at])},
        {
            "response_kl": lambda prompt, at: (
                None if (prompt, at) in missing else float(y[prompt, at])
            )
        },
        prompts=7,
    )
    row = rank_correlations(replayed, live, ["response_kl"]).row(0, named=True)
    within, means = [], []
    for prompt in range(7):
        there = [at for at in range(len(CELLS)) if (prompt, at) not in missing]
        if prompt != 2:
            within.append(spearmanr(x[prompt, there], y[prompt, there]).statistic)
    for at in range(len(CELLS)):
        there = [prompt for prompt in range(7) if (prompt, at) not in missing]
        means.append((x[there, at].mean(), y[there, at].mean()))

    assert row["within"] == pytest.approx(statistics.fmean(within))
    assert row["between"] == pytest.approx(spearmanr(*zip(*means, strict=True)).statistic)
    assert row["varied"] == 6
    assert row["between_low"] < row["between"] < row["between_high"]
    assert row["within_low"] < row["within"] < row["within_high"]


def test_cells_that_evict_nothing_are_left_out():
    """Where the replay has no error, and of the policy full, there is nothing to predict."""
    replayed, live = loops(
        {"output_error": lambda _, at: max(0.0, at - 1.0)},
        {"response_kl": lambda _, at: float(at)},
        prompts=2,
    )
    full = replayed.with_columns(policy=pl.lit("full"), value=pl.lit(9.0))
    out = rank_correlations(pl.concat([replayed, full]), live, ["response_kl"])

    assert out["cells"].to_list() == [4]
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
    assert out["open"].to_list() == pytest.approx([5.25, 5.25])
    assert out["closed"].to_list() == pytest.approx([5.25, 8.75])
    assert out["between"].to_list() == pytest.approx([1, 1])


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
    """Over three policies and two budgets of the sample, error and KL are ordered alike."""
    replayed, live = runs
    out = rank_correlations(replayed.table, live.table)
    layers = errors_by_layer(replayed.table, live.table, ["output_error"])
    kl = out.filter(metric="output_error", outcome="response_kl").row(0, named=True)

    assert kl["cells"] == 6
    assert kl["between"] == pytest.approx(kl["within"])  # of one prompt
    assert kl["between"] > 0.5
    assert kl["between_low"] is None
    assert layers["ratio"][0] == pytest.approx(1, abs=1e-3)  # knorm has ties
