"""Records: what rows see, and the stored form."""

import numpy as np
import pytest
import torch
import zarr

import kvsim
from kvsim.core.record import Record, read_records, write_records
from kvsim.errors import OutputError
from kvsim.schema import NEVER


def make_record(evicted_at, **given):
    """A Record of one layer and head."""
    fields = {"policy": "tova", "params": {}, "budget": 2, "interval": 1, "prefill": True}
    array = np.asarray(evicted_at, dtype=np.int32).reshape(1, 1, -1)
    return Record(array, prompt_len=2, layers=(0,), **{**fields, **given})


def test_a_row_sees_a_position_from_its_own_row_to_its_last():
    """Row r sees p iff p <= r <= evicted_at[p]; retained is what the next row finds."""
    record = make_record([2, NEVER, 3, NEVER])

    assert record.events == [2, 3]
    assert record.kept(2)[0, 0].tolist() == [True, True, True, False]
    assert record.retained(2)[0, 0].tolist() == [False, True, True, False]
    assert record.kept(3)[0, 0].tolist() == [False, True, True, True]
    assert record.retained(3)[0, 0].tolist() == [False, True, False, True]


@pytest.mark.parametrize("row", [-1, 4])
def test_a_row_outside_the_trace_is_refused(row):
    """The message names the rows that there are."""
    record = make_record([NEVER] * 4)

    for ask in (record.kept, record.retained):
        with pytest.raises(IndexError, match=r"expected 0\.\.3"):
            ask(row)


def test_records_come_back_from_disk_as_they_were(tmp_path):
    """Every field except the internals, bit for bit."""
    torch.manual_seed(0)
    trace = kvsim.Trace.from_arrays(
        torch.randn(2, 4, 30, 8),
        torch.randn(2, 2, 30, 8),
        torch.randn(2, 2, 30, 8),
        prompt_len=9,
        rope=kvsim.Rope.default(8),
        name="somewhere",
    )
    records = [
        kvsim.replay(trace, kvsim.policy("snapkv@original", window=3), budget=5),
        kvsim.replay(trace, kvsim.policy("streaming_llm@original"), budget=6, layers=[1]),
    ]

    write_records(tmp_path / "records.zarr", records)
    back = read_records(tmp_path / "records.zarr")

    for expected, found in zip(records, back, strict=True):
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
    with pytest.raises(OutputError, match="version None; expected 1"):
        read_records(tmp_path / "other.zarr")
