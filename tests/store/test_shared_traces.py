"""Traces as one file, behind URLs, and as xarray Datasets."""

from __future__ import annotations

import contextlib
import errno
import http.server
import json
import os
import re
import shutil
import socket
import stat
import struct
import threading
import time
import uuid
import zipfile
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
import zarr

import kvsim
from kvsim.errors import TraceError, TraceExistsError, TraceNotFoundError
from kvsim.samples import sample_trace
from kvsim.store import describe, open_trace, packing, remote, verify
from kvsim.store.packing import pack, unpack
from kvsim.studies.language import tasks
from traces import random_trace
from web import Quiet, served

N = 300


def make(**options):
    """A trace in memory of two layers and two blocks."""
    settings = {
        "prompt_len": 10,
        "tokens": np.arange(N),
        "token_text": [f"tök{i}" for i in range(N)],
        "layer_ids": [2, 5],
        "o_proj": torch.randn(2, 4, 8, 6, generator=torch.Generator().manual_seed(1)),
        "name": "made",
        **options,
    }
    return random_trace(n=N, computed=True, **settings)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A stored trace, to be copied before it is changed."""
    return make().save(tmp_path_factory.mktemp("saved") / "made.zarr")


@pytest.fixture
def stored(saved, tmp_path):
    """A stored trace that a test may damage."""
    return shutil.copytree(saved, tmp_path / "made.zarr")


def files(folder):
    """Every file of a folder with its bytes."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def same(found, expected):
    """Whether two traces have the same arrays, facts and text."""
    names = ("q", "k", "v", "attn_out", "lse", "o_proj", "tokens")
    facts = ("prompt_len", "scale", "rope", "layer_ids", "name", "meta", "token_text", "digest")
    return all(torch.equal(getattr(found, one), getattr(expected, one)) for one in names) and all(
        getattr(found, one) == getattr(expected, one) for one in facts
    )


# --- one file ---


def test_a_packed_trace_is_the_trace(stored, run):
    """It opens, verifies, replays and says of itself what the folder does; zarr opens it too."""
    packed = pack(stored)

    assert packed == stored.with_name("made.zarr.zip")
    trace = open_trace(packed)
    assert same(trace, make())
    assert trace.path == packed
    assert verify(packed).ok
    found, folder = describe(packed), describe(stored)
    assert {**found, "path": ""} == {**folder, "path": ""}
    with zarr.storage.ZipStore(packed, mode="r") as store:
        assert np.array_equal(zarr.open_group(store, mode="r")["q"][:], trace.q.numpy())
    policy = kvsim.policy("h2o")
    records = [kvsim.replay(open_trace(one), policy, budget=40) for one in (packed, stored)]
    assert np.array_equal(records[0].evicted_at, records[1].evicted_at)
    for command in ("info", "verify"):
        status, out, _ = run(command, packed)
        assert status == 0
        assert str(packed) in out
    status, out, _ = run("replay", packed, "--policy", "tova", "--budget", "32")
    assert status == 0
    assert "tova" in out


def test_packing_and_unpacking_gives_the_same_bytes(stored, tmp_path):
    """The same trace packs to the same bytes, and unpacks to the same files."""
    packed = pack(stored, tmp_path / "one.zip")
    os.utime(stored / "zarr.json", (1, 1))

    again = unpack(packed, tmp_path / "again.zarr")

    assert files(again) == files(stored)
    assert pack(again, tmp_path / "two.zip").read_bytes() == packed.read_bytes()
    with zipfile.ZipFile(packed) as archive:
        members = archive.infolist()
    assert [member.filename for member in members] == sorted(files(stored))
    assert {member.date_time for member in members} == {(1980, 1, 1, 0, 0, 0)}
    assert {member.compress_type for member in members} == {zipfile.ZIP_STORED}


