"""Runs into a folder that are stopped: resumed, they end as undisturbed ones."""

import errno
import importlib
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace

import polars as pl
import pytest
import torch

import kvsim
from kvsim.analysis import registry
from kvsim.analysis.folder import read_run
from kvsim.core.policy import Policy, Schedule, Scorer
from kvsim.errors import OutputError, PolicyError
from kvsim.files import lock, replace_file
from kvsim.store.records import read_records
from kvsim.sweeps import folder, tasks
from kvsim.sweeps.driver import Plan, replay_all
from kvsim.sweeps.folder import Parts
from kvsim.sweeps.grid import grid_of
from tests.sweeps.conftest import make_trace, parts, same

METRICS = ["wipeout", "entries_seen", "window_overlap", "regret"]


def run(out=None, **options):
    """Replay three policies at two budgets over two traces."""
    policies = [kvsim.policy("tova"), kvsim.policy("ams", window=4, recent=4), "quest"]
    given = {"traces": [make_trace("a"), make_trace("b", 50)], "policies": policies}
    given |= {"budgets": [16, "25%"], "interval": 8, "metrics": METRICS}
    return replay_all(**given | options, out=out)


@pytest.fixture(scope="module")
def whole():
    """The undisturbed run."""
    return run()


def check(out, whole):
    """Assert that a finished run folder holds what the undisturbed run has."""
    assert pl.read_parquet(out / "results.parquet").equals(whole.table)
    assert read_run(out).table.equals(whole.table)
    records = read_records(out / "records.zarr")
    assert same(replace(whole, records=tuple(records)), whole)


@pytest.mark.parametrize("together", [1, 3])
def test_results_do_not_depend_on_what_is_measured_together(tmp_path, monkeypatch, whole, together):
    """A folder is written task by task, and holds the same rows in the same order."""
    monkeypatch.setattr(tasks, "_TOGETHER", together)

    assert same(run(tmp_path / "x"), whole)
    check(tmp_path / "x", whole)


@pytest.mark.parametrize("at", [2, 5, 12])
def test_an_interrupted_run_is_resumed(tmp_path, whole, small_tasks, replays, at):
    """After Ctrl-C at any replay, finished cells are not computed again; the end is the same."""
    replays.stop = at
    first = run(tmp_path / "x")
    assert (first.interrupted, len(first.records)) == (True, at - 1)
    assert pl.read_parquet(tmp_path / "x" / "results.parquet").equals(first.table)
    replays.calls, replays.stop = 0, None

    resumed = run(tmp_path / "x")

    assert replays.calls == 12 - (at - 1)
    assert same(resumed, whole)
    check(tmp_path / "x", whole)
    assert same(run(tmp_path / "x"), whole)
    assert replays.calls == 12 - (at - 1)


def test_an_interrupt_before_the_first_cell_leaves_nothing(tmp_path, replays):
    """No folder appears, and with the trace's own values done it has a run of no cells."""
    replays.stop = 1
    assert run(tmp_path / "x", metrics=["wipeout"]).interrupted
    assert not (tmp_path / "x").exists()


