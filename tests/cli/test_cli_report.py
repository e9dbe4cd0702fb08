"""`kvsim report` of traces behind URLs."""

from pathlib import Path

import pytest

from kvsim.sweeps import replay_all
from saved_traces import elsewhere


@pytest.fixture(scope="module")
def folder(tmp_path_factory, trace):
    """A run of a small trace, next to it."""
    run = replay_all([trace], ["tova", "knorm"], [16], metrics=["output_error", "wipeout"])
    return run.save(Path(trace).parent / "run")


@pytest.fixture
def address(folder):
    """The URL of a copy of the folder of run and trace."""
    with elsewhere(folder.parent) as url:
        yield url


def test_a_run_and_a_trace_at_a_url_are_reported(run, folder, address, tmp_path, no_layout):
    """A folder is a run, and a URL a trace."""
    out = tmp_path / "report.html"

    status, _, err = run("report", folder, f"{address}/small.zarr", "--out", out)

    assert (status, err.count("error")) == (0, 0)
    page = out.read_text()
    assert "tova" in page
    assert "small" in page


def test_a_url_with_nothing_behind_it_is_an_error(run, address, tmp_path):
    """It ends with one line, and status 2."""
    status, _, err = run("report", f"{address}/nothing", "--out", tmp_path / "report.html")

    assert status == 2
    assert f"{address}/nothing" in err
