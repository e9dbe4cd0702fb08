"""Traces, grids and counters that the tests of sweeps share."""

import pytest

import kvsim
from kvsim.sweeps import tasks
from traces import random_trace


def make_trace(name="a", tokens=60, seed=0, **more):
    """A small random trace."""
    return random_trace(n=tokens, seed=seed, size=1.0, prompt_len=30, name=name, **more)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Two small stored traces of four layers."""
    folder = tmp_path_factory.mktemp("traces")
    traces = [make_trace(name, seed=seed, layers=4) for seed, name in enumerate("ab")]
    return [str(kvsim.save_trace(trace, folder / f"{trace.name}.zarr")) for trace in traces]


@pytest.fixture
def grid(paths):
    """Policies of every kind: per layer, with a budget across layers, with propagation, reading."""
    names = ["tova", {"snapkv": {"window": [4, 8]}}, {"cake": {"window": 4}}, "fastkv", "quest"]
    metrics = ["output_error", "wipeout", "retained_iou", "sparsity"]
    terms = {"budgets": [12, "40%"], "interval": [8], "metrics": metrics, "records": True}
    return {"traces": paths, "policies": names, **terms}


@pytest.fixture
def small_tasks(monkeypatch):
    """As few layers a task as may be, and three cells."""
    monkeypatch.setattr(tasks, "_BLOCK", 1)
    monkeypatch.setattr(tasks, "_TOGETHER", 3)


@pytest.fixture
def replays(monkeypatch):
    """Counts the cells that are replayed; `stop` raises at one of them."""
    from kvsim.sweeps.tasks import Replays

    class Counter:
        calls, stop, error = 0, None, KeyboardInterrupt

    counter, record = Counter(), Replays.record

    def counted(self, cell):
        counter.calls += 1
        if counter.calls == counter.stop:
            raise counter.error
        return record(self, cell)

    monkeypatch.setattr(Replays, "record", counted)
    return counter


def parts(folder):
    """The files of finished tasks."""
    return sorted((folder / "parts").glob("*.parquet"))


def same(run, other):
    """Whether two runs have one Table and the same kept sets, to the bit."""
    pairs = zip(run.records, other.records, strict=True)
    return run.table.equals(other.table) and all(
        (a.policy, a.budget, a.layers) == (b.policy, b.budget, b.layers)
        and (a.evicted_at == b.evicted_at).all()
        and (a.reads is None) == (b.reads is None)
        and (a.reads is None or (a.reads.bits == b.reads.bits).all())
        for a, b in pairs
    )
