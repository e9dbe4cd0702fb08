"""Records on disk: whole, with named axes, and read within bounds."""

import numpy as np
import pytest
import zarr

import kvsim
from kvsim.errors import OutputError
from kvsim.schema import NEVER
from kvsim.store import records
from kvsim.store.records import read_records, write_records
from tests.core.test_record import make_record
from traces import random_trace


def test_records_come_back_from_disk_as_they_were(tmp_path):
    """Every field except the internals, bit for bit."""
    trace = random_trace(n=30, prompt_len=9, size=1.0, name="somewhere")
    replayed = [
        kvsim.replay(trace, kvsim.policy("snapkv@original", window=3), budget=5),
        kvsim.replay(trace, kvsim.policy("streaming_llm@original"), budget=6, layers=[1]),
    ]

    write_records(tmp_path / "records.zarr", replayed)
    back = read_records(tmp_path / "records.zarr")

    for expected, found in zip(replayed, back, strict=True):
        assert (found.evicted_at == expected.evicted_at).all()
        assert found.evicted_at.dtype == np.int32
        for name in set(vars(expected)) - {"evicted_at", "internals"}:
            assert getattr(found, name) == getattr(expected, name), name


def test_stored_records_name_their_axes(tmp_path):
    """layer, head, pos: another program finds them by name."""
    write_records(tmp_path / "records.zarr", [make_record([NEVER, 2])])

    array = zarr.open_group(tmp_path / "records.zarr", mode="r")["0/evicted_at"]

    assert array.metadata.dimension_names == ("layer", "head", "pos")


def test_records_are_not_written_over_anything(tmp_path):
    """What is there stays."""
    (tmp_path / "notes.txt").write_text("mine")

    with pytest.raises(OutputError, match="exists"):
        write_records(tmp_path, [make_record([NEVER])])
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_folder_without_records_is_refused(tmp_path):
    """Neither a missing path nor another zarr group is taken for records."""
    zarr.open_group(tmp_path / "other.zarr", mode="w")

    with pytest.raises(OutputError, match="holds no records"):
        read_records(tmp_path / "nothing.zarr")
    with pytest.raises(OutputError, match="version None, expected 3"):
        read_records(tmp_path / "other.zarr")


def test_all_records_together_are_bounded(tmp_path, monkeypatch):
    """Layers that compress well are refused in total, before the memory is taken."""
    many = [make_record([NEVER] * 20_000) for _ in range(5)]  # 80 kB each, 30 bytes on disk
    write_records(tmp_path / "records.zarr", many)
    monkeypatch.setattr(records, "_TOTAL", 100_000)
    assert len(read_records(tmp_path / "records.zarr")) == 5
    monkeypatch.setattr(records, "_PER_CHUNK", 1000)

    with pytest.raises(OutputError, match=r"damaged: ValueError: records have \d+ bytes, at most"):
        read_records(tmp_path / "records.zarr")


def test_records_of_real_policies_are_far_below_the_bound(tmp_path, monkeypatch):
    """Those of evicting policies are read on the strength of their bytes alone."""
    trace = random_trace(n=600, prompt_len=300)
    names = "streaming_llm", "tova", "snapkv", "ams"
    replayed = [kvsim.replay(trace, kvsim.policy(name), 64, interval=64) for name in names]
    write_records(tmp_path / "records.zarr", replayed)
    monkeypatch.setattr(records, "_TOTAL", 0)
    monkeypatch.setattr(records, "_PER_CHUNK", 0)

    assert len(read_records(tmp_path / "records.zarr")) == 4
