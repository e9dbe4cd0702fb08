"""Writing of traces: nothing is overwritten, half written or not finite."""

import os

import pytest
import torch
import zarr

import kvsim
from kvsim.errors import OutputError, TraceError, TraceExistsError
from kvsim.store import writer
from kvsim.store.reader import open_trace
from kvsim.store.writer import TraceWriter
from saved_traces import N, make


def test_an_existing_path_is_refused(stored):
    """Saving onto an existing trace is refused and changes nothing."""
    before = (stored / "zarr.json").read_bytes()

    with pytest.raises(TraceExistsError, match="exists, expected a free path"):
        kvsim.save_trace(make(prompt_len=20), stored)

    assert (stored / "zarr.json").read_bytes() == before
    assert [path.name for path in stored.parent.iterdir()] == ["made.zarr"]


def test_a_trace_that_no_reader_takes_is_not_published(tmp_path):
    """What describes a trace is read again before the rename; labels of no column are none."""
    labels = {"task": "a", "level": 2**63, "length": "9", "depth": True}
    assert open_trace(
        kvsim.save_trace(make(meta={"labels": labels}), tmp_path / "a.zarr")
    ).header.labels == {"task": "a"}

    with pytest.raises(TraceError, match=r"/made.zarr: zarr.json cannot be read \(has more than"):
        kvsim.save_trace(make(meta={"seed": ["a" * (1 << 26)]}), tmp_path / "made.zarr")

    assert [path.name for path in tmp_path.iterdir()] == ["a.zarr"]


@pytest.mark.parametrize("kind", ["file", "folder", "empty folder", "link", "other group"])
def test_only_a_trace_is_overwritten(kind, tmp_path, saved):
    """`overwrite` refuses whatever is not a trace, and leaves it as it was."""
    path = tmp_path / "target"
    if kind == "file":
        path.write_text("mine")
    elif kind == "link":
        path.symlink_to(saved)
    elif kind == "other group":
        zarr.create_group(path).create_array("a", shape=(1,), dtype="int8")
    else:
        path.mkdir()
        if kind == "folder":
            (path / "mine.txt").write_text("mine")

    with pytest.raises(TraceExistsError, match="not a kvsim trace"):
        kvsim.save_trace(make(), path, overwrite=True)

    assert os.path.lexists(path)
    assert list(tmp_path.iterdir()) == [path]


def test_an_interrupt_while_arrays_are_made_leaves_nothing(tmp_path, monkeypatch):
    """Even before there is a context manager to clean up."""

    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("kvsim.store.writer.create_array", stop)

    with pytest.raises(KeyboardInterrupt):
        kvsim.save_trace(make(), tmp_path / "made.zarr")

    assert list(tmp_path.iterdir()) == []


def test_text_that_utf8_cannot_hold_is_refused(tmp_path):
    """Half of a character is no text."""
    texts = [*(f"t{i}" for i in range(N - 1)), "x\ud800"]

    with pytest.raises(UnicodeEncodeError):
        kvsim.save_trace(make(token_text=texts), tmp_path / "made.zarr")

    assert list(tmp_path.iterdir()) == []


def test_a_missing_block_is_not_published(tmp_path):
    """A writer refuses to publish a trace with a chunk that was never written."""
    shapes = {"q": (1, 2, 300, 8), "k": (1, 1, 300, 8), "v": (1, 1, 300, 8)}
    trace = make(layer_ids=[0, 1])
    with TraceWriter(
        tmp_path / "a.zarr",
        shapes=shapes,
        source_dtypes=dict.fromkeys(shapes, "float32"),
    ) as writer:
        for name, shape in shapes.items():
            writer.append(name, 0, torch.ones(shape[1], 256, 8))
        with pytest.raises(TraceError, match="has 1 of 2 chunks, expected all"):
            writer.publish(trace.header)

    assert list(tmp_path.iterdir()) == []


def test_a_writer_refuses_what_is_not_finite_or_too_large(tmp_path):
    """NaN, and numbers that float16 storage cannot hold, are refused where they are."""
    shapes = {"q": (3, 2, 300, 8), "k": (3, 1, 300, 8), "v": (3, 1, 300, 8)}
    options = {
        "shapes": shapes,
        "source_dtypes": dict.fromkeys(shapes, "float32"),
    }
    bad = torch.zeros(1, 256, 8)
    bad[0, 100] = torch.nan
    with TraceWriter(tmp_path / "a.zarr", **options) as writer:
        with pytest.raises(TraceError, match="k is nan at layer 2, head 0, pos 100"):
            writer.append("k", 2, bad)
        with pytest.raises(ValueError, match="a block of 10 positions"):
            writer.append("k", 2, torch.zeros(1, 10, 8))
    with (
        TraceWriter(tmp_path / "a.zarr", store_dtype="float16", **options) as writer,
        pytest.raises(TraceError, match="v reaches 70000 in layer 1, float16 holds at most 65504"),
    ):
        writer.append("v", 1, torch.full((1, 256, 8), 7e4))


def test_a_full_disk_is_one_clear_line(tmp_path, monkeypatch):
    """A write that the disk refuses; nothing is left."""

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer, "sync_tree", full)

    with pytest.raises(OutputError, match=r"cannot be written \(No space left on device\)"):
        kvsim.save_trace(make(), tmp_path / "a.zarr")

    assert not list(tmp_path.iterdir())
