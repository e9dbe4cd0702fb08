"""`kvsim.sweep`: the same values as one replay after another, whoever computes them."""

import errno
import json
import shutil
import threading
from pathlib import Path

import polars as pl
import pytest
import torch

import kvsim
from kvsim.analysis.folder import read_run
from kvsim.core.policy import Policy, Scorer
from kvsim.errors import ConfigError, OutputError, TraceError
from kvsim.files import replace_file
from kvsim.policies import policy
from kvsim.sweeps import driver, planning, shards, tasks
from kvsim.sweeps.driver import replay_all as in_turn
from kvsim.sweeps.planning import Plan, grid_from
from kvsim.sweeps.shards import Shards

METRICS = ["output_error", "wipeout", "retained_iou", "sparsity"]


@pytest.fixture
def grid(paths):
    """Policies of every kind: per layer, with a budget across layers, with propagation."""
    names = ["tova", {"snapkv": {"window": [4, 8]}}, {"cake": {"window": 4}}, "fastkv"]
    return {
        "traces": paths,
        "policies": names,
        "budgets": [12, "40%"],
        "intervals": [8],
        "metrics": METRICS,
    }


@pytest.fixture
def small_blocks(monkeypatch):
    """As few layers a task as may be, and three cells."""
    monkeypatch.setattr(tasks, "_BLOCK", 1)
    monkeypatch.setattr(tasks, "_TOGETHER", 3)


def parts(folder):
    """Names of the files of finished tasks."""
    return sorted(path.name for path in (folder / "parts").glob("*.json"))


def test_a_sweep_is_one_replay_after_another(grid, small_blocks):
    """Cut into blocks of layers and cells, the Table is that of `sweep` in turn, row by row."""
    traces = [kvsim.open_trace(path) for path in grid["traces"]]
    tables = []
    for window in (4, 8):  # which takes one policy of a name
        policies = [policy(name) for name in ("tova", "pyramidkv", "fastkv")]
        policies.insert(1, policy("snapkv", window=window))
        tables.append(in_turn(traces, policies, grid["budgets"], interval=8, metrics=METRICS).table)
    names = ["tova", {"snapkv": {"window": [4, 8]}}, "pyramidkv", "fastkv"]
    run = kvsim.sweep(**grid | {"policies": names})

    assert run.failures == ()
    assert len(Plan.of(grid_from(None, **grid)).tasks) > 8
    for window, expected in zip((4, 8), tables, strict=True):
        other = pl.col("params").str.contains(f'"window": {12 - window},', literal=True)
        same = run.table.filter(~(other & (pl.col("policy") == "snapkv")).fill_null(value=False))
        assert same.equals(expected)


def test_values_of_all_layers_together_are_not_those_of_a_block(grid, small_blocks):
    """They need all layers at once; a joined record names each of its layers."""
    names = ["tova", "knorm"]
    of_all = {"policies": names, "metrics": ["pages_freed", "fragmentation"]}
    policies = [policy(name) for name in names]
    expected = in_turn(
        grid["traces"], policies, grid["budgets"], interval=8, metrics=of_all["metrics"]
    )
    record = kvsim.sweep(**grid | {"policies": names}, records=True).records[0]

    assert kvsim.sweep(**grid | of_all).table.equals(expected.table)
    assert record.layers == record.layer_ids == (0, 1, 2, 3)


def test_a_folder_holds_the_same_and_nothing_is_computed_twice(grid, small_blocks, tmp_path):
    """Shards, a resumed sweep and one in memory agree bit for bit; more budgets only add."""
    expected = kvsim.sweep(**grid, records=True)

    for number in range(3):
        kvsim.sweep(**grid, records=True, out=tmp_path / "x", shard=(number, 3))
    assert not (tmp_path / "x" / "run.json").exists()
    before = parts(tmp_path / "x")
    run = kvsim.sweep(**grid, records=True, out=tmp_path / "x")

    assert parts(tmp_path / "x") == before
    assert run.table.equals(expected.table)
    assert read_run(tmp_path / "x").table.equals(expected.table)
    for record, other in zip(run.records, expected.records, strict=True):
        assert (record.evicted_at == other.evicted_at).all()
        assert record.layers == other.layers == (0, 1, 2, 3)
    more = kvsim.sweep(**grid | {"budgets": [12, "40%", 20]}, records=True, out=tmp_path / "x")
    assert set(before) < set(parts(tmp_path / "x"))
    kept = more.table.filter((pl.col("budget") != 20) | pl.col("budget").is_null())
    assert kept.equals(expected.table)


def test_processes_compute_the_same(grid, tmp_path):
    """Two processes give the Table of one, bit for bit."""
    run = kvsim.sweep(**grid, out=tmp_path / "x", jobs=2)

    assert run.table.equals(kvsim.sweep(**grid).table)


