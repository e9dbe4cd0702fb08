"""Traces behind URLs, in fsspec's memory."""

import fsspec
import pytest
import torch

import kvsim
from kvsim.errors import TraceError, TraceNotFoundError
from kvsim.store import layout
from kvsim.store.reader import open_trace
from kvsim.store.verification import describe, verify
from saved_traces import elsewhere, projected, same


@pytest.fixture(params=[False, True], ids=["chunks", "shards"])
def url(request, tmp_path, monkeypatch):
    """The URL of a trace and its projections."""
    monkeypatch.setattr(layout, "MOST_FILES", 0 if request.param else 1000)
    kvsim.save_trace(projected(), tmp_path / "traces" / "made.zarr")
    with elsewhere(tmp_path / "traces") as folder:
        yield f"{folder}/made.zarr"


def test_a_trace_at_a_url_is_the_trace(url, run, tmp_path):
    """It opens, verifies, replays and describes itself there; it is saved on this machine alone."""
    trace, opened = projected(), open_trace(url)

    assert same(opened, trace)
    assert opened.path == url
    assert verify(url).ok
    assert describe(url)["bytes"] > describe(url)["arrays"]["q"]["bytes"] > 0
    assert torch.equal(opened.full(slice(1, 2))[0], trace.full()[0][1:2])
    assert torch.equal(open_trace(url).read("k", pos=slice(3, 9)), trace.read("k")[:, :, 3:9])
    for words in (("info",), ("replay", "--policy", "tova", "--budget", "32")):
        status, out, error = run(words[0], url, *words[1:])
        assert (status, error) == (0, "")
        assert words[0] == "replay" or url in out
    with pytest.raises(TraceError, match="a URL; expected a path on this machine"):
        kvsim.save_trace(trace, f"{url}.new")


def test_faults_at_a_url_are_found(url):
    """A file of other bytes and a lost one are found where they are read, and by verify."""
    system = fsspec.filesystem("memory")
    files = sorted(x for x in system.find(url) if "/c/" in x)
    system.pipe_file(files[-1], b"no chunk")
    assert "is of 8 bytes" in verify(url).problems[0]
    system.rm_file(next(x for x in files if "/k/" in x))
    with pytest.raises(TraceError, match="'k/c/0/0/0/0' is missing"):
        open_trace(url).read("k")
    system.rm_file(f"{url}/zarr.json")
    with pytest.raises(TraceNotFoundError, match=r"zarr\.json is missing"):
        open_trace(url)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://[/a.zarr", "is not a URL that fsspec opens"),
        ("http://127.0.0.1:1/a.zarr.zip", "is one file"),
        ("s3://bucket/a.zarr", "is not a URL that fsspec opens .*s3fs"),
        ("nowhere://bucket/a.zarr", "is not a URL that fsspec opens"),
        ("memory://nowhere/a.zarr", "zarr.json is missing"),
    ],
)
def test_urls_that_cannot_be_read(url, message, run):
    """Each is one line that says what is missing, and status 2."""
    with pytest.raises(TraceError, match=message):
        open_trace(url)

    status, out, error = run("info", url)
    assert (status, out, error.count("\n")) == (2, "", 1)
