"""Sweeps: budgets, run folders, failures that keep the rest."""

import json
from dataclasses import replace
from itertools import combinations

import polars as pl
import pytest
import torch
from probes import repeated

import kvsim
from kvsim.analysis.output import optimum as optimum_module
from kvsim.analysis.output.metrics import REGRET
from kvsim.analysis.overview import summarise
from kvsim.analysis.registry import METRICS
from kvsim.core.arguments import resolve_budget
from kvsim.core.parts import by_query_head
from kvsim.core.policy import Protection, Schedule
from kvsim.errors import (
    BudgetError,
    ConfigError,
    MemoryLimitError,
    OutputError,
    PolicyError,
    ScoreError,
)
from kvsim.policies import CATALOGUE, has_parameter, names
from kvsim.store.records import read_records
from kvsim.sweeps.driver import replay_all
from traces import random_arrays, random_trace, short_lengths


def make_trace(name="a", tokens=80, **more):
    """A small random trace, and more arrays where they are given."""
    arrays = random_arrays(n=tokens, size=1.0)
    probe = repeated(arrays["q"], arrays["k"], 30)
    return random_trace(n=tokens, size=1.0, prompt_len=30, name=name, **probe, **more)


@pytest.mark.parametrize(
    ("budget", "expected"),
    [(48, 48), ("64", 64), ("33%", 26), ("0.1%", 1), (" 10% ", 8)]
    + [(budget, None) for budget in ("many", "0%", "101%", "-5%", "%", "1.5")],
)
def test_a_budget_is_entries_or_a_share_of_the_final_length(budget, expected):
    """Shares are rounded down, to one entry at least; anything else is refused."""
    if expected is not None:
        assert resolve_budget(budget, 80) == expected
        return
    with pytest.raises(BudgetError, match="expected"):
        resolve_budget(budget, 80)


def test_a_sweep_measures_every_policy_at_every_budget_of_every_trace():
    """Traces, policies and budgets cross; a share is one row of the summary, not one per trace."""
    traces = [make_trace("a"), make_trace("b", tokens=60)]
    policies = [kvsim.policy("tova"), kvsim.policy("random")]

    run = replay_all(traces, policies, [16, "25%"], interval=8)

    assert len(run.records) == 8
    assert run.failures == ()
    cells = run.table.filter(pl.col("metric") == "output_error")
    assert cells.select("trace", "policy", "budget").n_unique() == 8
    summary = summarise(run.table)
    assert summary.select("policy", "budget", "share").rows() == [
        ("tova", 16, None),
        ("tova", 18, "25%"),  # 20 entries of one trace, 15 of the other
        ("random", 16, None),
        ("random", 18, "25%"),
    ]


@pytest.mark.parametrize("prefill", [None, False])
def test_an_interval_is_one_schedule_for_every_policy(prefill):
    """All policies and presets evict after the same rows, also those that skip the prompt's end."""
    trace = make_trace(o_proj=torch.ones(2, 4, 8, 32))
    policies = []
    for name in names():
        entry = CATALOGUE[name.partition("@")[0]].preset(name.partition("@")[2])
        whole = name if entry.innermost or entry.default else f"{name}+knorm"
        params = dict.fromkeys(entry.required, "prefix:16")
        if has_parameter(whole, "window"):
            params["window"] = 4
        if whole.startswith("ams"):
            params["recent"] = 4
        if has_parameter(whole, "protect_prompt"):
            params["protect_prompt"] = False
        policies.append(kvsim.policy(whole, **{**params, **short_lengths(name)}))
    assert {one.schedule.prefill for one in policies} == {True, False}

    run = replay_all(
        [trace], policies, [16], interval=20, prefill=prefill, metrics=["entries_seen"]
    )

    assert run.failures == ()
    assert run.parameters["schedules"] == [
        {"interval": 20, "prefill": prefill is None, "compress": None, "prefill_chunk": None}
    ]
    first = [29] if prefill is None else []
    for one, record in zip(policies, run.records, strict=True):
        assert record.schedule == Schedule(20, prefill is None), one.name
        if one.bounded and one.propagation is None:
            assert record.events == [*first, 49, 69], one.name
    assert set(run.table["prefill"].drop_nulls()) == {prefill is None}


