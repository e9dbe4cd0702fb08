"""Tables as Parquet: what is written is read, and a file's size bounds its rows."""

import contextlib
import io
import random
import subprocess

import numpy as np
import polars as pl
import pytest

from kvsim.analysis.folder import decode_table, encode_table
from kvsim.analysis.table import COLUMNS, in_order


def written(table, **options):
    """Return a table as Parquet, as polars writes it."""
    data = io.BytesIO()
    table.write_parquet(data, **options)
    return data.getvalue()


def results(rows=100, **columns):
    """Return a Table with random values, or other columns."""
    values = np.random.default_rng(0).random(rows)
    table = pl.DataFrame({"trace": ["a"] * rows, "layer": np.arange(rows) // 9, "value": values})
    return in_order([table.with_columns(**columns)])


MEASURE = """
import sys
from pathlib import Path
from kvsim.analysis.folder import decode_table

def peak():
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])

decode_table(Path("honest").read_bytes())
before = peak()
try:
    decode_table(Path("large").read_bytes())
except ValueError:
    print(peak() - before)
"""


@pytest.mark.linux
def test_a_small_file_of_many_rows_takes_no_memory(tmp_path, warm_python):
    """Fifty million rows in some kilobytes are refused before any is read."""
    large = written(pl.select(value=pl.repeat(0.0, 50_000_000)))
    assert len(large) < 200_000
    (tmp_path / "large").write_bytes(large)
    (tmp_path / "honest").write_bytes(encode_table(results()))

    command = [warm_python, "-c", MEASURE]
    done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)

    assert int(done.stdout) < 60_000  # KiB


def test_every_column_of_a_table_is_decoded():
    """All types of columns, with and without nulls; other columns are left out."""
    row = dict.fromkeys(COLUMNS) | {"value": 1.0, "fidelity": "open", "prefill": True}
    table = pl.DataFrame([row, {**row, "policy": "ams", "layer": 3, "chance": 0.5}], COLUMNS)

    assert decode_table(encode_table(table.with_columns(other=1))).equals(table)


def test_equal_rows_are_stored_so_that_they_are_decoded():
    """Many rows of one value compress beyond the bound, so they are not compressed."""
    table = results(400_000, value=pl.lit(0.0), layer=pl.lit(1))
    with pytest.raises(ValueError, match=r"400000 rows in \d+ bytes, at most \d+ fit"):
        decode_table(written(table))

    assert decode_table(encode_table(table)).equals(table)


@pytest.mark.parametrize("value", [[1.0], {"a": 1}, b"1"])
def test_columns_of_other_kinds_are_refused(value):
    """No number, text or flag of a Table is nested or bytes."""
    with pytest.raises(ValueError, match="column value has type"):
        decode_table(written(pl.DataFrame({"value": [value]})))


def test_damaged_tables_end_in_one_kind_of_error():
    """Any byte of footer and pages may be changed."""
    data = encode_table(results())
    draw = random.Random(0)  # noqa: S311  no secret
    for _ in range(300):
        changed = bytearray(data)
        for _ in range(draw.randint(1, 3)):
            changed[draw.randrange(len(data))] = draw.randrange(256)
        with contextlib.suppress(ValueError):
            decode_table(bytes(changed[: draw.choice([len(data), draw.randrange(len(data))])]))
