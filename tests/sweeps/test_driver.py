"""`kvsim.sweep`: the same values as one replay after another, whoever computes them."""

import functools
import pickle
import shutil
import subprocess
import sys
from concurrent.futures import BrokenExecutor, Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
from chores import work_on

import kvsim
from kvsim.analysis.folder import read_run
from kvsim.core import lazy
from kvsim.core.policy import Policy, Scorer
from kvsim.errors import ConfigError, OutputError, TraceError
from kvsim.store.forecast import Forecast
from kvsim.sweeps import driver, pool, tasks
from kvsim.sweeps.driver import Plan, replay_all
from kvsim.sweeps.grid import grid_of
from kvsim.sweeps.pool import in_processes, in_this_process, processes
from saved_traces import elsewhere
from tests.sweeps.conftest import make_trace, same


def test_a_sweep_is_one_replay_after_another(grid, small_tasks):
    """Cut into blocks of layers and cells, the Table is that of single replays, row by row."""
    run = kvsim.sweep(**grid)

    assert run.failures == ()
    assert len(Plan.of(grid_of(grid)).tasks) > 8
    traces = [kvsim.open_trace(path) for path in grid["traces"]]
    for record in run.records:
        trace = next(each for each in traces if each.name == record.trace)
        policy = next(x for x in grid_of(grid).policies if x.params == dict(record.params))
        alone = kvsim.replay(trace, policy, record.budget, interval=8, prefill=True)
        assert (alone.evicted_at == record.evicted_at).all()
        table = kvsim.measure(trace, replace(alone, facts=record.facts), grid["metrics"])
        keys = ["trace", "policy", "params", "budget", "share"]
        one = table.filter(pl.col("policy").is_not_null())
        ours = run.table.join(one.select(keys).unique(), on=keys, nulls_equal=True)
        assert ours.equals(one)


class Elsewhere(Executor):
    """Computes as other processes would; its futures are of no class of `concurrent.futures`."""

    def __init__(self, most=1_000):
        self.sizes, self.most = [], most

    def submit(self, function, task):
        """Compute a pickled task, or break."""
        if len(self.sizes) == self.most:
            raise BrokenExecutor
        self.sizes.append(len(pickle.dumps(task)))
        future = Future()
        try:
            result = pickle.loads(pickle.dumps(function(pickle.loads(pickle.dumps(task)))))  # noqa: S301  our own
            future.set_result(result)
        except Exception as error:  # noqa: BLE001  as executors do
            future.set_exception(error)
        return type("Job", (), {"done": future.done, "result": future.result})()


@pytest.mark.parametrize("how", ["processes", "threads", "jobs"])
def test_any_executor_computes_the_same(grid, small_tasks, tmp_path, how):
    """Processes here, threads, and jobs of submitit's kind give the bits of one; no arrays go."""
    expected = kvsim.sweep(**grid)
    given = {"processes": {"jobs": 2}, "threads": {"executor": ThreadPoolExecutor(1)}}
    jobs = Elsewhere()

    run = kvsim.sweep(**grid, out=tmp_path / "x", **given.get(how, {"executor": jobs}))

    assert same(run, expected)
    assert read_run(tmp_path / "x").table.equals(expected.table)
    assert max(jobs.sizes, default=0) < 20_000


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore")  # of dask, and of jobs that submitit leaves to themselves
@pytest.mark.parametrize("library", ["distributed", "submitit"])
def test_executors_of_clusters_compute_the_same(grid, tmp_path, library):
    """Those of dask, with two workers over TCP, and of submitit, with jobs of this machine."""
    if library == "distributed":
        from distributed import Client

        with Client(n_workers=2, threads_per_worker=1, dashboard_address=None) as client:
            run = kvsim.sweep(**grid, executor=client.get_executor())
    else:
        import submitit

        executor = submitit.AutoExecutor(tmp_path / "jobs", cluster="local")
        executor.update_parameters(timeout_min=3)
        run = kvsim.sweep(**grid | {"traces": grid["traces"][:1]}, executor=executor)
        grid["traces"] = grid["traces"][:1]

    assert same(run, kvsim.sweep(**grid))


