"""Shards: the chunks of a layer of an array in one file, and an index of them at its end.

The index is that of zarr's codec `sharding_indexed`, within docs/trace-format.md, section 2: chunks
follow each other in order and without gaps, so an index is no more than where each of them ends.
"""

from __future__ import annotations

import google_crc32c
import numpy as np

from kvsim.store.layout import Bounds, StoredArray
from kvsim.store.place import Place, damaged


def crc32c(body: bytes) -> bytes:
    """Return the CRC-32C of bytes as it is stored."""
    crc: int = google_crc32c.value(body)
    return crc.to_bytes(4, "little")


def encode_index(bounds: Bounds) -> bytes:
    """Return the index of chunks with these bounds: offset and size of each, and a CRC-32C."""
    body = np.stack([bounds[:-1], np.diff(bounds)], 1).astype("<u8").tobytes()
    return body + crc32c(body)


def find_bounds(array: StoredArray, key: str, place: Place) -> Bounds:
    """Return where each chunk of a shard begins, and where the last one ends; read it once.

    Raises FileNotFoundError, and TraceError for an index that is damaged, or that has chunks which
    overlap, leave a gap, are too large or lie outside the file.
    """
    if key in array.bounds:
        return array.bounds[key]
    size = array.index_size
    data, total = place.part(key, -size, size)

    def require(what: str, expected: str, *, valid: bool) -> None:
        if not valid:
            raise damaged(f"{place.path}: the index of {key!r} {what}, expected {expected}")

    body = data[:-4]
    valid = len(data) == size and crc32c(body) == data[-4:]
    require("is damaged", "its checksum at the end", valid=valid)
    starts, sizes = np.frombuffer(body, "<u8").reshape(-1, 2).T
    largest, limit = int(sizes.max()), array.encoded
    require(f"has a chunk of {largest} bytes", f"at most {limit}", valid=largest <= limit)
    bounds = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    valid = bool((starts == bounds[:-1].astype(np.uint64)).all())
    require("has overlaps or gaps", "chunks in order, one behind the other", valid=valid)
    expected = int(bounds[-1]) + size
    require(f"is of {expected} bytes", f"the {total} of the file", valid=expected == total)
    array.bounds[key] = bounds
    return bounds
