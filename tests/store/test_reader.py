"""Paths and files that are no trace, or a damaged one."""

import shutil

import numpy as np
import pytest
import zarr

from damage import assign, edit, edit_header, flip
from kvsim.core.trace import Trace
from kvsim.errors import TraceError, TraceNotFoundError
from kvsim.schema import NEWEST_VERSION
from kvsim.store import describe, open_trace, verify
from mutations import reseal_folder


def header(**attributes):
    """A change of the attributes of the group."""
    return lambda path: edit_header(path, lambda found: found.update(attributes))


def one_line(caught):
    """Whether the message is one line."""
    return "\n" not in str(caught.value)


def test_arrays_of_a_later_version_are_ignored(stored):
    """An array that a reader does not know, with its checksums, has no effect."""
    group = zarr.open_group(stored, mode="r+", use_consolidated=False)
    group.create_array("later", data=np.ones((2, 3)), dimension_names=("layer", "thing"))
    sums = {**group.attrs["checksums"], "later": ["0" * 64, "1" * 64]}
    header(checksums=sums)(stored)
    reseal_folder(stored)

    assert verify(stored, deep=True).ok
    assert not open_trace(stored).has("later")
    assert "later" not in describe(stored)["arrays"]


@pytest.mark.parametrize("value", [None, 3, "x", [1], {"model": 3, "notes": 1, "text": []}])
def test_foreign_provenance_is_harmless(stored, value):
    """Provenance of another shape than ours is ignored: nothing depends on it."""
    header(meta=value)(stored)
    reseal_folder(stored)

    assert describe(stored)["model"] == {}
    assert verify(stored, deep=True).ok


@pytest.mark.parametrize("value", [None, {"q": []}, {"tokens": ["0" * 64], "q": ["x", "y"]}])
def test_missing_checksums_are_refused(stored, value):
    """A trace without the checksums of its arrays cannot be opened."""
    header(checksums=value)(stored)

    with pytest.raises(TraceError, match=r"attribute checksums\.\w+ is .*, expected \d of 64 hex"):
        open_trace(stored)


def test_no_such_path(tmp_path):
    """A path with nothing there is TraceNotFoundError, which is a FileNotFoundError too."""
    with pytest.raises(TraceNotFoundError, match="does not exist, expected a trace") as caught:
        open_trace(tmp_path / "none.zarr")

    assert isinstance(caught.value, FileNotFoundError)
    assert one_line(caught)


def test_what_is_no_trace(tmp_path):
    """A file, an empty folder, another zarr group and broken JSON are each told apart."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    zarr.create_group(tmp_path / "group")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "zarr.json").write_text("{")

    for name, message in {
        "file": "is not a kvsim trace: it is not a zip",
        "empty": "zarr.json is missing",
        "group": "has no kvsim_format",
        "broken": "not readable",
    }.items():
        with pytest.raises(TraceError, match=message) as caught:
            open_trace(tmp_path / name)
        assert one_line(caught)


UNUSABLE = {
    "is incomplete": header(complete=False),
    "recorded by another version": header(kvsim_format=NEWEST_VERSION + 1),
    "attribute rope is not readable": header(ropes=[{"inv_freq": [1.0]}]),
    "its seal does not fit": header(seal="sha256:"),
    "True is not a finite number": header(attention=[{"scale": True, "rope": 0}]),
    "prompt_len is 301, expected 1 to 300": header(prompt_len=301),
    "n_tokens is 299, but q has 300": header(n_tokens=299),
    "no array k, expected layer, q, k, v": lambda path: shutil.rmtree(path / "k"),
    "k has 3 of 4 chunks, the first missing is c/1/0/1/0, expected all": (
        lambda path: (path / "k/c/1/0/1/0").unlink()
    ),
    r"v has shape \(2, 2, 257, 8\), expected \(2, 2, 300, 8\)": (
        lambda path: edit(path / "v/zarr.json", lambda array: assign(array, ("shape", 2), 257))
    ),
    r"zarr_format and node_type are \(3, 'thing'\)": (
        lambda path: edit(path / "zarr.json", lambda root: root.update(node_type="thing"))
    ),
    "of layer is damaged": lambda path: flip(path / "layer/c/0"),
}


@pytest.mark.parametrize("message", UNUSABLE)
def test_what_cannot_be_opened(stored, message):
    """Each way in which a trace can be unusable is one line that says found and expected."""
    UNUSABLE[message](stored)

    with pytest.raises(TraceError, match=message) as caught:
        open_trace(stored)

    assert one_line(caught)


@pytest.mark.parametrize("how", ["flip", "truncate", "empty"])
def test_a_damaged_chunk_is_an_error_when_it_is_read(stored, how):
    """A flipped bit or a cut file is noticed on reading; other chunks still read."""
    chunk = stored / "k" / "c" / "1" / "0" / "0" / "0"
    if how == "flip":
        flip(chunk)
    else:
        chunk.write_bytes(chunk.read_bytes()[:100] if how == "truncate" else b"")
    trace = open_trace(stored)

    with pytest.raises(TraceError, match="of k is damaged"):
        trace.read("k", slice(1, 2))

    assert trace.read("k", slice(0, 1)).isfinite().all()


def test_a_chunk_lost_after_opening_is_an_error(stored):
    """A chunk that goes missing while the trace is open does not read as numbers."""
    trace = open_trace(stored)
    (stored / "k" / "c" / "1" / "0" / "1" / "0").unlink()

    with pytest.raises(TraceError, match="chunk c/1/0/1/0 of k is missing"):
        trace.read("k", slice(1, 2))
    with pytest.raises(TraceError, match="chunk c/1/0/1/0 of k is missing"):
        trace.read("k", slice(1, 2), slice(290, 300))
    assert trace.read("k", slice(1, 2), slice(0, 256)).isfinite().all()


def test_stray_partial_files_are_ignored(stored):
    """A partial file left by a killed writer does not count as a chunk."""
    (stored / "k" / "c" / "0" / "0" / "0" / "0.abc.partial").write_bytes(b"x")

    assert verify(stored, deep=True).ok


def test_other_texts_of_tokens_are_found(saved, tmp_path):
    """The text is no part of the digest, but it has a checksum of its own, which a swap fails."""
    other = open_trace(saved)
    texts = [text + "!" for text in other.token_text or []]
    changed = Trace(other.source, other.header, token_text=texts, path=other.path)
    path = changed.save(tmp_path / "other.zarr")
    assert open_trace(path).digest == other.digest
    shutil.rmtree(saved / "token_text")
    shutil.copytree(path / "token_text", saved / "token_text")
    reseal_folder(saved)

    (problem,) = verify(saved).problems

    assert "the text of the tokens is not the recorded one" in problem
    shutil.rmtree(saved / "token_text")
    with pytest.raises(TraceError, match="token_text has checksums and is not there"):
        verify(saved)