def test_an_interrupt_while_measuring_loses_one_task(tmp_path, monkeypatch, whole, small_tasks):
    """No record is without values; the resumed run computes the task again."""
    table, calls = tasks.Replays.table, []

    def interrupted(self, *given):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return table(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(tasks.Replays, "table", interrupted)
        first = run(tmp_path / "x")
    assert (len(first.records), first.interrupted) == (3, True)

    run(tmp_path / "x")

    check(tmp_path / "x", whole)


def test_cells_that_cannot_be_measured_together_are_measured_alone(monkeypatch):
    """One of them fails; the values of the others are those that they have without it."""
    original, given = tasks.measure, {"traces": [make_trace()], "metrics": ["wipeout"]}
    alone = run(**given, budgets=[16])

    def fails(trace, records, *given, **options):
        if any(record.budget == 20 for record in records):
            raise PolicyError("no rule")
        return original(trace, records, *given, **options)

    monkeypatch.setattr(tasks, "measure", fails)
    done = run(**given, budgets=[16, 20])

    assert {(each.budget, each.error) for each in done.failures} == {(20, "measuring: no rule")}
    assert done.table.equals(alone.table)


@dataclass(frozen=True)
class Faulty(Scorer):
    """A scorer that goes wrong at a budget."""

    how: str = "raise"

    def score(self, view):
        """Positions, except at budget 20."""
        if int(view.budget.max()) != 20:
            return view.pos.float()
        if self.how == "raise":
            raise ZeroDivisionError("no\nluck")
        return sys.exit(0) if self.how == "exit" else None


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", r"raised ZeroDivisionError \(no luck\) in test_resuming.py, line \d+"),
        ("exit", r"raised SystemExit \(0\) in test_resuming.py"),
        ("none", "faulty: .*at row 29.*NoneType"),
    ],
)
def test_whatever_a_policy_raises_is_a_failed_cell(tmp_path, how, message):
    """An ordinary exception, an exit and None cost one cell; resuming tries it again."""
    both = [Policy("faulty", Faulty(how), schedule=Schedule(8)), kvsim.policy("tova")]

    for _ in range(2):
        done = replay_all(make_trace(), both, [16, 20], metrics="wipeout", out=tmp_path / "x")

        (failure,) = done.failures
        assert (failure.policy, failure.budget) == ("faulty", 20)
        assert re.search(message, failure.error)
        assert "\n" not in failure.error
        assert len(read_records(tmp_path / "x" / "records.zarr")) == 3


@pytest.mark.parametrize("damage", ["rows", "records", "gone", "swapped", "other content"])
def test_a_damaged_part_is_computed_again(damage, grid, small_tasks, tmp_path, replays):
    """A part that is not what was written counts for nothing, whichever of its files it is."""
    expected, out = kvsim.sweep(**grid, out=tmp_path / "x"), tmp_path / "x"
    one, other = parts(out)[1:3]
    if damage == "gone":
        one.unlink()
    elif damage == "swapped":
        one.rename(out / "aside")
        other.rename(one)
        (out / "aside").rename(other)
    elif damage == "other content":
        for data in (b"PAR1", b"{}"):
            name = f"{one.stem.partition('-')[0]}-{folder._sha(data)}.parquet"
            one.with_name(name).write_bytes(data)
        one.unlink()
    else:
        path = one.with_suffix(".records") if damage == "records" else one
        path = path if path.exists() else other.with_suffix(".records")
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    replays.calls = 0

    again = kvsim.sweep(**grid, out=out)

    assert 0 < replays.calls <= 6
    assert same(again, expected)


@pytest.mark.parametrize(
    "change",
    [
        {"interval": 9},
        {"metrics": ["wipeout"]},
        {"events": True},
        {"budgets": [16]},
        {"policies": ["tova"]},
        {"traces": [make_trace("a", seed=1), make_trace("b", 50)]},
        {"protect": {"sink": 2}},
    ],
    ids=str,
)
def test_the_run_of_another_grid_is_refused(tmp_path, change):
    """Whatever results depend on: one line names it, and the folder stays byte for byte."""
    run(tmp_path / "x")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    name = {"interval": "schedules", "protect": "policies"}.get(*change, next(iter(change)))
    with pytest.raises(OutputError, match=rf"holds a run of other .*{name}.*nothing was changed"):
        run(tmp_path / "x", **change)

    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    run(tmp_path / "x", memory=10**9)  # values do not depend on it


def test_a_run_that_lacked_memory_is_continued_with_more(tmp_path):
    """Cells of a trace too large for the first limit come in; parts stay with their tasks."""
    given = {"policies": ["tova", "knorm"], "budgets": 16, "interval": 8, "out": tmp_path / "x"}
    given |= {"traces": [make_trace("a", 400), make_trace("b", 50)]}
    given |= {"metrics": ["wipeout", "sparsity"]}
    first = replay_all(**given, memory=(64 << 20) + 100_000)
    assert {*first.table["trace"]} == {"b"}
    assert ({x.trace for x in first.failures}, len(first.records)) == ({"a"}, 2)

    whole = replay_all(**given)

    assert same(whole, replay_all(**given | {"out": None}))
    check(tmp_path / "x", whole)


