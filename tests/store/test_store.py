"""Traces on disk: round trip, publication, verification, and everything that can be wrong."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec

from damage import assign, edit, edit_header, flip
from kvsim.core.attention import causal_attention
from kvsim.core.trace import Trace
from kvsim.errors import TraceError, TraceExistsError, TraceNotFoundError
from kvsim.schema import AXES, FORMAT_VERSION, NEWEST_VERSION, axes_of
from kvsim.store import (
    TraceWriter,
    describe,
    open_trace,
    publication,
    recover,
    verification,
    verify,
)
from kvsim.store.draft import Group
from kvsim.store.layout import DIMENSIONS
from kvsim.store.publication import require_chunks
from mutations import reseal_folder
from traces import random_trace

N = 300


def make(dtype=torch.float32, n=N, full=True, **options):
    """A trace in memory, with attention recorded if `full`."""
    settings = {
        "prompt_len": 10,
        "tokens": np.arange(n),
        "token_text": [f"tök{i}" for i in range(n)],
        "name": "made",
        "layer_ids": [2, 5],
        "meta": {"text": {"prompt": "p" * 500, "response": "r"}, "model": {"name": "m"}},
        **options,
    }
    return random_trace(n=n, dtype=dtype, computed=full, **settings)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """One stored trace, to be copied before it is changed."""
    return make().save(tmp_path_factory.mktemp("saved") / "made.zarr")


@pytest.fixture
def stored(saved, tmp_path):
    """A stored trace that a test may damage."""
    return shutil.copytree(saved, tmp_path / "made.zarr")


# --- round trip ---


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_round_trip_is_exact(dtype, tmp_path):
    """What is saved is what is opened: arrays, facts, text and digest, for each dtype."""
    trace = make(dtype)

    opened = open_trace(trace.save(tmp_path / "a.zarr"))

    for name in ("q", "k", "v", "attn_out", "lse", "tokens"):
        assert torch.equal(getattr(opened, name), getattr(trace, name))
        assert getattr(opened, name).dtype == getattr(trace, name).dtype
    for name in ("prompt_len", "scale", "rope", "layer_ids", "name", "meta", "token_text"):
        assert getattr(opened, name) == getattr(trace, name)
    assert opened.digest == trace.digest
    assert opened.source_dtypes["k"] == str(dtype).removeprefix("torch.")
    assert opened.path == tmp_path / "a.zarr"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_the_output_projection_comes_back(dtype, tmp_path):
    """`o_proj` is stored one layer per chunk, whatever its dtype, and verifies."""
    weights = torch.randn(2, 4, 8, 20, dtype=torch.float64).to(dtype)
    trace = make(o_proj=weights)

    opened = open_trace(trace.save(tmp_path / "a.zarr"))

    assert torch.equal(opened.o_proj, weights.float())
    assert torch.equal(opened.read("o_proj", slice(1, 2), slice(0, 3)), weights[1:].float())
    assert opened.source_dtypes["o_proj"] == str(dtype).removeprefix("torch.")
    assert opened.digest == trace.digest == make().digest
    report = verify(opened.path, deep=True)
    assert report.ok
    array = zarr.open_group(opened.path, mode="r")["o_proj"]
    assert array.chunks == (1, 4, 8, 20)
    version = opened.source.attributes["kvsim_format"]
    assert array.metadata.dimension_names == axes_of("o_proj", version)
    assert describe(opened.path)["arrays"]["o_proj"]["bytes"] > 0
    assert opened.to_xarray()["o_proj"].sizes["hidden"] == 20
    again = open_trace(opened.save(tmp_path / "b.zarr"))
    assert torch.equal(again.o_proj, opened.o_proj)


def test_dtypes_on_disk(tmp_path):
    """bfloat16 is stored as its 16 bits with its source dtype, float16 as float16."""
    half = zarr.open_group(make(torch.float16).save(tmp_path / "half.zarr"), mode="r")
    brain = zarr.open_group(make(torch.bfloat16).save(tmp_path / "brain.zarr"), mode="r")

    assert half["q"].dtype == np.float16
    assert half["q"].attrs["source_dtype"] == "float16"
    assert brain["q"].dtype == np.uint16
    assert brain["q"].attrs["source_dtype"] == "bfloat16"


@pytest.mark.parametrize("n", [1, 255, 256, 257, 512])
def test_lengths_around_the_block(n, tmp_path):
    """Traces that end at, before or after a block of 256 come back whole."""
    trace = make(n=n, prompt_len=1)

    opened = open_trace(trace.save(tmp_path / "a.zarr"))

    assert opened.n_pos == n
    assert torch.equal(opened.q, trace.q)
    assert verify(opened.path, deep=True).ok


def test_parts_are_read(saved):
    """Any layers and positions read from disk equal the same part of the whole."""
    opened, trace = open_trace(saved), make()

    for part in (slice(0, 3), slice(250, 260), slice(-5, None), slice(None)):
        assert torch.equal(opened.read("k", slice(1, 2), part), trace.k[1:2, :, part])
    assert torch.equal(opened.read("lse", pos=slice(250, 260)), trace.lse[..., 250:260])
    assert torch.equal(opened.read("tokens", pos=slice(7, 9)), torch.tensor([7, 8]))
    rows = opened.attention(1, [3, 299])
    assert torch.allclose(rows.sum(-1), torch.ones(4, 2), atol=1e-6)
    view = opened.per_query_head()
    assert torch.equal(view.k, trace.per_query_head().k)
    assert torch.equal(view.attn_out, trace.attn_out)


def test_attention_that_is_not_stored_is_computed(tmp_path):
    """A stored trace without attention output computes it, layer by layer, without keeping it."""
    trace = make(full=False)

    opened = open_trace(trace.save(tmp_path / "a.zarr"))

    assert not opened.has("attn_out")
    assert torch.equal(opened.full(slice(1, 2))[0], trace.attn_out[1:2])
    assert torch.equal(opened.lse, trace.lse)
    assert torch.allclose(opened.attention(0, [9]).sum(-1), torch.ones(4, 1), atol=1e-6)


def test_rows_of_attention_compute_a_layer_that_is_not_stored_once(tmp_path, monkeypatch):
    """However many blocks of rows are read of it; another layer is computed in its turn."""
    trace = make(full=False)
    opened = open_trace(trace.save(tmp_path / "t.zarr"))
    expected = [trace.attention(layer, slice(None)) for layer in (0, 1)]
    calls = []

    def counted(q, k, v, formula):
        calls.append(len(q))
        return causal_attention(q, k, v, formula)

    monkeypatch.setattr("kvsim.core.full.causal_attention", counted)
    for layer, computed in ((0, 1), (1, 2), (0, 3)):
        blocks = [opened.attention(layer, slice(at, at + 100)) for at in range(0, N, 100)]
        assert torch.equal(torch.cat(blocks, 1), expected[layer])
        assert len(calls) == computed


def test_arrays_follow_the_format(saved):
    """Dimension names, chunks, codecs and fill values are those of docs/trace-format.md."""
    group = zarr.open_group(saved, mode="r")

    for name in ("q", "k", "v", "attn_out", "lse", "tokens", "token_text"):
        metadata = json.loads((saved / name / "zarr.json").read_text())
        assert tuple(metadata["dimension_names"]) == AXES[name]
        assert metadata["codecs"][-1] == {"name": "crc32c"}
        assert metadata["codecs"][1]["configuration"]["shuffle"] == "bitshuffle"
    assert group["q"].chunks == (1, 4, 256, 8)
    assert group["lse"].chunks == (1, 4, 256)
    assert np.isnan(group["q"].fill_value)
    assert group["layer"][:].tolist() == [2, 5]
    attributes = dict(group.attrs)
    assert attributes["kvsim_format"] == FORMAT_VERSION
    assert attributes["complete"] is True
    assert attributes["n_tokens"] == attributes["committed_tokens"] == N


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_the_files_are_those_of_zarr(dtype, tmp_path):
    """Byte for byte what zarr writes for such arrays: chunks, edges, text, and all metadata."""
    rng = np.random.default_rng(0)
    arrays = {
        "q": rng.standard_normal((2, 9, 300, 64)).astype(dtype),
        "lse": rng.standard_normal((2, 3, 300)).astype("float32"),
        "attention": rng.standard_normal((1, 3, 300, 300)).astype("float32"),
        "tokens": rng.integers(0, 9, 300, dtype=np.int32),
        "token_text": np.array(["a", "", "ä\u4e2d\U0001f600"] * 100, dtype=object),
    }
    ours, theirs = Group(tmp_path / "ours"), zarr.create_group(tmp_path / "theirs", zarr_format=3)
    ours.set(kvsim_format=1, name="größe", meta={"a": [1.5, None, float("inf")]})
    theirs.update_attributes(ours.attributes)
    for name, values in arrays.items():
        text = name == "token_text"
        source = None if name.startswith("token") else "bfloat16"
        ours.create(name, values.shape, "string" if text else values.dtype.name, source)
        array = theirs.create_array(
            name,
            shape=values.shape,
            dtype="string" if text else values.dtype.name,
            chunks=ours.arrays[name].chunks,
            serializer="auto" if text else BytesCodec(endian="little"),
            compressors=(
                BloscCodec(
                    cname="lz4",
                    clevel=5,
                    shuffle="bitshuffle",
                    typesize=1 if text else values.itemsize,
                ),
                Crc32cCodec(),
            ),
            fill_value="" if text else np.nan if values.dtype.kind == "f" else -1,
            dimension_names=DIMENSIONS[name],
            attributes={} if source is None else {"source_dtype": source},
        )
        array[:] = values
        if name == "q":
            ours.write(name, values[:, :, :256], pos=0)
            ours.write(name, values[:, :, 256:], pos=256)
        else:
            ours.write(name, values)
    ours.consolidate()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        zarr.consolidate_metadata(theirs.store)

    def files(folder):
        return {
            path.relative_to(folder).as_posix(): (
                json.loads(path.read_bytes()) if path.name == "zarr.json" else path.read_bytes()
            )
            for path in folder.rglob("*")
            if path.is_file()
        }

    assert files(tmp_path / "ours") == files(tmp_path / "theirs")


def test_the_same_values_are_the_same_bytes():
    """Also of a chunk of many blocks, in a process where nothing but kvsim has been imported."""
    program = """
