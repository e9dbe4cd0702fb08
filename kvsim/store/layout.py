"""The one form of a trace's arrays as zarr arrays: chunks and codecs (docs/trace-format.md, 2)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from reprlib import repr as short_repr
from typing import Any

import numpy as np

from kvsim.core.checks import DTYPES
from kvsim.core.left_out import LeftOut, stored_shape
from kvsim.core.probe import ARRAYS as PROBE
from kvsim.schema import AXES, CHUNK, FORMAT_VERSION, NEWEST_VERSION, OF_ROWS, SUMS, axes_of
from kvsim.store.place import damaged

FLOATS = ("float16", "float32", "float64")

#: Data type of the bits of bfloat16, which zarr has no name for, and those of a NaN.
BITS, NAN = "uint16", 0x7FC0

#: How chunks are written: blosc with this compressor at this level, and bit shuffle.
COMPRESSOR, LEVEL = "lz4", 5

#: Most bytes of one decoded chunk: what blosc can hold.
CHUNK_LIMIT = (1 << 31) - 1

#: Most bytes of the text of a token, on average.
TEXT_LIMIT = 1 << 16

#: Most chunks of one array.
CHUNKS = 1 << 24

#: The arrays of a trace that may have more chunks than this are sharded.
MOST_FILES = 1000

#: The codec of sharded arrays, and where the chunks of a layer are counted.
SHARDING, _BLOCKS = "sharding_indexed", ("pos", "row", "probe")

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
_NUMPY[BITS] = "<u2"


Bounds = list[int] | np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class StoredArray:
    """One array of a stored trace.

    dtype: as stored; object for text. source_dtype: in the model; None if not recorded.
    crcs: the CRC-32C of each chunk, four bytes each, in order; None where they are not listed.
    sharded: whether the chunks of a layer are in one file, a shard.
    bounds: by key of a shard, where each chunk begins and where the last one ends, once known.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    source_dtype: str | None
    crcs: bytes | None = None
    sharded: bool = False
    bounds: dict[str, Bounds] = field(default_factory=dict, compare=False, repr=False)

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
    def number(self) -> str:
        """Name of the numbers: that of the data type, or bfloat16 where it is of their bits."""
        return "bfloat16" if self.dtype.name == BITS else self.dtype.name

    @property
    def per_shard(self) -> int:
        """Number of chunks of a layer."""
        return math.prod(self.grid[1:])

    @property
    def index_size(self) -> int:
        """Bytes of the index of a shard: offset and size of each chunk, and a CRC-32C."""
        return 16 * self.per_shard + 4

    @property
    def largest_file(self) -> int:
        """Most bytes of a file with chunks."""
        if self.sharded:
            return self.per_shard * self.encoded + self.index_size
        return self.encoded

    @property
    def nbytes(self) -> int:
        """Bytes of the values, before they are compressed."""
        return math.prod(self.shape) * self.dtype.itemsize

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

    def rank(self, index: Sequence[int]) -> int:
        """Return how many chunks are before the one at an index of the grid."""
        rank = 0
        for at, n in zip(index, self.grid, strict=True):
            rank = rank * n + int(at)
        return rank

    def crc(self, index: Sequence[int]) -> bytes | None:
        """Return the listed CRC-32C of the chunk at an index of the grid, None if not listed."""
        if self.crcs is None:
            return None
        rank = self.rank(index)
        return self.crcs[4 * rank : 4 * rank + 4]

    def key(self, index: Sequence[int]) -> str:
        """Return the key of the file of the chunk at an index of the grid."""
        file = (index[0], *[0] * (len(index) - 1)) if self.sharded else index
        return f"{self.name}/c/" + "/".join(map(str, file))

    def files(self) -> Iterator[str]:
        """Yield the key of each file with chunks in order, lazily as `indices`."""
        shards = itertools.product(range(self.shape[0]), *[[0]] * (len(self.shape) - 1))
        return map(self.key, shards if self.sharded else self.indices())


