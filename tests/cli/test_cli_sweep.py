"""`kvsim sweep`: configurations, lists, folders, and what it says."""

import json
import shutil
from contextlib import nullcontext
from typing import NamedTuple

import polars as pl
import pytest

from kvsim.analysis.folder import read_run
from kvsim.cli import show
from kvsim.sweeps import tasks
from kvsim.sweeps.driver import begin, finish, publish, sweep
from kvsim.sweeps.planning import Plan, grid_from
from kvsim.sweeps.shards import Shards
from traces import random_trace

LIST = ("sweep", "sample", "--policy", "tova,snapkv", "--budget", "48", "--interval", "64")
ONLY = ("--metric", "output_error,wipeout")


class Ended(NamedTuple):
    """How a command ended."""

    status: int
    out: str
    err: str


@pytest.fixture
def command(run):
    """Runs one command in this process."""
    return lambda *arguments: Ended(*run(*arguments))


def test_lists_are_a_sweep(command, tmp_path):
    """Values of a parameter are rows of the table, and the folder holds them."""
    out = str(tmp_path / "x")
    done = command(*LIST, *ONLY, "--set", "snapkv.window=8,16", "--out", out)

    assert done.status == 0, done.err
    assert [line.split()[:2] for line in done.out.splitlines() if line.startswith("snapkv")] == [
        ["snapkv", "(window=8)"],
        ["snapkv", "(window=16)"],
    ]
    assert "3 of 3 cells are done" in done.out
    assert done.out.startswith("Budget ")
    status = command("sweep", "--out", out, "--status", "--json")
    told = {"cells": 3, "done": 3, "failed": 0, "tasks": 1, "tasks_left": 0, "tasks_running": 0}
    assert json.loads(status.out) == told


def test_shards_are_collected(command, tmp_path):
    """Each shard says how far the whole is; collecting writes what is there, with 1 for a part."""
    config = tmp_path / "grid.yaml"
    config.write_text(
        "traces: [sample, sample-smollm2]\npolicies: [tova]\nbudgets: [48]\nintervals: [64]\n"
        "metrics: [output_error]\n"
    )
    out = tmp_path / "x"

    first = command("sweep", str(config), "--out", str(out), "--shard", "0/2")
    part = command("sweep", "--out", str(out), "--collect", "--json")
    second = command("sweep", str(config), "--out", str(out), "--shard", "1/2")
    whole = command("sweep", "--out", str(out), "--collect", "--json")

    assert [first.status, part.status, second.status, whole.status] == [0, 1, 0, 0]
    assert "error: 1 of 2 cells are missing" in part.err
    assert "1 of 2 tasks are done, 1 of 2 cells are complete" in first.out
    assert json.loads(part.out)["done"] == 1
    assert json.loads(whole.out)["done"] == 2
    shown = command("info", str(out))
    assert shown.status == 0
    assert "traces    2: sample, sample-smollm2" in shown.out


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """A run stopped after the first of two traces, on which one of four cells failed."""
    out = tmp_path_factory.mktemp("runs") / "half"
    grid = {"traces": ["sample", "sample-smollm2"], "policies": ["tova", "snapkv"]}
    grid |= {"budgets": [4, 48], "intervals": [64], "metrics": ["output_error", "entries_seen"]}
    plan, kept = Plan.of(grid_from(grid)), Shards(out)
    begin(plan, kept)
    finish(plan, kept, shard=(0, 2))
    publish(plan.run(kept), kept)
    return out


COMMANDS = ("info", "compare", "table", "plot pareto", "report")
FORMS = ("info --json", "compare --json", "table --format latex")