import numpy as np
from kvsim.store.chunks import encode_chunk
from kvsim.store.layout import array_document
from kvsim.store.layout import parse_array
array = parse_array("k", array_document("k", (1, 128, 256, 64), "float32", None), "")
values = np.random.default_rng(0).standard_normal(array.shape)
print(len({encode_chunk(array, values) for _ in range(50)}))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)

    assert int(done.stdout) == 1


def test_only_whole_chunks_are_written(tmp_path):
    """A part of a chunk would undo the rest of it."""
    group = Group(tmp_path)
    group.create("lse", (1, 2, 600), "float32")

    for start, size in ((0, 255), (1, 256), (256, 300), (512, 100)):
        with pytest.raises(ValueError, match="not whole chunks"):
            group.write("lse", np.zeros((1, 2, size), np.float32), pos=start)

    assert group.written("lse") == 0


def test_the_format_is_documented():
    """The table of arrays in docs/trace-format.md has every array with its dimension names."""
    document = (Path(__file__).parents[2] / "docs" / "trace-format.md").read_text()

    for name, axes in DIMENSIONS.items():
        assert f"| `{name}` | `{', '.join(axes)}` |" in document
    assert f"# The kvsim trace format, version {FORMAT_VERSION}\n" in document


def test_xarray_opens_it_with_named_dimensions(saved):
    """xarray opens the folder without kvsim, with named dimensions and layer numbers."""
    import xarray

    data = xarray.open_dataset(saved, engine="zarr")

    assert data["q"].dims == ("layer", "qhead", "pos", "dim")
    assert data["k"].dims == ("layer", "head", "pos", "dim")
    assert data["lse"].dims == ("layer", "qhead", "pos")
    assert data["layer"].values.tolist() == [2, 5]
    assert np.array_equal(data["v"].sel(layer=5).values, make().v[1].numpy())
    assert str(data["token_text"].values[1]) == "tök1"
    assert open_trace(saved).to_xarray()["q"].sizes == data["q"].sizes


