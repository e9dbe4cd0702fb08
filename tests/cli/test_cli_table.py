"""`kvsim compare --by`: means of finished runs, in its forms."""

import csv
import dataclasses
import io
import json
import shutil

import polars as pl
import pytest
from command_line import one_line

import kvsim
from kvsim.analysis.folder import bind, read_run
from kvsim.analysis.results import csv_text
from kvsim.analysis.summaries import averages, main_variants, stages
from kvsim.sweeps import replay_all
from traces import random_trace

TASKS = {"a": "walk", "b": "get", "c": "walk"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of three random prompts with seven layers, of two tasks."""
    sizes = {"layers": 7, "heads": 1, "n": 60, "dim": 4, "prompt_len": 30}
    traces = [random_trace(**sizes, seed=seed, name=name) for seed, name in enumerate(TASKS)]
    policies = [kvsim.policy("tova"), kvsim.policy("knorm")]
    metrics = ["output_error", "retained_iou"]
    run = replay_all(traces, policies, [8, "25%"], interval=8, metrics=metrics)
    task = pl.col("trace").replace_strict(TASKS)
    out = tmp_path_factory.mktemp("runs") / "x"
    return dataclasses.replace(run, table=run.table.with_columns(task=task)).save(out)


def test_means_by_stage_and_task_are_those_of_python(run, printed, folder):
    """As `kvsim.averages` has them by stage and task, every number in CSV and JSON."""
    out = printed("compare", folder, "--by", "stage,task", "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    keys = ["policy", "requested", "metric", "stage", "task"]
    metrics = ["output_error", "retained_iou"]
    chosen = main_variants(read_run(folder).table, metrics)
    expected = averages(stages(chosen), ["stage", "task"]).select(*keys, "mean", "n")
    means = {tuple(map(str, row[:5])): row[5:] for row in expected.iter_rows()}

    assert len(rows) == len(means) == 3 * 2 * 2 * 2 * 2
    for row in rows:
        mean, count = means[tuple(row[key] for key in keys)]
        assert float(row["mean"]) == pytest.approx(mean)
        assert int(row["n"]) == count == (2 if row["task"] == "walk" else 1)
        assert row["low"] == ""  # of too few prompts
    by_json = json.loads(run("compare", folder, "--by", "stage,task", "--json")[1])
    assert [f"{one['mean']}" for one in by_json] == [row["mean"] for row in rows]


@pytest.mark.parametrize(
    ("label", "shown"),
    [
        *((x, f"'{x}") for x in ("=1+1", "@SUM(A1)", " =1", "-cmd|' /C'!A0")),
        *((x, x) for x in ("-2", "a-b", "a,b")),
    ],
)
def test_no_cell_of_csv_is_a_formula(run, folder, tmp_path, label, shown):
    """Text that a spreadsheet would compute has an apostrophe in front; numbers stay numbers."""
    table = tmp_path / "x.parquet"
    read_run(folder).table.with_columns(task=pl.lit(label)).write_parquet(table)
    for by in (["--by", "task"], []):
        rows = list(csv.DictReader(io.StringIO(run("compare", table, *by, "--format", "csv")[1])))
        assert {row["task"] for row in rows} == {shown if by else ""}
        assert all(float(row["mean"]) > -9 for row in rows)
    assert csv_text(pl.DataFrame({"x": ["\t1", "\rq"]})) == "x\n'\t1\n\"'\rq\"\n"


def test_rows_of_the_prompt_behind_an_event_are_shown_by_variant(run, tmp_path):
    """`--by variant` has a row for each variant; without it the main one alone is shown."""
    trace = random_trace(layers=2, heads=1, n=60, dim=4, prompt_len=30, name="a")
    made = replay_all([trace], ["tova"], [8], prefill_chunk=12, metrics=["output_error"])
    out = made.save(tmp_path / "x")

    _, text, _ = run("compare", out, "--by", "variant", "--format", "csv")
    shown = {row["variant"]: float(row["mean"]) for row in csv.DictReader(io.StringIO(text))}
    means = made.table.group_by("variant").agg(pl.col("value").mean())
    assert shown == pytest.approx(dict(means.iter_rows()))
    assert {*shown} == {"", "rows=prompt"}


def test_a_table_has_a_row_per_metric(run, folder):
    """With chance, prompts and the fidelity next to it."""
    asked = ["--by", "stage", "--metric", "retained_iou,output_error", "--budget", "25%"]
    lines = [line.split() for line in run("compare", folder, *asked)[1].splitlines()]

    assert lines[0] == [
        "stage",
        *["policy", "budget", "metric", "mean", "chance", "prompts", "fidelity"],
    ]
    assert lines[1][:4] == ["early", "tova", "25%", "retained_iou"]
    assert lines[1][-4:] == ["3", "of", "3", "open"]
    assert [len(line) for line in lines[1:13]] == [10] * 12
    assert lines[13] == []


def test_a_run_of_a_later_version_can_be_shown(run, folder, tmp_path):
    """`kvsim info` prints what it knows, means name what the run has instead."""
    later = shutil.copytree(folder, tmp_path / "later")
    table = pl.read_parquet(later / "results.parquet").with_columns(metric=pl.lit("later"))
    table.unique(["trace", "policy", "budget"]).write_parquet(later / "results.parquet")
    bind(later, json.loads((later / "run.json").read_text()))

    shown, (status, _, error) = run("info", later), run("compare", later, "--by", "task")

    assert shown[0] == 0
    assert status == 2
    assert "a metric that this version knows has task; the runs have later" in one_line(error)
