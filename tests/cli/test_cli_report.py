"""`kvsim report` of runs and traces behind URLs."""

import uuid
from pathlib import Path

import fsspec
import pytest

import kvsim
from kvsim.sweeps import replay_all
from web import served


@pytest.fixture(scope="module")
def folder(tmp_path_factory, trace):
    """A run of a small trace, next to it."""
    run = replay_all([trace], ["tova", "knorm"], [16], metrics=["output_error", "wipeout"])
    return run.save(Path(trace).parent / "run")


@pytest.fixture
def address(folder):
    """The URL on loopback of the folder of run and trace."""
    with served(folder.parent) as url:
        yield url


def test_a_run_and_a_trace_over_http_are_reported(run, folder, address, tmp_path, no_layout):
    """The server is asked for run.json, so that a run is not opened as a trace."""
    out = tmp_path / "report.html"

    status, _, err = run("report", f"{address}/run", f"{address}/small.zarr", "--out", out)

    assert (status, err.count("error")) == (0, 0)
    page = out.read_text()
    assert "tova" in page
    assert "small" in page
    assert kvsim.read_run(f"{address}/run/").table.equals(kvsim.read_run(folder).table)


def test_a_run_in_a_store_is_reported(printed, folder, tmp_path, no_layout):
    """Stores of fsspec are asked too."""
    system, root = fsspec.filesystem("memory"), f"/{uuid.uuid4()}"
    system.put(str(folder), root, recursive=True)

    printed("report", f"memory:/{root}", "--out", tmp_path / "report.html")
    system.rm(root, recursive=True)


def test_a_url_with_nothing_behind_it_is_an_error(run, address, tmp_path):
    """It ends with one line, and status 2."""
    status, _, err = run("report", f"{address}/nothing", "--out", tmp_path / "report.html")

    assert status == 2
    assert f"{address}/nothing" in err