def test_the_schedule_of_a_comparison_does_not_depend_on_its_policies():
    """Two policies or more act after the prompt and every 32 rows, one as its paper says."""
    trace, options = make_trace(), {"metrics": ["entries_seen"]}
    full, tova, snapkv, ams = (
        kvsim.policy("full"),
        kvsim.policy("tova"),
        kvsim.policy("snapkv", window=4),
        kvsim.policy("ams", window=4, recent=4),
    )
    run = replay_all([trace], [full, tova, ams, snapkv], [16], **options)
    pair = replay_all([trace], [snapkv, full], [16], **options)
    alone = replay_all([trace], [snapkv, snapkv], [16], **options)
    given = replay_all([trace], [snapkv], [16], interval=8, **options)
    own = replay_all([trace], [tova, ams], [16], interval="paper", **options).records
    after = replay_all([trace], [tova, ams], [16], interval="paper", prefill=True, **options)

    assert [record.events for record in run.records] == [[], *[[29, 61]] * 3]
    assert (pair.records[0].evicted_at == run.records[3].evicted_at).all()
    for each in (run, pair):
        assert each.parameters["schedules"][0]["interval"] == 32
        (remark,) = (one for one in each.remarks if "schedule" in one)
        assert "the prompt, every 32 rows" in remark
    assert [record.events for record in alone.records] == [[29]]  # the same cell twice is one
    assert not any("schedule" in one for one in given.remarks)
    assert [x.schedule for x in own] == [Schedule(1), Schedule(512, prefill=False)]
    assert all(x.facts.own_schedule for x in own)
    assert [x.schedule for x in after.records] == [Schedule(1), Schedule(512)]
    with pytest.raises(ConfigError, match="interval is 0; expected rows, at least 1, or paper"):
        replay_all([trace], [tova, ams], [16], interval=0)


def test_every_metric_of_a_policy_has_a_main_variant():
    """One variant of each stands in the summary; a mean over variants would mean nothing."""
    trace = kvsim.open_trace(kvsim.sample_trace())
    # segments and quotas are of ams alone
    policies = [kvsim.policy("snapkv"), kvsim.policy("ams", window=16)]
    run = replay_all([trace], policies, ["25%"], interval=64)
    of_policy = run.table.filter(pl.col("policy").is_not_null())
    found = dict(of_policy.group_by("metric").agg(pl.col("variant").unique()).iter_rows())

    assert [name for name, variants in found.items() if METRICS[name].main not in variants] == []


def test_two_policies_that_look_alike_are_refused():
    """Unless parameters tell their results apart; what a policy protects is one of them."""
    first = kvsim.policy("tova")
    second = replace(first, protect=Protection(sink=4))

    with pytest.raises(PolicyError, match="two different policies are called 'tova'"):
        replay_all([make_trace()], [first, replace(first, schedule=Schedule(4))], [16])
    run = replay_all([make_trace()], [first, second], [16], metrics=["entries_seen"])
    protect = {"sink": 4, "recent": 0, "prompt": False}
    assert run.parameters["policies"]["tova"] == [
        first.params,
        {**first.params, "protect": protect},
    ]


def test_a_run_folder_holds_parameters_records_and_results(tmp_path):
    """Nothing half-written beside them, and never over anything but an empty folder."""
    run = replay_all([make_trace()], [kvsim.policy("snapkv", window=4)], [16])
    (tmp_path / "x").mkdir()

    folder = run.save(tmp_path / "x")

    assert [p.name for p in tmp_path.iterdir()] == ["x"]
    names = {"records.zarr", "results.parquet", "run.json"}
    assert {p.name for p in folder.iterdir()} == names
    assert pl.read_parquet(folder / "results.parquet").equals(run.table)
    (record,) = read_records(folder / "records.zarr")
    assert (record.evicted_at == run.records[0].evicted_at).all()
    stored = json.loads((folder / "run.json").read_text())
    assert stored["policies"] == {"snapkv": {"window": 4, "pool": "max", "pool_kernel": 7}}
    assert stored["versions"]["kvsim"] == kvsim.__version__
    with pytest.raises(OutputError, match="nothing was changed"):
        run.save(tmp_path)


def test_a_cell_that_cannot_be_replayed_fails_alone():
    """Its budget has no rule; where no cell can be replayed, an error says why before any work."""
    run = replay_all(make_trace(), ["tova", "snapkv"], 8)

    assert ([x.policy for x in run.records], len(run.failures)) == (["tova"], 1)
    assert "smallest budget that works is 32" in run.failures[0].error
    with pytest.raises(MemoryLimitError, match="give at least --set memory="):
        replay_all(make_trace(), "tova", 8, memory=1000)


