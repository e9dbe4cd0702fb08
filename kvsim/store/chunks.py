"""Chunks of untrusted traces: bytes are checked, decoded and assembled, values are encoded.

Decoding is done here and not by zarr, so that no chunk makes the process allocate more than the
chunk of its array has (docs/decisions.md, section Store).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numcodecs.blosc
import numpy as np
from numcodecs.vlen import VLenUTF8
from numpy.typing import NDArray

from kvsim.core.lazy import Tensor, torch
from kvsim.errors import TraceError, error_line
from kvsim.store.layout import COMPRESSOR, LEVEL, NAN, StoredArray
from kvsim.store.place import Place, check_limit, damaged
from kvsim.store.shards import crc32c, find_bounds

# As zarr does: blosc's threads order the blocks of a frame by when they finish, so the same values
# would have other bytes every time.
numcodecs.blosc.use_threads = False

Index = tuple[int, ...]
Values = NDArray[Any]


def check_chunks(array: StoredArray, sizes: Mapping[str, int], where: str) -> None:
    """Raise TraceError if a file of `array` is missing or far too large, whatever it claims."""
    for key in array.files():
        if key not in sizes:  # reached after as many keys as there are files
            count = sum(file.startswith(f"{array.name}/c/") for file in sizes)
            expected = array.shape[0] if array.sharded else array.nchunks
            raise damaged(
                f"{where}: {array.name} has {count} of {expected} chunks, the first missing is "
                f"{key.partition('/')[2]}, expected all"
            )
        check_limit(where, key, sizes[key], array.largest_file)


def read_part(array: StoredArray, part: Sequence[slice], place: Place) -> Values:
    """Return part of an array in its stored dtype, reading only the chunks that it touches.

    part: a slice of step 1 for each leading axis; the axes after them are read whole. Raises
    TraceError if a chunk is missing or damaged.
    """
    slices = [*part, *[slice(None)] * (len(array.shape) - len(part))]
    ranges = [range(n)[part] for n, part in zip(array.shape, slices, strict=True)]
    out = np.empty([len(span) for span in ranges], array.dtype)
    if not out.size:
        return out
    chunks = np.array(array.chunks)
    low, high = (np.array(ends) for ends in zip(*((r.start, r.stop) for r in ranges), strict=True))
    touched = itertools.product(*map(range, low // chunks, -(-high // chunks)))

    def copy(index: Index) -> None:
        values = read_chunk(array, index, place)
        begin = index * chunks
        first, end = np.maximum(low, begin), np.minimum(high, begin + chunks)
        out[tuple(map(slice, first - low, end - low))] = values[
            tuple(map(slice, first - begin, end - begin))
        ]

    if place.readers == 1 or out.nbytes < place.few_bytes:
        for index in touched:
            copy(index)
        return out
    with ThreadPoolExecutor(place.readers) as pool:
        if array.sharded:  # each index once, before all its chunks would read it together
            keys = [array.key([layer, *low[1:]]) for layer in range(low[0], high[0])]
            with suppress(FileNotFoundError):  # which reading its chunks names
                for _ in pool.map(lambda key: find_bounds(array, key, place), keys):
                    pass
        for _ in pool.map(copy, touched):
            pass
    return out


def as_numbers(array: StoredArray, values: Values) -> Tensor:
    """Return stored values as a tensor of the numbers that they are."""
    return torch.from_numpy(values).view(getattr(torch, array.number))


def read_chunk(array: StoredArray, index: Index, place: Place) -> Values:
    """Return one decoded chunk; raise as `check_chunk`."""
    body = check_chunk(array, index, place)
    try:
        return _decode(array, body)
    except (ValueError, RuntimeError) as error:  # what decoders raise for damaged data
        raise _unusable(array, index, place, f"is damaged ({error_line(error)})") from error


def check_chunk(array: StoredArray, index: Sequence[int], place: Place) -> bytes:
    """Return a compressed chunk without its checksum; TraceError if missing, damaged or another."""
    data = _stored(array, index, place)
    body = data[:-4]
    if len(data) < 4 or crc32c(body) != data[-4:]:
        raise _unusable(array, index, place, "is damaged (its checksum is wrong)")
    if array.crc(index) not in (None, data[-4:]):
        reason = "is not the recorded one, or the trace was replaced since it was opened"
        raise _unusable(array, index, place, reason)
    return body


def _stored(array: StoredArray, index: Sequence[int], place: Place) -> bytes:
    """Return a chunk as it is stored: a file, or part of one; raise as `check_chunk`."""
    key = array.key(index)
    try:
        if not array.sharded:
            return place.read(key, array.encoded)
        bounds = find_bounds(array, key, place)
        rank = array.rank(index) % array.per_shard
        return place.part(key, int(bounds[rank]), int(bounds[rank + 1] - bounds[rank]))[0]
    except FileNotFoundError as error:
        raise _unusable(array, index, place, "is missing") from error


def read_crc(array: StoredArray, index: Sequence[int], place: Place) -> bytes:
    """Return the CRC-32C with which a chunk ends; raise as `check_chunk`."""
    return crc32c(check_chunk(array, index, place))


def _unusable(array: StoredArray, index: Sequence[int], place: Place, what: str) -> TraceError:
    return TraceError(
        f"{place.path}: chunk c/{'/'.join(map(str, index))} of {array.name} {what}, "
        "expected the recorded one; open the trace again, copy it again or record it again"
    )


def encode_chunk(array: StoredArray, values: Values) -> tuple[bytes, bytes]:
    """Return a chunk as kvsim stores it, in two parts: compressed values, and their checksum.

    values: those of the chunk, fewer along an axis that ends within it.
    """
    if array.dtype.hasobject:
        data = VLenUTF8().encode(values)
        size = 1
    else:
        data = np.ascontiguousarray(values, array.dtype)
        size = array.dtype.itemsize
        if data.shape != array.chunks:
            fill = {"f": np.nan, "u": NAN}.get(array.dtype.kind, -1)
            data = np.full(array.chunks, fill, array.dtype)
            data[tuple(map(slice, values.shape))] = values
    shuffle = numcodecs.blosc.BITSHUFFLE
    name = COMPRESSOR.encode("ascii")
    body: bytes = numcodecs.blosc.compress(data, name, LEVEL, shuffle, 0, size)
    return body, crc32c(body)


def _decode(array: StoredArray, body: bytes) -> Values:
    """Decode a chunk, allocating at most what it may have; ValueError, RuntimeError if damaged."""
    if len(body) < 16 or int.from_bytes(body[12:16], "little") != len(body):
        raise ValueError("not a whole blosc frame")
    size = int.from_bytes(body[4:8], "little")
    text = array.dtype.hasobject
    if size > array.decoded or (size < array.decoded and not text):
        raise ValueError(f"{size} bytes, expected {array.decoded}")
    raw = np.empty(size, np.uint8)
    numcodecs.blosc.decompress(body, raw)
    if not text:
        return raw.view(array.dtype).reshape(array.chunks)
    # the decoder allocates as many texts as the first number says
    if size < 4 or int.from_bytes(raw[:4], "little") != array.shape[0]:
        raise ValueError("not as many texts as tokens")
    values: Values = VLenUTF8().decode(raw)
    return values
