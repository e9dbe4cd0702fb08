"""Traces behind URLs, in fsspec's memory and on a server on loopback."""

import shutil

import fsspec
import pytest
import torch

from kvsim.errors import TraceError, TraceExistsError, TraceNotFoundError
from kvsim.store import describe, layout, open_trace, verify
from saved_traces import projected, same
from web import Quiet, served


@pytest.fixture(scope="module", params=[False, True], ids=["chunks", "shards"])
def saved(request, tmp_path_factory):
    """A stored trace, to be copied before it is changed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "MOST_FILES", 0 if request.param else 1000)
        return projected().save(tmp_path_factory.mktemp("saved") / "made.zarr")


@pytest.fixture
def web(tmp_path):
    """The URL of a server of `tmp_path` that lists no files."""
    with served(tmp_path, type("Handler", (Quiet,), {"lists": False})) as url:
        yield url


def test_a_trace_goes_to_a_url_and_comes_back(memory, run):
    """What is saved to a URL opens, verifies, replays and describes itself there."""
    trace = projected()

    assert trace.save(memory) == memory

    opened = open_trace(memory)
    assert same(opened, trace)
    assert opened.path == memory
    assert verify(memory).ok
    assert describe(memory)["bytes"] > describe(memory)["arrays"]["q"]["bytes"] > 0
    assert torch.equal(opened.full(slice(1, 2))[0], trace.attn_out[1:2])
    for words in (("info",), ("replay", "--policy", "tova", "--budget", "32")):
        status, out, error = run(words[0], memory, *words[1:])
        assert (status, error) == (0, "")
        assert words[0] == "replay" or memory in out


def test_a_failed_upload_is_removed(memory, monkeypatch):
    """The document of the group comes last; where a store refuses a file, the rest is removed."""
    system = fsspec.filesystem("memory")
    put, written = type(system).put_file, []

    def fail(self, local, path, **options):
        written.append(path)
        if path.endswith("v/c/1/0/0/0"):
            raise OSError("no\nspace")
        return put(self, local, path, **options)

    monkeypatch.setattr(type(system), "put_file", fail)
    with pytest.raises(TraceError, match=r"made.zarr cannot be written \(no space\)"):
        projected().save(memory)

    assert not any(path.endswith("made.zarr/zarr.json") for path in written)
    assert not system.exists(memory)


def test_nothing_at_a_url_is_overwritten(memory, web):
    """A trace that is there, or anything else, is refused; so is overwriting, and HTTP."""
    projected().save(memory)

    with pytest.raises(TraceExistsError, match="exists, expected a free URL"):
        projected(prompt_len=20).save(memory)
    with pytest.raises(TraceError, match="stores cannot rename"):
        projected(prompt_len=20).save(memory, overwrite=True)
    with pytest.raises(TraceError, match="HTTP is read-only"):
        projected().save(f"{web}/new.zarr")
    assert open_trace(memory).prompt_len == 10


def test_faults_at_a_url_are_found(memory):
    """A lost chunk, and a file that is no chunk, are found where they are read, and by verify."""
    system = fsspec.filesystem("memory")
    projected().save(memory)
    system.pipe_file(f"{memory}/v/c/0/0/0/0", b"no chunk")
    assert "'v/c/0/0/0/0' is of 8 bytes" in verify(memory).problems[0]
    system.rm_file(f"{memory}/k/c/1/0/1/0")
    with pytest.raises(TraceError, match="'k/c/1/0/1/0' is missing"):
        open_trace(memory).read("k")
    system.rm_file(f"{memory}/zarr.json")
    with pytest.raises(TraceNotFoundError, match=r"zarr\.json is missing"):
        open_trace(memory)


def test_a_trace_is_read_over_http(web, stored, run):
    """A trace behind a server that lists nothing is the trace; what it lacks is found."""
    url = f"{web}/made.zarr/"
    trace = open_trace(url)

    assert same(trace, projected())
    assert torch.equal(open_trace(url).read("k", pos=slice(3, 9)), projected().k[:, :, 3:9])
    assert trace.path == url
    assert verify(url).ok
    status, _, error = run("replay", url, "--policy", "tova", "--budget", "32")
    assert (status, error) == (0, "")
    shutil.rmtree(stored / "v")
    trace = open_trace(url)
    with pytest.raises(TraceError, match=r"'v/c/\d/0/\d/0' is missing"):
        trace.read("v")
    with pytest.raises(TraceNotFoundError, match=r"zarr\.json is missing"):
        open_trace(f"{web}/other.zarr")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://127.0.0.1:1/a.zarr", "is not readable"),
        ("https://127.0.0.1:1/a.zarr", "is not readable"),
        ("http://[/a.zarr", "is not readable"),
        ("http://127.0.0.1:1/a.zarr.zip", "is one file"),
        ("s3://bucket/a.zarr", "is not a URL that fsspec opens .*s3fs"),
        ("nowhere://bucket/a.zarr", "is not a URL that fsspec opens"),
        ("file:///tmp/a.zarr", "is local; give its path"),
    ],
)
def test_urls_that_cannot_be_read(url, message, run):
    """Each is one line that says what is missing, and status 2."""
    with pytest.raises(TraceError, match=message):
        open_trace(url)

    status, out, error = run("info", url)
    assert (status, out, error.count("\n")) == (2, "", 1)
