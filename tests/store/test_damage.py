"""Damaged and hostile traces: every changed byte is found, and small files take little memory."""

import os
import shutil
import subprocess
import zipfile

import numpy as np
import pytest
import torch
import zarr
from zarr.codecs import BloscCodec, BytesCodec, GzipCodec

import kvsim
from damage import assign, change_byte, edit, edit_header, flip, reseal
from kvsim.errors import TraceError, TraceNotFoundError
from kvsim.store import layout
from kvsim.store.group import seal
from kvsim.store.reader import open_trace
from kvsim.store.verification import verify
from saved_traces import make, projected, same

CHUNK = "k/c/1/0/0/0"


@pytest.fixture(scope="module", params=[False, True], ids=["chunks", "shards"])
def any_saved(request, tmp_path_factory):
    """A stored trace with projections of its own, in chunks and in shards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "MOST_FILES", 0 if request.param else 1000)
        return kvsim.save_trace(projected(), tmp_path_factory.mktemp("any") / "made.zarr")


def silent(path, rng):
    """Whether a changed byte changes what is read without an error; the byte is put back."""
    files = sorted(each for each in path.rglob("*") if each.is_file())
    weights = np.sqrt([each.stat().st_size for each in files])
    file = rng.choice(files, p=weights / weights.sum())
    before = file.read_bytes()
    change_byte(file, rng)
    try:
        return not same(open_trace(path), projected())
    except TraceError as error:
        return "\n" in str(error)
    finally:
        file.write_bytes(before)


@pytest.mark.parametrize("times", [30, pytest.param(500, marks=pytest.mark.deep)])
def test_no_changed_byte_is_silent(any_saved, times):
    """A changed byte anywhere is an error of one line, or changes nothing that is read."""
    rng = np.random.default_rng(times)

    assert not any(silent(any_saved, rng) for _ in range(times))


def test_a_changed_byte_of_metadata_is_found_by_verify(any_saved, tmp_path):
    """Also of a document that consolidated metadata repeats."""
    path = shutil.copytree(any_saved, tmp_path / "made.zarr")
    flip(path / "q/zarr.json")

    assert "'q/zarr.json' is damaged" in verify(path).problems[0]


def header(**attributes):
    """A change of the attributes of the group, with a seal that fits."""

    def change(path):
        edit_header(path, lambda found: found.update(attributes))
        reseal(path)

    return change


def link(path):
    """Put a link in place of a chunk."""
    (path / CHUNK).rename(path.parent / "elsewhere")
    (path / CHUNK).symlink_to(path.parent / "elsewhere")


def pipe(path):
    """Put a pipe in place of a chunk."""
    (path / CHUNK).unlink()
    os.mkfifo(path / CHUNK)


def no_root(path):
    """Put a pipe in place of the document of the group."""
    (path / "zarr.json").unlink()
    os.mkfifo(path / "zarr.json")


UNUSABLE = {
    "is a pipe or a device": no_root,
    "its attribute files cannot be read": lambda path: (
        edit_header(path, lambda found: found.update(files={"q/c/0/0/0/0": 7})),
        edit(path / "zarr.json", lambda root: root["attributes"].update(seal=seal(root))),
    ),
    "kvsim_format 5, expected 6; kvsim 0.1.0 reads earlier": header(kvsim_format=5),
    "kvsim_format 7, expected 6": header(kvsim_format=7),
    "its attributes: rope: inv_freq is": header(ropes=[{"inv_freq": ["a"]}]),
    "scale is True": header(attention=[{"scale": True, "rope": 0}]),
    "prompt_len is 301; expected 1 to 300": header(prompt_len=301),
    "attribute checksums is None": header(checksums=None),
    "token_text": header(token_text=["x"]),
    "its seal does not fit": lambda path: edit_header(path, lambda x: x.update(name="other")),
    "has no kvsim_format": lambda path: edit_header(path, dict.clear),
    "no array k": lambda path: (shutil.rmtree(path / "k"), reseal(path)),
    "k has 3 of 4 chunks": lambda path: ((path / CHUNK).unlink(), reseal(path)),
    "'k/c/1/0/0/0' is missing": lambda path: (path / CHUNK).unlink(),
    "'k/c/1/0/0/0' is missing or has 9 bytes": lambda path: (path / CHUNK).write_bytes(b"x" * 9),
    "missing or is no regular file": link,
    "'k/c/1/0/0/0' is missing or is no": pipe,
}


@pytest.mark.parametrize("message", UNUSABLE)
def test_what_cannot_be_opened(stored, message):
    """Each way in which a trace can be unusable is one line, before a chunk is read."""
    UNUSABLE[message](stored)

    with pytest.raises(TraceError, match=message) as caught:
        open_trace(stored)

    assert "\n" not in str(caught.value)


def test_no_trace(tmp_path):
    """Nothing, a file, an empty folder, another group and broken JSON are told apart."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    zarr.create_group(tmp_path / "group")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "zarr.json").write_text("{")

    for name, message in {
        "none": "does not exist, expected a trace",
        "file": "is not a kvsim trace",
        "empty": "zarr.json is missing",
        "group": "has no kvsim_format",
        "broken": "cannot be read",
    }.items():
        with pytest.raises(TraceError, match=message) as caught:
            open_trace(tmp_path / name)
        assert isinstance(caught.value, FileNotFoundError) == (name != "broken")


def test_damage_is_found_where_it_is_read(stored):
    """An exchanged, changed or lost chunk is no number; other chunks still read."""
    other = kvsim.save_trace(make(seed=1), stored.with_name("other.zarr"))
    whole = (stored / CHUNK).read_bytes()
    for content in (whole[:50] + b"x" + whole[51:], (other / CHUNK).read_bytes()):
        (stored / CHUNK).write_bytes(content[: len(whole)].ljust(len(whole)))
        trace = open_trace(stored)
        with pytest.raises(TraceError, match=CHUNK):
            trace.read("k", slice(1, 2), slice(3, 4))
        assert torch.equal(trace.read("k", slice(0, 1)), make().read("k")[:1])
    (stored / CHUNK).write_bytes(whole)
    trace = open_trace(stored)
    (stored / CHUNK).unlink()
    with pytest.raises(TraceError, match=f"{CHUNK}' is missing"):
        trace.read("k", slice(1, 2))


def test_an_open_trace_is_one_snapshot(stored):
    """Replaced while it is open, the trace is an error and not a mixture."""
    trace = open_trace(stored)
    kvsim.save_trace(make(seed=1), stored, overwrite=True)

    with pytest.raises(TraceError, match=r"was replaced since it was opened|bytes, expected"):
        trace.read("k")


def test_a_nan_is_a_lost_chunk(stored):
    """Writers refuse NaN, so a reader that finds one says where."""
    zarr.open_group(stored, mode="r+", use_consolidated=False)["q"][1, 2, 7, 3] = np.nan
    reseal(stored)

    with pytest.raises(TraceError, match="q is nan at layer 1, head 2, pos 7"):
        open_trace(stored).read("q")


def pack(folder, method=zipfile.ZIP_STORED):
    """The files of a trace in one zip."""
    with zipfile.ZipFile(folder.with_name(folder.name + ".zip"), "w", method) as archive:
        for path in sorted(folder.rglob("*")):
            archive.write(path, path.relative_to(folder))
    return archive.filename


def test_a_zip_is_a_trace(any_saved, stored):
    """As zarr's ZipStore has it; damage, and compression, which has no bound, are refused."""
    packed = pack(shutil.copytree(any_saved, stored.with_name("any.zarr")))
    trace = open_trace(packed)

    assert same(trace, projected())
    assert verify(packed, deep=True).ok
    assert torch.equal(
        trace.read("k", slice(1, 2), slice(250, 260)), projected().read("k")[1:, :, 250:260]
    )
    with pytest.raises(TraceError, match="is compressed"):
        open_trace(pack(stored, zipfile.ZIP_DEFLATED))
    (stored / CHUNK).unlink()
    with pytest.raises(TraceError, match=f"{CHUNK}' is missing"):
        open_trace(pack(stored))
    with pytest.raises(TraceNotFoundError):
        open_trace(shutil.copy(stored / "zarr.json", stored.with_name("no.zip")))


def bomb(path, codec, typesize=4):
    """Write zeros of 256 MiB into the chunks of `k`, in a few hundred kB or less."""
    shutil.rmtree(path / "k")
    group = zarr.open_group(path, mode="r+", use_consolidated=False)
    array = group.create_array(
        "k",
        shape=(2, 1 << 14, 256, 8),
        chunks=(1, 1 << 14, 256, 8),
        dtype="float32",
        serializer=BytesCodec(),
        compressors=codec,
        config={"write_empty_chunks": True},
    )
    chunk = np.zeros((1, 1 << 14, 256, 8), np.float32)
    array[:1], array[1:] = chunk, chunk


def claim(path):
    """Let metadata claim a shape that no file has."""
    edit(path / "q/zarr.json", lambda x: assign(x, ("shape", 2), 1 << 30))


BOMBS = {
    "blosc with zstd inside": lambda path: bomb(
        path, BloscCodec(typesize=4, cname="zstd", clevel=1)
    ),
    "gzip": lambda path: bomb(path, GzipCodec()),
    "a shape": claim,
    "nesting": lambda path: (path / "zarr.json").write_text("[" * 100_000),
}

CHILD = """
import resource, sys
from kvsim.errors import TraceError
from kvsim.store.reader import open_trace
open_trace(sys.argv[1]).read("k")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    trace = open_trace(sys.argv[2])
    trace.read("k"), trace.read("q")
except TraceError as error:
    print(len(str(error)) < 1000, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("kind", BOMBS)
def test_a_small_file_takes_little_memory(kind, saved, stored, warm_python):
    """Less than 100 MB before it is refused, whatever it claims or decodes to."""
    BOMBS[kind](stored)
    if kind != "nesting":
        reseal(stored)

    done = subprocess.run(
        [warm_python, "-c", CHILD, saved, stored], capture_output=True, text=True, check=True
    )

    refused, kibibytes = done.stdout.split()
    assert refused == "True"
    assert int(kibibytes) < 100_000


def test_documents_beyond_the_limit_are_not_decoded(stored, monkeypatch):
    """Neither more bytes than the limit nor more values."""
    for name, message in (("group.DOCUMENT", "100 bytes"), ("inputs.VALUES", "100 values")):
        with monkeypatch.context() as patch:
            patch.setattr(f"kvsim.store.{name}", 100)
            with pytest.raises(TraceError, match=f"has more than {message}"):
                open_trace(stored)
