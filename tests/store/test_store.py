"""Stored traces: what is read is what was saved, in files that zarr and xarray open."""

import numpy as np
import pytest
import torch
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import kvsim
from kvsim.core.attention import causal_attention
from kvsim.core.parts import by_query_head
from kvsim.errors import TraceError
from kvsim.schema import FORMAT_VERSION, axes_of
from kvsim.store import layout
from kvsim.store.reader import open_trace
from kvsim.store.verification import describe, verify
from kvsim.store.writer import TraceWriter
from saved_traces import N, files, make, projected, same
from traces import random_arrays, random_trace

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
#: Lengths around a block of 256.
LENGTHS = [1, 2, 255, 256, 257, 512, 600]


def of_bfloat16(n=N, seed=0):
    """A trace of a bfloat16 model, with every array that may be stored in its bits."""
    trace = random_trace(n=n, dtype=torch.bfloat16, seed=seed, prompt_len=1)
    arrays = random_arrays(n=n, dtype=torch.bfloat16, seed=seed)
    drawn = {"gate": (2, 4, n, 8), "o_proj": (2, 4, 8, 6), "residual": (2, n, 6)}
    generator = torch.Generator().manual_seed(1)
    arrays |= {x: torch.randn(*drawn[x], generator=generator).bfloat16() for x in drawn}
    settings = {"prompt_len": 1, "rope": kvsim.Rope.default(8), "lse": trace.full()[1]}
    return kvsim.Trace.from_arrays(**arrays, attn_out=trace.full()[0].bfloat16(), **settings)


@settings(deadline=None, max_examples=12)
@given(
    dtype=st.sampled_from(DTYPES),
    n=st.sampled_from(LENGTHS),
    full=st.booleans(),
    sharded=st.booleans(),
    seed=st.integers(0, 99),
)
def test_round_trip_is_exact(tmp_path_factory, dtype, n, full, sharded, seed):
    """What is saved is what is opened: arrays, facts, text and digest, whatever the trace."""
    path = tmp_path_factory.mktemp("saved") / "a.zarr"
    trace = make(dtype, n, full, seed=seed, prompt_len=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "MOST_FILES", 0 if sharded else 1000)
        opened = open_trace(kvsim.save_trace(trace, path))

    names = ("q", "k", "v", "tokens")
    of_opened, of_trace = ((*map(x.read, names), *x.full()) for x in (opened, trace))
    for found, expected in zip(of_opened, of_trace, strict=True):
        assert torch.equal(found, expected)
        assert found.dtype == expected.dtype
    for name in ("prompt_len", "formulas", "ropes", "layer_ids", "name", "meta", "token_text"):
        assert getattr(opened, name) == getattr(trace, name)
    assert opened.digest == trace.digest
    assert opened.fingerprint == trace.fingerprint
    assert opened.header.source_dtypes["k"] == str(dtype).removeprefix("torch.")
    assert opened.path == path
    assert verify(path, deep=full).ok
    again = open_trace(kvsim.save_trace(opened, path.with_name("b.zarr")))
    assert again.fingerprint == trace.fingerprint


@pytest.mark.parametrize("sharded", [False, True])
def test_parts_are_read(sharded, tmp_path, monkeypatch):
    """Any layers and positions read from disk equal the same part of the whole."""
    monkeypatch.setattr(layout, "MOST_FILES", 0 if sharded else 1000)
    trace = projected()
    opened = open_trace(kvsim.save_trace(trace, tmp_path / "a.zarr"))

    assert same(opened, trace)
    array = opened.source.arrays["k"]
    assert (array.chunks, array.shards) == ((1, 2, 256, 8), (1, 2, 512, 8) if sharded else None)
    for part in (slice(0, 3), slice(250, 260), slice(-5, None), slice(7, 7), slice(None)):
        assert torch.equal(opened.read("k", slice(1, 2), part), trace.read("k")[1:2, :, part])
    assert torch.equal(opened.read("lse", pos=slice(250, 260)), trace.full()[1][..., 250:260])
    assert torch.equal(opened.read("tokens", pos=slice(7, 9)), torch.tensor([7, 8]))
    assert torch.equal(opened.read("o_proj", slice(1, 2), slice(0, 3)), trace.read("o_proj")[1:])
    assert torch.equal(by_query_head(opened).read("k"), by_query_head(trace).read("k"))


