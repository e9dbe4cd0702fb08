"""Arrays as a `.npz` file: its size bounds the bytes that are decoded, as NumPy's own does not."""

from __future__ import annotations

import io
import math
import tokenize
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.errors import error_line

#: Most bytes of arrays: a number for each byte of the file, and one for files of any size.
_PER_BYTE, _FREE = 64, 16 << 20

#: Errors of a damaged zip.
_UNREADABLE = zipfile.BadZipFile, zlib.error, EOFError

_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def encode_arrays(arrays: Mapping[str, Any]) -> bytes:
    """Return arrays as a `.npz` file that `decode_arrays` reads."""
    data = io.BytesIO()
    np.savez_compressed(data, **arrays)
    try:
        _check_size(zipfile.ZipFile(data), data.getvalue())
    except ValueError:  # compressed beyond the bounds: long runs of equal values
        data = io.BytesIO()
        np.savez(data, **arrays)
    return data.getvalue()


def decode_arrays(data: bytes) -> dict[str, NDArray[Any]]:
    """Return the arrays of a `.npz` file by name; ValueError for damage, or far too many bytes."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            _check_size(archive, data)
            return {x.filename.removesuffix(".npy"): _array(archive, x) for x in archive.infolist()}
    except (*_UNREADABLE, NotImplementedError, RuntimeError) as error:
        raise ValueError(str(error)) from error


def _check_size(archive: zipfile.ZipFile, data: bytes) -> None:
    size = sum(member.file_size for member in archive.infolist())
    if size > (limit := _FREE + _PER_BYTE * len(data)):
        raise ValueError(f"it has {size} bytes of arrays in {len(data)} bytes, at most {limit} fit")


def _array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> NDArray[Any]:
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{member.filename} is compressed by another method than deflate")
    with archive.open(member) as file:
        return decode_array(bytearray(file.read(member.file_size + 1)), member.filename)


def decode_array(content: bytes | bytearray, name: str) -> NDArray[Any]:
    """Return the array of a `.npy` file over its bytes; ValueError, with `name`, for others."""
    stream = io.BytesIO(content)
    try:
        shape, fortran, dtype = _HEADERS[np.lib.format.read_magic(stream)](stream)
        begin = stream.tell()
        if dtype.hasobject or math.prod(shape) * dtype.itemsize != len(content) - begin:
            raise ValueError(f"it is {dtype} {list(shape)} in {len(content)} bytes")  # noqa: TRY301  as NumPy's
        return np.ndarray(shape, dtype, content, begin, order="F" if fortran else "C")
    except (ValueError, TypeError, KeyError, SyntaxError, tokenize.TokenError) as error:
        raise ValueError(f"{name} is no array of numbers ({error_line(error)})") from error