def stored_arrays(
    shapes: Mapping[str, tuple[int, ...]],
    source_dtypes: Mapping[str, str],
    store_dtype: str | None = None,
    left_out: LeftOut = None,
    *,
    shards: bool = True,
) -> list[StoredArray]:
    """Return the arrays of a trace as they are stored.

    shapes: with the rows that are left out. store_dtype: ``float16`` to store all but lse, sums and
    attention in half precision. shards: whether arrays with many chunks are sharded.
    """
    arrays, sharded = [], shards and to_shard(shapes)
    for name, shape in shapes.items():
        source = source_dtypes[name]
        narrow = store_dtype is not None and name not in ("lse", *SUMS, *DENSE, *LATER)
        number = store_dtype if narrow else source
        dtype = np.dtype(_NUMPY[BITS if number == "bfloat16" else str(number)])
        part = stored_shape(name, shape, left_out)
        of_layers = sharded and can_be_sharded(name)
        arrays.append(StoredArray(name, part, dtype, source, sharded=of_layers))
    return arrays


def chunk_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Chunks: a layer, all heads, 256 positions or probe rows; all, of an array without layers."""
    axes = DIMENSIONS[name]
    if len(axes) == 1:
        return (max(1, shape[0]),)
    size = {"layer": 1, **dict.fromkeys(_BLOCKS, CHUNK)}
    return tuple(size.get(axis, length) for axis, length in zip(axes, shape, strict=True))


def can_be_sharded(name: str) -> bool:
    """Whether the chunks of a layer of an array may be in one file."""
    axes = DIMENSIONS[name]
    return "layer" in axes and any(axis in axes for axis in _BLOCKS)


def to_shard(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether arrays of these shapes, or upper bounds of them, have too many chunks for files."""
    arrays = (StoredArray(name, shape, np.dtype("<f4"), None) for name, shape in shapes.items())
    return sum(array.nchunks for array in arrays) > MOST_FILES


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
    sharded: bool = False,
    rows: bool = False,
) -> dict[str, Any]:
    """Metadata of an array; dtype: numpy's name or ``string``; rows: whether some are left out."""
    axes = axes_of(name, version, rows=rows) if name in AXES else (name,)
    text = dtype == "string"
    first = {"name": "bytes", "configuration": {"endian": "little"}}
    if text:
        first = {"name": "vlen-utf8", "configuration": {}}
    size = 1 if text else np.dtype(_NUMPY[dtype]).itemsize
    fills = {"string": "", BITS: NAN} | dict.fromkeys(FLOATS, "NaN")
    blosc = {"typesize": size, "cname": COMPRESSOR, "clevel": LEVEL, "shuffle": "bitshuffle"}
    chunk = chunk_shape(name, shape)
    codecs: list[dict[str, Any]] = [
        first,
        {"name": "blosc", "configuration": {**blosc, "blocksize": 0}},
        {"name": "crc32c"},
    ]
    file = chunk
    if sharded:
        # a layer, up to whole chunks
        file = (1, *(-(-n // size) * size for n, size in zip(shape[1:], chunk[1:], strict=True)))
        index = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
        inner = {"chunk_shape": list(chunk), "codecs": codecs, "index_codecs": index}
        codecs = [{"name": SHARDING, "configuration": {**inner, "index_location": "end"}}]
    return {
        "shape": list(shape),
        "data_type": dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(file)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": fills.get(dtype, -1),
        "codecs": codecs,
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
    attributes = document.get("attributes", {})
    require("attributes", attributes, "an object", valid=isinstance(attributes, dict))
    source = attributes.get("source_dtype")
    sources = DTYPES.values()
    valid = source == LATER[name] if name in LATER else source in (None, *sources)
    require("source_dtype", source, " or ".join(sources), valid=valid)
    if version == NEWEST_VERSION and source == "bfloat16":
        types = (*types, BITS)
    require("data type", dtype, " or ".join(types), valid=dtype in types)

    codecs = document.get("codecs")
    first = codecs[0] if isinstance(codecs, list) and codecs else None
    sharded = isinstance(first, dict) and first.get("name") == SHARDING
    sharded = sharded and version == NEWEST_VERSION and can_be_sharded(name)
    array = StoredArray(name, shape, np.dtype(_NUMPY[str(dtype)]), source, sharded=sharded)
    size, count = array.decoded, array.nchunks
    require("bytes in a chunk:", size, f"at most {CHUNK_LIMIT}", valid=size <= CHUNK_LIMIT)
    require("chunks:", count, f"at most {CHUNKS}", valid=count <= CHUNKS)
    how = {"sharded": sharded, "rows": rows}
    expected = array_document(name, shape, str(dtype), source, version, **how)
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
