"""Sweeps that are stopped: finished cells are on disk, and resumed they end as undisturbed ones."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

import kvsim
from kvsim.core.policy import Policy, Schedule, Scorer
from kvsim.errors import OutputError
from kvsim.report import read_run
from kvsim.schema import NEVER, plural
from kvsim.store.records import read_records
from kvsim.sweeps import cells, parts
from kvsim.sweeps.run import replay_all
from tests.probes import repeated

METRICS = ["wipeout", "entries_seen", "segment_count", "window_overlap"]
BUDGETS = [16, "25%"]


def make_trace(name="a", tokens=60, seed=0):
    """A small random trace."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, heads, tokens, 8, generator=generator) for heads in (4, 2, 2))
    rope = kvsim.Rope.default(8)
    return kvsim.Trace.from_arrays(q, k, v, prompt_len=30, rope=rope, name=name)


def policies():
    """Two policies, one of which notes its decisions."""
    return [kvsim.policy("tova"), kvsim.policy("ams", window=4, recent=4)]


def run(out=None, resume=False, **options):
    """Sweep two policies and three budgets over two traces."""
    metrics = [*METRICS, "oracle_regret"]
    settings = {"interval": 8, "metrics": metrics, "regret": True, **options}
    traces = [make_trace("a"), make_trace("b", 50)]
    return replay_all(traces, policies(), BUDGETS, out=out, resume=resume, **settings)


@pytest.fixture(scope="module")
def counted():
    """The undisturbed sweep, without a folder, and how often it replays."""
    counter = Stopper(cells.replay, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cells, "replay", counter)
        return run(), counter.calls


@pytest.fixture(scope="module")
def whole(counted):
    """The undisturbed sweep."""
    return counted[0]


@pytest.fixture(scope="module")
def replays(counted):
    """How often the undisturbed sweep replays."""
    return counted[1]


def check(folder, whole):
    """Assert that a finished run folder holds what the undisturbed sweep has."""
    assert sorted(path.name for path in folder.iterdir()) == [
        "records.zarr",
        "results.parquet",
        "run.json",
    ]
    assert pl.read_parquet(folder / "results.parquet").equals(whole.table)
    records = read_records(folder / "records.zarr")
    for record, expected in zip(records, whole.records, strict=True):
        assert (record.evicted_at == expected.evicted_at).all()
        assert (record.policy, record.budget) == (expected.policy, expected.budget)


class Stopper:
    """A stand-in for a function that raises an error at one of its calls and counts them all."""

    def __init__(self, function, at, error=KeyboardInterrupt):
        self.function, self.at, self.error, self.calls = function, at, error, 0

    def __call__(self, *args, **options):
        """Call the function, or raise."""
        self.calls += 1
        if self.calls == self.at:
            raise self.error
        return self.function(*args, **options)


@pytest.mark.parametrize("together", [1, 2, 3])
def test_results_do_not_depend_on_what_is_measured_together(tmp_path, monkeypatch, whole, together):
    """A folder is written part by part, and holds the same rows in the same order."""
    monkeypatch.setattr(cells, "TOGETHER", together)

    done = run(tmp_path / "x")

    assert done.table.equals(whole.table)
    check(tmp_path / "x", whole)


def test_cells_are_on_disk_as_they_finish(tmp_path):
    """Before each cell, all earlier ones are in the folder; it is a run only at the end."""
    seen = []

    def look(done, _, label):
        if "budget" in label:
            folder = tmp_path / "x"
            seen.append(
                (done, len(list(folder.glob("parts/cell-*"))), (folder / "run.json").exists())
            )

    run(tmp_path / "x", progress=look)

    assert seen == [(done, done, False) for done in range(8)]


@pytest.mark.parametrize("at", [1, 2, 7, 12, 14])
def test_an_interrupted_sweep_is_resumed(tmp_path, monkeypatch, whole, replays, at):
    """After Ctrl-C at any replay, finished cells are not computed again; the end is the same."""
    stopped = Stopper(cells.replay, at)
    monkeypatch.setattr(cells, "replay", stopped)
    first = run(tmp_path / "x")
    assert first.interrupted
    assert first.unmeasured == 0
    if first.records:
        assert pl.read_parquet(tmp_path / "x" / "results.parquet").equals(first.table)
    again = Stopper(stopped.function, 0)
    monkeypatch.setattr(cells, "replay", again)

    run(tmp_path / "x", resume=True)

    check(tmp_path / "x", whole)
    # the interrupted cell is replayed again, and so is an oracle that several cells share
    assert replays + 1 - at <= again.calls <= replays + 3 - at


