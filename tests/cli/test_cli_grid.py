"""`kvsim replay GRID.yaml`, and what commands say of runs that are not whole."""

import json
import shutil

import pytest

from kvsim.analysis.folder import read_run
from kvsim.sweeps.driver import sweep
from kvsim.sweeps.tasks import Replays

GRID = """
traces: [sample, sample-smollm2]
policies: [tova, {snapkv: {window: [8, 16]}}]
budgets: [4, 48]
interval: [64]
metrics: [output_error, wipeout]
protect: {sink: 2}
"""


@pytest.fixture
def grid(tmp_path, monkeypatch):
    """A file with a grid in the working folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "grid.yaml").write_text(GRID)
    return "grid.yaml"


def test_a_grid_is_replayed(run, grid):
    """Values of a parameter are rows of the table; cells without a rule fail alone, by name."""
    status, out, err = run("replay", grid, "--out", "x")

    assert status == 1
    assert "snapkv (window=8)" in out
    assert "snapkv (window=16)" in out
    assert "Written to x: run.json, results.parquet." in out
    assert "failed: sample: snapkv, budget 4" in err
    assert err.splitlines()[-1] == "error: 4 of 12 cells failed, the others are kept in x"
    status, out, _ = run("replay", grid, "--out", "x", "--json", "--jobs", "1")
    document = json.loads(out)
    assert (status, document["done"], len(document["failures"])) == (1, 8, 4)
    table = sweep(grid).table
    assert table.equals(read_run("x").table)
    assert run("info", "x")[1].count("traces    2: sample, sample-smollm2") == 1


def test_a_plan_counts_and_writes_nothing(run, grid, tmp_path):
    """Cells, tasks and bytes; no folder appears."""
    (tmp_path / grid).write_text(f"{GRID}out: x\n")
    status, out, _ = run("replay", grid, "--plan", "--json")

    told = json.loads(out)
    assert (status, told["cells"], told["traces"], told["tasks"], told["jobs"]) == (0, 12, 2, 2, 1)
    assert not (tmp_path / "x").exists()


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """A run stopped before the second of two traces, and one cell of the first failed."""
    out = tmp_path_factory.mktemp("runs") / "half"
    record = Replays.record

    def stopped(self, cell):
        if cell.trace.name != "sample":
            raise KeyboardInterrupt
        return record(self, cell)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Replays, "record", stopped)
        given = {"traces": ["sample", "sample-smollm2"], "policies": ["tova", "snapkv"]}
        given |= {"budgets": [4, 48], "metrics": ["output_error", "entries_seen"]}
        sweep(**given, interval=64, out=out)
    return out


COMMANDS = ("info", "compare", "plot pareto", "report", "info --json", "compare --json")


@pytest.mark.parametrize("command_line", COMMANDS)
@pytest.mark.parametrize("kind", ["partial", "killed"])
def test_a_run_that_is_not_whole_says_so(run, half, tmp_path, command_line, kind):
    """In one line: how many cells are missing, or that nothing is there, and what to do."""
    there = tmp_path / "run"
    shutil.copytree(half, there)
    if kind == "killed":
        (there / "run.json").unlink()
    name, *options = command_line.split()
    outputs = {"plot": ["--out", tmp_path / "a.png"], "report": ["--out", tmp_path / "a.html"]}
    figure = [options.pop(0)] if name == "plot" else []

    status, out, err = run(name, *figure, there, *options, *outputs.get(name, []))

    text = out + err + ((tmp_path / "a.html").read_text() if name == "report" and not err else "")
    word = "partial: 3 missing and 2 failed of 8 cells" if kind == "partial" else "not finished"
    lines = [line for line in text.splitlines() if f"{there} is {word}" in line]
    assert len(lines) == 1, text
    assert "give the command that wrote it again" in lines[0]
    assert status == (2 if kind == "killed" else 0)


def test_a_partial_run_is_partial_in_python(half):
    """Its text counts the missing cells, and a whole run has no such remark."""
    whole = sweep(traces="sample", policies="tova", budgets=48, metrics="wipeout")

    assert "partial: 3 missing and 2 failed of 8 cells" in repr(read_run(half))
    assert "partial" not in repr(whole)