def test_the_same_trace_gives_the_same_bytes(saved, tmp_path):
    """Writing a trace twice gives identical files: nothing on disk depends on time or place."""
    again = make().save(tmp_path / "made.zarr")

    files = sorted(path.relative_to(saved) for path in saved.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(again) for path in again.rglob("*") if path.is_file())
    for file in files:
        found, expected = (again / file).read_bytes(), (saved / file).read_bytes()
        if file.name == "zarr.json":  # consolidated metadata lists arrays in the disk's order
            found, expected = json.loads(found), json.loads(expected)
        assert found == expected


# --- publication ---


def test_an_existing_path_is_refused(stored):
    """Saving onto an existing trace is refused and changes nothing."""
    before = (stored / "zarr.json").read_bytes()

    with pytest.raises(TraceExistsError, match="exists, expected a free path"):
        make(prompt_len=20).save(stored)

    assert (stored / "zarr.json").read_bytes() == before
    assert [path.name for path in stored.parent.iterdir()] == ["made.zarr"]


def test_overwriting_replaces_a_trace(stored):
    """`overwrite` replaces a trace and leaves nothing beside it."""
    make(prompt_len=20).save(stored, overwrite=True)

    assert open_trace(stored).prompt_len == 20
    assert [path.name for path in stored.parent.iterdir()] == ["made.zarr"]


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
        make().save(path, overwrite=True)

    assert os.path.lexists(path)
    assert list(tmp_path.iterdir()) == [path]