def test_an_interrupt_while_measuring_leaves_replays_to_be_measured(tmp_path, monkeypatch, whole):
    """No record is without values; the resumed sweep measures and replays nothing of them again."""
    original = cells.measure
    monkeypatch.setattr(cells, "TOGETHER", 2)
    monkeypatch.setattr(cells, "measure", Stopper(original, 2))
    first = run(tmp_path / "x")
    assert (len(first.records), first.unmeasured, first.interrupted) == (2, 2, True)
    assert len(read_records(tmp_path / "x" / "records.zarr")) == 2
    assert first.table["budget"].drop_nulls().n_unique() == 2
    monkeypatch.setattr(cells, "measure", original)
    replays = Stopper(cells.replay, 0)
    monkeypatch.setattr(cells, "replay", replays)

    run(tmp_path / "x", resume=True, regret=True)

    assert replays.calls == 4 + 4  # with their oracles
    check(tmp_path / "x", whole)


@dataclass(frozen=True)
class Faulty(Scorer):
    """A scorer that goes wrong at a budget."""

    how: str = "raise"

    def score(self, view):
        """Positions, except at budget 20."""
        if view.setting.budget != 20:
            return view.pos.float()
        if self.how == "raise":
            raise ZeroDivisionError("no\nluck")
        if self.how == "exit":
            sys.exit(0)
        return None


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", r"raised ZeroDivisionError \(no luck\) in test_parts.py, line \d+"),
        ("exit", r"raised SystemExit \(0\) in test_parts.py"),
        ("none", "faulty: scores at row 29 are NoneType; expected a tensor"),
    ],
)
def test_whatever_a_policy_raises_is_a_failed_cell(tmp_path, how, message):
    """An ordinary exception, an exit and None cost one cell; resuming tries it again."""
    both = [Policy("faulty", Faulty(how), schedule=Schedule(8)), kvsim.policy("tova")]

    for resume in (False, True):
        done = replay_all(
            [make_trace()], both, [16, 20], metrics=METRICS, out=tmp_path / "x", resume=resume
        )

        (failure,) = done.failures
        assert (failure.policy, failure.budget) == ("faulty", 20)
        assert re.search(message, failure.error)
        assert "\n" not in failure.error
        assert len(read_records(tmp_path / "x" / "records.zarr")) == 3
        stored = json.loads((tmp_path / "x" / "run.json").read_text())
        assert len(stored["failures"]) == 1


class FullDisk:
    """A disk on which only so many files fit."""

    def __init__(self, monkeypatch, at):
        self.files, self.at = 0, at
        original = Path.write_bytes

        def write(path, data):
            self.files += 1
            if self.files == at:
                original(path, bytes(data)[:10])
                raise OSError(errno.ENOSPC, "No space left on device")
            return original(path, data)

        monkeypatch.setattr(Path, "write_bytes", write)