@pytest.mark.parametrize("command_line", [*COMMANDS, *FORMS])
def test_a_partial_run_says_so(command, half, tmp_path, command_line):
    """Every command says in one line how many cells are missing and how to compute them."""
    name, *options = command_line.split()
    outputs = {"plot": ["--out", tmp_path / "a.png"], "report": ["--out", tmp_path / "a.html"]}
    figure = [options.pop(0)] if name == "plot" else []

    shown = command(name, *figure, half, *options, *outputs.get(name, []))

    assert shown.status == 0, shown.err
    text = shown.out + shown.err
    if name == "report":
        text += (tmp_path / "a.html").read_text()
    lines = [line for line in text.splitlines() if f"{half} is partial: " in line]
    cells, there = 2 * 2 * 2, pl.read_parquet(half / "results.parquet")
    finished = there.drop_nulls("policy").select("trace", "policy", "budget").n_unique()
    assert len(lines) == 1
    assert f"is partial: {cells - finished - 1} missing and 1 failed of {cells} cells" in lines[0]
    assert "give the command that wrote it again" in lines[0]


def test_a_partial_run_is_partial_in_python(half):
    """Its text counts the missing cells, and a whole run has no such remark."""
    partial = "partial: 4 missing and 1 failed of 8 cells"
    whole = sweep(traces="sample", policies="tova", budgets=48, metrics="wipeout")

    saved = read_run(half)

    assert partial in repr(saved)
    assert "partial" not in repr(whole)


@pytest.mark.parametrize("command_line", COMMANDS)
def test_a_run_without_results_is_not_finished(command, half, tmp_path, command_line):
    """A folder that a killed command left is called a run everywhere, and how to finish it."""
    killed = tmp_path / "killed"
    shutil.copytree(half, killed)
    (killed / "run.json").unlink()
    name, *options = command_line.split()
    outputs = {"plot": ["--out", tmp_path / "a.png"], "report": ["--out", tmp_path / "a.html"]}

    shown = command(name, *options, killed, *outputs.get(name, []))

    assert shown.status == 2
    assert f"error: {killed} is not finished, it has no results yet; give the command" in shown.err


def test_what_shows_progress_comes_first(command, tmp_path, monkeypatch):
    """Tasks of some layers lead wherever the cells that they complete are counted, in a bar too."""
    monkeypatch.setattr(tasks, "_BLOCK", 1)  # two layers a task
    bars = []
    monkeypatch.setattr(
        show, "bar", lambda unit: nullcontext(lambda *now: bars.append((unit, now)))
    )
    trace = random_trace(layers=4, group=1, n=60, prompt_len=30)
    path, out = str(trace.save(tmp_path / "trace.zarr")), str(tmp_path / "x")

    done = command("sweep", path, *LIST[2:], *ONLY, "--out", out, "--shard", "0/2")

    status = command("sweep", "--out", out, "--status")
    for text in (done.out, status.out):
        assert "1 of 2 tasks are done, 0 of 2 cells are complete" in text
    assert [(unit, now[:2]) for unit, now in (bars[0], bars[-1])] == [
        ("cells", (0, 2)),
        ("cells", (2, 2)),
    ]


def test_a_plan_counts_and_writes_nothing(command, tmp_path):
    """Cells, tasks and bytes; no folder appears."""
    out = tmp_path / "x"
    done = command(*LIST, *ONLY, "--plan", "--out", str(out), "--json")

    told = json.loads(done.out)
    assert (told["cells"], told["traces"], told["tasks"], told["jobs"]) == (2, 1, 1, 1)
    assert told["bytes_to_read"] > 1_000_000
    assert not out.exists()


def test_cells_that_fail_are_named_and_the_others_shown(command, tmp_path):
    """A budget that a policy has no rule for is a line on standard error and status 1."""
    terms = ("--budget", "4,48", "--interval", "64", *ONLY, "--out", str(tmp_path / "x"))
    done = command(*LIST[:4], *terms)

    assert done.status == 1
    assert "1 of 1 task is done, 3 of 4 cells are complete" in done.out
    assert "failed: sample: snapkv, budget 4" in done.err
    assert "error: 1 of 4 cells failed" in done.err
    assert "snapkv  48" in done.out