def test_what_computes_and_where_does_not_matter(paths, tmp_path, replays):
    """A sweep goes on with a replay of the same grid, and the other way round."""
    given = {"traces": paths, "policies": ["tova", "knorm"], "budgets": [16, "25%"]}
    options = {"metrics": ["wipeout"], "out": tmp_path / "x"}
    replayed = replay_all(*given.values(), interval=8, **options)
    calls = replays.calls

    swept = kvsim.sweep(**given, interval=[8], records=True, **options)

    assert replays.calls == calls
    assert same(swept, replayed)


@pytest.mark.parametrize(
    "change",
    [
        {"meta": {"spans": {"needle": [[2, 5]]}}},
        {"meta": {"labels": {"task": "walk"}}},
        {"meta": {"turns": [{"labels": {"task": "walk"}}]}},
        {"o_proj": torch.ones(2, 4, 8, 32)},
    ],
    ids=["needle", "labels", "turns", "weights"],
)
def test_a_trace_recorded_again_is_another_one(tmp_path, change):
    """Whatever results read is compared, although the digest of a trace leaves it out."""
    first, other = (make_trace(**x) for x in ({"o_proj": torch.zeros(2, 4, 8, 32)}, change))
    options = {"out": tmp_path / "x", "metrics": ["entries_seen"]}
    replay_all(first, "tova", 16, **options)

    assert first.digest == other.digest
    with pytest.raises(OutputError, match="traces"):
        replay_all(other, "tova", 16, **options)


def test_an_impossible_folder_is_found_before_any_work(tmp_path, replays):
    """Something at the path, or a file where a folder is needed: no cell is replayed."""
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")

    for out in (tmp_path, tmp_path / "file", tmp_path / "file" / "x", tmp_path / "link"):
        with pytest.raises(OutputError, match=r"exists|Not a directory"):
            run(out)

    assert replays.calls == 0
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_that_another_process_writes_to_is_refused(tmp_path, whole, grid):
    """Before any work, by one line, and also if it was begun meanwhile."""
    run(tmp_path / "x")
    with (tmp_path / "x" / "lock").open("ab") as file:
        assert lock(file)
        with pytest.raises(OutputError, match="being written by another process"):
            run(tmp_path / "x")
    check(tmp_path / "x", whole)

    plan = Plan.of(grid_of(grid))
    both = [Parts(tmp_path / "y", plan.description) for _ in range(2)]
    outcome = plan.compute(plan.tasks[0])
    both[0].add(plan.tasks[0], outcome)
    with pytest.raises(OutputError, match="being written by another process"):
        both[1].add(plan.tasks[0], outcome)
    both[0].close()


