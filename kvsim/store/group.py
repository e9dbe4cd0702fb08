"""Zarr groups with a manifest: zarr writes them, and reads them through a store that checks files.

The attribute `files` of a group lists size and CRC-32C of every other file, and `seal` is the
SHA-256 of the group's document, so that one document describes one snapshot.
"""

from __future__ import annotations

import json
import math
import os
import stat
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import product
from pathlib import Path
from reprlib import repr as short_repr
from typing import Any

import google_crc32c
import numpy as np
import zarr
from zarr.abc.store import ByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.codecs import BloscCodec
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import FsspecStore, LocalStore, WrapperStore, ZipStore

from kvsim.core.digest import document_digest
from kvsim.errors import KvsimError, TraceError, TraceNotFoundError, error_line
from kvsim.files import DOCUMENT
from kvsim.schema import is_url, object_at
from kvsim.store.inputs import decode_document

# few threads, because each keeps memory of what it has decoded
zarr.config.set({"threading.max_workers": min(4, os.cpu_count() or 1)})

ROOT = "zarr.json"

#: Most bytes that LZ4 decodes from a byte, and more for a header.
RATIO, HEADER = 256, 1 << 16

#: Codecs of arrays, and of the chunks of a shard; others could decode a byte to thousands.
_CODECS = ["bytes", "blosc"]


def damaged(what: str) -> TraceError:
    """Return the error of a damaged or changed group; what: the place and the damage."""
    return TraceError(f"{what}; copy it again or record it again")