@pytest.mark.parametrize("at", [1, 2, 5, 7, 11, 12])
def test_a_full_disk_loses_no_finished_cell(tmp_path, whole, at):
    """One line says how many cells are kept; with room again the sweep is resumed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cells, "TOGETHER", 8)
        disk = FullDisk(patch, at)
        with pytest.raises(OutputError, match=r"No space left on device.*--resume") as caught:
            run(tmp_path / "x")
    assert disk.files == at
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "x" / "run.json").exists()
    kept = len(list(tmp_path.glob("x/parts/cell-*")))
    message = f"with {plural(kept, 'replayed cell')} kept" if kept else "with nothing done"
    assert message in str(caught.value)
    assert (tmp_path / "x").exists() == bool(kept)
    assert not list(tmp_path.glob("x/parts/.*")) + list(tmp_path.glob("x/.*"))

    run(tmp_path / "x", resume=True)

    check(tmp_path / "x", whole)


def test_a_folder_is_written_by_one_process_at_a_time(tmp_path):
    """The second writer gets one line, and changes nothing."""
    with parts.Parts(tmp_path / "x", {}, resume=False):
        for resume in (True, False):
            with pytest.raises(OutputError, match=r"by another process|unfinished run"):
                run(tmp_path / "x", resume=resume)
        assert {path.name for path in (tmp_path / "x").iterdir()} == {"lock", "parts", "sweep.json"}
    assert not (tmp_path / "x").exists()


def test_an_unfinished_run_is_not_written_over(tmp_path, monkeypatch):
    """Without resume the folder stays as it is, and the message names the option."""
    monkeypatch.setattr(cells, "replay", Stopper(cells.replay, 4))
    run(tmp_path / "x")
    (tmp_path / "x" / "run.json").unlink()

    with pytest.raises(OutputError, match=r"unfinished run; continue it with .*--resume"):
        run(tmp_path / "x")


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"interval": 9}, "interval"),
        ({"metrics": None}, "metrics"),
        ({"memory": 2**30, "events": True}, "events, memory"),
    ],
)
def test_another_sweep_is_not_resumed(tmp_path, monkeypatch, change, names):
    """The message names the parameters that differ."""
    with monkeypatch.context() as patch:
        patch.setattr(cells, "replay", Stopper(cells.replay, 4))
        run(tmp_path / "x")

    with pytest.raises(OutputError, match=f"a run with other {names}; expected the same"):
        run(tmp_path / "x", resume=True, **change)


def test_another_trace_of_the_same_name_is_not_resumed(tmp_path, monkeypatch):
    """Traces are compared by their digests, also in memory."""
    with monkeypatch.context() as patch:
        patch.setattr(cells, "measure", Stopper(cells.measure, 2))
        patch.setattr(cells, "TOGETHER", 1)
        replay_all([make_trace()], policies(), [16], out=tmp_path / "x", metrics=METRICS)

    with pytest.raises(OutputError, match="a run with other traces"):
        replay_all(
            *([make_trace(seed=1)], policies(), [16]),
            out=tmp_path / "x",
            metrics=METRICS,
            resume=True,
        )


def test_a_trace_with_another_probe_is_not_resumed(tmp_path):
    """Probes are compared too, although the digest of a trace leaves them out."""
    generator, rope = torch.Generator().manual_seed(0), kvsim.Rope.default(8)
    q, k = (torch.randn(2, heads, 20, 8, generator=generator) for heads in (4, 2))
    whole, halves = repeated(q, k, 12), repeated(q, k, 12)
    halves["meta"]["probe"]["chunks"] = [[0, 6, 6], [6, 12, 6]]
    traces = [
        kvsim.Trace.from_arrays(q, k, k, prompt_len=12, rope=rope, name="a", **probe)
        for probe in (whole, halves)
    ]
    options = {"out": tmp_path / "x", "metrics": ["entries_seen"], "resume": True}
    replay_all(traces[:1], [kvsim.policy("kvzip")], [4], **options)
    assert traces[0].digest == traces[1].digest

    with pytest.raises(OutputError, match="a run with other traces"):
        replay_all(traces[1:], [kvsim.policy("kvzip")], [4], **options)


def test_damaged_and_foreign_parts_are_computed_again(tmp_path, monkeypatch, whole):
    """A flipped bit, a cut and the part of another sweep or cell change nothing in the results."""
    for name, options in (("x", {}), ("other", {"interval": 9})):
        with monkeypatch.context() as patch:
            patch.setattr(cells, "replay", Stopper(cells.replay, 12))
            run(tmp_path / name, **options)
    flipped, cut, foreign, one, other, *_ = sorted((tmp_path / "x" / "parts").glob("cell-*"))
    one.rename(tmp_path / "aside")
    other.rename(one)
    (tmp_path / "aside").rename(other)
    data = bytearray(flipped.read_bytes())
    data[len(data) // 2] ^= 4
    flipped.write_bytes(data)
    cut.write_bytes(cut.read_bytes()[:-1])
    foreign.write_bytes((tmp_path / "other" / "parts" / foreign.name).read_bytes())

    run(tmp_path / "x", resume=True)

    check(tmp_path / "x", whole)


def test_an_impossible_folder_is_found_before_any_work(tmp_path):
    """Something at the path, or a file where a folder is needed: no cell is replayed."""
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    calls = []

    for out in (tmp_path, tmp_path / "file", tmp_path / "file" / "x", tmp_path / "link"):
        with pytest.raises((OutputError, kvsim.errors.TraceError), match=r"exists|is a file"):
            run(out, progress=lambda *call: calls.append(call))

    assert calls == []
    assert (tmp_path / "file").read_text() == "mine"


MINE = """
import os, signal
from dataclasses import dataclass
from kvsim import Policy
from kvsim.core.policy import Schedule, Scorer

@dataclass(frozen=True)
class Odd(Scorer):
    def score(self, view):
        if view.setting.budget == 24 and os.environ.get("KILL"):
            os.kill(os.getpid(), int(os.environ["KILL"]))
        return view.pos.float()

def odd():
    return Policy("odd", Odd(), schedule=Schedule(interval=64))