def test_an_executor_that_breaks_loses_its_own_cells(grid, small_tasks, tmp_path):
    """What it computed is kept, the others are failures, and the same call goes on."""
    run = kvsim.sweep(**grid, out=tmp_path / "x", executor=Elsewhere(9))

    assert 0 < run.parameters["done"] < run.parameters["cells"]
    assert {each.error.partition(":")[0] for each in run.failures} == {"BrokenExecutor"}
    assert same(kvsim.sweep(**grid, out=tmp_path / "x"), kvsim.sweep(**grid))


def test_another_kvsim_on_an_executor_is_refused(grid, monkeypatch):
    """No value of other code is mixed in."""
    codes = iter(["here", *["there"] * 99])
    monkeypatch.setattr(tasks, "of_kvsim", functools.partial(next, codes))
    grid |= {"traces": grid["traces"][:1], "metrics": ["wipeout"], "policies": ["tova"]}

    run = kvsim.sweep(**grid, executor=Elsewhere())

    assert {each.error.partition(";")[0] for each in run.failures} == {
        "the executor runs another kvsim"
    }


def test_a_cell_that_fails_stops_no_other(grid):
    """Its failure is reported; progress counts it; the others are kept."""

    class Fails(Scorer):
        def score(self, view):
            raise ZeroDivisionError("nothing to divide")

    policies = [kvsim.policy("tova"), Policy("fails", Fails()), kvsim.policy("snapkv")]
    counts = []
    given = grid | {"policies": policies, "budgets": [12, 40, 90], "metrics": ["wipeout"]}

    run = kvsim.sweep(**given, progress=lambda done, total, _: counts.append((done, total)))

    assert counts == sorted(counts)
    assert {(x.trace, x.policy, x.budget, x.unexpected) for x in run.failures} == {
        *((name, "fails", budget, True) for name in "ab" for budget in (12, 40)),
        *((name, "snapkv", 12, False) for name in "ab"),  # no rule for a budget below its window
    }
    assert run.parameters["done"] == 12  # with a budget of 90 nothing is evicted
    assert run.parameters["missing"] == 0


@pytest.mark.parametrize("how", ["gone", "another"])
def test_a_trace_that_changes_fails_and_the_others_are_done(grid, tmp_path, monkeypatch, how):
    """Removed or replaced while a sweep runs it fails its own cells alone."""
    copies = [str(shutil.copytree(path, tmp_path / Path(path).name)) for path in grid["traces"]]
    plan = Plan.of(grid_of(grid, traces=copies, out=tmp_path / "x"))
    shutil.rmtree(copies[1])
    if how == "another":
        shutil.copytree(copies[0], copies[1])

    run = plan.finish(plan.begin())

    assert {failure.trace for failure in run.failures} == {"b"}
    assert {record.trace for record in run.records} == {"a"}
    words = "is another trace than when" if how == "another" else "b.zarr"
    assert all(words in failure.error for failure in run.failures)


def test_traces_at_urls_are_the_traces(grid, tmp_path):
    """A configuration with URLs gives the Table of the same files here; what is gone fails."""
    grid |= {"policies": ["tova"]}
    with elsewhere(Path(grid["traces"][0]).parent) as url:
        urls = [f"{url}/{name}.zarr" for name in "ab"]
        run = kvsim.sweep(**grid | {"traces": urls})
        plan = Plan.of(grid_of(grid | {"traces": urls}))
    expected = kvsim.sweep(**grid)

    assert same(run, expected)
    assert plan.description == Plan.of(grid_of(grid)).description
    gone = plan.finish(plan.begin())
    assert {each.cell for each in gone.failures if each.policy} == {0, 1, 2, 3}


def test_the_same_cell_twice_is_one(grid):
    """Budgets given twice, and an interval that is the policy's own, are computed once."""
    grid |= {"policies": ["tova"], "metrics": ["wipeout"]}
    run = kvsim.sweep(**grid | {"budgets": [12, "12"], "interval": [1, "paper"]})

    assert len(run.records) == run.parameters["cells"] == 2
    assert same(run, kvsim.sweep(**grid | {"budgets": [12], "interval": ["paper"]}))


def test_what_cannot_be_a_sweep_is_refused_before_any_work(grid, tmp_path):
    """Traces in memory elsewhere, folders of something else."""
    memory = grid | {"traces": [make_trace()]}
    for options in ({"jobs": 2}, {"executor": Elsewhere()}):
        with pytest.raises(ConfigError, match="other processes cannot read"):
            kvsim.sweep(**memory, **options)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    with pytest.raises(OutputError, match="nothing was changed"):
        kvsim.sweep(**grid, out=tmp_path / "full")
    for url in ("s3://bucket/run", "memory://run"):
        with pytest.raises(OutputError, match="a URL"):
            kvsim.sweep(**grid, out=url)
    with pytest.raises(TraceError):
        kvsim.sweep(**grid | {"traces": [str(tmp_path / "none.zarr")]})
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["file"]


