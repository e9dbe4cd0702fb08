"""The arrays of a trace as zarr arrays: data types, chunks, codecs (docs/trace-format.md, 2)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvsim.schema import AXES, CHUNK
from kvsim.store.documents import read_document
from kvsim.store.place import Folder

FLOATS = ("float16", "float32", "float64")

#: How chunks are written: blosc with this compressor at this level, and bit shuffle.
COMPRESSOR, LEVEL = "lz4", 5

#: Dense attention: of all rows, or of the last ones.
DENSE = ("attention", "attention_window")

#: Arrays that a trace must have.
REQUIRED = ("layer", "q", "k", "v")

#: Dimension names of the arrays of a trace; evictions belong to records.
DIMENSIONS = {**AXES, "layer": ("layer",)}
del DIMENSIONS["evicted_at"]


def chunk_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """One layer, all heads, 256 positions if there are any; without a layer axis one chunk."""
    axes = DIMENSIONS[name]
    if len(axes) == 1:
        return (max(1, shape[0]),)
    size = {"layer": 1, "pos": CHUNK, "row": CHUNK}
    return tuple(size.get(axis, length) for axis, length in zip(axes, shape, strict=True))


def pos_axis(name: str) -> int:
    """The axis of positions in one layer of an array that has both."""
    return DIMENSIONS[name].index("pos") - 1


def array_document(
    name: str, shape: tuple[int, ...], dtype: str, source_dtype: str | None
) -> dict[str, Any]:
    """The metadata of an array of a trace; dtype is a numpy name or ``string``."""
    text = dtype == "string"
    size = 1 if text else {"float16": 2, "float64": 8}.get(dtype, 4)
    first = {"name": "vlen-utf8", "configuration": {}}
    if not text:
        first = {"name": "bytes", "configuration": {"endian": "little"}}
    return {
        "shape": list(shape),
        "data_type": dtype,
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": list(chunk_shape(name, shape))},
        },
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": "" if text else "NaN" if dtype in FLOATS else -1,
        "codecs": [
            first,
            {
                "name": "blosc",
                "configuration": {
                    "typesize": size,
                    "cname": COMPRESSOR,
                    "clevel": LEVEL,
                    "shuffle": "bitshuffle",
                    "blocksize": 0,
                },
            },
            {"name": "crc32c"},
        ],
        "attributes": {} if source_dtype is None else {"source_dtype": source_dtype},
        "dimension_names": list(DIMENSIONS[name]),
        "zarr_format": 3,
        "node_type": "array",
        "storage_transformers": [],
    }


def read_json(path: Path, where: str) -> dict[str, Any]:
    """The metadata document at `path`; `where` names the trace in error messages."""
    return read_document(Folder(path.parent), path.name, where)
