"""Sweeps of traces over HTTP: the same values, and what happens without them."""

import functools
import http.server
import shutil
import threading
from pathlib import Path

import pytest

import kvsim
from kvsim.errors import OutputError
from kvsim.sweeps import driver, planning
from kvsim.sweeps.planning import Plan, grid_from
from kvsim.sweeps.shards import kept_in
from web import Quiet

GRID = {"policies": ["knorm", "tova"], "budgets": [12, 20], "intervals": 8, "metrics": ["wipeout"]}


@pytest.fixture
def server(paths):
    """A server of the folder of the traces on loopback."""
    handler = functools.partial(Quiet, directory=Path(paths[0]).parent)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server
    server.shutdown()
    thread.join(10)
    server.server_close()


@pytest.fixture
def urls(server):
    """The URLs of the traces."""
    return [f"http://127.0.0.1:{server.server_port}/{name}.zarr" for name in "ab"]


@pytest.fixture
def computed(monkeypatch):
    """The keys of the tasks that have been computed."""
    keys, compute = [], planning.replayed

    def counting(task, *report):
        keys.append(task.key)
        return compute(task, *report)

    monkeypatch.setattr(planning, "replayed", counting)
    return keys


def test_traces_over_http_are_the_traces(urls, paths, tmp_path):
    """A configuration with URLs gives the Table, under the keys, of the same files here."""
    lines = [f"{key}: {value}" for key, value in {**GRID, "traces": urls}.items()]
    (tmp_path / "grid.yaml").write_text("\n".join(lines).replace("'", '"'))

    run = kvsim.sweep(tmp_path / "grid.yaml", out=tmp_path / "x")

    assert run.failures == ()
    assert run.table.equals(kvsim.sweep(**GRID, traces=paths).table)
    plans = [Plan.of(grid_from(None, **GRID, traces=x)) for x in (urls, paths)]
    assert plans[0].keys == plans[1].keys


def test_a_server_that_goes_away_fails_its_cells_alone(server, urls, tmp_path, computed):
    """What is done stays, each cell without its trace says so, and the sweep goes on later."""
    with pytest.MonkeyPatch.context() as gone:
        opener = driver.Shards.add

        def add(self, task, outcome):
            opener(self, task, outcome)
            server.RequestHandlerClass = functools.partial(Quiet, directory=tmp_path / "nothing")
            server.shutdown()
            server.socket.close()

        gone.setattr(driver.Shards, "add", add)
        run = kvsim.sweep(**GRID, traces=urls, out=tmp_path / "x")

    assert run.parameters["done"] == 4
    assert {failure.trace for failure in run.failures} == {"b"}
    assert len(run.failures) == 4
    assert "is not readable" in run.failures[0].error
    assert "\n" not in run.failures[0].error


def test_another_trace_at_the_url_is_no_part_of_the_sweep(urls, paths):
    """A trace that changes after the sweep was planned fails its cells, with both digests."""
    plan = Plan.of(grid_from(None, **GRID, traces=urls))
    kept, there = Path(paths[0]).with_suffix(".kept"), Path(paths[0])
    there.rename(kept)
    try:
        shutil.copytree(paths[1], there)
        run = driver.finish(plan, kept_in(None))
    finally:
        shutil.rmtree(there)
        kept.rename(there)

    assert {failure.trace for failure in run.failures} == {"a"}
    assert "is another trace than when the sweep began" in run.failures[0].error
    assert run.parameters["done"] == 4


@pytest.mark.parametrize("url", ["s3://bucket/run", "http://127.0.0.1:1/run", "memory://run"])
def test_a_run_is_a_folder_on_this_machine(url, run, paths):
    """Nothing is asked for a run behind a URL, or writes one there; a line says so."""
    grid = ("sweep", paths[0], "--policy", "knorm", "--budget", "12")
    for command in ((*grid, "--out", url), ("compare", url), ("table", url), ("info", url)):
        status, _, error = run(*command)

        assert (status, error.count("\n")) == (2, 1)
        assert url in error
    for function in (
        kvsim.read_run,
        kept_in,
        lambda out: kvsim.sweep(**GRID, traces=paths, out=out),
    ):
        with pytest.raises(OutputError, match="a URL; expected a path on this machine"):
            function(url)
