"""The zarr group of a trace that is being written: metadata and chunks, one file at a time.

They are written here and not by zarr, whose threads go on writing after an error, when the folder
may have been removed (docs/decisions.md, section Store).
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from kvsim.store.chunks import encode_chunk, read_part
from kvsim.store.documents import find_document, object_at, read_document
from kvsim.store.layout import DIMENSIONS, StoredArray, array_document, parse_array
from kvsim.store.place import Folder

_ROOT = "zarr.json"

#: Suffix of a file until it is whole.
PARTIAL = ".partial"


class Group:
    """A group in a folder to which nothing else writes.

    Each file is written under a temporary name and renamed, in the calling thread: when a call has
    returned or raised, nothing is still being written.

    Attributes:
        folder: its path.
        attributes: attributes of the group.
        arrays: its arrays by name.

    Raises:
        OSError: (any method that writes) the disk refuses.
        TraceError: (any method that reads) a file is damaged or does not belong to a trace.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.attributes: dict[str, Any] = {}
        self.arrays: dict[str, StoredArray] = {}
        self._documents: dict[str, dict[str, Any]] = {}

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open the group in a folder."""
        group, place, where = cls(folder), Folder(folder), str(folder)
        group.attributes = object_at(read_document(place, _ROOT, where), "attributes")
        for name in DIMENSIONS:
            document = find_document(place, f"{name}/{_ROOT}", where)
            if document is not None:
                group._register(name, document)
        return group

    def set(self, **attributes: Any) -> None:
        """Add or change attributes of the group."""
        self.attributes.update(attributes)
        self._put(_ROOT, _json(self._root()))

    def create(
        self, name: str, shape: tuple[int, ...], dtype: str, source_dtype: str | None = None
    ) -> None:
        """Create an array without chunks; dtype is a numpy name or ``string``."""
        self._declare(name, array_document(name, shape, dtype, source_dtype))

    def resize(self, name: str, shape: tuple[int, ...]) -> None:
        """Change the shape of an array; chunks beyond it are removed."""
        array = self.arrays[name]
        document = {**self._documents[name], "shape": list(shape)}
        resized = parse_array(name, document, str(self.folder))
        for index in array.indices():
            if any(at >= n for at, n in zip(index, resized.grid, strict=True)):
                (self.folder / array.key(index)).unlink(missing_ok=True)
        self._declare(name, document)

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
            self._put(array.key(place + first // chunks), *encode_chunk(array, part))

    def read(self, name: str, part: Sequence[slice]) -> NDArray[Any]:
        """Return part of an array: a slice for each leading axis."""
        return read_part(self.arrays[name], part, Folder(self.folder), str(self.folder))

    def written(self, name: str) -> int:
        """Return the number of chunks of an array that are written."""
        array = self.arrays[name]
        return sum((self.folder / array.key(index)).is_file() for index in array.indices())

    def consolidate(self) -> None:
        """Copy the metadata of all arrays into that of the group, for readers of zarr."""
        metadata = {name: self._documents[name] for name in sorted(self._documents)}
        inline = {"kind": "inline", "must_understand": False, "metadata": metadata}
        self._put(_ROOT, _json({**self._root(), "consolidated_metadata": inline}))

    def _root(self) -> dict[str, Any]:
        return {"attributes": self.attributes, "zarr_format": 3, "node_type": "group"}

    def _declare(self, name: str, document: dict[str, Any]) -> None:
        self._register(name, document)
        self._put(f"{name}/{_ROOT}", _json(document))

    def _register(self, name: str, document: dict[str, Any]) -> None:
        self.arrays[name] = parse_array(name, document, str(self.folder))
        self._documents[name] = document

    def _put(self, key: str, *parts: bytes) -> None:
        path = self.folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + PARTIAL)
        with partial.open("wb") as file:
            file.writelines(parts)
        partial.replace(path)


def _json(document: dict[str, Any]) -> bytes:
    return json.dumps(document, indent=2).encode("ascii")
