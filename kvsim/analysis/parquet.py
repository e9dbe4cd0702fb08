"""Tables as Parquet: the size of an untrusted file bounds the bytes that are decoded.

A page of a few bytes may decompress to 2 GiB, and neither polars nor the totals in the footer bound
it. So headers of pages, which the decoder follows, are read first (parquet.thrift of
https://github.com/apache/parquet-format, in Thrift's compact protocol).
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Collection
from typing import Any

import polars as pl

from kvsim.analysis.table import TYPES

#: Most bytes of decompressed pages, and most rows: a number for each byte of the file (real ones
#: have 3, and 1/4), and one for files of any size.
_PER_BYTE, _PAGES = 64, 16 << 20
_ROWS_PER_BYTE, _ROWS = 4, 250_000

#: Most bytes of the footer; 3 kB describe a row group of up to 262,144 rows.
_FOOTER = 1 << 20

_MAGIC = b"PAR1"

#: Prefix of a SHA-256.
_SEAL = b"kvsim sha256 "

# Of enums: a column's physical type, codec and encodings of a page. Others are not what polars,
# pandas and pyarrow write by default, and some decode to more than rows and bytes of pages say.
_FLAT = (0, 1, 2, 4, 5, 6)  # all but INT96 and FIXED_LEN_BYTE_ARRAY
_REQUIRED, _OPTIONAL = 0, 1
_UNCOMPRESSED, _SNAPPY, _ZSTD = 0, 1, 6
_PLAIN, _PLAIN_DICTIONARY, _RLE, _RLE_DICTIONARY = 0, 2, 3, 8
_DATA_PAGE, _DICTIONARY_PAGE = 0, 2

# Structures: kinds of fields by their numbers. A decoder reads a field as the kind that it expects
# at its number, so a file that declares another is refused.
_STATISTICS: dict[int, Any] = dict.fromkeys((1, 2, 5, 6), bytes)
_STATISTICS |= {3: int, 4: int, 7: bool, 8: bool}
_KEY_VALUE = {1: bytes, 2: bytes}
_COLUMN: dict[int, Any] = dict.fromkeys((1, 4, 5, 6, 7, 9, 10, 11, 14, 15), int)
_COLUMN |= {2: [int], 3: [bytes], 8: [_KEY_VALUE], 12: _STATISTICS, 13: [{1: int, 2: int, 3: int}]}
_CHUNK = {1: bytes, 2: int, 3: _COLUMN, 4: int, 5: int, 6: int, 7: int}
_GROUP = {1: [_CHUNK], 2: int, 3: int, 4: [{1: int, 2: bool, 3: bool}], 5: int, 6: int, 7: int}
_ELEMENT: dict[int, Any] = {**dict.fromkeys((1, 2, 3, 5, 6, 7, 8, 9), int), 4: bytes, 10: {}}
_FILE = {1: int, 2: [_ELEMENT], 3: int, 4: [_GROUP], 5: [_KEY_VALUE], 6: bytes, 7: [{1: {}}]}
_DATA = {1: int, 2: int, 3: int, 4: int, 5: _STATISTICS}
_PAGE = {1: int, 2: int, 3: int, 4: int, 5: _DATA, 7: {1: int, 2: int, 3: bool}}


def encode_table(table: pl.DataFrame) -> bytes:
    """Return a Table as Parquet that `decode_table` reads."""
    data = io.BytesIO()
    table.write_parquet(data)
    try:
        _check_size(data.getvalue())
    except ValueError:  # compressed beyond the bounds: many rows of equal values
        data = io.BytesIO()
        table.write_parquet(data, compression="uncompressed")
    return data.getvalue()


def sealed(data: bytes) -> bytes:
    """Return Parquet with its SHA-256 between pages and footer, where readers do not look."""
    start = _footer(data)
    return data[:start] + _SEAL + hashlib.sha256(data).digest() + data[start:]


def check_seal(data: bytes) -> None:
    """Raise ValueError where Parquet has a SHA-256 and it is another; `sealed` writes it."""
    start = _footer(data)
    seal = start - len(_SEAL) - 32
    if data[seal : start - 32] == _SEAL:
        whole = hashlib.sha256(data[:seal] + data[start:]).digest()
        if whole != data[start - 32 : start]:
            raise ValueError("its SHA-256 is another")


def _footer(data: bytes) -> int:
    """Return where the footer begins, by its length."""
    return len(data) - 8 - int.from_bytes(data[-8:-4], "little")


def decode_table(data: bytes, names: Collection[str] = TYPES.keys()) -> pl.DataFrame:
    """Return the columns with some names, a Table's, that Parquet has; they may have other types.

    Raises ValueError for damaged data, and for more rows or bytes than files of this size have.
    """
    _check_size(data)
    try:
        schema = pl.read_parquet_schema(io.BytesIO(data))
        columns = [name for name in names if name in schema]
        for name in columns:
            if schema[name].is_nested() or schema[name] == pl.Binary:
                raise ValueError(f"column {name} has type {schema[name]}")
        return pl.read_parquet(io.BytesIO(data), columns=columns)
    except (OSError, pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise ValueError(str(error)) from error


def _check_size(data: bytes) -> None:
    """Raise ValueError unless rows and pages are bounded by the size of the file."""
    try:
        rows, size = _declared(data)
    except (IndexError, KeyError, RecursionError) as error:
        raise ValueError(f"its footer or pages are not whole ({type(error).__name__})") from error
    for count, name, limit in (
        (rows, "rows", _ROWS + _ROWS_PER_BYTE * len(data)),
        (size, "bytes of decompressed pages", _PAGES + _PER_BYTE * len(data)),
    ):
        if count > limit:
            raise ValueError(f"it has {count} {name} in {len(data)} bytes, at most {limit} fit")


def _declared(data: bytes) -> tuple[int, int]:
    """Return rows, and bytes of decompressed pages as their headers have them."""
    start = _footer(data)
    if data[-4:] != _MAGIC or start < len(_MAGIC) or len(data) - 8 - start > _FOOTER:
        raise ValueError("it has no footer of Parquet, or a longer one than any Table")
    footer = _Thrift(data, start).struct(_FILE)
    for element in footer[2][1:]:
        if element.get(1) not in _FLAT or element.get(3) not in (_REQUIRED, _OPTIONAL):
            raise ValueError("a column is nested or of fixed length")
    rows = size = 0
    for group in footer[4]:
        rows += group[3]
        for chunk in group[1]:
            values, more = _pages(data, start, chunk[3])
            size += more
            if values != group[3]:
                raise ValueError(f"a column has {values} values in {group[3]} rows")
    if rows != footer[3]:
        raise ValueError(f"it has {rows} rows, its footer says {footer[3]}")
    return rows, size


def _pages(data: bytes, stop: int, column: dict[int, Any]) -> tuple[int, int]:
    """Return values and bytes of the decompressed pages of a column in a row group."""
    position = column.get(11, column[9])
    end = position + column[7]
    if not len(_MAGIC) <= position <= column[9] <= end <= stop or 5 not in column:
        raise ValueError("a column lies outside the file")
    if column[4] not in (_UNCOMPRESSED, _SNAPPY, _ZSTD):
        raise ValueError(f"a column is compressed with codec {column[4]}")
    values = size = 0
    while position < end:
        reader = _Thrift(data, position)
        page = reader.struct(_PAGE)
        if page[1] == _DATA_PAGE:
            header = page[5]
            values += header[1]
        elif page[1] == _DICTIONARY_PAGE:
            header = page[7]
        else:
            raise ValueError(f"a page has type {page[1]}")
        if header[2] not in (_PLAIN, _PLAIN_DICTIONARY, _RLE, _RLE_DICTIONARY):
            raise ValueError(f"a page has encoding {header[2]}")
        if not all(0 <= number < 1 << 31 for number in (page[2], page[3], header[1])):
            raise ValueError("a page has a size that is negative or too large")
        size += page[2]
        position = reader.at + page[3]
    if position != end:
        raise ValueError("a page is longer than its column")
    return values, size


class _Thrift:
    """Reads values of Thrift's compact protocol from `at` on."""

    def __init__(self, data: bytes, at: int) -> None:
        self.data, self.at = data, at

    def struct(self, kinds: dict[int, Any]) -> dict[int, Any]:
        """Return the fields of a structure by number; fields of unknown numbers have any kind."""
        fields: dict[int, Any] = {}
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._signed()
            fields[number] = self._value(head & 15, kinds.get(number))
        return fields

    def _value(self, code: int, kind: Any) -> Any:
        """Return a value of a type `code`; kind: int, bytes, bool, [kind] or {number: kind}."""
        if code in (1, 2) and kind in (bool, None):
            return code == 1
        if code == 3 and kind is None:
            return self._byte()
        if code in (4, 5, 6) and kind in (int, None):
            return self._signed()
        if code == 8 and kind in (bytes, None):
            length = self._varint()
            self.at += length
            return self.data[self.at - length : self.at]
        if code == 9 and (kind is None or isinstance(kind, list)):
            head = self._byte()
            count = self._varint() if head >> 4 == 15 else head >> 4
            code = head & 15 if head & 15 > 2 else 3  # booleans of a list take a byte
            return [self._value(code, kind and kind[0]) for _ in range(count)]
        if code == 12 and (kind is None or isinstance(kind, dict)):
            return self.struct(kind or {})
        raise ValueError("its footer or pages have fields of other types")

    def _byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1]

    def _varint(self) -> int:
        value = shift = 0
        while shift < 64:
            byte = self._byte()
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value
        raise ValueError("a number has more than 64 bits")

    def _signed(self) -> int:
        value = self._varint()
        return value >> 1 ^ -(value & 1)
