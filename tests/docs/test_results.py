"""docs/results.py measures every policy, and claims in the repository follow from its values."""

import json
import re
from dataclasses import replace
from functools import partial

import numpy as np
import polars as pl
import pytest

import kvsim
import results
from claims import tables as measuring
from claims.answers import pairs
from claims.page import cases, claims_page
from claims.plan import FULL, PLANS, SMALLEST
from claims.policies import CROSSES, PAPER, RELEASE, of_engine
from claims.statistics import read_values, stored_rows
from claims.tables import measure_prompt
from claims.traces import ANSWER, ANSWERS, SHEET, record, samples
from kvsim import policy
from kvsim.analysis.summaries import per_prompt
from kvsim.core.policy import Schedule
from kvsim.policies import CATALOGUE, names
from kvsim.recorder import load_model
from kvsim.studies.claims.claim import HOLDS, OPEN

pytestmark = pytest.mark.deep


def smallest(model, folder):
    """Measure the smallest plan of a model into a folder."""
    places = f"--out={folder / 'values.parquet'}", f"--traces={folder / 'traces'}"
    results.main([f"--model={model}", "--smallest", "--jobs=1", *places])
    return folder / "values.parquet"


@pytest.fixture(scope="module")
def values(tmp_path_factory):
    """What `--smallest` writes."""
    return smallest("tiny", tmp_path_factory.mktemp("results"))


def test_every_policy_has_values_that_make_sense(values):
    """All scorers, AMS and crosses have some; `full` loses nothing, no regret is below 0."""
    found = read_values(values, SMALLEST["tiny"])
    crossed = ("global", "criticalkv", "adakv", "chunkkv", "union", "paged", "dms")
    alone = [
        name
        for name in names()
        if name.partition("@")[0] not in crossed
        and CATALOGUE[name.partition("@")[0]].kind != "propagation"
        and not of_engine(name)
    ]
    across = [f"across: {name}" for name, of in CATALOGUE.items() if of.kind == "propagation"]
    of = partial(found.of, budget=SMALLEST["tiny"].budgets[0])

    assert [x for x in (*alone, *CROSSES, *across, PAPER, RELEASE) if not found.has(x)] == []
    assert of("full", metric="response_kl").tolist() == [0, 0]
    assert of("full", metric="retained_mass").tolist() == [1, 1]
    for name in alone:
        assert np.nanmin([0, *of(name, metric="regret")]) > -1e-6, name
        assert np.all(of(name, metric="retained_mass") <= 1 + 1e-6), name
    oracle, tova, random = (of(x, metric="regret").mean() for x in ("oracle", "tova", "random"))
    assert oracle < tova < random


def test_claims_of_two_prompts_are_not_decided(values):
    """A claim without a test lacks prompts, or what else it needs."""
    found = pl.read_csv(values.with_name("claims.csv")).fill_null("")
    for row in found.filter(pl.col("number") != "Q13").iter_rows(named=True):  # of repetitions
        if row["verdict"] == "not tested" and not row["result"]:
            lacking = ("yet", "three layers", "norms", "two budgets", "two numbers", "prompts")
            assert any(x in row["tested"] for x in lacking), row["claim"]
            continue
        assert row["verdict"] in ("not tested", OPEN), row["claim"]
        assert re.match(r"n=[12],|.* left out", row["result"]), row["claim"]
    for paper, letter, count in (
        ("AMS, arXiv 2605.23200", "Q", 13),
        ("G-KV, arXiv 2512.00504", "G", 14),
    ):
        numbers = {*found.filter(paper=paper)["number"]} - {""}
        assert numbers == {f"{letter}{i}" for i in range(1, count + 1)}


def test_only_what_is_missing_is_measured(values, tmp_path, monkeypatch):
    """A policy that is new or has other parameters; the rows of all others are those of before."""
    plan, folder, replayed = SMALLEST["tiny"], values.parent / "traces", []
    (calibration,) = record(plan, folder, [0])
    policies, replay_all = measuring.table_policies, measuring.replay_all
    changes = {"new": replace(policy("tova"), name="new"), "h2o": policy("h2o", recent=3)}

    def noted(traces, policies, *budgets, **options):
        replayed.append([each.name for each in policies])
        return replay_all(traces, policies, *budgets, **options)

    monkeypatch.setattr(measuring, "replay_all", noted)
    before = measure_prompt(1, plan, folder, calibration, tmp_path / "none.parquet")
    kept = measure_prompt(1, plan, tmp_path / "nothing", calibration, values)
    assert set(kept["piece"]) == set(before["piece"])
    assert replayed == []
    monkeypatch.setattr(measuring, "table_policies", lambda *given: policies(*given) | changes)
    after = measure_prompt(1, plan, folder, calibration, tmp_path / "none.parquet")
    assert replayed == [["h2o", "new"]]
    unchanged = [each.filter(~pl.col("policy").is_in([*changes])) for each in (before, after)]
    assert unchanged[0].equals(unchanged[1])
    assert set(after.filter(policy="new")["metric"]) > {"response_kl", "output_error", "regret"}
    errors = [each.filter(policy="h2o", metric="output_error") for each in (before, after)]
    assert not errors[0]["value"].equals(errors[1]["value"])


def test_the_file_of_values_has_those_of_every_prompt(values):
    """Means over layers, or their sum, as of what was measured layer by layer."""
    plan, folder = SMALLEST["tiny"], values.parent / "traces"
    (calibration,) = record(plan, folder, [0])
    read = read_values(values, plan)
    for number in (1, 2):
        rows = measure_prompt(number, plan, folder, calibration, folder / "none.parquet")
        measured = per_prompt(rows.filter(policy="tova", budget=32, prefill=False))
        for metric, variant in (("layer_error", ""), ("wipeout", "length=32,threshold=0")):
            (expected,) = measured.filter(
                metric=metric, variant=variant, params=measured["params"][0]
            )["value"]
            found = read.of("tova", 32, metric, variant)[number - 1]
            assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", ["8k", "qwen-1.5b"])