class CheckedStore(WrapperStore[Store]):
    """Files as the manifest lists them; TraceError for any other.

    Whole files are checked whenever they are read, others once, before a part of them is read.
    size: returns that of a file, None without a regular one; left out where files are not listed.
    """

    def __init__(
        self, store: Store, where: str, size: Callable[[str], int | None] | None = None
    ) -> None:
        super().__init__(store)
        self.where, self._size = where, size
        self.files: dict[str, tuple[int, str]] = {}
        self.sharded: dict[str, int] = {}  # chunks of a shard, by array
        self._root, self._checked = b"", set[str]()

    def read_root(self) -> dict[str, Any] | None:
        """Read the document of the group and the manifest in it; None without a document."""
        limit = RangeByteRequest(0, DOCUMENT + 1)
        with reading(f"{self.where}: {ROOT}"):
            data = sync(self._store.get(ROOT, default_buffer_prototype(), limit))
            if data is None:
                return None
            self._root = data.to_bytes()
            return decode_document(self._root, DOCUMENT)

    def check_root(self, root: Mapping[str, Any]) -> None:
        """Check the seal of the document and the sizes of files, as far as they can be listed."""
        attributes = object_at(root, "attributes")
        if attributes.get("seal") != seal(root):
            raise damaged(f"{self.where}: its seal does not fit its attributes and arrays")
        with reading(f"{self.where}: its attribute files"):
            self.files = {key: (int(size), crc) for key, (size, crc) in attributes["files"].items()}
        if self._size is None:
            return
        for key, (size, _) in self.files.items():
            if (found := self._size(key)) != size:
                actual = "is no regular file" if found is None else f"has {found} bytes"
                raise damaged(
                    f"{self.where}: {key!r} is missing or {actual}, expected {size} bytes"
                )

    async def get(
        self,
        key: str,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        """Return a file, or part of one; None for one that the manifest does not have."""
        prototype = prototype or default_buffer_prototype()
        if key == ROOT:
            return prototype.buffer.from_bytes(self._root)
        if key not in self.files:
            return None
        with reading(self.where):
            if byte_range is not None and key in self._checked:
                return await self._store.get(key, prototype, byte_range)
            whole = RangeByteRequest(0, self.files[key][0] + 1)
            data = await self._store.get(key, prototype, whole)
        self._check(key, data)
        self._checked.add(key)
        return data if data is None else data[_part(byte_range)]

    def _check(self, key: str, data: Buffer | None) -> None:
        size, crc = self.files[key]
        if data is None or len(data) != size:
            actual = "missing" if data is None else f"of {len(data)} bytes"
            raise damaged(f"{self.where}: {key!r} is {actual}, expected {size} bytes")
        content: Any = data.as_numpy_array()
        if checksum(content) != crc:
            raise damaged(
                f"{self.where}: {key!r} is damaged, or the trace was replaced since it was opened"
            )
        name, chunk, _ = key.rpartition("/c/")
        if not chunk:
            return
        bounds = np.array([[0, size]], np.uint64)
        if (chunks := self.sharded.get(name)) is not None:
            bounds = np.frombuffer(content[-4 - 16 * chunks : -4].tobytes(), "<u8").reshape(-1, 2)
        for start, length in bounds.tolist():
            claimed = int.from_bytes(content[start + 4 : start + 8].tobytes(), "little")
            if claimed > RATIO * length + HEADER or start + length > size:
                raise damaged(f"{self.where}: {key!r} has a chunk of {claimed} bytes")


def _part(byte_range: ByteRequest | None) -> slice:
    if isinstance(byte_range, RangeByteRequest):
        return slice(byte_range.start, byte_range.end)
    if isinstance(byte_range, SuffixByteRequest):
        return slice(-byte_range.suffix, None)
    return slice(0 if byte_range is None else byte_range.offset, None)


def open_store(path: str | Path) -> CheckedStore:
    """Return the store at a path or URL, of which nothing has been read.

    Raises TraceNotFoundError for a missing path, and TraceError for a file that is no zip.
    """
    if isinstance(path, str) and is_url(path):
        return CheckedStore(_open_url(path), path)
    path = Path(path)
    if path.is_dir():
        if (path / ROOT).exists() and not (path / ROOT).is_file():
            raise damaged(f"{path / ROOT} is a pipe or a device, expected a regular file")
        return CheckedStore(LocalStore(path, read_only=True), str(path), partial(_size, path))
    try:
        with zipfile.ZipFile(path) as archive:
            members = {each.filename: each for each in archive.infolist()}
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise TraceNotFoundError(
            f"{path} is not a kvsim trace ({error_line(error)}), expected a folder or a zip of one"
        ) from error
    if any(each.compress_type != zipfile.ZIP_STORED for each in members.values()):
        raise TraceError(f"{path} is compressed, expected a zip of stored files (`zip -0 -r`)")
    sizes = {name: each.file_size for name, each in members.items()}
    return CheckedStore(sync(ZipStore.open(path, mode="r")), str(path), sizes.get)


def _size(folder: Path, key: str) -> int | None:
    with suppress(OSError):
        status = (folder / key).lstat()
        return status.st_size if stat.S_ISREG(status.st_mode) else None
    return None


def _open_url(url: str) -> Store:
    """Return the store at a URL; TraceError if fsspec does not open it, or it is one file."""
    if url.endswith(".zip"):
        raise TraceError(f"{url} is one file, which can only be read here; download it first")
    try:
        return FsspecStore.from_url(url.rstrip("/"), read_only=True)
    except (ImportError, ValueError, TypeError, OSError) as error:
        raise TraceError(
            f"{url} is not a URL that fsspec opens ({error_line(error)}); install kvsim[remote] "
            "and the driver of the store"
        ) from error


def open_group(
    path: str | Path, mark: str, version: int | None = None
) -> tuple[CheckedStore, dict[str, Any], dict[str, zarr.Array[Any]]]:
    """Return the files, the document and the arrays of a group, after all checks.

    mark: the attribute that identifies the kind of group, with its version if any. Raises
    TraceNotFoundError without it, and TraceError for another version or damage.
    """
    store = open_store(path)
    root = store.read_root()
    attributes = object_at(root or {}, "attributes")
    if root is None or mark not in attributes:
        reason = f"{ROOT} is missing" if root is None else f"its {ROOT} has no {mark}"
        raise TraceNotFoundError(f"{store.where} is not a kvsim trace: {reason}")
    if version not in (None, attributes[mark]):
        raise TraceError(
            f"{store.where} has {mark} {short_repr(attributes[mark])}, expected {version}; kvsim "
            "0.1.0 reads earlier ones, or record it again"
        )
    store.check_root(root)
    return store, root, read_arrays(store, root)


def read_arrays(store: CheckedStore, root: Mapping[str, Any]) -> dict[str, zarr.Array[Any]]:
    """Return the arrays of a group by name, after checks of what they could make zarr allocate.

    Chunks are checked on reading. Raises TraceError.
    """
    consolidated = object_at(object_at(root, "consolidated_metadata"), "metadata")
    with reading(f"{store.where}: its arrays"):
        names = [name for name, each in consolidated.items() if each.get("node_type") == "array"]
        group = zarr.open_group(store, mode="r", zarr_format=3, use_consolidated=True)
        arrays: dict[str, Any] = {name: group[name] for name in names}
        for name, array in arrays.items():
            if problem := _problem(store, name, array, consolidated[name]["codecs"]):
                raise damaged(f"{store.where}: {name} has {problem}")
    return arrays


def _problem(
    store: CheckedStore, name: str, array: zarr.Array[Any], codecs: Sequence[Mapping[str, Any]]
) -> str:
    """Describe an error of an array that is visible before a chunk is read; empty without one."""
    chunks = array.shards or array.chunks
    if array.shards is not None:
        codecs = codecs[0]["configuration"]["codecs"]
        inner = zip(array.shards, array.chunks, strict=True)
        store.sharded[name] = math.prod(-(-a // b) for a, b in inner)
    if [each["name"] for each in codecs] != _CODECS:
        return f"codecs {short_repr(codecs)}, expected {', '.join(_CODECS)}"
    grid = [-(-n // size) for n, size in zip(array.shape, chunks, strict=True)]
    sizes = {k: size for k, (size, _) in store.files.items() if k.startswith(f"{name}/c/")}
    # as many keys as there are files: a shape may claim any number
    if math.prod(grid) != len(sizes) or not all(
        f"{name}/c/{'/'.join(map(str, at))}" in sizes for at in product(*map(range, grid))
    ):
        return f"{len(sizes)} of {math.prod(grid)} chunks, expected all"
    limit = sum(RATIO * size + HEADER for size in sizes.values())
    if math.prod(grid) * math.prod(chunks) * array.dtype.itemsize > limit:
        return f"shape {array.shape}, more than its files can hold"
    return ""


@contextmanager
def reading(where: str) -> Iterator[None]:
    """Raise TraceError, with one line, for errors of stores and decoders."""
    try:
        yield
    except (KvsimError, MemoryError):
        raise
    except Exception as error:  # drivers of stores raise their own errors
        raise damaged(f"{where} cannot be read ({error_line(error)})") from error


def checksum(data: Any) -> str:
    """Return the CRC-32C of bytes, 8 hex digits."""
    return f"{google_crc32c.value(data):08x}"


def seal(root: Mapping[str, Any]) -> str:
    """Return the seal of a group's document, which leaves itself out."""
    attributes = {key: x for key, x in object_at(root, "attributes").items() if key != "seal"}
    return document_digest({**root, "attributes": attributes})


class _Folder(LocalStore):
    """A folder to which nothing else writes, also where the file system has no hard links."""

    async def set_if_not_exists(self, key: str, value: Buffer) -> None:
        if not await self.exists(key):
            await self.set(key, value)


def create_group(folder: Path) -> zarr.Group:
    """Create an empty group in a folder."""
    return zarr.open_group(_Folder(folder), mode="a", zarr_format=3)


def create_array(
    group: zarr.Group,
    name: str,
    shape: tuple[int, ...],
    dtype: Any,
    chunks: tuple[int, ...],
    axes: tuple[str, ...],
    attributes: Mapping[str, Any] = {},
    *,
    sharded: bool = False,
) -> zarr.Array[Any]:
    """Create an array of a group, every chunk of which is written; sharded: a file per layer."""
    dtype = np.dtype(dtype)
    shard = (1, *(-(-n // x) * x for n, x in zip(shape[1:], chunks[1:], strict=True)))
    array: zarr.Array[Any] = group.create_array(
        name,
        shape=shape,
        dtype=dtype,
        chunks=chunks,
        shards=shard if sharded else None,
        compressors=BloscCodec(typesize=dtype.itemsize, cname="lz4", clevel=5),
        fill_value=np.nan if dtype.kind == "f" else 0,
        dimension_names=axes,
        attributes=dict(attributes),
        config={"write_empty_chunks": True},
        overwrite=True,
    )
    return array


def seal_group(folder: Path, attributes: Mapping[str, Any]) -> None:
    """Write attributes, consolidated metadata and manifest of a group."""
    paths = {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path != folder / ROOT
    }
    documents = {
        key.removesuffix(f"/{ROOT}"): json.loads(path.read_bytes())
        for key, path in paths.items()
        if path.name == ROOT
    }
    files = {key: [path.stat().st_size, checksum(path.read_bytes())] for key, path in paths.items()}
    consolidated = {"kind": "inline", "must_understand": False, "metadata": documents}
    root: dict[str, Any] = {"zarr_format": 3, "node_type": "group"}
    root["consolidated_metadata"] = consolidated
    # in a reader's form: keys that are numbers would be sorted differently
    root |= json.loads(json.dumps({"attributes": {**attributes, "files": files}}))
    root["attributes"]["seal"] = seal(root)
    (folder / ROOT).write_text(json.dumps(root, indent=1), "ascii")
