"""Records on disk: whole, with named axes, and checked when they are read."""

from contextlib import suppress

import numpy as np
import pytest
import zarr

import kvsim
from damage import change_byte
from kvsim.errors import OutputError
from kvsim.schema import NEVER
from kvsim.store.records import read_records, write_records
from tests.core.test_record import make_record
from traces import random_trace


@pytest.fixture
def stored(tmp_path):
    """Records and the path of them."""
    trace = random_trace(n=30, prompt_len=9, size=1.0, name="somewhere")
    replayed = [
        kvsim.replay(trace, kvsim.policy("snapkv@original", window=3), budget=5),
        kvsim.replay(trace, kvsim.policy("streaming_llm@original"), budget=6, layers=[1]),
        kvsim.replay(trace, kvsim.policy("tova+quest"), budget=6),
    ]
    path = tmp_path / "records.zarr"
    write_records(path, replayed)
    return replayed, path


def same(found, expected):
    """Whether every field except the internals is equal, bit for bit."""
    names = set(vars(expected)) - {"evicted_at", "internals", "reads"}
    bits = [None if each.reads is None else each.reads.bits.tolist() for each in (found, expected)]
    return (
        np.array_equal(found.evicted_at, expected.evicted_at)
        and found.evicted_at.dtype == np.int32
        and bits[0] == bits[1]
        and all(getattr(found, name) == getattr(expected, name) for name in names)
    )


def test_records_come_back_from_disk_as_they_were(stored):
    """Every field; another program finds the axes by name."""
    replayed, path = stored

    assert len(read_records(path)) == 3
    assert all(map(same, read_records(path), replayed))
    array = zarr.open_group(path, mode="r")["0/evicted_at"]
    assert array.metadata.dimension_names == ("layer", "head", "pos")


def test_no_changed_byte_is_silent(stored):
    """A changed byte anywhere is an error of one line, or changes nothing that is read."""
    replayed, path = stored
    files = sorted(each for each in path.rglob("*") if each.is_file())
    rng = np.random.default_rng(0)
    for _ in range(40):
        file = rng.choice(files)
        before = file.read_bytes()
        change_byte(file, rng)
        with suppress(OutputError):
            assert all(map(same, read_records(path), replayed))
        file.write_bytes(before)


def test_records_are_not_written_over_anything(tmp_path):
    """What is there stays."""
    (tmp_path / "notes.txt").write_text("mine")

    with pytest.raises(OutputError, match="exists"):
        write_records(tmp_path, [make_record([NEVER])])


def test_a_folder_without_records_is_refused(tmp_path):
    """Neither a missing path nor another zarr group is taken for records."""
    zarr.open_group(tmp_path / "other.zarr", mode="w")

    for name in ("nothing.zarr", "other.zarr"):
        with pytest.raises(OutputError, match="holds no records"):
            read_records(tmp_path / name)
