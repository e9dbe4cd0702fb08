"""Traces as one file."""

import errno
import json
import os
import shutil
import stat
import struct
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import zarr

import kvsim
from kvsim.errors import TraceError, TraceExistsError
from kvsim.store import describe, open_trace, packing, verify
from kvsim.store.packing import pack, unpack
from saved_traces import files, projected, same


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A stored trace, to be copied before it is changed."""
    return projected().save(tmp_path_factory.mktemp("saved") / "made.zarr")


def test_a_packed_trace_is_the_trace(stored, run):
    """It opens, verifies, replays and says of itself what the folder does; zarr opens it too."""
    packed = pack(stored)

    assert packed == stored.with_name("made.zarr.zip")
    trace = open_trace(packed)
    assert same(trace, projected())
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
    """Each has its line, with what is wrong, and one that is not whole makes the status 2."""
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
