"""The zarr group of a trace on its way: its documents and chunks, one file after another.

They are written here and not by zarr, whose threads hold memory of their own and go on after an
error, when their folder may be gone already.
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
from kvsim.store.documents import find_document, read_document
from kvsim.store.layout import DIMENSIONS, StoredArray, array_document, parse_array
from kvsim.store.place import Folder

_ROOT = "zarr.json"

#: What a file is called until it is whole.
PARTIAL = ".partial"


class Group:
    """A group in a folder that no one else writes to.

    Each file is written under another name and renamed, by the thread that asks for it: after a
    call, also one that failed, nothing is on its way.

    Attributes:
        folder: where it is.
        attributes: those of the group.
        arrays: its arrays by name.

    Raises:
        OSError: (any method that writes) the disk refuses.
        TraceError: (any method that reads) what is there is no part of a trace, or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.attributes: dict[str, Any] = {}
        self.arrays: dict[str, StoredArray] = {}
        self._documents: dict[str, dict[str, Any]] = {}

    @classmethod
    def open(cls, folder: Path) -> Self:
        """The group that is in a folder."""
        group, place, where = cls(folder), Folder(folder), str(folder)
        attributes = read_document(place, _ROOT, where).get("attributes")
        group.attributes = attributes if isinstance(attributes, dict) else {}
        for name in DIMENSIONS:
            document = find_document(place, f"{name}/{_ROOT}", where)
            if document is not None:
                group._know(name, document)
        return group

    def set(self, **attributes: Any) -> None:
        """Add or change attributes of the group."""
        self.attributes.update(attributes)
        self._put(_ROOT, _json(self._root()))

    def create(
        self, name: str, shape: tuple[int, ...], dtype: str, source_dtype: str | None = None
    ) -> None:
        """A new array without chunks; dtype is a numpy name or ``string``."""
        self._declare(name, array_document(name, shape, dtype, source_dtype))

    def resize(self, name: str, shape: tuple[int, ...]) -> None:
        """Cut an array to `shape`; chunks beyond it are removed."""
        array = self.arrays[name]
        document = {**self._documents[name], "shape": list(shape)}
        smaller = parse_array(name, document, str(self.folder))
        for index in array.indices():
            if any(at >= n for at, n in zip(index, smaller.grid, strict=True)):
                (self.folder / array.key(index)).unlink(missing_ok=True)
        self._declare(name, document)

    def remove(self, name: str) -> None:
        """Remove an array."""
        shutil.rmtree(self.folder / name, ignore_errors=True)
        self.arrays.pop(name, None)
        self._documents.pop(name, None)

    def write(self, name: str, values: NDArray[Any], **start: int) -> None:
        """Write whole chunks of an array.

        values: as many axes as the array; they end where chunks do, or where the array does.
        start: where they begin along the axes of these names; 0 along the others.
        """
        array = self.arrays[name]
        first = [start.get(axis, 0) for axis in DIMENSIONS[name]]
        ends = [
            at + size == n or (at + size) % chunk == 0
            for at, size, n, chunk in zip(
                first, values.shape, array.shape, array.chunks, strict=True
            )
        ]
        if not all(ends) or any(np.mod(first, array.chunks)):
            raise ValueError(f"{name}: {values.shape} from {first} are no whole chunks")
        count = [-(-n // chunk) for n, chunk in zip(values.shape, array.chunks, strict=True)]
        for place in itertools.product(*map(range, count)):
            cut = tuple(
                slice(at * chunk, (at + 1) * chunk)
                for at, chunk in zip(place, array.chunks, strict=True)
            )
            index = [
                at + begin // chunk
                for at, begin, chunk in zip(place, first, array.chunks, strict=True)
            ]
            self._put(array.key(index), *encode_chunk(array, values[cut]))

    def read(self, name: str, part: Sequence[slice]) -> NDArray[Any]:
        """Part of an array: a slice for each leading axis."""
        return read_part(self.arrays[name], part, Folder(self.folder), str(self.folder))

    def written(self, name: str) -> int:
        """How many chunks of an array are there."""
        array = self.arrays[name]
        return sum((self.folder / array.key(index)).is_file() for index in array.indices())

    def consolidate(self) -> None:
        """Repeat the metadata of all arrays in that of the group, as zarr reads it."""
        metadata = {name: self._documents[name] for name in sorted(self._documents)}
        inline = {"kind": "inline", "must_understand": False, "metadata": metadata}
        self._put(_ROOT, _json({**self._root(), "consolidated_metadata": inline}))

    def _root(self) -> dict[str, Any]:
        return {"attributes": self.attributes, "zarr_format": 3, "node_type": "group"}

    def _declare(self, name: str, document: dict[str, Any]) -> None:
        self._know(name, document)
        self._put(f"{name}/{_ROOT}", _json(document))

    def _know(self, name: str, document: dict[str, Any]) -> None:
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