def test_what_belongs_to_no_trace_is_not_packed(stored):
    """Notes and what a killed writer left stay behind; an array of a later version goes along."""
    (stored / "notes.txt").write_text("mine")
    (stored / "q" / "c" / "0" / "0" / "0" / "0.ab.partial").write_bytes(b"x")
    group = zarr.open_group(stored, mode="r+", use_consolidated=False)
    group.create_array("later", data=np.ones((2, 3)), dimension_names=("layer", "thing"))

    with zipfile.ZipFile(pack(stored)) as archive:
        names = archive.namelist()

    assert "later/zarr.json" in names
    assert not [name for name in names if "partial" in name or "notes" in name]


@pytest.mark.parametrize("fault", ["incomplete", "flipped", "missing", "packed"])
def test_only_a_whole_folder_is_packed(stored, tmp_path, fault):
    """An incomplete or damaged trace is refused, and nothing is left beside it."""
    chunk = stored / "v" / "c" / "1" / "0" / "1" / "0"
    given = stored
    if fault == "incomplete":
        root = json.loads((stored / "zarr.json").read_text())
        root["attributes"]["complete"] = False
        (stored / "zarr.json").write_text(json.dumps(root))
    elif fault == "flipped":
        data = bytearray(chunk.read_bytes())
        data[99] ^= 1
        chunk.write_bytes(data)
    elif fault == "missing":
        chunk.unlink()
    else:
        given = pack(stored, tmp_path / "a.zip")
    before = sorted(tmp_path.iterdir())

    with pytest.raises(TraceError, match=r"incomplete|is damaged|first missing|is already packed"):
        pack(given, tmp_path / "out.zip")

    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_nothing_is_overwritten(stored, tmp_path, kind):
    """Whatever is at the output stays as it is, for packing and unpacking."""
    packed, target = pack(stored), tmp_path / "target"
    if kind == "file":
        target.write_text("mine")
    elif kind == "folder":
        target.mkdir()
    else:
        target.symlink_to(tmp_path / "nowhere")
    before = sorted(tmp_path.iterdir())

    for do, given in ((pack, stored), (unpack, packed)):
        with pytest.raises(TraceExistsError, match="exists, expected a free path"):
            do(given, target)

    assert sorted(tmp_path.iterdir()) == before


def test_unpacking_writes_the_root_last(stored, tmp_path, monkeypatch):
    """What a killed unpacking leaves is no trace, in whatever order the members come."""
    packed = tmp_path / "first.zip"
    with zipfile.ZipFile(pack(stored)) as source, zipfile.ZipFile(packed, "w") as target:
        for member in reversed(source.infolist()):
            target.writestr(member, source.read(member))
        assert target.namelist()[0] == "zarr.json"
    written = []
    copy = packing._copy
    monkeypatch.setattr(
        packing, "_copy", lambda place, key, *rest: (written.append(key), copy(place, key, *rest))
    )

    again = unpack(packed)

    assert verify(again).ok
    assert written[-1] == "zarr.json"


def test_an_unpacking_that_fails_leaves_nothing(stored, tmp_path):
    """A member that is damaged is found, and no folder is there then."""
    packed = pack(stored)
    data = bytearray(packed.read_bytes())
    with zipfile.ZipFile(packed) as archive:
        member = archive.getinfo("v/c/1/0/1/0")
    data[member.header_offset + 300] ^= 1
    packed.write_bytes(data)
    before = sorted(tmp_path.iterdir())

    with pytest.raises(TraceError, match="member v/c/1/0/1/0 is damaged"):
        unpack(packed, tmp_path / "out.zarr")

    assert sorted(tmp_path.iterdir()) == before
    assert "member v/c/1/0/1/0 is damaged" in verify(packed).problems[0]


def rezip(stored, path, change):
    """A zip of the files of a trace; `change` has a say in each member: what to write instead."""
    with zipfile.ZipFile(path, "w") as archive:
        for key, data in sorted(files(stored).items()):
            change(archive, zipfile.ZipInfo(key), data)
    return path


