"""bfloat16 in 16 bits: the bits of the model on disk, the same numbers and digests as in 32."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
import zarr

import kvsim
from damage import assign, edit, edit_header
from kvsim import Trace
from kvsim.errors import TraceError
from kvsim.schema import FORMAT_VERSION, NEWEST_VERSION
from kvsim.store import layout, open_trace, verify, writer
from kvsim.store.layout import stored_arrays
from kvsim.store.writer import TraceWriter
from mutations import reseal_folder
from traces import random_arrays, random_trace

N = 300
MODEL = ("q", "k", "v", "attn_out", "gate", "o_proj", "residual")


def make(**options):
    """A trace of a bfloat16 model in memory."""
    trace = random_trace(n=N, dtype=torch.bfloat16)
    arrays = random_arrays(n=N, dtype=torch.bfloat16)
    drawn = {"gate": (2, 4, N, 8), "o_proj": (2, 4, 8, 6), "residual": (2, N, 6)}
    generator = torch.Generator().manual_seed(1)
    arrays |= {x: torch.randn(*drawn[x], generator=generator).bfloat16() for x in drawn}
    given = {"prompt_len": 100, "rope": kvsim.Rope.default(8), "lse": trace.lse} | options
    return Trace.from_arrays(**arrays, attn_out=trace.attn_out.bfloat16(), **given)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """It on disk, to be copied before it is changed."""
    return make().save(tmp_path_factory.mktemp("bits") / "a.zarr")


def in_32_bits(*arguments, **options):
    """The arrays of a trace, with 32 bits for each number."""
    return [replace(each, dtype=np.dtype("<f4")) for each in stored_arrays(*arguments, **options)]


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """The trace in 32 bits, as version 3 has it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "stored_arrays", in_32_bits)
        return make().save(tmp_path_factory.mktemp("wide") / "a.zarr")


def test_the_bits_of_the_model_are_stored(saved):
    """zarr reads the 16 bits of each number, kvsim the numbers; lse has 32."""
    group, trace = zarr.open_group(saved, mode="r"), make()
    opened = open_trace(saved)

    for name in MODEL:
        numbers = trace.read(name)
        assert group[name].dtype == np.uint16
        assert np.array_equal(group[name][:], numbers.bfloat16().view(torch.uint16).numpy())
        assert opened.source.read(name, slice(None), slice(None)).dtype == torch.bfloat16
        assert opened.stored(name).dtype == torch.bfloat16
        assert torch.equal(opened.read(name), numbers)
        metadata = json.loads((saved / name / "zarr.json").read_bytes())
        assert metadata["attributes"] == {"source_dtype": "bfloat16"}
        fill = torch.tensor(metadata["fill_value"], dtype=torch.uint16)
        assert torch.isnan(fill.view(torch.bfloat16))
    assert group["lse"].dtype == np.float32
    assert group.attrs["kvsim_format"] == NEWEST_VERSION
    assert verify(saved).ok


def test_a_trace_in_32_bits_is_the_same_trace(saved, wide):
    """Traces of before open as they are: digest, checksums, numbers and kept sets are the same."""
    old, new = open_trace(wide), open_trace(saved)

    assert old.source.attributes["kvsim_format"] == FORMAT_VERSION
    assert old.digest == new.digest == make().digest
    assert old.source.attributes["checksums"] == new.source.attributes["checksums"]
    assert old.source_dtypes == new.source_dtypes
    for name in ("tova", "h2o", "snapkv", "expected_attention", "keydiff"):
        records = [kvsim.replay(x, kvsim.policy(name), budget=40) for x in (old, new, make())]
        assert all(np.array_equal(records[0].evicted_at, x.evicted_at) for x in records)
        assert kvsim.measure(old, records[0]).equals(kvsim.measure(new, records[1]))


def test_bfloat16_is_sharded_too(saved, tmp_path, monkeypatch):
    """Both at once: files for each layer, of the same bits."""
    monkeypatch.setattr(layout, "MOST_FILES", 0)
    path = make().save(tmp_path / "b.zarr")

    assert zarr.open_group(path, mode="r")["q"].shards == (1, 4, 512, 8)
    assert verify(path, deep=True).problems == verify(saved, deep=True).problems
    assert torch.equal(open_trace(path).q, make().q)
    assert open_trace(path).digest == make().digest


def test_a_copy_and_xarray_have_the_numbers(saved, tmp_path):
    """A trace that is saved again has the same bits, and xarray has float32."""
    again = open_trace(saved).save(tmp_path / "b.zarr")
    names = [x.relative_to(saved) for x in saved.rglob("c/**/*") if x.is_file()]

    assert all((again / x).read_bytes() == (saved / x).read_bytes() for x in names)
    data = open_trace(saved).to_xarray()
    assert data["k"].dtype == np.float32
    assert data["v"].dims == data["k"].dims == ("layer", "head", "pos", "dim")
    assert np.array_equal(data["k"].values, make().k.numpy())


def test_what_16_bits_cannot_hold_is_refused(tmp_path):
    """A layer with more bits than its source_dtype says is an error, and nothing is rounded."""
    shapes = {"q": (1, 2, 4, 8), "k": (1, 2, 4, 8), "v": (1, 2, 4, 8)}
    with (
        TraceWriter(
            tmp_path / "a.zarr",
            shapes=shapes,
            source_dtypes=dict.fromkeys(shapes, "bfloat16"),
            layer_ids=[0],
        ) as writer,
        pytest.raises(TraceError, match=r"q of layer 0 is float32, expected bfloat16 as its"),
    ):
        writer.append("q", 0, torch.full((2, 4, 8), 1 + 2**-12))


@pytest.mark.parametrize("source", ["float16", "float32", None])
def test_bits_are_those_of_bfloat16_alone(stored, source):
    """uint16 without a source_dtype of bfloat16, or before version 5, is refused."""
    other = shutil.copytree(stored, stored.with_name("b.zarr"))
    edit(stored / "q/zarr.json", lambda x: assign(x, ("attributes", "source_dtype"), source))
    edit_header(other, lambda attributes: attributes.update(kvsim_format=3))

    for path in (stored, other):
        with pytest.raises(TraceError, match="q has data type 'uint16', expected float16 or float"):
            open_trace(path)


def test_a_nan_in_16_bits_is_a_lost_chunk(stored):
    """The padding of a block is NaN, and NaN in a trace is refused."""
    group = zarr.open_group(stored, mode="r+")
    group["q"][1, 2, 7, 3] = 0x7FC0
    reseal_folder(stored)

    with pytest.raises(TraceError, match="q is nan at layer 1, head 2, pos 7"):
        open_trace(stored).read("q")
