"""Replays into a folder that are stopped: resumed, they end as undisturbed ones."""

import importlib
import io
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass, replace

import numpy as np
import polars as pl
import pytest
import torch

import kvsim
from kvsim.analysis import registry
from kvsim.analysis.folder import read_run
from kvsim.core.policy import Policy, Schedule, Scorer
from kvsim.errors import OutputError, PolicyError, TraceError
from kvsim.schema import NEVER
from kvsim.store.inputs import digests, sealed
from kvsim.store.records import read_records
from kvsim.sweeps import cells, tasks
from kvsim.sweeps.driver import replay_all
from kvsim.sweeps.planning import Plan, grid_from
from kvsim.sweeps.shards import Shards
from tests.probes import repeated
from traces import random_trace

METRICS = ["wipeout", "entries_seen", "segment_count", "window_overlap"]
BUDGETS = [16, "25%"]


def make_trace(name="a", tokens=60, seed=0):
    """A small random trace."""
    return random_trace(n=tokens, seed=seed, size=1.0, prompt_len=30, name=name)


def policies():
    """Two policies, one of which notes its decisions."""
    return [kvsim.policy("tova"), kvsim.policy("ams", window=4, recent=4)]


def run(out=None, resume=False, **options):
    """Sweep two policies and three budgets over two traces."""
    metrics = [*METRICS]
    settings = {"interval": 8, "metrics": metrics, "regret": True, **options}
    traces = [make_trace("a"), make_trace("b", 50)]
    return replay_all(traces, policies(), BUDGETS, out=out, resume=resume, **settings)


@pytest.fixture(scope="module")
def whole():
    """The undisturbed run."""
    return run()


@pytest.fixture
def small_tasks(monkeypatch):
    """Two cells a task."""
    monkeypatch.setattr(tasks, "_TOGETHER", 2)


def check(folder, whole):
    """Assert that a finished run folder holds what the undisturbed run has."""
    assert pl.read_parquet(folder / "results.parquet").equals(whole.table)
    records = read_records(folder / "records.zarr")
    for record, expected in zip(records, whole.records, strict=True):
        assert (record.evicted_at == expected.evicted_at).all()
        assert (record.policy, record.budget) == (expected.policy, expected.budget)


def parts(folder, suffix="json"):
    """The files of finished tasks."""
    return sorted((folder / "parts").glob(f"*.{suffix}"))


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


@pytest.mark.parametrize("together", [1, 3])
def test_results_do_not_depend_on_what_is_measured_together(tmp_path, monkeypatch, whole, together):
    """A folder is written task by task, and holds the same rows in the same order."""
    monkeypatch.setattr(tasks, "_TOGETHER", together)

    done = run(tmp_path / "x")

    assert done.table.equals(whole.table)
    check(tmp_path / "x", whole)


def test_a_sweep_continues_what_a_replay_wrote(paths, tmp_path, monkeypatch):
    """The cells of both are the same, so nothing is replayed again; the other way round too."""
    given = {"traces": paths, "policies": ["tova", "knorm"], "budgets": [16, "25%"]}
    options = {"metrics": METRICS, "out": tmp_path / "x"}
    replayed = replay_all(*given.values(), interval=8, **options)
    again = Stopper(cells.replay, 0)
    monkeypatch.setattr(cells, "replay", again)

    swept = kvsim.sweep(**given, intervals=[8], records=True, **options)
    resumed = replay_all(*given.values(), interval=8, resume=True, **options)

    assert again.calls == 0
    assert swept.table.equals(replayed.table)
    assert resumed.table.equals(replayed.table)


@pytest.mark.parametrize("at", [1, 7, 14])
def test_an_interrupted_run_is_resumed(tmp_path, monkeypatch, whole, small_tasks, at):
    """After Ctrl-C at any replay, finished cells are not computed again; the end is the same."""
    counter = Stopper(cells.replay, 0)
    monkeypatch.setattr(cells, "replay", counter)
    run()
    stopped = Stopper(counter.function, at)
    monkeypatch.setattr(cells, "replay", stopped)
    first = run(tmp_path / "x")
    assert first.interrupted
    if first.records:
        assert pl.read_parquet(tmp_path / "x" / "results.parquet").equals(first.table)
    again = Stopper(stopped.function, 0)
    monkeypatch.setattr(cells, "replay", again)

    resumed = run(tmp_path / "x", resume=True)

    assert not resumed.interrupted
    check(tmp_path / "x", whole)
    # the interrupted cell is replayed again, and so is an oracle that several cells share
    assert counter.calls + 1 - at <= again.calls <= counter.calls + 3 - at


