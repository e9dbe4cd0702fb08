"""Traces behind URLs."""

import contextlib
import http.server
import json
import re
import shutil
import socket
import threading
import time
from pathlib import Path

import fsspec
import pytest
import torch

from kvsim.errors import TraceError, TraceExistsError, TraceNotFoundError
from kvsim.store import describe, open_trace, remote, verify
from kvsim.studies.language import tasks
from saved_traces import projected, same
from web import Quiet, served


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A stored trace, to be copied before it is changed."""
    return projected().save(tmp_path_factory.mktemp("saved") / "made.zarr")


@pytest.fixture(params=[True, False], ids=["listing", "no listing"])
def web(request, tmp_path):
    """The URL of a server of `tmp_path` on loopback."""
    handler = type("Handler", (Quiet,), {"lists": request.param})
    with served(tmp_path, handler) as url:
        yield url


def drip(request, head, pause=0.05):
    """The URL of a server that sends `head`, and then single bytes for five seconds."""
    listener = socket.create_server(("127.0.0.1", 0))
    ended = threading.Event()

    def serve():
        while not ended.is_set():
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    connection.recv(4096)
                    connection.sendall(head)
                    for _ in range(100):
                        if ended.wait(pause):
                            return
                        connection.sendall(b"x")

    thread = threading.Thread(target=serve)
    thread.start()

    def stop():
        ended.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10)

    request.addfinalizer(stop)
    return f"http://127.0.0.1:{listener.getsockname()[1]}/run.zarr"


@pytest.mark.parametrize(
    "head", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n"], ids=["header", "content"]
)
def test_a_server_that_sends_single_bytes_is_given_up(request, monkeypatch, head):
    """A read ends in one line soon after its time is over, however often a byte arrives."""
    monkeypatch.setattr(remote, "_TIMEOUT", 0.3)
    url = drip(request, head)
    start = time.monotonic()

    with pytest.raises(TraceError, match=r"is not readable \(the server is too slow\)") as caught:
        open_trace(url)

    assert time.monotonic() - start < 3
    assert "\n" not in str(caught.value)


def test_a_server_that_is_slow_and_steady_is_read(request, monkeypatch):
    """What arrives fast enough is read to its end, longer than a silence may last."""
    monkeypatch.setattr(remote, "_TIMEOUT", 0.3)
    monkeypatch.setattr(remote, "_SLOWEST", 5)
    url = drip(request, b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\n")

    assert remote.Web(url).read("zarr.json", 1000) == b"x" * 20


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
    for words in (("info",), ("verify",), ("replay", "--policy", "tova", "--budget", "32")):
        status, out, error = run(words[0], memory, *words[1:])
        assert (status, error) == (0, "")
        assert words[0] == "replay" or memory in out


def test_what_says_complete_is_written_last(memory, monkeypatch):
    """The root metadata is the last file, so that nothing unfinished looks like a trace."""
    system = fsspec.filesystem("memory")
    written, pipe = [], type(system).pipe_file

    def record(self, path, value, **options):
        written.append(path)
        return pipe(self, path, value, **options)

    monkeypatch.setattr(type(system), "pipe_file", record)

    projected().save(memory)

    assert written[-1].endswith("made.zarr/zarr.json")
    assert len(written) == describe(memory)["files"]


def test_a_failed_upload_is_removed(memory, monkeypatch):
    """Where a store refuses a file, the others are removed, and the error is one line."""
    system = fsspec.filesystem("memory")
    pipe = type(system).pipe_file

    def fail(self, path, value, **options):
        if path.endswith("v/c/1/0/0/0"):
            raise OSError("no\nspace")
        return pipe(self, path, value, **options)

    monkeypatch.setattr(type(system), "pipe_file", fail)

    with pytest.raises(TraceError, match=r"made.zarr cannot be written \(no space\)"):
        projected().save(memory)

    assert not system.exists(memory)


def test_nothing_at_a_url_is_overwritten(memory, tmp_path):
    """A trace that is there, or anything else, is refused; so is overwriting."""
    projected().save(memory)

    with pytest.raises(TraceExistsError, match="exists, expected a free URL"):
        projected(prompt_len=20).save(memory)
    with pytest.raises(TraceError, match="stores cannot rename, so nothing is overwritten"):
        projected(prompt_len=20).save(memory, overwrite=True)

    assert open_trace(memory).prompt_len == 10


def test_faults_at_a_url_are_found(memory):
    """A lost chunk, and a file that is no chunk, are found as they are in a folder."""
    system = fsspec.filesystem("memory")
    projected().save(memory)
    system.pipe_file(f"{memory}/v/c/0/0/0/0", b"no chunk")
    assert "of v is damaged" in verify(memory).problems[0]
    system.rm_file(f"{memory}/k/c/1/0/1/0")
    with pytest.raises(TraceError, match="k has 3 of 4 chunks"):
        open_trace(memory)
    system.rm_file(f"{memory}/zarr.json")
    with pytest.raises(TraceNotFoundError, match=r"zarr\.json is missing"):
        open_trace(memory)


def test_a_trace_is_read_over_http(web, stored, run):
    """Whether or not the server lists files, a trace behind it is the trace; sizes are unknown."""
    url = f"{web}/made.zarr/"

    trace = open_trace(url)

    assert same(trace, projected())
    assert trace.path == url
    assert verify(url).ok
    assert describe(url)["bytes"] is None
    for words in (("info",), ("verify",), ("replay", "--policy", "tova", "--budget", "32")):
        status, out, error = run(words[0], url, *words[1:])
        assert (status, error) == (0, "")
        assert words[0] != "info" or "size unknown" in out


def test_what_is_missing_over_http_is_found_on_reading(web, stored):
    """A chunk that the server lacks is an error where it is read, and for `verify`."""
    (stored / "k" / "c" / "1" / "0" / "1" / "0").unlink()
    url = f"{web}/made.zarr"

    trace = open_trace(url)

    assert trace.read("k", slice(0, 1)).isfinite().all()
    with pytest.raises(TraceError, match="chunk c/1/0/1/0 of k is missing"):
        trace.read("k")
    assert any("chunk c/1/0/1/0 of k is missing" in one for one in verify(url).problems)
    shutil.rmtree(stored / "v")
    with pytest.raises(TraceError, match="no array v"):
        open_trace(url)
    with pytest.raises(TraceNotFoundError, match=r"zarr\.json is missing"):
        open_trace(f"{web}/other.zarr")


def test_a_large_answer_is_not_read_to_its_end(web, stored):
    """A file of more bytes than its place has is refused after that many."""
    with (stored / "q" / "zarr.json").open("r+b") as file:
        file.truncate(1 << 40)

    with pytest.raises(TraceError, match="has 1048577 bytes, expected at most 1048576"):
        open_trace(f"{web}/made.zarr")


@pytest.mark.parametrize("scheme", ["ftp", "file", "http"])
def test_redirects_stay_with_http(web, stored, monkeypatch, scheme):
    """A redirect to another scheme is one line and opens no connection; one to HTTP is followed."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        place = {"ftp": f"127.0.0.1:{other.getsockname()[1]}", "file": str(stored), "http": web[7:]}

        def redirect(handler):
            if handler.path.startswith("/moved"):
                handler.send_response(302)
                path = handler.path.removeprefix("/moved")
                handler.send_header("Location", f"{scheme}://{place[scheme]}{path}")
                handler.end_headers()
            else:
                http.server.SimpleHTTPRequestHandler.do_GET(handler)

        monkeypatch.setattr(Quiet, "do_GET", redirect, raising=False)
        monkeypatch.setenv("ftp_proxy", web)
        if scheme == "http":
            assert same(open_trace(f"{web}/moved/made.zarr"), projected())
            return
        with pytest.raises(TraceError, match="is not readable") as error:
            open_trace(f"{web}/moved/made.zarr")
        assert "\n" not in str(error.value)
        other.settimeout(0.1)
        with pytest.raises(TimeoutError):
            other.accept()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://127.0.0.1:1/a.zarr", "is not readable"),
        ("https://127.0.0.1:1/a.zarr", "is not readable"),
        ("http://[/a.zarr", "is not a URL"),
        ("http://127.0.0.1:1/a.zarr.zip", "is a packed file"),
        ("s3://bucket/a.zarr", "needs a driver that is not installed .*s3fs"),
        ("gs://bucket/a.zarr", "needs a driver that is not installed .*gcsfs"),
        ("nowhere://bucket/a.zarr", "is not a URL that fsspec supports"),
        ("file:///tmp/a.zarr", "is local; give its path"),
    ],
)
def test_urls_that_cannot_be_read(url, message, run):
    """Each is one line that says what is missing, and status 2."""
    with pytest.raises(TraceError, match=message):
        open_trace(url)

    status, out, error = run("info", url)
    assert (status, out, error.count("\n")) == (2, "", 1)
    status, out, again = run("verify", url)
    assert (status, again) == (2, error)
    assert "damaged" not in out


