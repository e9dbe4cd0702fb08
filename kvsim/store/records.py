"""Records on disk: a zarr group of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvsim.core.record import Record, record_document, record_of
from kvsim.errors import OutputError, TraceError, TraceNotFoundError, local_path
from kvsim.schema import AXES, object_at
from kvsim.store.inputs import damaged, read_document

#: Version of the stored form of a Record.
RECORD_VERSION = 4

# The axes of the pages that a reader read.
_READS = ("layer", "head", "row", "byte")


def write_records(path: str | Path, records: Sequence[Record]) -> None:
    """Store records without internals as a zarr group; OutputError where `path` exists."""
    from kvsim.store.group import create_array, create_group, seal_group  # noqa: PLC0415  zarr

    folder = local_path(path, OutputError)
    if folder.exists():
        raise OutputError(f"{path} exists; give a path where nothing is yet")
    root = create_group(folder)
    for i, record in enumerate(records):
        group = root.create_group(str(i), attributes=record_document(record))
        arrays: dict[str, tuple[Any, tuple[str, ...]]] = {
            "evicted_at": (record.evicted_at, AXES["evicted_at"])
        }
        if record.reads is not None:
            arrays["reads"] = record.reads.bits, _READS
        for name, (data, axes) in arrays.items():
            chunks = (1, *(max(1, n) for n in data.shape[1:]))
            create_array(group, name, data.shape, data.dtype, chunks, axes)[:] = data
    seal_group(folder, {"kvsim_records": RECORD_VERSION, "records": len(records)})


def read_records(path: str | Path) -> list[Record]:
    """Return the records that `write_records` stored; OutputError without any, or damaged."""
    from kvsim.store.group import open_group, reading  # noqa: PLC0415  as zarr

    folder = local_path(path, OutputError)
    run = folder.parent / "run.json"
    try:
        if run.exists():
            bound = object_at(read_document(run), "files")
            # an entry that is missing fits no file
            read_document(folder / "zarr.json", bound.get(f"{folder.name}/zarr.json") or {})
        _, root, arrays = open_group(folder, "kvsim_records", RECORD_VERSION)
        documents = object_at(object_at(root, "consolidated_metadata"), "metadata")
        with reading(str(folder)):
            return [
                _record(arrays, documents[str(i)]["attributes"], f"{i}/")
                for i in range(root["attributes"]["records"])
            ]
    except TraceNotFoundError as error:
        raise OutputError(f"{path} holds no records") from error
    except (TraceError, LookupError, TypeError) as error:
        raise damaged(folder, str(error)) from error


def _record(arrays: Mapping[str, Any], stored: Mapping[str, Any], prefix: str) -> Record:
    evicted_at, bits = arrays[f"{prefix}evicted_at"], arrays.get(f"{prefix}reads")
    events, layers = np.asarray(evicted_at[:]), len(stored["layers"])
    fits = events.dtype == np.int32 and events.ndim == 3 and len(events) == layers
    if not fits or events.min() < -1:
        raise ValueError(f"{prefix}evicted_at does not fit its {layers} layers")
    return record_of(stored, events, None if bits is None else np.asarray(bits[:]))
