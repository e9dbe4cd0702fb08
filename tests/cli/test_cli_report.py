"""`kvsim report` of traces behind URLs."""

from pathlib import Path

import pytest

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
