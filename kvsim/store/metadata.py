"""What the metadata of one array may say: everything that docs/trace-format.md does, no more."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvsim.errors import TraceError
from kvsim.store.checks import DTYPES
from kvsim.store.documents import brief
from kvsim.store.layout import DIMENSIONS, FLOATS, chunk_shape

COMPRESSORS = ("blosc", "zstd", "gzip")
CODECS = ("bytes", "vlen-utf8", *COMPRESSORS, "crc32c")

#: Most bytes of one decoded chunk: what blosc can hold.
CHUNK_LIMIT = (1 << 31) - 1

#: Most bytes of the text of a token, on average.
TEXT_LIMIT = 1 << 16

#: Most chunks of one array.
CHUNKS = 1 << 24

_TYPES = {"token_text": ("string",), "tokens": ("int32",), "layer": ("int32",)}
_NUMPY = {
    "float16": "<f2",
    "float32": "<f4",
    "float64": "<f8",
    "int32": "<i4",
    "string": "object",
}
_KEYS = (
    *("zarr_format", "node_type", "shape", "data_type", "chunk_grid", "chunk_key_encoding"),
    *("fill_value", "codecs", "attributes", "dimension_names", "storage_transformers"),
)
_KEY_ENCODINGS = (
    {"name": "default", "configuration": {"separator": "/"}},
    {"name": "default"},
    "default",
)


@dataclass(frozen=True)
class StoredArray:
    """One array of a stored trace as its metadata describes it.

    Attributes:
        name: its name in the group.
        shape: its shape.
        dtype: the type in which it is stored; object for text.
        compressor: ``blosc``, ``zstd``, ``gzip`` or None.
        source_dtype: the dtype that it had in the model, None where nothing says.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    compressor: str | None
    source_dtype: str | None

    @property
    def chunks(self) -> tuple[int, ...]:
        """Shape of a chunk."""
        return chunk_shape(self.name, self.shape)

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of chunks along each axis."""
        return tuple(-(-n // size) for n, size in zip(self.shape, self.chunks, strict=True))

    @property
    def nchunks(self) -> int:
        """Number of chunks."""
        return math.prod(self.grid)

    @property
    def decoded(self) -> int:
        """Bytes of a decoded chunk; of text, the most that it may have."""
        if self.dtype.hasobject:
            return min(self.shape[0] * TEXT_LIMIT, CHUNK_LIMIT)
        return math.prod(self.chunks) * self.dtype.itemsize

    @property
    def encoded(self) -> int:
        """The most bytes that a stored chunk may have: no codec adds more to what it is given."""
        return self.decoded + self.decoded // 64 + 1024

    def indices(self) -> Iterator[tuple[int, ...]]:
        """The places of the chunks in order, one by one, however many there are said to be."""
        for place in range(self.nchunks):
            left, index = place, []
            for n in reversed(self.grid):
                left, at = divmod(left, n)
                index.append(at)
            yield tuple(reversed(index))

    def key(self, index: Sequence[int]) -> str:
        """The key of the chunk at a place of the grid."""
        return f"{self.name}/c/" + "/".join(map(str, index))


def parse_array(name: str, document: Mapping[str, Any], where: str) -> StoredArray:
    """The array `name` as its metadata document describes it.

    Everything in the document is either understood or refused, and nothing of the size that it
    claims is made.

    Raises:
        TraceError: the document says anything that the format does not allow.
    """
    rules = _Rules(name, where)
    kind = document.get("zarr_format"), document.get("node_type")
    rules.need("zarr_format and node_type", kind, "3 and 'array'", kind == (3, "array"))
    check_extensions(document, _KEYS, name, where)

    axes = list(DIMENSIONS[name])
    names = document.get("dimension_names")
    rules.need("dimensions", names, f"{axes}", names == axes)
    given = document.get("shape")
    shape = tuple(given) if isinstance(given, list) else ()
    sized = len(shape) == len(axes) and all(type(n) is int and 0 < n < 1 << 31 for n in shape)
    rules.need("shape", given, f"[{', '.join(axes)}], none of them 0", sized)

    types = _TYPES.get(name, FLOATS)
    data_type = document.get("data_type")
    rules.need("data type", data_type, " or ".join(types), data_type in types)
    dtype = np.dtype(_NUMPY[str(data_type)])
    attributes = document.get("attributes", {})
    rules.need("attributes", attributes, "an object", isinstance(attributes, dict))
    source = attributes.get("source_dtype")
    sources = (None, *DTYPES.values())
    rules.need("source_dtype", source, " or ".join(DTYPES.values()), source in sources)

    codecs = document.get("codecs")
    compressor = rules.compressor(codecs if isinstance(codecs, list) else [codecs], dtype)
    array = StoredArray(name, shape, dtype, compressor, source)
    grid = {"name": "regular", "configuration": {"chunk_shape": list(array.chunks)}}
    rules.same(document, "chunk_grid", grid)
    encoding = document.get("chunk_key_encoding")
    rules.need("chunk_key_encoding", encoding, "the default", encoding in _KEY_ENCODINGS)
    fill = "NaN" if dtype.kind == "f" else "" if dtype.hasobject else -1
    rules.same(document, "fill_value", fill)
    rules.same({"storage_transformers": [], **document}, "storage_transformers", [])
    size, count = array.decoded, array.nchunks
    rules.need("bytes in a chunk:", size, f"at most {CHUNK_LIMIT}", size <= CHUNK_LIMIT)
    rules.need("chunks:", count, f"at most {CHUNKS}", count <= CHUNKS)
    return array


class _Rules:
    """Refuses what an array must not say."""

    def __init__(self, name: str, where: str) -> None:
        self.name, self.where = name, where

    def need(self, what: str, found: object, expected: str, allowed: bool) -> None:
        if not allowed:
            raise TraceError(
                f"{self.where}: {self.name} has {what} {brief(found)}, expected {expected}; "
                "kvsim reads nothing else, record the trace again"
            )

    def same(self, document: Mapping[str, Any], key: str, expected: object) -> None:
        found = document.get(key)
        self.need(key, found, f"{expected!r}", found == expected)

    def compressor(self, codecs: list[Any], dtype: np.dtype[Any]) -> str | None:
        """The compressor among the codecs, which have one order."""
        text = dtype.hasobject
        named = [codec if isinstance(codec, dict) else {"name": codec} for codec in codecs]
        for codec in named:
            name = codec.get("name")
            self.need("codec", name, f"one of {', '.join(CODECS)}", name in CODECS)
            check_extensions(
                codec, ("name", "configuration"), f"codec {name} of {self.name}", self.where
            )
            settings = codec.get("configuration", {})
            self.need("codec settings", settings, "an object", isinstance(settings, dict))
        first = "vlen-utf8" if text else "bytes"
        names = [codec["name"] for codec in named]
        middle = names[1:-1]
        configurations = [codec.get("configuration", {}) for codec in named]
        ordered = names in ([first, "crc32c"], *([first, one, "crc32c"] for one in COMPRESSORS))
        expected = f"{first}, at most one of {', '.join(COMPRESSORS)}, and crc32c"
        self.need("codecs", names, expected, ordered)
        if not text:
            self.same(configurations[0], "endian", "little")
        if middle == ["blosc"]:
            # what else is set says how hard the compressor tried; each block says how to undo it
            settings = configurations[1]
            cname = settings.get("cname")
            self.need("blosc with", cname, "lz4 or zstd", cname in ("lz4", "zstd"))
            self.same(settings, "typesize", 1 if text else dtype.itemsize)
        return middle[0] if middle else None


def check_extensions(
    document: Mapping[str, Any], known: Collection[str], what: str, where: str
) -> None:
    """Raise TraceError where a document says something beyond `known` that must be understood."""
    for key in document.keys() - set(known):
        said = document[key]
        if not (isinstance(said, dict) and said.get("must_understand") is False):
            raise TraceError(
                f"{where}: the metadata of {what} has {brief(key)}, which this kvsim does not "
                "know; install a newer kvsim or record the trace again"
            )
