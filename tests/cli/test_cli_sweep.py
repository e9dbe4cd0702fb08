"""`kvsim sweep`: configurations, lists, folders, and what it says."""

import json
from contextlib import nullcontext
from typing import NamedTuple

import pytest

from kvsim.cli import show
from kvsim.sweeps import tasks
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


def test_a_dry_run_counts_and_writes_nothing(command, tmp_path):
    """Cells, tasks, bytes and seconds; no folder appears."""
    out = tmp_path / "x"
    done = command(*LIST, *ONLY, "--dry-run", "--out", str(out), "--json")

    told = json.loads(done.out)
    assert (told["cells"], told["traces"], told["tasks"], told["jobs"]) == (2, 1, 1, 1)
    assert told["bytes_to_read"] > 1_000_000
    assert told["cpu_seconds"] > 0
    assert not out.exists()


def test_a_dry_run_gathers_finished_cells_once(command, tmp_path, monkeypatch):
    """A dry run reads the finished cells as often for many tasks as for one."""
    gathered = []

    def done(self):
        gathered.append(self)
        return set()

    monkeypatch.setattr(Shards, "done", property(done))
    counts = []
    for traces in (["sample"], ["sample", "sample-smollm2"]):
        gathered.clear()
        shown = command("sweep", *traces, *LIST[2:], *ONLY, "--dry-run", "--out", tmp_path / "x")
        assert shown.status == 0, shown.err
        counts.append(len(gathered))

    assert counts[0] == counts[1]


def test_cells_that_fail_are_named_and_the_others_shown(command):
    """A budget that a policy has no rule for is a line on standard error and status 1."""
    done = command(*LIST[:4], "--budget", "4,48", "--interval", "64", *ONLY)

    assert done.status == 1
    assert "failed: sample: snapkv, budget 4" in done.err
    assert "error: 1 of 4 cells failed" in done.err
    assert "snapkv  48" in done.out
