"""Parquet of untrusted runs: what it decodes to is bounded, whatever its footer and pages say."""

import contextlib
import functools
import io
import random
import subprocess

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from pyarrow import parquet

from kvsim.analysis import parquet as decoder
from kvsim.analysis.parquet import decode_table, encode_table
from kvsim.analysis.table import COLUMNS, in_order

LARGE = 200_000_000


def written(table, **options):
    """Return a table as Parquet without statistics, which repeat values in the footer."""
    data = io.BytesIO()
    table.write_parquet(data, statistics=False, **options)
    return data.getvalue()


def results(rows=100, **columns):
    """Return a Table with random values, or other columns."""
    values = np.random.default_rng(0).random(rows)
    table = pl.DataFrame({"trace": ["a"] * rows, "layer": np.arange(rows) // 9, "value": values})
    return in_order([table.with_columns(**columns)])


def varint(number, length=0):
    """Return a number in Thrift's compact protocol, padded to a length."""
    data = bytearray()
    number *= 2  # zigzag
    while number > 127 or len(data) < length - 1:
        data.append(number & 127 | 128)
        number >>= 7
    return bytes([*data, number])


def footer(data):
    """Return where the footer of Parquet begins."""
    return len(data) - 8 - int.from_bytes(data[-8:-4], "little")


def lying(data, number, claim):
    """Return data in which a number is replaced by another wherever it stands."""
    stored = varint(number)
    assert stored in data
    return data.replace(stored, varint(claim, len(stored)))


def arrow(table, **options):
    """Return a table as another library writes it."""
    data = io.BytesIO()
    parquet.write_table(table, data, compression="zstd", write_statistics=False, **options)
    return data.getvalue()


def long_text():
    """One value of 200 MB in a file of 20 kB."""
    return written(pl.DataFrame({"params": ["a" * LARGE]}))


def lying_totals():
    """The same, with a footer that says nothing of it; pages have their true size."""
    data = forged(long_text)
    start = footer(data)
    total = next(n for n in range(LARGE, LARGE + 200) if varint(n) in data[start:])
    return data[:start] + lying(data[start:], total, 100)


def lying_pages():
    """The same, with pages that decompress to more than their headers say."""
    data = forged(long_text)
    return lying(data[: footer(data)], LARGE + 4, 1000) + data[footer(data) :]


def many_groups():
    """Two hundred groups of rows with 1 MB each."""
    return written(pl.DataFrame({"params": ["a" * 1_000_000] * 200}), row_group_size=1)


def shared_prefixes():
    """Values of 10 kB that share their beginning, which is stored once."""
    table = pl.DataFrame({"params": ["a" * 10_000 + f"{n:06}" for n in range(20_000)]})
    encoding = {"column_encoding": {"params": "DELTA_BYTE_ARRAY"}}
    return arrow(table.to_arrow(), use_dictionary=False, **encoding)


def second_version():
    """Pages of the second version, of which kvsim writes none."""
    return arrow(results().to_arrow(), data_page_version="2.0")


def fixed_length():
    """Values of a length that is stored once."""
    column = pa.array([bytes(10_000)] * 20_000, pa.binary(10_000))
    return arrow(pa.table({"params": column}))


def lists():
    """A row of many equal elements."""
    return written(pl.DataFrame({"params": [np.zeros(25_000_000, np.int64)]}))


def many_rows():
    """Equal rows of 20 columns; a Table of two million takes 600 MB."""
    return written(results(2_000_000, layer=pl.lit(0), value=pl.lit(0.0)))


def other_codec():
    """A codec that writes more than it is asked for is none that kvsim uses."""
    return written(results(), compression="gzip")


def snappy_length():
    """A page of snappy that says of itself that it has a gigabyte."""
    data = bytearray(written(results(), compression="snappy"))
    column = decoder._Thrift(data, footer(data)).struct(decoder._FILE)[4][0][1][0][3]
    reader = decoder._Thrift(data, column.get(11, column[9]))
    reader.struct(decoder._PAGE)
    data[reader.at : reader.at + 5] = bytes([255, 255, 255, 255, 3])
    return bytes(data)


def fewer_values():
    """A footer with more rows than pages have values."""
    data = written(results(777))
    return data[: footer(data)] + lying(data[footer(data) :], 777, 8000)


def long_footer():
    """A footer of 2 MB, which would take far more as Python's objects."""
    return written(results(), metadata={"a": "b" * 2_000_000})


FORGERS = [
    *(long_text, lying_totals, lying_pages, many_groups, shared_prefixes, second_version, lists),
    *(fixed_length, many_rows, other_codec, snappy_length, fewer_values, long_footer),
]


@functools.cache
def forged(forger):
    """Return what a forger writes, once."""
    return forger()


@pytest.mark.parametrize("forger", FORGERS)
def test_forged_tables_are_refused(forger):
    """Whatever decodes to more than its size allows, or is not what polars writes for a Table."""
    with pytest.raises(ValueError, match=r"\w"):
        decode_table(forged(forger))


MEASURE = """
import sys
from pathlib import Path
from kvsim.analysis.parquet import decode_table

def peak():
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])

decode_table(Path("honest").read_bytes())
before = peak()
for name in sys.argv[1:]:
    try:
        decode_table(Path(name).read_bytes())
    except ValueError:
        pass
    else:
        raise SystemExit(f"{name} was decoded")
print(peak() - before)
"""


@pytest.mark.linux
def test_forged_tables_take_no_memory(tmp_path, warm_python):
    """A process that opens them all grows by less than any of them decodes to."""
    (tmp_path / "honest").write_bytes(encode_table(results()))
    for forger in FORGERS:
        (tmp_path / forger.__name__).write_bytes(forged(forger))
        assert len(forged(forger)) < 3_000_000
    command = [warm_python, "-c", MEASURE, *(forger.__name__ for forger in FORGERS)]

    done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)

    assert int(done.stdout) < 60_000  # KiB


@pytest.mark.linux
def test_the_largest_table_that_is_decoded_takes_bounded_memory(tmp_path, warm_python):
    """A file at both bounds, of 250,000 rows and 16 MB in pages, stays below 150 MB."""
    data = written(results(250_000, params=pl.lit("a" * 200)))
    assert len(data) < 3_000_000
    (tmp_path / "largest").write_bytes(data)
    (tmp_path / "honest").write_bytes(encode_table(results()))
    script = MEASURE.replace('raise SystemExit(f"{name} was decoded")', "pass")

    command = [warm_python, "-c", script, "largest"]
    done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)

    assert int(done.stdout) < 150_000


