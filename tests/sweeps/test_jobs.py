"""How work is spread: processes and threads by its size, with the same results."""

import pickle

import pytest
import torch

import kvsim
from kvsim.analysis.folder import read_run
from kvsim.core import threads
from kvsim.errors import ConfigError
from kvsim.sweeps import cells, driver, workers
from kvsim.sweeps.driver import replay_all
from kvsim.sweeps.workers import Lost, in_this_process, processes
from tests.sweeps.test_resuming import BUDGETS, METRICS, make_trace, policies
from tests.sweeps.test_resuming import run as whole_run


@pytest.fixture
def traces(tmp_path):
    """Two small traces on disk."""
    for trace in (make_trace("a"), make_trace("b", 50)):
        trace.save(tmp_path / f"{trace.name}.zarr")
    return [kvsim.open_trace(tmp_path / f"{name}.zarr") for name in "ab"]


@pytest.fixture
def elsewhere(monkeypatch):
    """Compute shares as other processes would; returns the pickled shares."""
    shares = []

    def in_processes(function, tasks, jobs):
        def apart(task):
            shares.append(pickle.dumps(task))
            result = function(pickle.loads(shares[-1]))  # noqa: S301 - our own bytes
            return pickle.loads(pickle.dumps(result))  # noqa: S301 - as above

        return in_this_process(apart, tasks)

    monkeypatch.setattr(driver, "in_processes", in_processes)
    return shares


def replays(traces, **options):
    """The sweep of `tests.sweeps.test_resuming` on these traces."""
    metrics = [*METRICS]
    settings = {"interval": 8, "metrics": metrics, "regret": True, **options}
    return replay_all(traces, policies(), BUDGETS, **settings)


def test_replays_in_processes_are_those_of_one(traces, elsewhere, tmp_path):
    """Table, records and values of traces; in a folder too. A share has no arrays in it."""
    expected, run = whole_run(), replays(traces, jobs=4, out=tmp_path / "x")

    assert len(elsewhere) == 4
    assert max(map(len, elsewhere)) < 10_000
    assert run.table.equals(expected.table)
    for record, other in zip(run.records, expected.records, strict=True):
        assert (record.policy, record.budget) == (other.policy, other.budget)
        assert (record.evicted_at == other.evicted_at).all()
    assert read_run(tmp_path / "x").table.equals(expected.table)


@pytest.mark.parametrize("jobs", [1, 2])
def test_accounts_are_freed_when_they_are_measured(paths, monkeypatch, elsewhere, jobs):
    """On request: values are the same, records have none, and few are there at a time."""
    traces = [kvsim.open_trace(path) for path in paths]
    both = [kvsim.policy(name, page=2, dense_layers=0) for name in ("quest", "tova+quest")]
    options = {"interval": 8, "metrics": ["output_error", "bytes_read"]}
    kept = replay_all(traces, both, [8, 12], **options)
    held, original = [], cells.Replays.table

    def counted(self, group, records):
        held.append(sum(record.reads is not None for record in records))
        return original(self, group, records)

    monkeypatch.setattr(cells, "TOGETHER", 2)
    monkeypatch.setattr(cells.Replays, "table", counted)
    freed = replay_all(traces, both, [8, 12], accounts=False, jobs=jobs, **options)

    assert all(record.reads is not None for record in kept.records)
    assert all(record.reads is None for record in freed.records)
    assert freed.table.equals(kept.table)
    assert held == [2] * (2 * len(traces))
    assert bool(elsewhere) == (jobs > 1)


def test_a_process_that_dies_loses_its_cells_alone(traces, monkeypatch, tmp_path):
    """They are failures, a resumed run computes them, and Ctrl-C keeps what has come."""

    def dying(function, tasks, jobs):
        for task in tasks:
            lost = Lost("its process died 3 times; was it killed for memory?")
            yield task, lost if task.name == "a" else function(task)
        raise KeyboardInterrupt

    monkeypatch.setattr(driver, "in_processes", dying)
    run = replays(traces, jobs=2, out=tmp_path / "x")

    assert run.interrupted
    assert {failure.error[:19] for failure in run.failures} == {"its process died 3 "}
    assert {failure.trace for failure in run.failures} == {"a"}
    assert {record.trace for record in run.records} == {"b"}
    again = replays(traces, out=tmp_path / "x", resume=True)
    assert again.table.equals(whole_run().table)


def test_a_trace_that_changed_meanwhile_is_refused(traces, elsewhere):
    """Its cells fail with what is to be done; those of the others are kept."""
    make_trace("a", seed=1).save(traces[0].path, overwrite=True)

    run = replays(traces, jobs=2)

    assert {failure.trace for failure in run.failures} == {"a"}
    assert all("another trace than when" in failure.error for failure in run.failures)
    assert {record.trace for record in run.records} == {"b"}


def test_processes_are_chosen_by_the_size_of_the_work(traces, monkeypatch):
    """One for small work and traces in memory, else one per processor; one per task at most."""
    monkeypatch.setattr(workers.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)

    assert processes(None, 1e9, 100, traces) == 1
    assert processes(None, 1e14, 100, traces) == 8
    assert processes(None, 1e14, 3, traces) == 3
    assert processes(None, 1e14, 100, [make_trace()]) == 1
    assert processes(5, 1e9, 100, traces) == 5
    with pytest.raises(ConfigError, match="in memory"):
        processes(2, 1e9, 100, [make_trace()])


def test_small_work_uses_one_thread(traces, monkeypatch):
    """Replays of short traces and captures of small models; others keep torch's number."""
    used = {}

    def note(name):
        def noted(*_):
            used[name] = min(used.get(name, 9), torch.get_num_threads())

        return noted

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        replays(traces[:1], progress=note("short"), metrics=METRICS, regret=False)
        kvsim.capture("tiny", None, [5, 6, 7], max_new_tokens=1, progress=note("tiny"))
        monkeypatch.setattr(threads, "SHORT", 55)
        monkeypatch.setattr(threads, "SMALL", 1000)
        replays(traces[:1], progress=note("long"), metrics=METRICS, regret=False)
        kvsim.capture("tiny", None, [5, 6, 7], max_new_tokens=1, progress=note("large"))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert used == {"short": 1, "tiny": 1, "long": 2, "large": 2}
