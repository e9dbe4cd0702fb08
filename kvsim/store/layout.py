"""The arrays of a trace as zarr arrays: dimensions, chunks, codecs (docs/trace-format.md, 2).

`array_document` is what a writer writes, and the only thing that a reader accepts.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from reprlib import repr as short_repr
from typing import Any

import numpy as np

from kvsim.core.checks import DTYPES
from kvsim.core.left_out import LeftOut
from kvsim.core.probe import ARRAYS as PROBE
from kvsim.schema import AXES, CHUNK, FORMAT_VERSION, OF_ROWS, axes_of
from kvsim.store.place import damaged

FLOATS = ("float16", "float32", "float64")

#: How chunks are written: blosc with this compressor at this level, and bit shuffle.
COMPRESSOR, LEVEL = "lz4", 5

#: Most bytes of one decoded chunk: what blosc can hold.
CHUNK_LIMIT = (1 << 31) - 1

#: Most bytes of the text of a token, on average.
TEXT_LIMIT = 1 << 16

#: Most chunks of one array.
CHUNKS = 1 << 24

#: Dense attention: of all rows, or of the last ones.
DENSE = ("attention", "attention_window")

#: Arrays that a trace must have.
REQUIRED = ("layer", "q", "k", "v")

#: Dimension names of the arrays of a trace; evictions belong to records.
DIMENSIONS = {**AXES, "layer": ("layer",)}
del DIMENSIONS["evicted_at"]

#: Data types of the arrays of a single type.
_TYPES = {"token_text": ("string",), "tokens": ("int32",), "layer": ("int32",)}

#: Arrays of one type, in a trace and in the model, that came after the seal of version 3. The seal
#: leaves them out, as the readers of then do, and its shape and checksums bind them all the same.
LATER = {"residual_norm": "float32"}
_TYPES |= {name: (dtype,) for name, dtype in LATER.items()}

#: All arrays that the seal leaves out. The shape of a probe follows from `meta.probe` and q, and
#: its types are those of q.
UNSEALED = (*LATER, *PROBE)

_NUMPY = {"float16": "<f2", "float32": "<f4", "float64": "<f8", "int32": "<i4", "string": "object"}


@dataclass(frozen=True)
class StoredArray:
    """One array of a stored trace.

    dtype: as stored; object for text. source_dtype: in the model; None if not recorded.
    crcs: the CRC-32C of each chunk, four bytes each, in order; None where they are not listed.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    source_dtype: str | None
    crcs: bytes | None = None

    @cached_property
    def chunks(self) -> tuple[int, ...]:
        """Shape of a chunk."""
        return chunk_shape(self.name, self.shape)

    @cached_property
    def grid(self) -> tuple[int, ...]:
        """Number of chunks along each axis."""
        return tuple(-(-n // size) for n, size in zip(self.shape, self.chunks, strict=True))

    @property
    def nchunks(self) -> int:
        """Number of chunks."""
        return math.prod(self.grid)

    @property
    def decoded(self) -> int:
        """Bytes of a decoded chunk; for text, the upper limit."""
        if self.dtype.hasobject:
            return min(self.shape[0] * TEXT_LIMIT, CHUNK_LIMIT)
        return math.prod(self.chunks) * self.dtype.itemsize

    @property
    def encoded(self) -> int:
        """Most bytes of a stored chunk: blosc adds at most its header, crc32c four bytes."""
        return self.decoded + self.decoded // 64 + 1024

    def indices(self) -> Iterator[tuple[int, ...]]:
        """Yield the index of each chunk in order, lazily: the grid may claim any size."""
        for place in range(self.nchunks):
            yield tuple(map(int, np.unravel_index(place, self.grid)))

    def crc(self, index: Sequence[int]) -> bytes | None:
        """Return the listed CRC-32C of the chunk at an index of the grid, None if not listed."""
        if self.crcs is None:
            return None
        place = 0
        for at, n in zip(index, self.grid, strict=True):
            place = place * n + int(at)
        return self.crcs[4 * place : 4 * place + 4]

    def key(self, index: Sequence[int]) -> str:
        """Return the key of the chunk at an index of the grid."""
        return f"{self.name}/c/" + "/".join(map(str, index))


def chunk_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the chunks: one layer, all heads, 256 positions or rows of a probe.

    Of an array without a layer axis, all of it.
    """
    axes = DIMENSIONS[name]
    if len(axes) == 1:
        return (max(1, shape[0]),)
    size = {"layer": 1, "pos": CHUNK, "row": CHUNK, "probe": CHUNK}
    return tuple(size.get(axis, length) for axis, length in zip(axes, shape, strict=True))


def block_axis(name: str) -> int | None:
    """Return the axis along which an array is cut into blocks of positions, None without one."""
    axes = DIMENSIONS[name]
    return next((axes.index(axis) for axis in ("row", "pos") if axis in axes), None)


def pos_axis(name: str) -> int:
    """Return the axis of positions in one layer of an array."""
    return DIMENSIONS[name].index("pos") - 1


def cut_shape(
    name: str, shape: tuple[int, ...], n_pos: int, left_out: LeftOut = None
) -> tuple[int, ...]:
    """Return the shape for `n_pos` positions; dense attention has as many rows at most."""
    lengths = dict(zip(DIMENSIONS[name], shape, strict=True))
    if left_out is not None and name in OF_ROWS:
        n_pos -= left_out[1] - left_out[0]
    limits = {"pos": n_pos, "row": min(n_pos, lengths.get("row", n_pos))}
    return tuple(limits.get(axis, length) for axis, length in lengths.items())


def require_arrays(names: Collection[str], where: str) -> None:
    """Raise TraceError unless `REQUIRED` are among the names."""
    missing = [name for name in REQUIRED if name not in names]
    if missing:
        raise damaged(f"{where}: no array {', '.join(missing)}, expected {', '.join(REQUIRED)}")


def array_document(
    name: str,
    shape: tuple[int, ...],
    dtype: str,
    source_dtype: str | None,
    version: int = FORMAT_VERSION,
    *,
    rows: bool = False,
) -> dict[str, Any]:
    """Return the metadata of an array; dtype is a numpy name or ``string``.

    rows: whether the trace leaves out rows.
    """
    axes = axes_of(name, version, rows=rows) if name in AXES else (name,)
    text = dtype == "string"
    first = {"name": "bytes", "configuration": {"endian": "little"}}
    if text:
        first = {"name": "vlen-utf8", "configuration": {}}
    size = 1 if text else {"float16": 2, "float64": 8}.get(dtype, 4)
    blosc = {"typesize": size, "cname": COMPRESSOR, "clevel": LEVEL, "shuffle": "bitshuffle"}
    chunks = {"chunk_shape": list(chunk_shape(name, shape))}
    return {
        "shape": list(shape),
        "data_type": dtype,
        "chunk_grid": {"name": "regular", "configuration": chunks},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": "" if text else "NaN" if dtype in FLOATS else -1,
        "codecs": [
            first,
            {"name": "blosc", "configuration": {**blosc, "blocksize": 0}},
            {"name": "crc32c"},
        ],
        "attributes": {} if source_dtype is None else {"source_dtype": source_dtype},
        "dimension_names": list(axes),
        "zarr_format": 3,
        "node_type": "array",
        "storage_transformers": [],
    }


def parse_array(
    name: str,
    document: Mapping[str, Any],
    where: str,
    version: Any = FORMAT_VERSION,
    *,
    rows: bool = False,
) -> StoredArray:
    """Return the array that a metadata document of a version of the format describes.

    It must be equal to `array_document` of its shape and types, but for more attributes; otherwise
    TraceError names the first difference. Nothing of the size that it claims is allocated.
    """

    def require(what: str, value: object, expected: object, *, valid: bool) -> None:
        if not valid:
            raise damaged(f"{where}: {name} has {what} {short_repr(value)}, expected {expected}")

    axes, types = DIMENSIONS[name], _TYPES.get(name, FLOATS)
    value = document.get("shape")
    shape = tuple(value) if isinstance(value, list) else ()
    valid = len(shape) == len(axes) and all(type(n) is int and 0 < n < 1 << 31 for n in shape)
    require("shape", value, f"[{', '.join(axes)}], none of them 0", valid=valid)
    dtype = document.get("data_type")
    require("data type", dtype, " or ".join(types), valid=dtype in types)
    attributes = document.get("attributes", {})
    require("attributes", attributes, "an object", valid=isinstance(attributes, dict))
    source = attributes.get("source_dtype")
    sources = DTYPES.values()
    valid = source == LATER[name] if name in LATER else source in (None, *sources)
    require("source_dtype", source, " or ".join(sources), valid=valid)

    array = StoredArray(name, shape, np.dtype(_NUMPY[str(dtype)]), source)
    size, count = array.decoded, array.nchunks
    require("bytes in a chunk:", size, f"at most {CHUNK_LIMIT}", valid=size <= CHUNK_LIMIT)
    require("chunks:", count, f"at most {CHUNKS}", valid=count <= CHUNKS)
    expected = array_document(name, shape, str(dtype), source, version, rows=rows)
    document = {**document, "attributes": expected["attributes"]}
    if (difference := _difference(document, expected)) is not None:
        path, value, wanted = difference
        require(path, value, short_repr(wanted), valid=False)
    return array


def _difference(value: Any, expected: Any, path: str = "") -> tuple[str, Any, Any] | None:
    """Where two JSON values first differ, as a dotted path, and what each has there."""
    if isinstance(value, dict) and isinstance(expected, dict):
        if odd := value.keys() ^ expected.keys():
            key = min(odd)
            return f"{path}{short_repr(key)[1:-1]}", value.get(key), expected.get(key)
        pairs = [(key, value[key], expected[key]) for key in expected]
    elif isinstance(value, list) and isinstance(expected, list) and len(value) == len(expected):
        pairs = [(str(i), *pair) for i, pair in enumerate(zip(value, expected, strict=True))]
    else:
        return None if value == expected else (path.removesuffix("."), value, expected)
    differences = (_difference(a, b, f"{path}{key}.") for key, a, b in pairs)
    return next((first for first in differences if first is not None), None)