def named(name):
    """Calls the first member by another name."""

    def change(archive, member, data):
        if member.filename == "attn_out/c/0/0/0/0":
            member.filename = name
        archive.writestr(member, data)

    return change


NAMES = [
    *("../evil", "/evil", "C:/evil", "C:evil", "q\\c\\0", "q/../evil", "./q/c/0", "q//c/0", "q/c/"),
    *("evil.txt", ".hidden/zarr.json", "q/c/0/../../../../evil", "q/zarr.json\n", "q/c/\u0661"),
    *("q/zarr.jsonx", "a/b/zarr.json"),
]


def twice(archive, member, data):
    """Writes a member two times."""
    archive.writestr(member, data)
    if member.filename == "q/zarr.json":
        with pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr(member, data)


def other_case(archive, member, data):
    """Writes a member that some file systems take for another one."""
    archive.writestr(member, data)
    if member.filename == "q/zarr.json":
        archive.writestr("Q/zarr.json", data)


def mode(kind):
    """Makes a member something else than a file."""

    def change(archive, member, data):
        if member.filename == "q/zarr.json":
            member.external_attr = (kind | 0o777) << 16
        archive.writestr(member, data)

    return change


def compressed(archive, member, data):
    """Compresses a member."""
    kind = zipfile.ZIP_DEFLATED if member.filename == "q/zarr.json" else zipfile.ZIP_STORED
    archive.writestr(member, data, compress_type=kind)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (twice, "appears twice"),
        (other_case, "appears twice"),
        (mode(stat.S_IFLNK), "is not a regular file"),
        (mode(stat.S_IFIFO), "is not a regular file"),
        (mode(stat.S_IFDIR), "is not a regular file"),
        (compressed, "is compressed"),
        *((named(name), "has no place in a trace") for name in NAMES),
    ],
    ids=["twice", "other case", "link", "fifo", "folder", "compressed", *map(ascii, NAMES)],
)
def test_members_that_no_packed_trace_has(stored, tmp_path, change, message):
    """A zip that could write elsewhere, or more than it has, is refused before anything is."""
    path = rezip(stored, tmp_path / "a.zip", change)
    before = sorted(tmp_path.iterdir())

    for do in (open_trace, unpack):
        with pytest.raises(TraceError, match=message) as caught:
            do(path)
        assert "\n" not in str(caught.value)

    assert sorted(tmp_path.iterdir()) == before


def patch(data, at, form, *values):
    """Overwrite numbers in bytes."""
    struct.pack_into(form, data, at, *values)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data, entry: patch(data, entry + 8, "<H", 1), "is encrypted"),
        (lambda data, entry: patch(data, entry + 24, "<I", 1 << 30), "is compressed"),
        (lambda data, entry: patch(data, entry + 20, "<II", 1 << 30, 1 << 30), "shares bytes"),
        (lambda data, entry: patch(data, entry + 42, "<I", 200), "shares bytes"),
        (lambda data, _: patch(data, len(data) - 10, "<I", 1 << 30), "table of contents has"),
        (lambda data, _: patch(data, len(data) - 12, "<H", 0xFFFF), "64-bit record is missing"),
        (lambda data, _: data.extend(b"PK"), "not that of a zip"),
        (lambda data, _: data.__delitem__(slice(9, None)), "not that of a zip"),
        (lambda data, _: data.__delitem__(slice(0, 100)), "is not a kvsim trace: it is not a zip"),
        (lambda data, entry: patch(data, entry, "<I", 7), "is not a usable packed trace"),
    ],
    ids=[
        *("encrypted", "grown", "long", "overlap", "contents", "64 bit", "more", "cut", "begin"),
        "signature",
    ],
)
def test_a_zip_that_contradicts_itself(stored, damage, message):
    """Sizes and places that cannot be are refused, however large they are."""
    packed = pack(stored)
    data = bytearray(packed.read_bytes())
    damage(data, data.index(b"PK\x01\x02"))
    packed.write_bytes(data)

    with pytest.raises(TraceError, match=message) as caught:
        open_trace(packed)

    assert "\n" not in str(caught.value)