def best_by_trying(trace, budget, row, fixed):
    """Most mass that any set of `budget` entries retains, by layer and KV head, and how many sets.

    Mean over the rows after `row`, which hold the set and everything later, and the group. The
    positions `fixed` belong to every set.
    """
    free = [pos for pos in range(row + 1) if pos not in fixed]
    sets = [(*fixed, *more) for more in combinations(free, budget - len(fixed))]
    best = []
    for layer in range(trace.n_layers):
        attention = trace.attention(layer, range(row + 1, trace.n_pos)).double()
        mass = attention.unflatten(0, (trace.n_heads, -1)).mean((1, 2))  # [head, pos]
        each = torch.stack([mass[:, list(one)].sum(-1) for one in sets])
        best.append(each.amax(0) + mass[:, row + 1 :].sum(-1))
    return torch.stack(best), len(sets)


def by_group(table, name, trace):
    """Values of a metric of one record, averaged over each group; [layer, head]."""
    values = table.filter(pl.col("metric") == name).sort("layer", "qhead")["value"].to_torch()
    return values.view(trace.n_layers, trace.n_heads, -1).mean(-1)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("sink", [0, 2])
def test_regret_is_the_distance_to_the_best_set(seed, sink):
    """At one event, retained mass and regret add up to the best of all sets, found by trying."""
    trace = random_trace(n=14, seed=seed, size=4.0, prompt_len=9)
    one = replace(kvsim.policy("random"), protect=Protection(sink=sink))

    table = replay_all([trace], [one], [4], interval=100, metrics=["retained_mass", "regret"]).table

    mass, regret = (by_group(table, name, trace) for name in ("retained_mass", "regret"))
    best, tried = best_by_trying(trace, 4, 8, range(sink))
    assert tried == (126 if sink == 0 else 21)
    assert torch.allclose(mass + regret, best, atol=1e-6)
    assert float(regret.max()) > 0.01


def test_sets_of_query_heads_are_compared_with_sets_of_query_heads():
    """Where every query head keeps its own set, the oracle has one for each as well."""
    trace = random_trace(n=14, size=4.0, prompt_len=9)
    one = kvsim.policy("snapkv@original", window=2)

    run = replay_all([trace], [one], [4], metrics=["retained_mass", "regret"])

    alone = by_query_head(trace)
    mass, regret = (by_group(run.table, name, alone) for name in ("retained_mass", "regret"))
    best, _ = best_by_trying(alone, 4, 8, (7, 8))  # the window is protected
    assert regret.shape == (2, 4)
    assert torch.allclose(mass + regret, best, atol=1e-6)


def test_regret_does_not_depend_on_what_else_is_replayed():
    """The optimum reads all that it holds, whichever policy asked for it first."""
    trace = make_trace()
    names = ["snapkv+quest", "snapkv", "snapkv+int4"]
    policies = [kvsim.policy(name, window=2) for name in names]
    options = {"interval": 8, "metrics": ["regret"]}
    alone = [replay_all([trace], [each], [16], **options).table for each in policies]

    for order in (policies, policies[::-1]):
        table = replay_all([trace], order, [16], **options).table
        for name, expected in zip(names, alone, strict=True):
            assert table.filter(policy=name)["value"].equals(expected["value"])
    mean = [float(table["value"].mean()) for table in alone]
    assert mean[0] >= mean[1] >= -1e-6


def test_references_are_computed_once_for_equal_terms(monkeypatch):
    """Budget, events and protected entries decide; the policy does not matter."""
    solved, solve = [], optimum_module._solved

    def noted(trace, record, events, places, protect, **options):
        solved.append((int(places.max()), protect[1]))
        return solve(trace, record, events, places, protect, **options)

    monkeypatch.setattr(optimum_module, "_solved", noted)
    policies = [kvsim.policy(n) for n in ("tova", "random", "full")]
    policies.append(kvsim.policy("snapkv", window=4))

    run = replay_all(
        [make_trace()], policies, [16, 20], interval=8, metrics=["output_error", *REGRET]
    )

    assert solved == [(16, 0), (20, 0), (16, 4), (20, 4)]
    of_policies = run.table.filter(metric="regret")["policy"]
    assert set(of_policies) == {"tova", "random", "snapkv"}  # no budget binds the other
    assert summarise(run.table).filter(policy="full")["regret"].to_list() == [None, None]
    assert [record.policy for record in run.records].count("oracle") == 0


def test_a_cell_survives_its_optimum(monkeypatch):
    """Where the optimum fails, the policy's own results are kept, and a remark says why."""

    def fail(*args, **options):
        raise ScoreError("oracle: broken")

    monkeypatch.setattr(optimum_module, "_solved", fail)

    run = replay_all(
        [make_trace()], [kvsim.policy("tova")], [16], interval=8, metrics=["output_error", *REGRET]
    )

    assert len(run.records) == 1
    assert "output_error" in set(run.table["metric"])
    assert "regret" not in set(run.table["metric"])
    assert run.failures == ()
    assert [x for x in run.remarks if "no regret: oracle: broken" in x]