def test_an_interrupt_while_arrays_are_made_leaves_nothing(tmp_path, monkeypatch):
    """Even before there is a context manager to clean up."""

    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(Group, "create", stop)

    with pytest.raises(KeyboardInterrupt):
        make().save(tmp_path / "made.zarr")

    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_waits_for_what_is_being_written(tmp_path, warm_python):
    """A file is written to its end, and what was begun is removed then; nothing comes later.

    In a process of its own, whose main thread gets the signal.
    """
    program = """
import os, signal, sys, threading, time
from kvsim import Rope, Trace
from kvsim.store.draft import Group
import torch

begun, write, ended = threading.Event(), Group._put, []

def slow(self, key, *parts):
    if key.startswith("q/c/"):
        begun.set()
        time.sleep(0.3)
    write(self, key, *parts)
    ended.append(key)

Group._put = slow
q, k, v = (torch.randn(1, heads, 300, 8) for heads in (2, 1, 1))
trace = Trace.from_arrays(q, k, v, prompt_len=10, rope=Rope.default(8))
hand = threading.Thread(target=lambda: begun.wait(60) and os.kill(os.getpid(), signal.SIGINT))
hand.start()
try:
    trace.save(os.path.join(sys.argv[1], "made.zarr"))
except KeyboardInterrupt:
    print("interrupted after", ended[-1], os.listdir(sys.argv[1]))
time.sleep(0.3)
print("later", os.listdir(sys.argv[1]))
"""
    done = subprocess.run(
        [warm_python, "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )

    assert done.stdout.splitlines() == [
        "interrupted after q/c/0/0/0/0 []",
        "later []",
    ], done.stderr


def test_text_that_utf8_cannot_hold_is_refused(tmp_path):
    """Half of a character is no text; the message names the token."""
    texts = [*(f"t{i}" for i in range(N - 1)), "x\ud800"]

    with pytest.raises(TraceError, match=rf"token {N - 1} is 'x\\ud800', half of a character"):
        make(token_text=texts).save(tmp_path / "made.zarr")

    assert list(tmp_path.iterdir()) == []


def test_texts_of_numpy_are_saved_as_texts(tmp_path):
    """Numpy's strings are strings, and read back as those."""
    texts = [np.str_(f"t{i}") for i in range(make().n_pos)]

    opened = open_trace(make(token_text=texts).save(tmp_path / "made.zarr"))

    assert opened.token_text == texts


def test_a_missing_block_is_not_published(tmp_path):
    """A writer refuses to publish a trace with a chunk that was never written."""
    shapes = {"q": (1, 2, 300, 8), "k": (1, 1, 300, 8), "v": (1, 1, 300, 8)}
    trace = make(layer_ids=[0, 1])
    with TraceWriter(
        tmp_path / "a.zarr",
        shapes=shapes,
        source_dtypes=dict.fromkeys(shapes, "float32"),
        layer_ids=[0],
    ) as writer:
        for name, shape in shapes.items():
            writer.append(name, 0, torch.ones(shape[1], 256, 8))
        with pytest.raises(TraceError, match="k has 1 of 2 chunks"):
            writer.publish(trace.header)

    assert list(tmp_path.iterdir()) == []


def test_a_writer_refuses_what_is_not_finite_or_too_large(tmp_path):
    """NaN, and numbers that float16 storage cannot hold, are refused where they are."""
    shapes = {"q": (3, 2, 300, 8), "k": (3, 1, 300, 8), "v": (3, 1, 300, 8)}
    options = {
        "shapes": shapes,
        "source_dtypes": dict.fromkeys(shapes, "float32"),
        "layer_ids": [0, 1, 2],
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
    with pytest.raises(TraceError, match="store_dtype is 'int8'"):
        TraceWriter(tmp_path / "a.zarr", store_dtype="int8", **options)


def test_a_writer_refuses_weights_that_are_not_finite_or_too_large(tmp_path):
    """The output projection is held to the same as what is appended."""
    writer = TraceWriter(
        tmp_path / "a.zarr",
        shapes={"q": (2, 2, 9, 8), "o_proj": (2, 2, 8, 20)},
        source_dtypes={"q": "float32", "o_proj": "float32"},
        layer_ids=[0, 1],
        store_dtype="float16",
    )
    with writer:
        with pytest.raises(TraceError, match="o_proj reaches 70000 in layer 1, float16 holds"):
            writer.write_layer("o_proj", 1, torch.full((2, 8, 20), 7e4))
        with pytest.raises(TraceError, match="o_proj is nan at layer 1, head 0, dim 0"):
            writer.write_layer("o_proj", 1, torch.full((2, 8, 20), torch.nan))
        writer.write_layer("o_proj", 0, torch.ones(2, 8, 20))
        with pytest.raises(TraceError, match="o_proj has 1 of 2 chunks"):
            require_chunks(writer._group, "o_proj", "a.zarr", "write it")


def test_an_output_folder_that_cannot_be(tmp_path):
    """A path below a file is one clear error."""
    (tmp_path / "file").write_text("")

    with pytest.raises(TraceError, match="cannot be written"):
        make().save(tmp_path / "file" / "a.zarr")


def test_a_full_disk_is_one_clear_line(tmp_path, monkeypatch):
    """A write that the disk refuses is a TraceError; a trace that is complete can be recovered."""

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(publication, "sync_tree", full)

    with pytest.raises(TraceError, match=r"cannot be written \(No space left on device\)"):
        make().save(tmp_path / "a.zarr")

    assert not (tmp_path / "a.zarr").exists()
    monkeypatch.undo()
    assert open_trace(recover(tmp_path / "a.zarr")).digest == make().digest
    assert [path.name for path in tmp_path.iterdir()] == ["a.zarr"]


# --- verification ---


def test_verify_accepts_what_was_saved(saved):
    """An untouched trace verifies, with errors far below the stated tolerances."""
    report = verify(saved, deep=True)

    assert report.ok
    assert report.layers == (2, 5)
    assert max(report.output_error) < 1e-6
    assert max(report.lse_error) < 1e-5
    assert report.output_tolerance == 1e-4
    assert json.loads(json.dumps(report.to_dict()))["ok"] is True


def test_verify_recomputes_blocks_of_rows(stored, monkeypatch):
    """Blocks have the errors of the whole layer; damage in a later one is found in its array."""
    whole = verify(stored, deep=True)
    monkeypatch.setattr(verification, "ROWS", 256)
    blocks = verify(stored, deep=True)
    flip(stored / "attn_out" / "c" / "1" / "0" / "1" / "0")
    damaged = verify(stored, deep=True)

    assert open_trace(stored).n_pos > 256
    assert blocks.ok
    assert blocks.output_error == pytest.approx(whole.output_error, abs=1e-6)
    assert blocks.lse_error == pytest.approx(whole.lse_error, abs=1e-5)
    assert len(damaged.problems) == 1
    assert "of attn_out is damaged" in damaged.problems[0]
    assert (len(damaged.output_error), len(damaged.lse_error)) == (1, 2)


def test_verify_reports_progress(saved):
    """Progress counts layers."""
    seen = []

    verify(saved, deep=True, progress=lambda done, total: seen.append((done, total)))

    assert seen == [(1, 2), (2, 2)]


def rewrite(path, name, change):
    """Change the values of a stored array, with valid chunks and a valid seal."""
    array = zarr.open_group(path, mode="r+", use_consolidated=False)[name]
    values = np.asarray(array[:])
    change(values)
    array[:] = values
    reseal_folder(path)


@pytest.mark.parametrize("name", ["q", "k", "v", "attn_out", "lse"])
def test_verify_finds_a_changed_number(stored, name):
    """A number changed with a valid checksum of its chunk is found by the array's checksum."""

    def change(values):
        values[1, 0, 5] *= 1.5

    rewrite(stored, name, change)

    report = verify(stored, deep=True)

    assert not report.ok
    assert any(f"checksum of {name} in layer 1" in problem for problem in report.problems)
    assert any("from what q, k, v give" in problem for problem in report.problems)


def test_verify_finds_changed_tokens(stored):
    """Tokens that were changed are found by their checksum."""

    def change(values):
        values[0] = 99

    rewrite(stored, "tokens", change)

    assert "the checksum of tokens is" in verify(stored, deep=True).problems[0]


def test_verify_finds_every_damaged_chunk(stored):
    """A damaged chunk is a problem of its layer; the others are still checked."""
    flip(stored / "v" / "c" / "1" / "0" / "0" / "0")

    report = verify(stored, deep=True)

    assert len(report.problems) == 1
    assert "of v is damaged" in report.problems[0]
    assert len(report.output_error) == 1


def test_describe(saved):
    """The description has sizes, dtypes, model and the head of the text, ready for JSON."""
    found = json.loads(json.dumps(describe(saved)))

    assert found["tokens"] == N
    assert found["arrays"]["q"]["shape"] == [2, 4, N, 8]
    assert found["arrays"]["q"]["dtype"] == found["arrays"]["q"]["source_dtype"] == "float32"
    assert found["bytes"] > found["arrays"]["q"]["bytes"] > 0
    assert found["prompt"] == "p" * 200 + "..."
    assert found["model"] == {"name": "m"}
    assert found["answer_check"] is None


def test_verify_finds_a_changed_output_projection(tmp_path):
    """A changed weight, a flipped bit and a lost chunk are each found."""
    path = make(o_proj=torch.ones(2, 4, 8, 20)).save(tmp_path / "a.zarr")
    lost = shutil.copytree(path, tmp_path / "lost.zarr")
    flipped = shutil.copytree(path, tmp_path / "flipped.zarr")

    def change(values):
        values[1, 0, 5] = 2.0

    rewrite(path, "o_proj", change)
    flip(flipped / "o_proj" / "c" / "0" / "0" / "0" / "0")
    (lost / "o_proj" / "c" / "1" / "0" / "0" / "0").unlink()

    (problem,) = verify(path, deep=True).problems
    assert "checksum of o_proj in layer 1" in problem
    (problem,) = verify(flipped, deep=True).problems
    assert "of o_proj is damaged" in problem
    with pytest.raises(TraceError, match="o_proj has 1 of 2 chunks"):
        open_trace(lost)


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


# --- bad input ---


def header(**attributes):
    """A change of the attributes of the group."""
    return lambda path: edit_header(path, lambda found: found.update(attributes))


def one_line(caught):
    """Whether the message is one line."""
    return "\n" not in str(caught.value)


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
    r"incomplete \(300 tokens were written\)": header(complete=False),
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