def test_a_full_disk_loses_nothing_that_is_finished(grid, small_tasks, tmp_path, monkeypatch):
    """A file that cannot be written ends the sweep in one line, and the next one goes on."""
    written = []

    def full(path, content):
        written.append(path)
        if len(written) == 6:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace_file(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(folder, "replace_file", full)
        with pytest.raises(OutputError, match=r"No space left on device.*finished tasks are kept"):
            kvsim.sweep(**grid, out=tmp_path / "x")

    assert len(parts(tmp_path / "x")) == 2
    assert same(kvsim.sweep(**grid, out=tmp_path / "x"), kvsim.sweep(**grid))


@pytest.mark.parametrize("kills", [3, pytest.param(30, marks=pytest.mark.deep)])
def test_a_killed_command_is_resumed(tmp_path, monkeypatch, warm_kvsim, kills):
    """Killed at random moments, however often, a command ends with the bytes of an undisturbed one.

    Until then the folder is no run; nothing that was finished is lost.
    """
    names = [f"{number}.zarr" for number in range(6)]
    for number, name in enumerate(names):
        kvsim.save_trace(make_trace(str(number), seed=number, tokens=200), tmp_path / name)
    monkeypatch.chdir(tmp_path)
    command = [warm_kvsim / "kvsim", "replay", *names, "--policy", "tova,h2o", "--budget", "16,24"]
    command += ["--metric", ",".join(METRICS[:2]), "--out"]
    subprocess.run([*command, "first"], check=True, capture_output=True)  # starts the server
    began = time.monotonic()
    subprocess.run([*command, "whole"], check=True, capture_output=True)
    seconds, draws = time.monotonic() - began, random.Random(kills)  # noqa: S311  no secrets

    killed, finished = 0, dict[str, int]()
    for attempt in range(kills):
        out = tmp_path / f"killed{attempt % (kills // 10 or 1)}"  # again and again
        process = subprocess.Popen([*command, out.name], stdout=-3, stderr=-3)
        with process:
            time.sleep(draws.uniform(0.1, 1) * seconds)
            process.kill()
        killed += process.returncode == -signal.SIGKILL
        if not (out / "run.json").exists() and (out / "grid.json").exists():
            with pytest.raises(OutputError, match="is not finished"):
                read_run(out)
        done = len(parts(out))
        assert done >= finished.get(out.name, 0)
        finished[out.name] = done

    assert killed > 0
    for out in tmp_path.glob("killed*"):
        subprocess.run([*command, out.name], check=True, capture_output=True)
        results = [each / "results.parquet" for each in (out, tmp_path / "whole")]
        assert results[0].read_bytes() == results[1].read_bytes()
        check(out, replay_all(names, ["tova", "h2o"], [16, 24], metrics=METRICS[:2]))


MINE = """
from dataclasses import dataclass
from kvsim.analysis.definition import Cells
from kvsim.core.policy import Scorer
from . import deep

@dataclass(frozen=True)
class Mine(Scorer):
    def score(self, view):
        from pack.late import SIGN
        return SIGN * deep.sign(view.pos.float())

def cells(subject):
    for layer in subject.record.layers:
        yield Cells(layer, deep.sign(subject.record.evicted_at[0, :, 0]), "head")
"""


@pytest.mark.parametrize("file", ["deep", "late", "mine", None])
def test_code_of_users_is_part_of_a_run(tmp_path, monkeypatch, file):
    """An edit of what a policy or a metric imports, when it is loaded or later, is another run."""
    (tmp_path / "pack").mkdir()
    sources = {"__init__": "", "deep": "def sign(x):\n    return x\n", "late": "SIGN = 1\n"}
    for name, text in {**sources, "mine": MINE}.items():
        (tmp_path / "pack" / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # files change within a second
    own = registry.METRICS._own

    def replayed():
        for name in [name for name in sys.modules if name.partition(".")[0] == "pack"]:
            monkeypatch.delitem(sys.modules, name)
        mine = importlib.import_module("pack.mine")
        metric = replace(registry.METRICS["wipeout"], cells=mine.cells)
        monkeypatch.setattr(registry.METRICS, "_own", {**own, "signed": metric})
        options = {"metrics": ["wipeout", "signed"], "out": tmp_path / "x"}
        return replay_all(make_trace(), mine.Mine(), 16, interval=8, **options)

    first = replayed()
    if file is None:
        assert same(replayed(), first)
        return
    path = tmp_path / "pack" / f"{file}.py"
    path.write_text(path.read_text() + "\n# edited\n")
    with pytest.raises(OutputError, match="holds a run of other code"):
        replayed()


def test_a_policy_defined_in_an_interpreter_is_its_code(tmp_path, monkeypatch):
    """Defined again with another rule, as in a cell of a notebook, it is another policy."""
    here = sys.modules["__main__"]
    options = {"interval": 8, "out": tmp_path / "x", "metrics": ["wipeout"]}
    for rule in ("view.pos", "view.pos", "-view.pos"):
        scope = {"__name__": "__main__", "Scorer": Scorer, "dataclass": dataclass}
        text = "@dataclass(frozen=True)\nclass Mine(Scorer):\n    def score(self, view):\n"
        exec(f"{text}        return {rule}.float()", scope)  # noqa: S102  as a notebook does
        monkeypatch.setattr(here, "Mine", scope["Mine"], raising=False)
        if rule == "view.pos":
            replay_all(make_trace(), scope["Mine"](), 16, **options)
    with pytest.raises(OutputError, match="other code"):
        replay_all(make_trace(), scope["Mine"](), 16, **options)