def test_members_that_are_missing_or_wrong_are_found(stored, tmp_path):
    """A packed trace is under the same checks as a folder."""

    def lose(archive, member, data):
        if member.filename != "k/c/1/0/1/0":
            archive.writestr(member, data)

    def cut(archive, member, data):
        archive.writestr(member, data[:50] if member.filename == "k/c/1/0/1/0" else data)

    with pytest.raises(TraceError, match="k has 3 of 4 chunks, the first missing is c/1/0/1/0"):
        open_trace(rezip(stored, tmp_path / "lost.zip", lose))
    (problem, *_) = verify(rezip(stored, tmp_path / "cut.zip", cut)).problems
    assert "of k is damaged" in problem


def test_the_commands_pack_and_unpack(stored, tmp_path, run):
    """`kvsim trace pack` and `unpack` say where they wrote; errors are one line and status 2."""
    status, out, _ = run("trace", "pack", stored)
    assert status == 0
    assert out.startswith(f"{stored}.zip: ")
    status, out, _ = run("trace", "unpack", f"{stored}.zip", "--out", tmp_path / "b.zarr")
    assert (status, out) == (0, f"{tmp_path / 'b.zarr'}\n")
    assert files(tmp_path / "b.zarr") == files(stored)
    for words in (("pack", stored), ("unpack", f"{stored}.zip"), ("unpack", stored)):
        status, out, error = run("trace", *words)
        assert (status, out, error.count("\n")) == (2, "", 1)
    assert run("trace", "pack", "sample", "--out", tmp_path / "sample.zip")[0] == 0
    assert verify(tmp_path / "sample.zip").ok


@pytest.mark.parametrize("out", ["reading only", "closed/a", "a file/a"])
def test_where_nothing_can_be_written(stored, tmp_path, out, monkeypatch, unprivileged):
    """Packing and unpacking are refused in one line before chunks are read, and leave nothing."""
    unpack(pack(stored), tmp_path / "other.zarr")
    (tmp_path / "a file").write_text("mine")
    for name, permissions in (("reading only", 0o555), ("closed", 0), (".", 0o755)):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name).chmod(permissions)
    (stored / "v" / "c" / "1" / "0" / "1" / "0").write_bytes(b"what would be found by reading")
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)  # above it are folders that are closed to others

    with unprivileged():
        for do, given in ((pack, "made.zarr"), (unpack, "made.zarr.zip")):
            with pytest.raises(
                TraceError, match=r"cannot be written|is a file; expected"
            ) as caught:
                do(given, Path(out, "new"))
            assert type(caught.value) is TraceError
            assert "\n" not in str(caught.value)

    assert sorted(tmp_path.rglob("*")) == before


def test_a_disk_for_reading_only(stored, monkeypatch):
    """A disk that refuses to remove what is not there is told of once, as refusing to write."""

    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("kvsim.store.packing.check_writable", lambda _: None)
    monkeypatch.setattr(zipfile, "ZipFile", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)

    with pytest.raises(TraceError, match=r"zip cannot be written \(Read-only file system\)"):
        pack(stored)


@pytest.mark.parametrize("do", [pack, unpack])
def test_what_is_not_on_this_machine(do):
    """A URL is named as one, before anything is asked for over the network."""
    with pytest.raises(TraceError, match=r"^http://127.0.0.1:1/a.zarr.zip is a URL, expected"):
        do("http://127.0.0.1:1/a.zarr.zip")


