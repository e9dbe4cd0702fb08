"""Arrays as a `.npz` file: its size bounds the bytes that are decoded, as NumPy's own does not."""

from __future__ import annotations

import io
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


def encode_arrays(arrays: Mapping[str, Any]) -> bytes:
    """Return arrays as a `.npz` file that `decode_arrays` reads."""
    for save in (np.savez_compressed, np.savez):  # long runs of equal values are not compressed
        data = io.BytesIO()
        save(data, **arrays)
        if _fits(zipfile.ZipFile(data), data.getvalue()):
            break
    return data.getvalue()


def decode_arrays(data: bytes) -> dict[str, NDArray[Any]]:
    """Return the arrays of a `.npz` file by name; ValueError for damage, or far too many bytes."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if not _fits(archive, data):
                raise ValueError(f"its arrays are far larger than its {len(data)} bytes")
            names = archive.namelist()
            return {x.removesuffix(".npy"): decode_array(archive.read(x), x) for x in names}
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise ValueError(str(error)) from error


def _fits(archive: zipfile.ZipFile, data: bytes) -> bool:
    return sum(each.file_size for each in archive.infolist()) <= _FREE + _PER_BYTE * len(data)


def decode_array(content: bytes, name: str) -> NDArray[Any]:
    """Return the array of a `.npy` file; ValueError, with `name`, for others."""
    try:
        array: NDArray[Any] = np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
    except (ValueError, MemoryError, OverflowError, tokenize.TokenError) as error:
        raise ValueError(f"{name} is no array of numbers ({error_line(error)})") from error
    return array