@pytest.mark.parametrize("rows", [0, 1, 100, 300_000])
@pytest.mark.parametrize("compression", ["zstd", "snappy", "uncompressed"])
def test_tables_of_any_size_are_decoded(rows, compression):
    """Tables as kvsim and its earlier versions write them, with several groups of rows."""
    table = results(rows)

    assert decode_table(written(table, compression=compression)).equals(table)
    assert decode_table(encode_table(table)).equals(table)


def test_equal_rows_are_stored_so_that_they_are_decoded():
    """A million rows of one value compress beyond the bound, so they are not compressed."""
    table = results(1_000_000, value=pl.lit(0.0), layer=pl.lit(1))
    with pytest.raises(ValueError, match=r"1000000 rows in \d+ bytes, at most \d+ fit"):
        decode_table(written(table))

    assert decode_table(encode_table(table)).equals(table)


def test_every_column_of_a_table_is_decoded():
    """All types of columns, with and without nulls."""
    row = dict.fromkeys(COLUMNS) | {"value": 1.0, "fidelity": "open", "prefill": True}
    table = pl.DataFrame([row, {**row, "policy": "ams", "layer": 3, "chance": 0.5}], COLUMNS)

    assert decode_table(encode_table(table)).equals(table)


def test_sizes_are_those_of_another_reader():
    """Rows and bytes of pages are those in the footer that pyarrow reads, less page headers."""
    data = written(results(300_000))
    metadata = parquet.read_metadata(io.BytesIO(data))
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    columns = [group.column(n) for group in groups for n in range(metadata.num_columns)]

    rows, size = decoder._declared(data)

    assert rows == metadata.num_rows
    total = sum(column.total_uncompressed_size for column in columns)
    assert total - 200 * len(columns) < size < total


def test_damaged_tables_end_in_one_kind_of_error():
    """Any byte of footer and pages may be changed."""
    data = encode_table(results())
    draw = random.Random(0)  # noqa: S311  no secret
    for _ in range(2000):
        changed = bytearray(data)
        for _ in range(draw.randint(1, 3)):
            changed[draw.randrange(len(data))] = draw.randrange(256)
        with contextlib.suppress(ValueError):
            decode_table(bytes(changed[: draw.choice([len(data), draw.randrange(len(data))])]))