"""


def test_a_killed_command_is_resumed(tmp_path, monkeypatch, run, warm_kvsim):
    """Its three finished cells stay; the run is refused until then, and whole afterwards."""
    (tmp_path / "mine.py").write_text(MINE)
    command = ["replay", "sample", "--policy", "tova,mine:odd"]
    command += ["--budget", "16,24", "--interval", "64", "--metric", "wipeout", "--out", "x"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "mine", None)  # forgotten after the test

    def resumed():
        del sys.modules["mine"]  # a new process would import it anew
        return run(*command, "--resume")

    killed = subprocess.run(
        [warm_kvsim / "kvsim", *command],
        check=False,
        capture_output=True,
        env=os.environ | {"KILL": str(int(signal.SIGKILL))},
    )

    assert killed.returncode == -signal.SIGKILL
    assert len(list((tmp_path / "x" / "parts").glob("cell-*"))) == 3
    with pytest.raises(OutputError, match=r"is not finished.*--resume"):
        read_run(tmp_path / "x")
    (tmp_path / "mine.py").write_text(MINE + "# edited\n")
    status, out, err = resumed()
    assert (status, out) == (2, "")
    assert "a run with other code; expected the same" in err
    (tmp_path / "mine.py").write_text(MINE)
    status, _, err = resumed()
    assert (status, err) == (0, "")
    assert len(read_records(tmp_path / "x" / "records.zarr")) == 4
    assert not (tmp_path / "x" / "parts").exists()


def forged(name, body):
    """Return a part of a sweep with a checksum that fits."""
    return hashlib.sha256(name.encode() + body).digest() + body


@pytest.mark.parametrize("how", ["empty", "too large", "no zip", "pipe", "other meta"])
def test_hostile_parts_are_computed_again(tmp_path, monkeypatch, whole, how):
    """Parts with a checksum that fits are decoded within bounds, and a pipe is not waited for."""
    out = tmp_path / "r"
    monkeypatch.setattr(cells, "TOGETHER", 2)
    with monkeypatch.context() as patch:
        patch.setattr(parts.Parts, "publish", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(out)
    for path in [*sorted(out.glob("parts/cell-*"))[:3], *sorted(out.glob("parts/rows-*"))[:1]]:
        data = path.read_bytes()
        with np.load(io.BytesIO(data[64:])) as stored:
            arrays = dict(stored)
        if how == "pipe":
            path.unlink()
            os.mkfifo(path)
            continue
        archive = io.BytesIO()
        if how == "empty":
            with zipfile.ZipFile(archive, "w"):
                pass
        elif how == "too large":  # and of other content, which shows if it is accepted
            arrays |= {
                name: array.clip(NEVER) for name, array in arrays.items() if "evicted" in name
            }
            np.savez_compressed(archive, more=np.zeros(32 << 20, np.uint8), **arrays)
        elif how == "other meta":
            np.savez_compressed(archive, **arrays | {"meta": np.frombuffer(b"[1]", np.uint8)})
        path.write_bytes(forged(path.name, data[32:64] + archive.getvalue()))

    run(out, resume=True)

    check(out, whole)


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table.head(1).with_columns(params=pl.lit("a" * 50_000_000)),
        lambda table: table.with_columns(value=pl.lit("much")),
    ],
    ids=["too large", "no numbers"],
)
def test_hostile_rows_are_computed_again(tmp_path, monkeypatch, whole, change):
    """Rows that would fill the memory, or that are no numbers, are not taken from a part."""
    out = tmp_path / "r"
    with monkeypatch.context() as patch:
        patch.setattr(parts.Parts, "publish", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(out)
    for path in out.glob("parts/rows-*"):
        data = path.read_bytes()
        with np.load(io.BytesIO(data[64:])) as stored:
            arrays = dict(stored)
        table, archive = io.BytesIO(), io.BytesIO()
        change(pl.read_parquet(io.BytesIO(arrays["table"]))).write_parquet(table, statistics=False)
        arrays["table"] = np.frombuffer(table.getvalue(), np.uint8)
        np.savez_compressed(archive, **arrays)
        path.write_bytes(forged(path.name, data[32:64] + archive.getvalue()))

    run(out, resume=True)

    check(out, whole)


def interrupt(*_, **__):
    """Ctrl-C."""
    raise KeyboardInterrupt


@pytest.mark.parametrize("jobs", [1, 2])
def test_accounts_are_freed_when_they_are_measured(paths, monkeypatch, jobs):
    """On request: values are the same, records have none, and few are there at a time."""
    traces = [kvsim.open_trace(path) for path in paths]
    policies = [kvsim.policy(name, page=2, dense_layers=0) for name in ("quest", "tova+quest")]
    options = {"interval": 8, "metrics": ["output_error", "bytes_read"]}
    kept = replay_all(traces, policies, [8, 12], **options)
    held, values = [], cells.Cells._values

    def counted(self, *given):
        held.append(sum(each.record.reads is not None for each in self._replayed.values()))
        return values(self, *given)

    monkeypatch.setattr(cells, "TOGETHER", 2)
    monkeypatch.setattr(cells.Cells, "_values", counted)
    here = lambda work, shares, _: ((share, work(share)) for share in shares)  # noqa: E731
    monkeypatch.setattr(cells, "in_processes", here)
    freed = replay_all(traces, policies, [8, 12], accounts=False, jobs=jobs, **options)

    assert all(record.reads is not None for record in kept.records)
    assert all(record.reads is None for record in freed.records)
    assert freed.table.equals(kept.table)
    assert jobs > 1 or held == [2] * (2 * len(traces))