def test_an_interrupt_while_measuring_loses_one_task(tmp_path, monkeypatch, whole, small_tasks):
    """No record is without values; the resumed run computes the task again."""
    with monkeypatch.context() as patch:
        patch.setattr(cells, "measure", Stopper(cells.measure, 2))
        first = run(tmp_path / "x")
    assert (len(first.records), first.interrupted) == (2, True)
    assert len(read_records(tmp_path / "x" / "records.zarr")) == 2

    run(tmp_path / "x", resume=True)

    check(tmp_path / "x", whole)


def test_cells_that_cannot_be_measured_together_are_measured_alone(monkeypatch):
    """One of them fails; the values of the others are those that they have without it."""
    original, options = cells.measure, {"interval": 8, "metrics": METRICS, "regret": True}
    alone = replay_all([make_trace()], policies(), [16], **options)

    def fails(trace, records, *given, **options):
        if any(record.budget == 20 for record in records):
            raise PolicyError("no rule")
        return original(trace, records, *given, **options)

    monkeypatch.setattr(cells, "measure", fails)
    run = replay_all([make_trace()], policies(), [16, 20], **options)

    assert {(each.budget, each.error) for each in run.failures} == {(20, "measuring: no rule")}
    assert run.table.equals(alone.table)


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
        ("raise", r"raised ZeroDivisionError \(no luck\) in test_resuming.py, line \d+"),
        ("exit", r"raised SystemExit \(0\) in test_resuming.py"),
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


def test_an_unfinished_run_is_not_written_over(tmp_path, monkeypatch):
    """Without resume the folder stays as it is, and the message names the option."""
    monkeypatch.setattr(cells, "replay", Stopper(cells.replay, 4))
    run(tmp_path / "x")
    (tmp_path / "x" / "run.json").unlink()

    with pytest.raises(OutputError, match=r"holds a run; continue it with .*--resume"):
        run(tmp_path / "x")


@pytest.mark.parametrize(
    "change",
    [{"interval": 9}, {"metrics": ["wipeout"]}, {"events": True}, {"traces": [make_trace(seed=1)]}],
    ids=str,
)
def test_other_arguments_compute_other_cells(tmp_path, change):
    """What depends on them is computed, also where a trace has the same name; no value is mixed."""
    given = {"traces": [make_trace()], "policies": policies(), "budgets": [16], "interval": 8}
    options = {"metrics": METRICS, "out": tmp_path / "x", "resume": True}
    replay_all(**given, **options)
    before = parts(tmp_path / "x")

    other = replay_all(**given | options | change)

    assert set(before) < set(parts(tmp_path / "x"))
    assert other.table.equals(replay_all(**given | {"metrics": METRICS} | change).table)
    assert read_run(tmp_path / "x").table.equals(other.table)