def test_a_task_that_kills_its_process_takes_no_other_with_it(tmp_path):
    """Good tasks come through, one that dies once too; the error and the killer are named."""
    given = [("good", number) for number in range(6)]
    given[3:3] = [("dies", 0), ("raises", 0), ("dies once", str(tmp_path / "flag"))]

    results = dict(in_processes(work_on, given, 2))
    endless = in_processes(work_on, (("good", number) for number in range(10_000_000)), 1)
    next(endless)
    endless.close()  # stops the process, and waits for no other task

    assert len(results) == len(given)
    assert all(results["good", number] == number for number in range(6))
    assert results["dies once", str(tmp_path / "flag")] == str(tmp_path / "flag")
    assert isinstance(results["raises", 0], ValueError)
    assert isinstance(results["dies", 0], BrokenExecutor)
    (_, error), good = in_this_process(work_on, [("raises", 0), ("good", 1)])
    assert isinstance(error, ValueError)
    assert good == (("good", 1), 1)


DRIVER = """
import sys
sys.path.insert(0, sys.argv[1])
from chores import work_on
from kvsim.sweeps.pool import in_processes
for task, _ in in_processes(work_on, [("hangs", "busy"), ("says", "idle")], 2):
    print("took it from", task, flush=True)
"""


def test_workers_end_with_a_killed_driver():
    """Neither a busy nor an idle worker outlives the process that started it."""
    command = [sys.executable, "-c", DRIVER, str(Path(__file__).parents[1])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        lines = [process.stdout.readline().split() for _ in range(3)]
        process.kill()
        # its workers have the same standard output: it ends with the last of them
        rest, _ = process.communicate(timeout=20)
    assert sorted(line[0] for line in lines) == ["busy", "idle", "took"]
    assert rest == ""


def test_processes_are_chosen_by_the_size_of_the_work(paths, monkeypatch):
    """One for small work, for traces in memory and on a GPU, else one per processor.

    One per task at most, and as many as fit the memory.
    """
    monkeypatch.setattr(pool.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(pool.os, "sysconf", {"SC_PHYS_PAGES": 4000, "SC_PAGE_SIZE": 10}.get)
    traces, small = [kvsim.open_trace(path) for path in paths], Forecast(memory=5000)

    assert processes(None, 1e9, 100, traces, small) == 1
    assert processes(None, 1e14, 100, traces, small) == 8
    assert processes(None, 1e14, 3, traces, small) == 3
    assert processes(None, 1e14, 100, [make_trace()], small) == 1
    assert processes(None, 1e14, 100, traces, Forecast(memory=15_000)) == 2
    assert processes(None, 1e14, 100, traces, Forecast(memory=50_000)) == 1
    assert processes(None, 1e14, 100, traces, Forecast(device_memory=1)) == 1
    assert processes(5, 1e9, 100, traces, small) == 5


def test_small_work_uses_one_thread(monkeypatch):
    """Replays of short traces; others keep torch's number."""
    used, before = [], lazy.torch.get_num_threads()
    options = {"metrics": ["wipeout"], "progress": lambda *_: used.append(now())}
    now = lazy.torch.get_num_threads
    lazy.torch.set_num_threads(2)
    try:
        replay_all(make_trace(), "tova", 16, **options)
        assert min(used) == 1
        used.clear()
        monkeypatch.setattr(lazy, "SHORT", 55)
        replay_all(make_trace(), "tova", 16, **options)
        assert min(used) == now() == 2
    finally:
        lazy.torch.set_num_threads(before)


def test_a_lost_task_is_an_unexpected_failure(grid, monkeypatch):
    """What a task raises, and no rule of kvsim, is a failure of each of its cells."""
    monkeypatch.setattr(driver, "in_this_process", lambda _, todo: ((x, OSError(5)) for x in todo))

    run = kvsim.sweep(**grid | {"metrics": ["wipeout"]})

    assert len(run.failures) == run.parameters["cells"]
    assert all(x.unexpected and x.error.startswith("OSError") for x in run.failures)
