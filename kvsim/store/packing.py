"""Packing of traces: a folder into one zip, and back."""

from __future__ import annotations

import stat
import zipfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from kvsim.errors import OutputError, TraceError, TraceExistsError, local_path
from kvsim.files import published, refused, unbroken
from kvsim.schema import is_url
from kvsim.store.chunks import check_chunk
from kvsim.store.layout import StoredArray
from kvsim.store.place import MEMBER, PIECE, SUFFIX, Folder, Packed, Place
from kvsim.store.projections import copy_projections
from kvsim.store.publication import check_writable
from kvsim.store.reader import StoredTrace


def pack(path: str | Path, out: str | Path | None = None) -> Path:
    """Write the trace in the folder `path` as one file and return its path.

    The same trace has the same bytes. Files that do not belong to a trace are left out; output
    projections next to the trace are stored next to the file.

    Args:
        path: a folder with a trace.
        out: the file, the folder's name and ``.zip`` by default.

    Raises:
        TraceExistsError: something is at `out`.
        TraceError: the trace cannot be opened, one of its chunks is damaged, or the file cannot be
            written.
    """
    stored = _open(path, "pack")
    place, arrays = stored.place, stored.arrays
    if not isinstance(place, Folder):
        raise TraceError(f"{place.path} is already packed, expected the folder of a trace")
    target = place.path.with_name(place.path.name + SUFFIX)
    if out is not None:
        target = local_path(out, TraceError)
    with _published(target) as draft:
        for array in arrays.values():
            _check(array, place)
        sizes = place.sizes()
        with unbroken(), zipfile.ZipFile(draft, "x", zipfile.ZIP_STORED) as archive:
            for key in _keys(sizes, arrays):
                member = zipfile.ZipInfo(key)  # dated 1980, whatever the time
                member.external_attr = (stat.S_IFREG | 0o644) << 16
                member.create_system = 3
                member.file_size = sizes[key]
                with archive.open(member, "w") as file:
                    _copy(place, key, sizes[key], file)
    copy_projections(stored.projections, target.parent)
    return target


def unpack(path: str | Path, out: str | Path | None = None) -> Path:
    """Write the packed trace `path` as a folder and return its path.

    Members that do not belong to the trace are left out; output projections next to the file are
    stored next to the folder.

    Args:
        path: a packed trace.
        out: the folder, the file's name without ``.zip`` by default.

    Raises:
        TraceExistsError: something is at `out`.
        TraceError: the file is damaged or not a packed trace, or the folder cannot be written;
            nothing is left behind.
    """
    stored = _open(path, "unpack")
    place = stored.place
    if not isinstance(place, Packed):
        raise TraceError(f"{place.path} is a folder, expected a packed trace to unpack")
    name = place.path.name
    plain = name.removesuffix(SUFFIX) if name.endswith(SUFFIX) else f"{name}.zarr"
    target = place.path.with_name(plain) if out is None else local_path(out, TraceError)
    for array in stored.arrays.values():
        if array.sharded:  # whose checksum in the zip is of all its chunks
            _check(array, place)
    sizes = place.sizes()
    with _published(target) as draft, unbroken():
        # the root comes last: after a kill there is no trace
        for key in sorted(_keys(sizes, stored.arrays), key=lambda key: key == "zarr.json"):
            member = draft / key
            member.parent.mkdir(parents=True, exist_ok=True)
            with member.open("wb") as file:
                _copy(place, key, sizes[key], file)
    copy_projections(stored.projections, target.parent)
    return target


def _open(path: str | Path, verb: str) -> StoredTrace:
    if isinstance(path, str) and is_url(path):
        raise TraceError(f"{path} is a URL, expected a local trace to {verb}; download it first")
    return StoredTrace(path)


def _check(array: StoredArray, place: Place) -> None:
    """Raise TraceError if a chunk of an array is damaged."""
    for index in array.indices():
        check_chunk(array, index, place)


def _copy(place: Place, key: str, size: int, file: IO[bytes]) -> None:
    """Write a file of a trace, no more than a piece of it at a time."""
    if size <= PIECE:
        file.write(place.read(key, size))
        return
    for start in range(0, size, PIECE):
        file.write(place.part(key, start, PIECE)[0])


def _keys(sizes: Collection[str], arrays: Mapping[str, StoredArray]) -> list[str]:
    """Return the keys of the files of a trace, and of arrays of later versions, sorted."""
    expected = {f"{name}/zarr.json" for name in arrays}
    expected.update(key for array in arrays.values() for key in array.files())
    return sorted(
        key
        for key in filter(MEMBER.fullmatch, sizes)
        if key in expected or key.partition("/")[0] not in arrays
    )


@contextmanager
def _published(target: Path) -> Iterator[Path]:
    """Provide a path to write to as `published`, and check that `target` stays free; TraceError."""
    try:
        _check_free(target)
        check_writable(target.parent)
        with published(target) as draft:
            yield draft
            _check_free(target)
    except TraceError:
        raise
    except OSError as error:
        failure = error if isinstance(error, OutputError) else refused(target, error)
        raise TraceError(str(failure)) from error


def _check_free(target: Path) -> None:
    if target.exists() or target.is_symlink():
        raise TraceExistsError(f"{target} exists, expected a free path; give another one (--out)")
