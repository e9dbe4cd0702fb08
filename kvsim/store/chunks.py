"""Chunks: values encoded, and stored bytes checked, decoded and put together.

Decoding is done here and not by zarr, so that the bytes of a stranger make nothing that is larger
than the chunk that the format says is there.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import google_crc32c
import numcodecs.blosc
import numcodecs.zstd
import numpy as np
from numcodecs.vlen import VLenUTF8
from numpy.typing import NDArray

from kvsim.errors import TraceError
from kvsim.store.documents import said
from kvsim.store.layout import COMPRESSOR, LEVEL
from kvsim.store.metadata import StoredArray
from kvsim.store.place import Place, check_limit

# As zarr sets it, too: threads put the blocks of a frame in the order in which they end, so that
# the same values would be other bytes every time.
numcodecs.blosc.use_threads = False

Index = tuple[int, ...]
Values = NDArray[Any]


def check_chunks(array: StoredArray, sizes: Mapping[str, int], where: str) -> None:
    """Raise TraceError where a chunk of `array` is missing among the files or far too large.

    What is done grows with the files that are there, not with what the metadata claims.
    """
    prefix = f"{array.name}/c/"
    found = [key for key in sizes if key.startswith(prefix) and _in_grid(key, prefix, array.grid)]
    if len(found) != array.nchunks:
        known = set(found)
        missing = next(key for key in map(array.key, array.indices()) if key not in known)
        raise TraceError(
            f"{where}: {array.name} has {len(found)} of {array.nchunks} chunks, the first missing "
            f"is {missing.removeprefix(array.name + '/')}, expected all; "
            "copy the trace again or record it again"
        )
    for key in found:
        check_limit(where, key, sizes[key], array.encoded)


def _in_grid(key: str, prefix: str, grid: Index) -> bool:
    """Whether a file is a chunk of an array with this grid."""
    index = key.removeprefix(prefix).split("/")
    return len(index) == len(grid) and all(map(_below, index, grid))


def _below(text: str, n: int) -> bool:
    """Whether a text is a number of 0 to n - 1 as a key spells it; no larger one is made of it."""
    digits = text.isascii() and text.isdecimal() and len(text) <= len(str(n))
    return digits and int(text) < n and str(int(text)) == text


def read_part(array: StoredArray, part: Sequence[slice], place: Place, where: str) -> Values:
    """Part of an array in its stored dtype, from the chunks that it touches.

    part: a slice of step 1 for each leading axis; the axes after them are read whole.

    Raises:
        TraceError: a chunk is missing or damaged.
    """
    slices = [*part, *[slice(None)] * (len(array.shape) - len(part))]
    wanted = [range(n)[one] for n, one in zip(array.shape, slices, strict=True)]
    out = np.empty([len(one) for one in wanted], array.dtype)
    if not out.size:
        return out
    touched = itertools.product(
        *(
            range(one.start // size, (one.stop - 1) // size + 1)
            for one, size in zip(wanted, array.chunks, strict=True)
        )
    )

    def copy(index: Index) -> None:
        values = read_chunk(array, index, place, where)
        begin = [at * size for at, size in zip(index, array.chunks, strict=True)]
        low = [max(one.start, first) for one, first in zip(wanted, begin, strict=True)]
        high = [
            min(one.stop, first + size)
            for one, first, size in zip(wanted, begin, array.chunks, strict=True)
        ]
        source = tuple(map(slice, np.subtract(low, begin), np.subtract(high, begin)))
        start = [one.start for one in wanted]
        out[tuple(map(slice, np.subtract(low, start), np.subtract(high, start)))] = values[source]

    if place.readers == 1 or out.nbytes < place.few_bytes:
        for index in touched:
            copy(index)
        return out
    with ThreadPoolExecutor(place.readers) as pool:
        for _ in pool.map(copy, touched):
            pass
    return out


def read_chunk(array: StoredArray, index: Index, place: Place, where: str) -> Values:
    """One decoded chunk.

    Raises:
        TraceError: it is missing or damaged.
    """
    body = check_chunk(array, index, place, where)
    try:
        return _decode(array, body)
    except (ValueError, RuntimeError, zlib.error) as error:  # what decoders say of damage
        raise _damaged(array, index, where, said(error)) from error


def check_chunk(array: StoredArray, index: Sequence[int], place: Place, where: str) -> bytes:
    """A chunk before it is decoded, without the checksum that it fits.

    Raises:
        TraceError: it is missing or damaged.
    """
    key = array.key(index)
    try:
        data = place.read(key, array.encoded)
    except FileNotFoundError as error:
        raise TraceError(
            f"{where}: chunk {key.partition('/')[2]} of {array.name} is missing, expected all; "
            "copy the trace again or record it again"
        ) from error
    body = data[:-4]
    if len(data) < 4 or google_crc32c.value(body) != int.from_bytes(data[-4:], "little"):
        raise _damaged(array, index, where, "its checksum is another")
    return body


def _damaged(array: StoredArray, index: Sequence[int], where: str, reason: str) -> TraceError:
    short = array.key(index).partition("/")[2]
    return TraceError(
        f"{where}: a chunk of {array.name} is damaged ({short}: {reason}), expected data "
        "that its checksum fits; copy the trace again or record it again"
    )


def encode_chunk(array: StoredArray, values: Values) -> tuple[bytes, bytes]:
    """A chunk as kvsim stores it, in two parts: compressed values, and their checksum.

    values: those of the chunk, fewer along an axis that ends in it.
    """
    if array.dtype.hasobject:
        data = VLenUTF8().encode(values)
        size = 1
    else:
        data = np.ascontiguousarray(values, array.dtype)
        size = array.dtype.itemsize
        if data.shape != array.chunks:
            data = np.full(array.chunks, np.nan if array.dtype.kind == "f" else -1, array.dtype)
            data[tuple(map(slice, values.shape))] = values
    shuffle = numcodecs.blosc.BITSHUFFLE
    name = COMPRESSOR.encode("ascii")
    body: bytes = numcodecs.blosc.compress(data, name, LEVEL, shuffle, 0, size)
    return body, google_crc32c.value(body).to_bytes(4, "little")


def _decode(array: StoredArray, body: bytes) -> Values:
    """The values of a stored chunk.

    Raises:
        ValueError, RuntimeError, zlib.error: it is not what a writer of such an array writes.
    """
    text = array.dtype.hasobject
    raw = _decompress(array.compressor, body, array.decoded)
    if len(raw) > array.decoded or (len(raw) < array.decoded and not text):
        raise ValueError(f"{len(raw)} bytes, expected {array.decoded}")
    if not text:
        return np.frombuffer(raw, array.dtype).reshape(array.chunks)
    # the decoder makes room for as many texts as the first number says
    if len(raw) < 4 or int.from_bytes(raw[:4], "little") != array.shape[0]:
        raise ValueError("another number of texts than tokens")
    values: Values = VLenUTF8().decode(raw)
    return values


def _decompress(compressor: str | None, body: bytes, limit: int) -> bytes | Values:
    """The bytes behind a compressor; room for more than `limit` + 1 is never made."""
    if compressor is None:
        return body
    if compressor == "gzip":
        unpacker = zlib.decompressobj(wbits=31)
        raw = unpacker.decompress(body, limit + 1)
        if not unpacker.eof:
            raise ValueError("it ends too early, or has too many bytes")
        return raw
    size = _blosc_size(body) if compressor == "blosc" else _zstd_size(body)
    if size > limit:
        raise ValueError(f"{size} bytes, expected {limit}")
    room = np.empty(size, np.uint8)
    (numcodecs.blosc if compressor == "blosc" else numcodecs.zstd).decompress(body, room)
    return room


def _blosc_size(body: bytes) -> int:
    """The number of bytes that a blosc frame says it has."""
    if len(body) < 16 or int.from_bytes(body[12:16], "little") != len(body):
        raise ValueError("no whole blosc frame")
    return int.from_bytes(body[4:8], "little")


def _zstd_size(body: bytes) -> int:
    """The number of bytes that a zstd frame says it has (RFC 8878, 3.1.1.1); it has to."""
    if len(body) < 18 or body[:4] != b"\x28\xb5\x2f\xfd":
        raise ValueError("no zstd frame")
    kind, single, dictionary = body[4] >> 6, body[4] >> 5 & 1, body[4] & 3
    at = 5 + (1 - single) + (0, 1, 2, 4)[dictionary]
    width = (single, 2, 4, 8)[kind]
    if not width:
        raise ValueError("a zstd frame that does not say its size")
    return int.from_bytes(body[at : at + width], "little") + (256 if width == 2 else 0)