def test_the_bits_of_a_bfloat16_model_are_stored(tmp_path):
    """zarr reads the 16 bits of each number, kvsim the numbers."""
    trace = of_bfloat16()
    opened = open_trace(kvsim.save_trace(trace, tmp_path / "a.zarr"))
    group = zarr.open_group(opened.path, mode="r")

    for name in ("q", "k", "v", "attn_out", "gate", "o_proj", "residual"):
        numbers = trace.read(name)
        assert np.array_equal(group[name][:], numbers.bfloat16().view(torch.uint16).numpy())
        assert opened.read(name, stored=True).dtype == torch.bfloat16
        assert torch.equal(opened.read(name), numbers)
    assert group["lse"].dtype == np.float32
    assert opened.digest == trace.digest
    assert verify(opened.path, deep=True).ok
    with (
        TraceWriter(
            tmp_path / "b.zarr",
            shapes=dict.fromkeys("qkv", (1, 2, 4, 8)),
            source_dtypes=dict.fromkeys("qkv", "bfloat16"),
        ) as writer,
        pytest.raises(TraceError, match=r"q of layer 0 is float32, expected bfloat16"),
    ):
        writer.append("q", 0, torch.full((2, 4, 8), 1 + 2**-12))


def test_rows_of_attention_compute_a_layer_that_is_not_stored_once(tmp_path, monkeypatch):
    """However many blocks of rows are read of it; another layer is computed in its turn."""
    trace = make(full=False)
    opened = open_trace(kvsim.save_trace(trace, tmp_path / "t.zarr"))
    assert not opened.has("attn_out")
    assert torch.equal(opened.full(slice(1, 2))[0], trace.full()[0][1:2])
    expected = [trace.attention(layer, slice(None)) for layer in (0, 1)]
    calls = []

    def counted(q, k, v, formula):
        calls.append(len(q))
        return causal_attention(q, k, v, formula)

    opened = open_trace(opened.path)
    monkeypatch.setattr("kvsim.core.full.causal_attention", counted)
    for layer, computed in ((0, 1), (1, 2), (0, 3)):
        blocks = [opened.attention(layer, slice(at, at + 100)) for at in range(0, N, 100)]
        assert torch.equal(torch.cat(blocks, 1), expected[layer])
        assert len(calls) == computed


def test_zarr_and_xarray_open_it_with_named_dimensions(saved):
    """Without kvsim: groups, arrays, attributes; every chunk is a file of the manifest."""
    import xarray

    group = zarr.open_group(saved, mode="r")
    data = xarray.open_dataset(saved, engine="zarr")

    assert {name for name, _ in group.arrays()} == {"q", "k", "v", "attn_out", "lse", "tokens"}
    for name, array in group.arrays():
        assert array.metadata.dimension_names == axes_of(name) == data[name].dims
    assert group["q"].chunks == (1, 4, 256, 8)
    assert group.attrs["kvsim_format"] == FORMAT_VERSION
    assert group.attrs["layer_ids"] == [2, 5]
    assert group.attrs["token_text"][1] == "tök1"
    assert np.array_equal(data["v"][1].values, make().read("v")[1].numpy())
    assert {*group.attrs["files"], "zarr.json"} == {*files(saved)}
    assert describe(saved)["bytes"] == sum(size for size, _ in group.attrs["files"].values())


def test_the_same_trace_gives_the_same_bytes(saved, tmp_path):
    """Writing a trace twice gives identical files: nothing on disk depends on time or place."""
    assert files(kvsim.save_trace(make(), tmp_path / "made.zarr")) == files(saved)


def test_chunks_of_another_trace_are_links(saved, tmp_path):
    """Those with the same bytes are stored once; other chunks, and copies, are not touched."""
    trace = make()
    shapes = {name: trace.source.shapes[name] for name in "qkv"}
    path = tmp_path / "a.zarr"
    with TraceWriter(
        path,
        shapes=shapes,
        source_dtypes=dict.fromkeys("qkv", "float32"),
        like=saved,
    ) as writer:
        writer.copy(trace.source, "qk", trace.n_pos)
        for layer in range(2):
            for block in (trace.read("v")[layer] + 1).split(256, 1):
                writer.append("v", layer, block)
        writer.publish(trace.header)

    chunks = [each for each in path.rglob("c/**/*") if each.is_file()]
    links = {p.relative_to(path).parts[0] for p in chunks if p.stat().st_nlink > 1}
    assert links == {"q", "k"}
    assert torch.equal(open_trace(path).read("v"), trace.read("v") + 1)
    assert verify(path).ok
    assert verify(saved).ok


def test_arrays_and_provenance_of_others_are_ignored(stored):
    """An array that a reader does not know, and `meta` of another shape, have no effect."""
    from damage import edit_header, reseal

    group = zarr.open_group(stored, mode="r+", use_consolidated=False)
    group.create_array("later", data=np.ones((2, 3)), compressors=zarr.codecs.BloscCodec())
    edit_header(stored, lambda found: found.update(meta={"model": 3, "notes": 1, "text": []}))
    reseal(stored)

    assert verify(stored, deep=True).ok
    assert not open_trace(stored).has("later")
    assert describe(stored)["model"] == {}
