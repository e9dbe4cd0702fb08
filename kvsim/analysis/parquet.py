"""Tables as Parquet, which polars reads; the rows of an untrusted file are bounded by its size."""

from __future__ import annotations

import io
from collections.abc import Collection

import polars as pl

from kvsim.analysis.table import TYPES

#: Most rows: a number for each byte of the file (real ones have 1/4), and one for any size.
_ROWS_PER_BYTE, _ROWS = 4, 250_000


def encode_table(table: pl.DataFrame) -> bytes:
    """Return a table as Parquet that `decode_table` reads."""
    data = io.BytesIO()
    table.write_parquet(data)
    if table.height > _limit(data.getvalue()):  # many rows of equal values
        data = io.BytesIO()
        table.write_parquet(data, compression="uncompressed")
    return data.getvalue()


def decode_table(data: bytes, names: Collection[str] = TYPES.keys()) -> pl.DataFrame:
    """Return the columns with some names, a Table's, that Parquet has; they may have other types.

    Raises ValueError for damaged data, and for more rows than files of this size have.
    """
    try:
        table = pl.scan_parquet(io.BytesIO(data))
        schema = table.collect_schema()
        columns = [name for name in names if name in schema]
        for name in columns:
            if schema[name].is_nested() or schema[name] == pl.Binary:
                raise ValueError(f"column {name} has type {schema[name]}")
        rows = table.select(pl.len()).collect().item()
        if rows > _limit(data):
            raise ValueError(f"it has {rows} rows in {len(data)} bytes, at most {_limit(data)} fit")
        return table.select(columns).collect()
    except (OSError, pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise ValueError(str(error)) from error


def _limit(data: bytes) -> int:
    return _ROWS + _ROWS_PER_BYTE * len(data)