HALVES = [[0, 6, 6], [6, 12, 6]]


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ("meta", {"spans": {"needle": [[2, 5]]}}),
        ("meta", {"labels": {"task": "walk"}}),
        ("meta", {"answer_check": {"right": True}}),
        ("meta", {"turns": [{"labels": {"task": "walk"}}]}),
        ("meta", {"layer_sensitivity": [1.0, 2.0]}),
        ("meta", {"model": {"name": "tiny", "weights": "sha256:0"}}),
        ("meta", {"probe": HALVES}),
        ("o_proj", torch.ones(2, 4, 8, 3)),
        ("residual_norm", torch.ones(2, 20)),
        ("token_text", ["a"] * 20),
    ],
    ids=lambda value: (
        value
        if isinstance(value, str)
        else "-".join(value)[:9]
        if isinstance(value, dict)
        else "other"
    ),
)
@pytest.mark.parametrize("stored", [False, True], ids=["memory", "stored"])
def test_a_trace_recorded_again_is_another_one(tmp_path, change, key, stored):
    """Whatever results read is compared, although the digest of a trace leaves it out."""
    generator, rope = torch.Generator().manual_seed(0), kvsim.Rope.default(8)
    q, k = (torch.randn(2, heads, 20, 8, generator=generator) for heads in (4, 2))
    first = repeated(q, k, 12) | {"o_proj": torch.zeros(2, 4, 8, 3), "token_text": ["b"] * 20}
    first |= {"residual_norm": torch.zeros(2, 20)}
    if change == "meta":
        probe = {"probe": first["meta"]["probe"] | {"chunks": HALVES}}
        key = first["meta"] | (probe if "probe" in key else key)
    traces = []
    for place, given in enumerate((first, first | {change: key})):
        trace = kvsim.Trace.from_arrays(q, k, k, prompt_len=12, rope=rope, name="a", **given)
        traces.append(kvsim.open_trace(trace.save(tmp_path / f"{place}.zarr")) if stored else trace)
    options = {"out": tmp_path / "x", "metrics": ["entries_seen"], "resume": True}
    runs = [replay_all(each, ["kvzip"], [4], **options) for each in (*traces, traces[0])]

    assert traces[0].digest == traces[1].digest
    assert len(parts(tmp_path / "x")) == 2
    (record,) = runs[1].records
    if stored:
        with pytest.raises(TraceError, match="measure a record on the trace it was replayed from"):
            kvsim.measure(traces[0], record, "entries_seen")


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
import os
from pathlib import Path
from dataclasses import dataclass
from kvsim import Policy
from kvsim.core.policy import Schedule, Scorer

@dataclass(frozen=True)
class Odd(Scorer):
    def score(self, view):
        if os.environ.get("KILL") and any(Path("x/parts").glob("*.json")):
            os.kill(os.getpid(), int(os.environ["KILL"]))
        return view.pos.float()

def odd():
    return Policy("odd", Odd(), schedule=Schedule(interval=64))
"""


def test_a_killed_command_is_resumed(tmp_path, monkeypatch, run, warm_kvsim):
    """Its finished task stays; the run is refused until then, and whole afterwards."""
    (tmp_path / "mine.py").write_text(MINE)
    for number, name in enumerate("ab"):
        make_trace(name, seed=number).save(tmp_path / f"{name}.zarr")
    command = ["replay", "a.zarr", "b.zarr", "--policy", "tova,mine:odd"]
    command += ["--budget", "16,24", "--interval", "8", "--metric", "wipeout", "--out", "x"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "mine", None)  # forgotten after the test

    killed = subprocess.run(
        [warm_kvsim / "kvsim", *command],
        check=False,
        capture_output=True,
        env=os.environ | {"KILL": str(int(signal.SIGKILL))},
    )

    assert killed.returncode == -signal.SIGKILL
    assert len(parts(tmp_path / "x")) == 1
    with pytest.raises(OutputError, match=r"is not finished.*--resume"):
        read_run(tmp_path / "x")
    del sys.modules["mine"]  # a new process would import it anew
    status, _, err = run(*command, "--resume")
    assert (status, err) == (0, "")
    assert len(read_records(tmp_path / "x" / "records.zarr")) == 8
    before = parts(tmp_path / "x")
    (tmp_path / "mine.py").write_text(MINE + "# edited\n")
    del sys.modules["mine"]
    run(*command, "--resume")
    assert set(before) < set(parts(tmp_path / "x"))  # cells of other code are computed anew


OWN = registry.METRICS._own
PACKAGE = {
    "__init__.py": "",
    "sub/__init__.py": "",
    "sub/helper.py": "from ..deep import sign\nimport pack.table\n\n"
    "def f(x):\n    return sign(x) * pack.table.SCALE * pack.table.MORE['a']\n",
    "deep.py": "def sign(x):\n    return x\n",
    "table.py": "SCALE, MORE = 1.0, {'a': 1.0}\n",
    "late.py": "LAST = 1.0\n",
    "mine.py": """
from dataclasses import dataclass
import numpy as np
from kvsim.analysis.definition import Cells
from kvsim.core.policy import Scorer
from .sub import helper

@dataclass(frozen=True)
class Mine(Scorer):
    def score(self, view):
        from pack.late import LAST
        return helper.f(view.pos.float()) * LAST

