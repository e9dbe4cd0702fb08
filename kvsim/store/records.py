"""Records on disk: a zarr group of them, read within bounds of memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numcodecs.zstd
import numpy as np
from numpy.typing import NDArray

from kvsim.core.record import Record, record_document, record_of
from kvsim.errors import OutputError, local_path
from kvsim.schema import AXES, NEVER, object_at
from kvsim.store.inputs import Digests, damaged, digests, read_document, read_file

#: Version of the stored form of a Record.
RECORD_VERSION = 3

# Most bytes of a layer of a record: 64 heads and a million tokens.
_LARGEST = 256 << 20

# Most bytes of all records: some for each chunk, some for each of its bytes on disk (real policies
# have 3 to 20), and some for any number of chunks.
_PER_CHUNK, _PER_BYTE, _TOTAL = 4 << 20, 256, 1 << 30

# The axes of the pages that a reader read.
_READS = ("layer", "head", "row", "byte")

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
        arrays: dict[str, tuple[NDArray[Any], tuple[str, ...], dict[str, Any]]] = {
            "evicted_at": (record.evicted_at, AXES["evicted_at"], {"never": NEVER})
        }
        if record.reads is not None:
            arrays["reads"] = (record.reads.bits, _READS, {})
        for name, (data, axes, attributes) in arrays.items():
            group.create_array(
                name,
                data=data,
                chunks=(1, *data.shape[1:]),
                dimension_names=axes,
                attributes=attributes,
                config={"write_empty_chunks": True},
            )
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    root.update_attributes({"files": digests(folder, *sorted({*names} - {"zarr.json"}))})


def read_records(path: str | Path) -> list[Record]:
    """Return the records that `write_records` stored; OutputError without any, or damaged."""
    folder = local_path(path, OutputError)
    run, entry = folder.parent / "run.json", None
    try:
        if run.exists():
            bound = object_at(read_document(run), "files")
            # an entry that is missing, here and below, fits no file
            entry = bound.get(f"{folder.name}/zarr.json") or {}
        attributes = object_at(read_document(folder / "zarr.json", entry), "attributes")
    except FileNotFoundError as error:
        raise OutputError(f"{path} holds no records: {error} is missing") from error
    version, files = attributes.get("kvsim_records"), attributes.get("files")
    if version != RECORD_VERSION:
        raise OutputError(
            f"{path} was recorded by another version of kvsim (records of version {version}, "
            f"expected {RECORD_VERSION}); replay it again"
        )
    if not isinstance(files, dict):
        raise damaged(folder, "its list of files is missing, or of another type")
    try:
        count = len({name.partition("/")[0] for name in files})
        total = _Total()
        return [_read_record(folder, f"{number}/", files, total) for number in range(count)]
    except FileNotFoundError as error:
        raise damaged(folder, f"{error} is missing") from error
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
        raise damaged(folder, f"{type(error).__name__}: {error}") from error


class _Total:
    """Decoded bytes of all records, bounded by the chunks read so far."""

    def __init__(self) -> None:
        self._decoded, self._limit = 0, _TOTAL

    def add(self, stored: int, decoded: int) -> None:
        """Count the bytes of a chunk before it is decoded. Raises ValueError beyond the bound."""
        self._decoded += decoded
        self._limit += _PER_CHUNK + _PER_BYTE * stored
        if self._decoded > self._limit:
            raise ValueError(f"records have {self._decoded} bytes, at most {self._limit} fit")


def _read_record(folder: Path, prefix: str, files: Digests, total: _Total) -> Record:
    """Return one record.

    Decoded here and not by zarr, so that no file makes the process allocate more than an array of
    reasonable size. Raises ValueError and its like for what `write_records` does not write.
    """

    def entry(name: str) -> Mapping[str, Any]:
        return files[prefix + name] or {}

    def layers(name: str, dtype: str) -> tuple[NDArray[Any], list[bytes]]:
        """An empty array as its document declares it, and the stored bytes of its layers."""
        array = read_document(folder / f"{prefix}{name}/zarr.json", entry(f"{name}/zarr.json"))
        shape = tuple(array["shape"])
        endian, compressor = array["codecs"]
        order = endian.get("configuration", {}).get("endian", "little")
        chunk = array["chunk_grid"]["configuration"]["chunk_shape"]
        form = array["data_type"], chunk, order, compressor["name"]
        if form != (dtype, [1, *shape[1:]], "little", "zstd"):
            raise ValueError(f"{name} is stored as {form}")
        size = np.dtype(dtype).itemsize * prod(shape[1:])
        least = 0 if name == "reads" else 1  # a trace may end with its prompt
        if len(stored["layers"]) != shape[0] or not least <= size <= _LARGEST:
            raise ValueError(f"{name} has the shape {shape} of {len(stored['layers'])} layers")
        chunks = []
        for layer in range(shape[0] if size else 0):
            path = f"{name}/c/{layer}" + "/0" * (len(shape) - 1)
            data = read_file(folder / (prefix + path), size + size // 64 + 1024, entry(path))
            total.add(len(data), size)
            chunks.append(data)
        return np.empty(shape, dtype), chunks

    stored = read_document(folder / f"{prefix}zarr.json", entry("zarr.json"))["attributes"]
    evicted_at, chunks = layers("evicted_at", "int32")
    for layer, data in enumerate(chunks):
        evicted_at[layer] = _UNSET
        numcodecs.zstd.decompress(data, evicted_at[layer].reshape(-1))
        if evicted_at[layer].min() <= _UNSET:
            raise ValueError(f"{prefix}evicted_at has values below -1, or too few")
    bits = None
    if "reads" in stored:
        bits, chunks = layers("reads", "uint8")
        for layer, data in enumerate(chunks):
            # what the stored bytes do not fill is 0 once and 255 once
            filled = [np.full(bits[layer].size, x, np.uint8) for x in (0, 255)]
            bits[layer].reshape(-1)[:] = numcodecs.zstd.decompress(data, filled[0])
            if (bits[layer].reshape(-1) != numcodecs.zstd.decompress(data, filled[1])).any():
                raise ValueError(f"{prefix}reads has too few values")
    return record_of(stored, evicted_at, bits)
