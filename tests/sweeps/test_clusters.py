"""Sweeps on a dask cluster over TCP and through submitit: the same Table, and what goes wrong."""

import os
import re
import socket
import subprocess
import time

import distributed
import pytest

import kvsim
from kvsim.errors import ClusterError, ConfigError
from kvsim.sweeps.cluster import _check_versions
from kvsim.sweeps.driver import publish
from kvsim.sweeps.planning import Plan, grid_from
from kvsim.sweeps.shards import Shards
from kvsim.sweeps.slurm import submit

WATCHDOG = 120


@pytest.fixture
def grid(paths):
    """Two traces, three policies, two budgets."""
    return {
        "traces": paths,
        "policies": ["tova", "knorm", {"snapkv": {"window": 4}}],
        "budgets": [12, 24],
        "intervals": [8],
        "metrics": ["output_error", "wipeout"],
    }


def free_port():
    """A port of loopback that is free now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.fixture
def cluster(tmp_path, warm_python):
    """A scheduler and two workers over TCP, each a process of its own; ends with the test."""
    dask = [warm_python, "-m", "dask"]
    address = f"tcp://127.0.0.1:{free_port()}"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    started = []

    def start(*arguments):
        process = subprocess.Popen(
            [*dask, *arguments], cwd=tmp_path, start_new_session=True, env=os.environ, **quiet
        )
        started.append(process)
        return process

    host = ("--host", "127.0.0.1", "--no-dashboard")
    start("scheduler", *host[:2], "--port", address.rpartition(":")[2], host[2])
    workers = [start("worker", address, *host, "--no-nanny", "--nthreads", "1") for _ in range(2)]
    try:
        yield address, workers
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait(timeout=WATCHDOG)


def wait_for_workers(address, count):
    """Wait until a cluster has so many workers."""
    from distributed import Client

    end = time.monotonic() + WATCHDOG
    while True:
        try:
            with Client(address, timeout=5, set_as_default=False) as client:
                client.wait_for_workers(count, timeout=60)
                return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_a_cluster_computes_the_same(grid, cluster, tmp_path):
    """Two workers over TCP give the Table of one process, and so does one after the other died."""
    address, workers = cluster
    wait_for_workers(address, 2)

    run = kvsim.sweep(**grid, out=tmp_path / "x", scheduler=address)

    expected = kvsim.sweep(**grid)
    assert run.failures == ()
    assert run.table.equals(expected.table)
    workers[0].kill()
    again = kvsim.sweep(**grid | {"budgets": [12, 24, 30]}, scheduler=address)
    assert again.failures == ()
    assert again.parameters["done"] == 18


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_a_cluster_that_is_not_there_is_named(grid, run, monkeypatch):
    """An address without a scheduler ends in one line with status 3, and nothing is computed."""
    client = distributed.Client
    impatient = {"timeout": 0.5, "set_as_default": False}  # instead of 5 s
    monkeypatch.setattr(distributed, "Client", lambda **where: client(**where | impatient))
    address = f"tcp://127.0.0.1:{free_port()}"
    with pytest.raises(ClusterError, match="cannot be reached"):
        kvsim.sweep(**grid, scheduler=address)
    status, _, err = run(
        *("sweep", grid["traces"][0], "--policy", "tova", "--budget", "12"),
        *("--scheduler", address),
    )
    assert status == 3
    assert err.startswith("error: the scheduler at tcp://127.0.0.1")


@pytest.mark.parametrize(
    ("scheduler", "command"),
    [("tcp://host:8786", "worker tcp://host:8786`"), ("s.json", "worker --scheduler-file s.json`")],
)
def test_a_cluster_without_workers_says_how_to_start_one(scheduler, command):
    """An address is an argument of `dask worker`, a scheduler file an option."""

    class Empty:
        def run_on_scheduler(self, _):
            return kvsim.__version__

        def run(self, *_, **__):
            return {}

    with pytest.raises(ClusterError, match=re.escape(f"start some with `dask {command}")):
        _check_versions(Empty(), scheduler)


# submitit leaves its local jobs to themselves
@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
def test_shards_are_submitted_as_jobs(grid, tmp_path):
    """submitit's local executor computes two shards; together they are the whole."""
    shards = Shards(tmp_path / "x")
    plan = Plan.of(grid_from(None, **grid))
    shards.begin(plan.document)

    numbers = submit(tmp_path / "x", 2, {"cluster": "local", "timeout_min": 2})

    end = time.monotonic() + WATCHDOG
    while len(shards.done) < 12 and time.monotonic() < end:
        time.sleep(0.2)
        shards.scan()
    run = plan.run(shards)
    publish(run, shards)
    assert len(numbers) == 2
    assert run.table.equals(kvsim.sweep(**grid).table)


def test_without_slurm_nothing_is_submitted(grid, tmp_path):
    """Neither a machine without Slurm nor an option that submitit has not passes for a sweep."""
    Shards(tmp_path / "x").begin(Plan.of(grid_from(None, **grid)).document)
    with pytest.raises(ClusterError, match="no job can be submitted"):
        submit(tmp_path / "x", 1, {})
    with pytest.raises(ConfigError, match="submitit refuses"):
        submit(tmp_path / "x", 1, {"cluster": "local", "nodes_per_moon": 3})
