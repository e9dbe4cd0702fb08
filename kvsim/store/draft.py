"""Drafts: hidden folders with a trace that is being written.

Written one file at a time, and not by zarr, whose threads go on writing after an error
(docs/decisions.md, section Store). Shards grow chunk by chunk and get their index at the end.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.core.left_out import LeftOut
from kvsim.errors import TraceError
from kvsim.store.binding import sealed
from kvsim.store.chunks import Index, encode_chunk, read_part
from kvsim.store.layout import DIMENSIONS, StoredArray, array_document, parse_array
from kvsim.store.metadata import encode_document, left_out_of
from kvsim.store.place import Folder
from kvsim.store.shards import encode_index

_ROOT = "zarr.json"

#: Suffix of a file until it is whole.
PARTIAL = ".partial"


class Group:
    """A group in a folder to which nothing else writes.

    Each file is written under a temporary name and renamed, or a shard continued, in the calling
    thread: when a call has returned or raised, nothing is still being written. Methods that write
    raise OSError where the disk refuses, and those that read TraceError where a file is damaged or
    of no trace.

    attributes: of the group. arrays: by name. like: another trace; chunks with the bytes of its own
    are links to them.
    """

    def __init__(self, folder: Path, like: Path | None = None) -> None:
        self.folder, self.place = folder, Folder(folder)
        self.like = None if like is None else Folder(like)
        self.attributes: dict[str, Any] = {}
        self.arrays: dict[str, StoredArray] = {}
        self._documents: dict[str, dict[str, Any]] = {}
        self._crcs: dict[tuple[str, Index], bytes] = {}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each array."""
        return {name: array.shape for name, array in self.arrays.items()}

    @property
    def version(self) -> Any:
        """The version of the format, None before it is set."""
        return self.attributes.get("kvsim_format")

    @property
    def left_out(self) -> LeftOut:
        """Rows that are left out."""
        return left_out_of(self.attributes, str(self.folder))

    def set(self, **attributes: Any) -> None:
        """Add or change attributes of the group."""
        self.attributes.update(attributes)
        self._put_root()

    def create(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: str,
        source_dtype: str | None = None,
        *,
        sharded: bool = False,
    ) -> None:
        """Create an array without chunks; dtype is a numpy name or ``string``."""
        how: dict[str, Any] = {"sharded": sharded, "rows": self.left_out is not None}
        document = array_document(name, shape, dtype, source_dtype, self.version, **how)
        self._declare(name, document)

    def resize(self, name: str, shape: tuple[int, ...]) -> None:
        """Change the shape of an array; chunks beyond it are removed."""
        array, document = self.arrays[name], self._documents[name]
        types = document["data_type"], array.source_dtype, self.version
        resized = replace(array, shape=shape)
        bounds = {key: each[: resized.per_shard + 1] for key, each in array.bounds.items()}
        for index in () if array.sharded else array.indices():
            if any(at >= n for at, n in zip(index, resized.grid, strict=True)):
                (self.folder / array.key(index)).unlink(missing_ok=True)
        how: dict[str, Any] = {"sharded": array.sharded, "rows": self.left_out is not None}
        self._declare(name, array_document(name, shape, *types, **how))
        self.arrays[name].bounds.update(bounds)  # the file is cut when its index is written

    def remove(self, name: str) -> None:
        """Remove an array."""
        shutil.rmtree(self.folder / name, ignore_errors=True)
        self.arrays.pop(name, None)
        self._documents.pop(name, None)

    def write(self, name: str, values: NDArray[Any], **start: int) -> None:
        """Write whole chunks of an array.

        values: with all axes of the array; they end at the end of a chunk or of the array.
        start: where they begin along the named axes; 0 along the others.
        """
        array = self.arrays[name]
        chunks = np.array(array.chunks)
        first = np.array([start.get(axis, 0) for axis in DIMENSIONS[name]])
        end = first + values.shape
        if (first % chunks).any() or ((end % chunks > 0) & (end != array.shape)).any():
            raise ValueError(f"{name}: {values.shape} from {start} are not whole chunks")
        for place in itertools.product(*map(range, -(-(end - first) // chunks))):
            low = place * chunks
            part = values[tuple(map(slice, low, low + chunks))]
            index = tuple(map(int, place + first // chunks))
            body, crc = encode_chunk(array, part)
            self._add(array, index, body, crc)
            self._crcs[name, index] = crc

    def _add(self, array: StoredArray, index: Index, body: bytes, crc: bytes) -> None:
        key = array.key(index)
        if not array.sharded:
            if not self._link(key, body + crc):
                self._put(key, body, crc)
            return
        bounds = [*array.bounds.get(key, [0])]
        if len(bounds) - 1 != array.rank(index) % array.per_shard:
            raise ValueError(f"{array.name}: chunk {index} is not the next of its shard")
        self._put(key, body, crc, start=bounds[-1])
        array.bounds[key] = [*bounds, bounds[-1] + len(body) + len(crc)]

    def _link(self, key: str, data: bytes) -> bool:
        """Make a new file a link to that of `like`, if that has the same bytes; whether it did."""
        if self.like is None:
            return False
        try:
            if self.like.read(key, len(data)) != data:
                return False
            path = self.folder / key
            path.parent.mkdir(parents=True, exist_ok=True)
            os.link(self.like.path / key, path)
        except (OSError, TraceError):  # another file, or a file system without links
            return False
        return True

    def read(self, name: str, part: Sequence[slice]) -> NDArray[Any]:
        """Return part of an array: a slice for each leading axis."""
        return read_part(self.arrays[name], part, self.place)

    def written(self, name: str) -> int:
        """Return the number of chunks of an array that are written."""
        array = self.arrays[name]
        if array.sharded:
            return sum(len(bounds) - 1 for bounds in array.bounds.values())
        return sum((self.folder / array.key(index)).is_file() for index in array.indices())

    def crcs(self, name: str) -> bytes:
        """Return the CRC-32C of each chunk of an array."""
        return b"".join(self._crcs[name, index] for index in self.arrays[name].indices())

    def seal(self, attributes: Mapping[str, Any]) -> bytes:
        """Replace the attributes of the group by these, bound to the arrays and all chunks.

        Shards get their indexes before. Returns the document of the group.
        """
        for array in self.arrays.values():
            for key, bounds in array.bounds.items():
                self._put(key, encode_index(bounds), start=bounds[-1])
        chunks = {name: self.crcs(name) for name in self.arrays}
        self.attributes = sealed(attributes, self.arrays, chunks)
        return self._put_root()

    def consolidate(self) -> None:
        """Copy the metadata of all arrays into that of the group, for readers of zarr."""
        metadata = {name: self._documents[name] for name in sorted(self._documents)}
        inline = {"kind": "inline", "must_understand": False, "metadata": metadata}
        self._put_root(consolidated_metadata=inline)

    def _put_root(self, **more: Any) -> bytes:
        document = {"attributes": self.attributes, "zarr_format": 3, "node_type": "group", **more}
        data = encode_document(document)
        self._put(_ROOT, data)
        return data

    def _declare(self, name: str, document: dict[str, Any]) -> None:
        self._register(name, document)
        self._put(f"{name}/{_ROOT}", encode_document(document))

    def _register(self, name: str, document: dict[str, Any]) -> None:
        rows = self.left_out is not None
        self.arrays[name] = parse_array(name, document, str(self.folder), self.version, rows=rows)
        self._documents[name] = document

    def _put(self, key: str, *parts: bytes, start: int | None = None) -> None:
        """Write a file, or the rest of one from `start` on; a kill leaves what was before it."""
        path = self.folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        if start is not None:
            with path.open("r+b" if start else "wb") as file:
                file.seek(start)
                file.writelines(parts)
                file.truncate()
            return
        partial = path.with_name(path.name + PARTIAL)
        with partial.open("wb") as file:
            file.writelines(parts)
        partial.replace(path)
