"""Files of run folders as untrusted input: regular, of bounded size, and bound by their digests."""

from __future__ import annotations

import hashlib
import io
import json
import tokenize
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.core.digest import document_digest
from kvsim.errors import OutputError, error_line
from kvsim.files import DOCUMENT, read_input

#: Sizes and SHA-256 of files by their relative paths.
Digests = Mapping[str, Mapping[str, Any]]

#: Most values of a JSON object.
VALUES = 1 << 22

#: Most bytes of arrays: a number for each byte of the file, and one for files of any size.
_PER_BYTE, _FREE = 64, 16 << 20


def digests(folder: Path, *names: str) -> Digests:
    """Return size and SHA-256 of files of a folder."""
    return {name: _digest((folder / name).read_bytes()) for name in names}


def _digest(data: bytes) -> dict[str, Any]:
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def read_file(path: Path, limit: int, expected: Mapping[str, Any] | None = None) -> bytes:
    """Return the content of a file; a pipe or device does not block.

    expected: its entry among `digests`, if it is bound. Raises FileNotFoundError, and OutputError
    if it is no regular file, cannot be read, has more than `limit` bytes, or another digest.
    """
    try:
        data = read_input(path, limit)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(str(path)) from None
    except OSError as error:
        raise damaged(path, f"it cannot be read ({error.strerror or error})") from error
    if expected is not None and _digest(data) != expected:
        raise damaged(path, "its SHA-256 is another")
    return data


def damaged(
    path: Path, reason: str, expected: str = "a file of `kvsim replay` or `live`"
) -> OutputError:
    """Return the error of a damaged or changed file; reason: one clause."""
    line = " ".join(reason.split())[:200]
    return OutputError(
        f"{path} is damaged: {line}, expected {expected}; copy the run again or replay it again"
    )


def decode_document(data: bytes, limit: int = DOCUMENT) -> dict[str, Any]:
    """Return a JSON object; ValueError for a refused one, before or after decoding."""
    if len(data) > limit:
        raise ValueError(f"has more than {limit} bytes")
    # each value is preceded by one of these characters; text has some too
    if sum(map(data.count, (b",", b"[", b"{"))) > VALUES:
        raise ValueError(f"has more than {VALUES} values")
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not readable ({error_line(error)}), expected JSON") from error
    if not isinstance(document, dict):
        raise ValueError("is not a JSON object")  # noqa: TRY004  of the data
    return document


def read_document(path: Path, expected: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a JSON object from a file; raise as `read_file`, and OutputError for other content."""
    try:
        return decode_document(read_file(path, DOCUMENT, expected))
    except ValueError as error:
        raise damaged(path, str(error), "a JSON object") from error


def sealed(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON object with its own digest."""
    return {**document, "digest": document_digest(document)}


def unsealed(document: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return a `sealed` object without its digest; OutputError if the digest differs."""
    content = {name: value for name, value in document.items() if name != "digest"}
    if document.get("digest") != document_digest(content):
        raise damaged(path, "its digest is another")
    return content


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
