"""The arrays of a trace as zarr arrays: data types, chunks, codecs (docs/trace-format.md, 2)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zarr
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec

from kvsim.schema import AXES, CHUNK
from kvsim.store.documents import read_document
from kvsim.store.place import Folder

ZarrArray = zarr.Array[Any]

FLOATS = ("float16", "float32", "float64")

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


def create_array(
    group: zarr.Group, name: str, shape: tuple[int, ...], dtype: str, source_dtype: str | None
) -> ZarrArray:
    """A new array of the trace `group`; dtype is a numpy name or ``string``."""
    text = dtype == "string"
    fill: Any = "" if text else float("nan") if dtype in FLOATS else -1
    size = {"float16": 2, "float64": 8}.get(dtype, 4)
    return group.create_array(
        name,
        shape=shape,
        dtype=dtype,
        chunks=chunk_shape(name, shape),
        serializer="auto" if text else BytesCodec(endian="little"),
        # typesize is explicit: blosc cannot know it, and bit shuffle needs it to compress
        compressors=(
            BloscCodec(cname="lz4", clevel=5, shuffle="bitshuffle", typesize=1 if text else size),
            Crc32cCodec(),
        ),
        fill_value=fill,
        dimension_names=DIMENSIONS[name],
        attributes={} if source_dtype is None else {"source_dtype": source_dtype},
        # a chunk that is all NaN is written as well: the number of chunks shows what is missing
        config={"write_empty_chunks": True},
    )


@contextmanager
def consolidation_allowed() -> Iterator[None]:
    """Without zarr's warning that consolidated metadata is not yet part of the specification."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Consolidated metadata is currently not part")
        yield


def read_json(path: Path, where: str) -> dict[str, Any]:
    """The metadata document at `path`; `where` names the trace in error messages."""
    return read_document(Folder(path.parent), path.name, where)