@pytest.mark.parametrize("damage", ["json", "parquet", "both gone"])
def test_a_damaged_part_is_computed_again(damage, grid, tmp_path):
    """A part that is not what was written counts for nothing, whichever of its files it is."""
    expected = kvsim.sweep(**grid, out=tmp_path / "x")
    name = Path(parts(tmp_path / "x")[0])
    for suffix in ("json", "parquet"):
        path = tmp_path / "x" / "parts" / name.with_suffix(f".{suffix}")
        if damage == suffix:
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
        elif damage == "both gone":
            path.unlink()

    folder = Shards(tmp_path / "x")
    folder.scan()
    assert len(folder.parts) == len(parts(tmp_path / "x")) - (damage != "both gone")
    again = kvsim.sweep(**grid, out=tmp_path / "x")

    assert again.table.equals(expected.table)


@pytest.mark.parametrize("suffixes", [("json",), ("json", "parquet")])
def test_parts_under_each_others_names_are_computed_again(suffixes, grid, small_blocks, tmp_path):
    """A part counts under the name of the cells that it has, whichever of its files are there."""
    expected = kvsim.sweep(**grid, out=tmp_path / "x")
    folder, names = tmp_path / "x" / "parts", [Path(name) for name in parts(tmp_path / "x")[:2]]
    for suffix in suffixes:
        one, other = (folder / name.with_suffix(f".{suffix}") for name in names)
        one.rename(folder / "aside")
        other.rename(one)
        (folder / "aside").rename(other)
    shards = Shards(tmp_path / "x")
    shards.scan()

    assert not {name.stem for name in names} & shards.parts.keys()
    assert kvsim.sweep(**grid, out=tmp_path / "x").table.equals(expected.table)


def test_a_part_counts_for_the_cells_that_it_has(grid, small_blocks, tmp_path):
    """Of an interrupted task those that are measured; another driver computes the others."""
    plan = Plan.of(grid_from(None, **grid))
    task = next(each for each in plan.tasks if len(each.cells) == 3)
    shards = Shards(tmp_path / "x")
    shards.begin(plan.document)
    whole = tasks.replayed(task)
    done = dict([*whole.done.items()][:1])
    shards.add(task, whole._replace(done=done, interrupted=True))

    assert not Shards(tmp_path / "x").look(task.key)
    assert shards.done == set(done)
    run = kvsim.sweep(**grid, out=tmp_path / "x")
    assert run.parameters["missing"] == 0
    assert run.table.equals(kvsim.sweep(**grid).table)


def test_what_is_missing_counts_cells_and_traces_apart(grid, paths):
    """The metrics of a trace alone are no cell; nothing is missing once all is done."""
    plan, kept = Plan.of(grid_from(None, **grid)), shards.Kept()
    nothing = plan.run(kept).parameters
    for task in plan.tasks:
        if task.cells:
            kept.add(task, tasks.replayed(task))
    cells = plan.run(kept).parameters

    assert (nothing["missing"], nothing["missing_traces"]) == (len(plan.cells), len(paths))
    assert (cells["missing"], cells["missing_traces"]) == (0, len(paths))
    assert cells["done"] == len(plan.cells)


def test_the_same_cell_twice_is_one(grid, tmp_path):
    """Budgets given twice, and an interval that is the policy's own, are computed once."""
    twice = {"policies": ["tova"], "budgets": [12, "12"], "intervals": [1, "own"], "records": True}

    run = kvsim.sweep(**grid | twice, out=tmp_path / "x")

    once = kvsim.sweep(**grid | {"policies": ["tova"], "budgets": [12], "intervals": ["own"]})
    assert len(run.records) == run.parameters["cells"] == 2
    assert run.table.equals(once.table)


class Fails(Scorer):
    """A scorer that raises what no policy should."""

    def score(self, view):
        """Raise."""
        raise ZeroDivisionError("nothing to divide")


def test_a_cell_that_fails_stops_no_other(grid, tmp_path):
    """Its failure is reported, and only the next sweep tries it again; the others are kept."""
    policies = [policy("tova"), Policy("fails", Fails()), policy("knorm")]
    counts = []
    requested = grid | {"policies": policies, "budgets": [12, 90]}

    run = kvsim.sweep(**requested, progress=lambda standing: counts.append(standing.steps))

    assert counts == sorted(counts)
    assert {done for done, _ in counts} == {*range(counts[0][1] + 1)}
    assert {(failure.trace, failure.policy) for failure in run.failures} == {
        (name, "fails") for name in "ab"
    }
    assert all("ZeroDivisionError" in failure.error for failure in run.failures)
    assert all(failure.unexpected for failure in run.failures)
    done = run.table.drop_nulls("policy").select("trace", "policy", "budget").unique()
    assert len(done) == 10  # with a budget of 90 nothing is evicted, and no score is asked for