def cells(subject):
    kept = subject.record.evicted_at > 1_000
    places = (kept * np.arange(kept.shape[-1])).sum(-1, dtype=float)
    for layer, values in zip(subject.record.layers, places):
        yield Cells(layer, helper.f(values), "head")
""",
}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package with a policy and a metric that compute by what they import, and its loader."""
    for name, text in PACKAGE.items():
        (tmp_path / "pack" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "pack" / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # files change within a second
    options = {"metrics": ["wipeout", "signed"], "interval": 8}

    def load():
        for name in [*sys.modules]:
            if name.partition(".")[0] == "pack":
                monkeypatch.delitem(sys.modules, name)
        mine = importlib.import_module("pack.mine")
        metric = replace(registry.METRICS["wipeout"], cells=mine.cells)
        monkeypatch.setattr(registry.METRICS, "_own", {**OWN, "signed": metric})

        def replayed(out=None):
            more = options if out is None else options | {"out": out, "resume": True}
            return replay_all([make_trace()], [mine.Mine()], [16], **more)

        return replayed

    return load


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("deep", "return x", "return -x"),
        ("sub/helper", "sign(x) *", "-sign(x) *"),
        ("table", "SCALE, MORE = 1.0", "SCALE, MORE = -1.0"),
        ("table", "'a': 1.0", "'a': -1.0"),
        ("late", "1.0", "-1.0"),
        ("mine", "view.pos.float()", "-view.pos.float()"),
        ("mine", "helper.f(values)", "-helper.f(values)"),
    ],
    ids=str,
)
def test_code_is_what_was_loaded(tmp_path, package, file, old, new):
    """An edit of what policies and metrics import counts once it is loaded, and never before."""
    path, out = tmp_path / "pack" / f"{file}.py", tmp_path / "x"
    first = package()()
    run = package()
    if file == "late" or "'a'" in old:  # elsewhere code counts, too, that no run has seen
        run(out)
    path.write_text(path.read_text().replace(old, new))

    again = run(out)

    assert again.table.equals(first.table)
    assert len(parts(out)) == 1
    run = package()
    edited = run(out)
    assert edited.table.equals(run().table)
    assert not edited.table.equals(first.table)
    assert len(parts(out)) == 2


def test_a_policy_defined_in_an_interpreter_is_its_code(tmp_path, monkeypatch):
    """Defined again with another rule, as in a cell of a notebook, it is another policy."""
    here = sys.modules["__main__"]
    for count, rule in enumerate(("view.pos", "-view.pos", "view.pos"), 1):
        scope = {"__name__": "__main__", "Scorer": Scorer, "dataclass": dataclass}
        text = "@dataclass(frozen=True)\nclass Mine(Scorer):\n    def score(self, view):\n"
        exec(f"{text}        return {rule}.float()", scope)  # noqa: S102  as a notebook does
        monkeypatch.setattr(here, "Mine", scope["Mine"], raising=False)
        options = {"interval": 8, "out": tmp_path / "x", "resume": True}
        replay_all([make_trace()], [scope["Mine"]()], [16], metrics=["wipeout"], **options)
        assert len(parts(tmp_path / "x")) == min(count, 2)


def sealed_part(path, files):
    """Write files of a part, and its document with their digests."""
    for name, data in files.items():
        path.with_name(name).write_bytes(data)
    document = json.loads(path.read_text()) | {"files": digests(path.parent, *files)}
    path.write_text(json.dumps(sealed(document)))


def huge(table):
    """A table of one row that fills the memory."""
    return table.head(1).with_columns(params=pl.lit("a" * 50_000_000))