def test_several_traces_are_verified(stored, tmp_path, run):
    """Each has its line, with what is wrong, and one that is not whole makes the status 2.

    A folder stands for the traces in it.
    """
    packed = pack(stored)
    assert run("verify", stored.parent) == run("verify", stored, packed)
    assert run("verify", stored, packed) == (
        *(0, f"{stored}: complete and undamaged\n{packed}: complete and undamaged\n", ""),
    )
    bad = shutil.copytree(stored, tmp_path / "bad.zarr")
    (bad / "v" / "c" / "1" / "0" / "1" / "0").write_bytes(b"no chunk")
    (tmp_path / "empty").mkdir()
    given = [bad, tmp_path / "nowhere.zarr", tmp_path / "empty", stored]

    status, out, error = run("verify", *given)

    assert status == 2
    lines = out.splitlines()
    assert [line for line in lines if not line.startswith("  ")] == [
        f"{bad}: damaged",
        f"{tmp_path / 'nowhere.zarr'}: no trace",
        f"{tmp_path / 'empty'}: no trace",
        f"{stored}: complete and undamaged",
    ]
    assert "of v is damaged" in lines[1]
    expected = "3 of 4 traces are not complete and undamaged, expected all to be; see the report"
    assert error == f"error: {expected}\n"
    status, out, _ = run("verify", *given, "--json")
    assert status == 2
    document = json.loads(out)["traces"]
    assert [one["path"] for one in document] == list(map(str, given))
    assert [one["ok"] for one in document] == [False, False, False, True]


def test_several_traces_are_described(stored, run):
    """As one by one, with an empty line between; one that cannot be opened is all that is said."""
    packed = pack(stored)

    status, out, _ = run("info", stored, packed)

    assert (status, out) == (0, "\n".join(run("info", one)[1] for one in (stored, packed)))
    documents = [json.loads(run("info", one, "--json")[1]) for one in (stored, packed)]
    assert json.loads(run("info", stored, packed, "--json")[1]) == {"traces": documents}
    status, out, error = run("info", stored, stored / "q")
    assert (status, out, error.count("\n")) == (2, "", 1)


# --- URLs ---


@pytest.fixture
def memory():
    """The URL of a place in fsspec's memory, empty before and after."""
    system = fsspec.filesystem("memory")
    root = f"/{uuid.uuid4()}"
    yield f"memory:/{root}/made.zarr"
    if system.exists(root):
        system.rm(root, recursive=True)


@pytest.fixture(params=[True, False], ids=["listing", "no listing"])
def web(request, tmp_path):
    """The URL of a server of `tmp_path` on loopback."""
    handler = type("Handler", (Quiet,), {"lists": request.param})
    with served(tmp_path, handler) as url:
        yield url


@pytest.fixture
def folder_on_the_web(tmp_path):
    """The URL of a server that lists `tmp_path`."""
    with served(tmp_path) as url:
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


@pytest.mark.parametrize("content", [b"", b"x"], ids=["empty", "one byte"])
def test_twenty_thousand_members_of_no_trace_take_no_time(stored, tmp_path, content):
    """Empty members are refused before any work; chunks that no array has are left out."""
    packed = pack(stored)
    with zipfile.ZipFile(packed, "a") as archive:
        for number in range(20_000):
            archive.writestr(f"q/c/{number}/9/9/9", content)
    start = time.monotonic()

    if not content:
        with pytest.raises(TraceError, match="member 'q/c/0/9/9/9' is empty, expected those of"):
            unpack(packed, tmp_path / "again.zarr")
    else:
        folder = unpack(packed, tmp_path / "again.zarr")
        files = [[*filter(Path.is_file, root.rglob("*"))] for root in (folder, stored)]
        assert len(files[0]) == len(files[1])

    assert time.monotonic() - start < 5


def test_a_trace_goes_to_a_url_and_comes_back(memory, run):
    """What is saved to a URL opens, verifies, replays and describes itself there."""
    trace = make()

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

    make().save(memory)

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
        make().save(memory)

    assert not system.exists(memory)