def test_a_trace_that_is_gone_fails_and_the_others_are_done(paths, grid, tmp_path, monkeypatch):
    """A trace removed while a sweep runs fails its own cells alone; put back, they are computed."""
    copies = []
    for path in paths:
        copies.append(str(tmp_path / Path(path).name))
        shutil.copytree(path, copies[-1])
    compute = planning.replayed

    def once_removed(task, *report):
        shutil.rmtree(copies[1], ignore_errors=True)
        return compute(task, *report)

    monkeypatch.setattr(planning, "replayed", once_removed)
    run = kvsim.sweep(**grid | {"traces": copies}, out=tmp_path / "x")

    assert {failure.trace for failure in run.failures} == {"b"}
    assert set(run.table["trace"]) == {"a"}
    failures = json.loads((tmp_path / "x" / "failures.json").read_text())
    assert len(failures) == len(run.failures)
    monkeypatch.setattr(planning, "replayed", compute)
    shutil.copytree(paths[1], copies[1])
    again = kvsim.sweep(**grid | {"traces": copies}, out=tmp_path / "x")
    assert again.failures == ()
    assert again.table.equals(kvsim.sweep(**grid).table)


def test_another_trace_at_the_same_path_is_noticed(paths, grid, tmp_path, monkeypatch):
    """A trace that is replaced while a sweep runs is not mixed with the one before."""
    path = str(tmp_path / "a.zarr")
    shutil.copytree(paths[0], path)
    compute = planning.replayed

    def replaced(task, *report):
        shutil.rmtree(path)
        shutil.copytree(paths[1], path)
        return compute(task, *report)

    monkeypatch.setattr(planning, "replayed", replaced)
    run = kvsim.sweep(**grid | {"traces": [path]})

    assert run.records == ()
    assert all("another trace" in failure.error for failure in run.failures)


def test_a_full_disk_loses_nothing_that_is_finished(grid, small_blocks, tmp_path, monkeypatch):
    """A file that cannot be written ends the sweep in one line, and the next one goes on."""
    written = []

    def full(path, content):
        written.append(path)
        if len(written) == 6:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace_file(path, content)

    monkeypatch.setattr(shards, "replace_file", full)
    with pytest.raises(OutputError, match=r"No space left on device.*what is finished is kept"):
        kvsim.sweep(**grid, out=tmp_path / "x")

    assert len(parts(tmp_path / "x")) == 2
    assert not list((tmp_path / "x" / "parts").glob("*.claim"))
    monkeypatch.undo()
    assert kvsim.sweep(**grid, out=tmp_path / "x").table.equals(kvsim.sweep(**grid).table)


def test_two_drivers_share_the_work(grid, small_blocks, tmp_path, monkeypatch):
    """Two sweeps of one folder compute each task once, and both end with the whole."""
    monkeypatch.setattr(driver, "_LOOK", 0.02)
    counted = []
    compute = planning.replayed

    def counting(task, *report):
        counted.append(task.key)
        return compute(task, *report)

    monkeypatch.setattr(planning, "replayed", counting)
    runs = []
    threads = [
        threading.Thread(target=lambda: runs.append(kvsim.sweep(**grid, out=tmp_path / "x")))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)

    assert len(counted) == len(set(counted)) == len(parts(tmp_path / "x"))
    assert len(runs) == 2
    assert runs[0].table.equals(runs[1].table)


def test_a_folder_that_another_process_begins_is_no_strange_one(tmp_path, monkeypatch):
    """Whatever is there of `begin` at that moment; a file of another kind is refused."""
    (tmp_path / "parts").mkdir()
    (tmp_path / ".config.resolved.yaml.tmp-1-0a").write_text("policies:")
    Shards(tmp_path).begin({"policies": ["tova"]})
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / "parts").write_text("mine")
    with pytest.raises(OutputError, match="not the folder of a sweep"):
        Shards(tmp_path / "strange").begin({})

    def begun_meanwhile(self):
        replace_file(self.folder / shards.CONFIG, b"policies: [tova]")
        return False

    monkeypatch.setattr(Shards, "is_empty", begun_meanwhile)
    (tmp_path / "new").mkdir()
    Shards(tmp_path / "new").begin({"policies": ["tova"]})


def test_what_cannot_be_a_sweep_is_refused_before_any_work(grid, tmp_path):
    """Bad shards, folders of something else, configurations and keywords at once."""
    with pytest.raises(ConfigError, match="i from 0 to N - 1"):
        kvsim.sweep(**grid, shard=(3, 3))
    trace = kvsim.Trace.from_arrays(
        *torch.randn(3, 1, 1, 20, 4), prompt_len=10, rope=kvsim.Rope.default(4)
    )
    with pytest.raises(ConfigError, match="other processes cannot read"):
        kvsim.sweep(**grid | {"traces": [trace]}, jobs=2)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    with pytest.raises(OutputError, match="not the folder of a sweep"):
        kvsim.sweep(**grid, out=tmp_path / "full")
    with pytest.raises(ConfigError, match="a mapping, or keywords"):
        kvsim.sweep("grid.yaml", budgets=[3])
    with pytest.raises(TraceError):
        kvsim.sweep(**grid | {"traces": [str(tmp_path / "none.zarr")]})
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["file"]