@pytest.mark.parametrize("how", ["no zip", "too large", "other meta", "huge rows", "no numbers"])
def test_hostile_parts_are_computed_again(tmp_path, whole, how):
    """Parts with digests that fit are decoded within bounds, and what is no part is none."""
    out = tmp_path / "r"
    run(out)
    for path in parts(out):
        table, records = path.with_suffix(".parquet"), path.with_suffix(".records")
        files = {each.name: each.read_bytes() for each in (table, records) if each.exists()}
        if how in ("huge rows", "no numbers"):
            rows, written = pl.read_parquet(table), io.BytesIO()
            changed = huge(rows) if how == "huge rows" else rows.cast({"value": pl.String})
            changed.write_parquet(written, statistics=False)
            files[table.name] = written.getvalue()
        elif records.exists():
            archive = io.BytesIO()
            with np.load(io.BytesIO(files[records.name])) as stored:
                arrays = dict(stored)
            if how == "too large":  # and of other content, which shows if it is accepted
                clipped = {x: y.clip(NEVER) for x, y in arrays.items() if "evicted" in x}
                np.savez_compressed(archive, more=np.zeros(32 << 20, np.uint8), **arrays | clipped)
            elif how == "other meta":
                np.savez_compressed(archive, **arrays | {"meta": np.frombuffer(b"[1]", np.uint8)})
            files[records.name] = archive.getvalue()
        sealed_part(path, files)

    run(out, resume=True)

    check(out, whole)


def test_a_sweep_without_records_leaves_none_of_an_older_run(paths, tmp_path):
    """Records of other cells are no part of the run that replaces them."""
    given = {"traces": paths, "policies": ["tova"], "budgets": [16]}
    kvsim.sweep(**given, intervals=8, metrics=METRICS, records=True, out=tmp_path / "x")

    swept = kvsim.sweep(**given, intervals=8, metrics=METRICS, out=tmp_path / "x")

    assert not (tmp_path / "x" / "records.zarr").exists()
    assert read_run(tmp_path / "x").table.equals(swept.table)


def test_the_configuration_of_a_replay_is_that_of_a_sweep(paths, tmp_path, run):
    """Policies with parameters and protection too: `kvsim sweep` says how far the folder is."""
    both = [kvsim.policy("tova"), kvsim.policy("ams", window=4, recent=4)]
    replay_all(paths, both, [16, "25%"], interval=8, metrics=METRICS, out=tmp_path / "x")

    status, out, err = run("sweep", "--out", tmp_path / "x", "--status", "--json")

    assert (status, err) == (0, "")
    told = json.loads(out)
    assert (told["cells"], told["done"], told["tasks_left"]) == (8, 8, 0)


@pytest.mark.parametrize("theirs", ["part", "claim"])
def test_a_folder_that_another_process_works_in_is_not_withdrawn(paths, tmp_path, theirs):
    """Of a run of which nothing is done the folder goes, but not with another's work in it."""
    plan = Plan.of(grid_from(None, traces=paths, policies="tova", budgets=16, metrics=METRICS))
    task = next(each for each in plan.tasks if each.cells)
    mine, other = Shards(tmp_path / "x"), Shards(tmp_path / "x")
    mine.begin(plan.document, resume=False)
    assert other.claim(task)
    if theirs == "part":
        other.add(task, plan.compute(task))

    mine.withdraw()
    assert (tmp_path / "x").exists()

    other.close()
    mine.withdraw()
    assert (tmp_path / "x").exists() == (theirs == "part")


@pytest.mark.parametrize("begun", ["replay", "sweep", "live", "older"])
@pytest.mark.parametrize("command", ["replay", "sweep", "collect"])
def test_no_command_replaces_results_of_another(tmp_path, run, begun, command):
    """The folder stays as it is, byte for byte; of an older kvsim, live runs are known."""
    make_trace().save(tmp_path / "a.zarr")
    out, trace = tmp_path / "x", str(tmp_path / "a.zarr")
    options = [
        trace,
        "--policy",
        "tova",
        "--budget",
        "16",
        "--metric",
        "wipeout",
        "--out",
        str(out),
    ]
    run("replay" if begun in ("live", "older") else begun, *options)
    if begun in ("live", "older"):
        config = (out / "config.resolved.yaml").read_text().replace("command: replay\n", "")
        text = "loop: closed\n" if begun == "older" else "command: live\n"
        (out / "config.resolved.yaml").write_text(config + text)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    again = {"replay": ["--resume"], "sweep": [], "collect": ["--collect"]}[command]
    status, _, err = run("replay" if command == "replay" else "sweep", *options, *again)

    kind = "sweep" if command == "collect" else command
    written = "live" if begun == "older" else begun
    if kind == written:
        assert status == 0
        return
    assert status == 2
    assert f"holds results of `kvsim {written}`, which `kvsim {kind}` would replace" in err
    assert before == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
