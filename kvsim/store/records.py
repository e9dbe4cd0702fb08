"""Records on disk: a zarr group of them, read within bounds of memory."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numcodecs.zstd
import numpy as np

from kvsim.core.record import Record, record_document, record_of
from kvsim.errors import OutputError, local_path
from kvsim.schema import AXES, NEVER
from kvsim.store.inputs import Digests, damaged, digests, read_document, read_file

#: Version of the stored form of a Record.
RECORD_VERSION = 1

# Most bytes of a layer of a record: 64 heads and a million tokens.
_LARGEST = 256 << 20

# Most bytes of all records: some for each chunk, some for each of its bytes on disk (real policies
# have 3 to 20), and some for any number of chunks.
_PER_CHUNK, _PER_BYTE, _TOTAL = 4 << 20, 256, 1 << 30

# Below all values: `evicted_at` of position 0 may be -1.
_UNSET = -2


def write_records(path: str | Path, records: Sequence[Record]) -> None:
    """Store records as a zarr group of groups 0, 1, 2, ...; internals are not stored.

    The attributes of the group have size and SHA-256 of each file. Raises OutputError where `path`
    exists.
    """
    import zarr  # noqa: PLC0415  reading needs no zarr

    folder = local_path(path, OutputError)
    if folder.exists():
        raise OutputError(f"{path} exists; give a path where nothing is yet")
    version = {"kvsim_records": RECORD_VERSION}
    root = zarr.create_group(store=str(path), zarr_format=3, attributes=version)
    for i, record in enumerate(records):
        # all at once: zarr would rewrite the document for every attribute
        group = root.create_group(str(i), attributes=record_document(record))
        group.create_array(
            "evicted_at",
            data=record.evicted_at,
            chunks=(1, *record.evicted_at.shape[1:]),
            dimension_names=AXES["evicted_at"],
            attributes={"never": NEVER},
            config={"write_empty_chunks": True},
        )
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    root.update_attributes({"files": digests(folder, *sorted({*names} - {"zarr.json"}))})


def read_records(path: str | Path) -> list[Record]:
    """Return the records that `write_records` stored.

    Raises OutputError without any, or where a file is damaged. Records of earlier versions have no
    digests, and a warning says so.
    """
    folder = local_path(path, OutputError)
    run = folder.parent / "run.json"
    try:
        bound = read_document(run).get("files") if run.exists() else None
        # an entry that is missing, here and below, fits no file
        entry = bound.get(f"{folder.name}/zarr.json") or {} if isinstance(bound, dict) else None
        attributes = read_document(folder / "zarr.json", entry).get("attributes")
    except FileNotFoundError as error:
        raise OutputError(f"{path} holds no records: {error} is missing") from error
    attributes = attributes if isinstance(attributes, dict) else {}
    version, files = (attributes.get(name) for name in ("kvsim_records", "files"))
    if version != RECORD_VERSION:
        raise OutputError(f"{path} has records of version {version}; expected {RECORD_VERSION}")
    if files is None:
        warnings.warn(
            f"{path} was written without digests by an earlier version, so changes of its files go "
            "unnoticed",
            stacklevel=2,
        )
    try:
        names = files or [child.name for child in folder.iterdir() if child.is_dir()]
        count = len({name.partition("/")[0] for name in names})
        total = _Total()
        return [_read_record(folder, f"{number}/", files, total) for number in range(count)]
    except FileNotFoundError as error:
        raise damaged(folder, f"{error} is missing") from error
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
        raise damaged(folder, f"{type(error).__name__}: {error}") from error


class _Total:
    """What is decoded of all records, bounded by the chunks read so far."""

    def __init__(self) -> None:
        self._decoded, self._limit = 0, _TOTAL

    def add(self, stored: int, decoded: int) -> None:
        """Count the bytes of a chunk before it is decoded. Raises ValueError beyond the bound."""
        self._decoded += decoded
        self._limit += _PER_CHUNK + _PER_BYTE * stored
        if self._decoded > self._limit:
            raise ValueError(f"records have {self._decoded} bytes, at most {self._limit} fit")


def _read_record(folder: Path, prefix: str, files: Digests | None, total: _Total) -> Record:
    """Return one record.

    Decoded here and not by zarr, so that no file makes the process allocate more than an array of
    reasonable size. Raises ValueError and its like for what `write_records` does not write.
    """

    def entry(name: str) -> Mapping[str, Any] | None:
        return None if files is None else files[prefix + name] or {}

    stored = read_document(folder / f"{prefix}zarr.json", entry("zarr.json"))["attributes"]
    array = read_document(folder / f"{prefix}evicted_at/zarr.json", entry("evicted_at/zarr.json"))
    n_layers, n_heads, n_pos = shape = tuple(array["shape"])
    order, compressor = array["codecs"]
    codecs = order["configuration"]["endian"], compressor["name"]
    form = array["data_type"], array["chunk_grid"]["configuration"]["chunk_shape"], codecs
    if form != ("int32", [1, n_heads, n_pos], ("little", "zstd")):
        raise ValueError(f"evicted_at is stored as {form}")
    size = 4 * n_heads * n_pos
    if len(stored["layers"]) != n_layers or not 0 < size <= _LARGEST:
        raise ValueError(f"evicted_at has the shape {shape} of {len(stored['layers'])} layers")
    evicted_at = []
    for layer in range(n_layers):
        name = f"evicted_at/c/{layer}/0/0"
        data = read_file(folder / (prefix + name), size + 1024, entry(name))
        total.add(len(data), size)
        chunk = np.full(n_heads * n_pos, _UNSET, "<i4")
        numcodecs.zstd.decompress(data, chunk)
        if chunk.min() <= _UNSET:
            raise ValueError(f"{prefix}{name} has values below -1, or too few")
        evicted_at.append(chunk.reshape(n_heads, n_pos))
    return record_of(stored, np.stack(evicted_at).astype(np.int32, copy=False))