def test_nothing_at_a_url_is_overwritten(memory, tmp_path):
    """A trace that is there, or anything else, is refused; so is overwriting."""
    make().save(memory)

    with pytest.raises(TraceExistsError, match="exists, expected a free URL"):
        make(prompt_len=20).save(memory)
    with pytest.raises(TraceError, match="stores cannot rename, so nothing is overwritten"):
        make(prompt_len=20).save(memory, overwrite=True)

    assert open_trace(memory).prompt_len == 10


def test_faults_at_a_url_are_found(memory):
    """A lost chunk, and a file that is no chunk, are found as they are in a folder."""
    system = fsspec.filesystem("memory")
    make().save(memory)
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

    assert same(trace, make())
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
            assert same(open_trace(f"{web}/moved/made.zarr"), make())
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
        make().save(f"{web}/new.zarr")


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


# --- xarray ---


@pytest.mark.parametrize("kind", ["folder", "packed", "memory", "http", "in memory"])
def test_a_dataset_has_the_arrays_of_the_trace(kind, request, stored):
    """Dimensions, layers, attributes and any part of any array are those of the trace."""
    trace = make()
    if kind == "packed":
        trace = open_trace(pack(stored))
    elif kind == "folder":
        trace = open_trace(stored)
    elif kind == "memory":
        trace = open_trace(make().save(request.getfixturevalue("memory")))
    elif kind == "http":
        trace = open_trace(f"{request.getfixturevalue('folder_on_the_web')}/made.zarr")

    data = trace.to_xarray()

    assert data["q"].dims == ("layer", "qhead", "pos", "dim")
    assert data["layer"].values.tolist() == [2, 5]
    assert data.attrs["prompt_len"] == 10
    assert data["token_text"].values[1] == "tök1"
    parts = [
        {},
        {"layer": 1, "pos": slice(250, 260)},
        {"layer": -1, "pos": slice(None, None, -7)},
        {"pos": [299, 0, 0], "dim": slice(1, 8, 3)},
        {"pos": slice(9, 9)},
    ]
    for name in ("q", "k", "v", "attn_out"):
        expected = getattr(make(), name).numpy()
        whole = dict(zip(data[name].dims, [slice(None)] * 4, strict=True))
        for part in parts:
            index = tuple({**whole, **part}.values())
            assert np.array_equal(data[name].isel(part).values, expected[index])
    assert np.array_equal(data["lse"].sel(layer=5).values, make().lse[1].numpy())
    assert np.array_equal(data["tokens"][3:7].values, np.arange(3, 7))
    assert np.array_equal(data["o_proj"][1].values, make().o_proj[1].numpy())


def test_a_dataset_reads_what_is_asked_for(stored):
    """Making it reads no chunk; a part reads the chunks that it touches, and damage is an error."""
    data = open_trace(stored).to_xarray()
    (stored / "q" / "c" / "1" / "0" / "1" / "0").write_bytes(b"damaged")

    assert np.array_equal(data["q"].isel(layer=0).values, make().q[0].numpy())
    assert np.array_equal(data["q"].isel(pos=slice(0, 256)).values, make().q[:, :, :256].numpy())
    with pytest.raises(TraceError, match="of q is damaged"):
        _ = data["q"].isel(layer=1).values


def test_half_precision_and_views_as_datasets(tmp_path):
    """A stored trace keeps its stored type; views of it, which repeat keys, are computed."""
    trace = random_trace(layers=1, heads=1, n=20, dim=4, dtype=torch.float16)

    opened = open_trace(trace.save(tmp_path / "a.zarr"))

    assert opened.to_xarray()["k"].dtype == np.float16
    assert opened.to_xarray()["k"].attrs == {"source_dtype": "float16"}
    assert opened.per_query_head().to_xarray()["k"].shape == (1, 2, 20, 4)


def test_the_sample_is_within_the_rules():
    """The shipped trace opens under every limit of the reader."""
    assert verify(sample_trace()).ok
