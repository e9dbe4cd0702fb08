"""Stored traces: what is read is what was saved, in files of zarr."""

import json
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec

from kvsim.core.attention import causal_attention
from kvsim.schema import AXES, FORMAT_VERSION, axes_of
from kvsim.store import describe, open_trace, verify
from kvsim.store.draft import Group
from kvsim.store.layout import DIMENSIONS
from saved_traces import N, make


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