def test_http_is_for_reading(web):
    """Writing over HTTP is refused before anything is computed."""
    with pytest.raises(TraceError, match="HTTP is read-only"):
        projected().save(f"{web}/new.zarr")


def test_a_capture_goes_to_a_url(memory, run, tmp_path):
    """`kvsim capture --out URL` writes there; what is there or cannot be written is refused."""
    prompts = tmp_path / "prompts.jsonl"
    status, out, _ = run("prompts", "--n", "2")
    prompts.write_text(out)
    words = ["capture", "--model", "tiny", "--prompts", prompts, "--max-new-tokens", "3"]

    status, out, _ = run(*words, "--out", memory, "--limit", "1", "--json")

    assert status == 0
    assert [one["path"] for one in json.loads(out)["traces"]] == [memory]
    assert verify(memory).ok
    folder = memory.replace("made.zarr", "several")
    status, out, _ = run(*words, "--out", folder, "--json")
    paths = [one["path"] for one in json.loads(out)["traces"]]
    assert len(paths) == 2
    assert all(path.startswith(f"{folder}/") and verify(path).ok for path in paths)
    for more, message in (
        ([memory, "--limit", "1"], "exists, expected a free URL"),
        ([f"{memory}2", "--overwrite", "--limit", "1"], "nothing is overwritten there"),
        (["https://127.0.0.1:1/a.zarr", "--limit", "1"], "HTTP is read-only"),
    ):
        status, out, error = run(*words, "--out", *more)
        assert (status, out, error.count("\n")) == (2, "", 1)
        assert message in error


@pytest.mark.parametrize("name", ["made.zarr", "made"])
def test_what_was_not_uploaded_is_kept(name, memory, run, monkeypatch):
    """A recording outlives a store that refuses it, whatever it is called, and is said to."""

    def refuse(folder, url):
        raise TraceError(f"{url} refuses {folder.name}")

    monkeypatch.setattr("kvsim.store.remote.upload", refuse)
    prompt = tasks.prompts(1, task="walk", level=1)[0].prompt
    words = ["capture", "--model", "tiny", "--prompt", prompt, "--max-new-tokens", "2"]
    status, _, error = run(*words, "--out", memory.replace("made.zarr", name))

    assert status == 2
    assert "refuses" in error
    kept = Path(re.search(r"files that were not uploaded are kept in (\S+)", error)[1])
    assert verify(kept / name).ok
    shutil.rmtree(kept)