def test_values_of_few_policies_are_of_their_plan(name, tmp_path):
    """Events are where the plan says; claims are tested on answers."""
    plan = SMALLEST[name]

    rows = stored_rows(smallest(name, tmp_path)).drop_nulls("policy")

    assert {*rows["policy"]} >= {*plan.only}
    kept = rows.filter(policy="snapkv", metric="response_kl")
    assert kept["interval"].unique().to_list() == [None if plan.once else plan.interval]
    assert (tmp_path / "claims.md").exists() == (name == "qwen-1.5b")


def test_pairs_of_a_wrong_and_a_right_answer():
    """Each pair is of one policy; a tie counts half."""
    kl = np.array([[1.0, 5.0], [2.0, 5.0], [3.0, 4.0]])
    wrong = np.array([[0, 1], [1, 0], [0, 0]], bool)

    assert pairs(kl, wrong).tolist() == [1, 0, 0.5, 1]


@pytest.mark.parametrize("name", ["qwen-1.5b", "qwen-1.5b-sheets"])
def test_recorded_answers_are_right_and_of_their_model(name):
    """Of the card's answers those count that are right, ended and long; each has a task."""
    plan = PLANS[name]
    rows = [json.loads(line) for line in ANSWERS.read_text("utf-8").splitlines()]

    answers = samples(plan)[1:]

    assert len({prompt.id for prompt in answers}) == plan.prompts
    for prompt in answers:
        (row,) = (
            row
            for row in rows
            if row["model"] == plan.solved
            and row["response"] == prompt.response
            and prompt.content[0]["content"] == row.get("prompt")
        )
        assert row["right"]
        assert row["ended"]
        assert row["response_tokens"] >= plan.least
        assert (row["task"] == SHEET) == plan.sheets


def test_values_of_another_plan_make_no_page(values):
    """The file says of which prompts and policies its values are."""
    with pytest.raises(SystemExit, match="has values of Plan"):
        read_values(values, FULL)


def test_the_committed_claims_follow_from_the_values_of_all_models():
    """Each claim has its verdict on each model."""
    text = results.CLAIMS_PAGE.read_text("utf-8")

    committed = results.committed()
    assert claims_page(committed) == text
    assert cases(committed).write_csv() == (results.DOCS / "claims.csv").read_text("utf-8")


def test_a_claim_about_most_layers_follows_from_its_values():
    """By loops over the file: 19 of 30 layers of SmolLM2 are for G4, and 11 against it."""
    rows = stored_rows(results.DOCS / PLANS["smollm2"].values)
    rows = rows.filter(metric="sparsity", variant="p=0.01,max=sequence")
    wide = rows.group_by("prompt", "layer").agg(pl.col("value").mean()).sort("prompt", "layer")
    shares = wide["value"].to_numpy().reshape(46, 30) - 0.9
    least = 0.01

    def p_value(gaps, cells):
        signs = np.vstack([np.ones(46), np.random.default_rng(7).choice([-1, 1], (4000, 46))])
        sums = signs @ gaps
        less = np.array([[np.sum(of < x) for x in of] for of in sums.T])  # [cell, flip]
        weakest = less[np.argsort(less[:, 0])[: 30 - cells + 1]].max(0)
        return np.mean(weakest >= weakest[0])

    assert sum(shares.mean(0) > least) == 19
    assert p_value(shares - least, 16) < 0.005  # at least 16 of 30
    assert p_value(-shares - least, 15) > 0.9
    rows = pl.read_csv(results.DOCS / "claims.csv").filter(number="G4", model="smollm2")
    (row,) = rows.filter(pl.col("claim").str.contains("all keys")).to_dicts()
    assert row["verdict"] == HOLDS
    means = f"{shares.mean(0).min():+.3f} to {shares.mean(0).max():+.3f}"
    assert row["result"] == f"p=0.0022, n=46, 19/30 above 0, {means}"


@pytest.mark.parametrize("model", results.WHOLE)
def test_no_regret_is_below_zero(model):
    """Nothing retains more than the optimum."""
    rows = stored_rows(results.DOCS / PLANS[model].values).filter(metric="regret")

    assert rows["prompt"].n_unique() == (PLANS[model].regret or PLANS[model].prompts)
    assert rows["value"].min() > -1e-6


@pytest.mark.real
def test_kept_answers_of_judged_rows_are_those_of_a_live_run(tmp_path):
    """With one event, after the prompt, greedy decoding writes what the judged rows predict."""
    only = ("snapkv", "tova", "expected_attention", "knorm")
    plan = replace(SMALLEST["smollm2"], budgets=(48, 128), only=only, once=True)
    (path,) = record(plan, tmp_path, [2])
    model, tokenizer = load_model("smollm2")
    schedule = Schedule(None, prefill=True)
    policies = [replace(policy(name), name=name, schedule=schedule) for name in only]
    run = kvsim.live(
        model,
        path,
        policies,
        plan.budgets,
        tokenizer=tokenizer,
        interval="paper",
        max_new_tokens=ANSWER,
        metrics="answer_kept",
    )
    judged = measure_prompt(2, plan, tmp_path, tmp_path, tmp_path / "none.parquet")

    columns = ("policy", "budget", "value")
    kept, expected = (
        sorted(table.filter(metric="answer_kept").select(columns).rows())
        for table in (judged, run.table)
    )
    assert kept == expected
    assert {value for *_, value in kept} == {0, 1}
