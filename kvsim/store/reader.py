"""Reading stored traces: metadata is checked before anything is decoded."""

from __future__ import annotations

import re
import stat
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from reprlib import repr as short_repr
from typing import Any

import numpy as np

from kvsim.core.checks import check_finite, check_shapes, first_row
from kvsim.core.digest import fingerprint
from kvsim.core.lazy import Tensor, torch
from kvsim.core.left_out import stored_part, whole_shape
from kvsim.core.probe import ARRAYS as PROBE
from kvsim.core.probe import check_probe
from kvsim.core.trace import Trace
from kvsim.errors import TraceError, TraceNotFoundError, suggest
from kvsim.samples import SAMPLES, locate
from kvsim.schema import NEWEST_VERSION, format_of, object_at
from kvsim.store.binding import bound, check_attributes, check_binding
from kvsim.store.chunks import as_numbers, check_chunks, read_part
from kvsim.store.layout import (
    DENSE,
    DIMENSIONS,
    StoredArray,
    block_axis,
    parse_array,
    require_arrays,
)
from kvsim.store.metadata import (
    check_format,
    check_numbers,
    find_document,
    left_out_of,
    read_header,
)
from kvsim.store.place import Folder, Packed, Place, damaged
from kvsim.store.projections import StoredProjections, find_projections
from kvsim.store.remote import find_remote

_ALL = slice(None)

#: Keys of the metadata of a group.
_ROOT_KEYS = {"zarr_format", "node_type", "attributes", "consolidated_metadata"}


def open_trace(path: str | Path) -> Trace:
    """Open the trace stored at `path`; arrays are read when they are needed.

    Args:
        path: a folder, a packed trace (`kvsim trace pack`), or the URL of a folder, such as
            ``s3://bucket/x.zarr``.

    Raises:
        TraceNotFoundError: nothing is at `path`, or something not marked as a trace.
        TraceError: the trace is incomplete, was recorded by another version of kvsim, lacks a
            chunk, or has anything that docs/trace-format.md does not allow.
    """
    stored = StoredTrace(path)
    return Trace(
        stored,
        stored.header,
        dtype=stored.compute_dtype,
        token_text=stored.token_text,
        fingerprint=stored.fingerprint,
        path=stored.path,
    )


def find_place(path: str | Path) -> Place:
    """Return the place of the trace at `path`: a folder, a packed trace, or a URL."""
    path = locate(path)
    if isinstance(path, str):
        return find_remote(path)
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        raise TraceNotFoundError(
            f"{path} does not exist, expected a trace; record one with `kvsim capture`, or give "
            f"one that ships: {', '.join(SAMPLES)}{suggest(str(path), SAMPLES)}"
        ) from error
    if stat.S_ISDIR(mode):
        return Folder(path)
    if stat.S_ISREG(mode):
        return Packed(path)
    raise TraceError(f"{path} is neither a file nor a folder, expected a trace")


class StoredTrace:
    """The arrays and the header of a trace, as a source of `Trace`; raises as `open_trace`."""

    def __init__(self, path: str | Path) -> None:
        self.place = find_place(path)
        self.path = self.place.path
        self.where = str(self.path)
        self.attributes = _root_attributes(self.place)
        self.digest = str(self.attributes["digest"])
        self.sizes = self.place.sizes()
        self.arrays = self._parse()
        #: shape of each array that `read` returns
        self._left_out = left_out_of(self.attributes, self.where)
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: whole_shape(name, array.shape, self._left_out)
            for name, array in self.arrays.items()
            if name not in ("layer", "token_text")
        }
        self._check()
        self.arrays = bound(self.arrays, self.attributes, self.where)
        self.header = read_header(self.attributes, self.arrays, self.place)
        self.header.check(self.shapes, self.where)
        self._check_probe()
        # last, because the checks above say more precisely what was changed
        check_binding(self.attributes, self.header, self.arrays, self.where)
        #: output projections next to the trace, None where it has its own or none
        self.projections: StoredProjections | None = None
        if "o_proj" not in self.arrays:
            self._find_projections()

    @property
    def positions(self) -> Tensor:
        """Positions 0, 1, 2, ... of the rows."""
        return torch.arange(self.shapes["q"][2])

    @property
    def compute_dtype(self) -> torch.dtype:
        """float64 where q, k or v is stored so, else float32."""
        double = any(self.arrays[name].dtype == np.float64 for name in "qkv")
        return torch.float64 if double else torch.float32

    @property
    def fingerprint(self) -> str:
        """The key of the trace in results, from its attributes (`kvsim.core.digest`)."""
        apart = {} if self.projections is None else {"o_proj": self.projections.facts.checksums}
        checksums = self.attributes["checksums"] | apart
        return fingerprint(self.digest, self.header, checksums)

    @cached_property
    def token_text(self) -> list[str] | None:
        """The text of each token, or None."""
        if "token_text" not in self.arrays:
            return None
        return list(map(str, read_part(self.arrays["token_text"], (), self.place)))

    def read(self, name: str, layers: slice, pos: slice) -> Tensor:
        """Return part of an array in its stored dtype, decoding only the chunks that it touches."""
        if name == "tokens":
            tokens = torch.from_numpy(read_part(self.arrays[name], (pos,), self.place))
            if (tokens < 0).any():
                raise damaged(f"{self.where}: {name} has {int(tokens.min())}, expected 0 or more")
            return tokens
        if name == "o_proj" and self.projections is not None:
            return self.projections.read(layers)
        pos = stored_part(name, pos, self.shapes["k"][2], self._left_out, self.where)
        return self.read_stored(name, layers, pos)

    def read_stored(self, name: str, layers: slice, pos: slice) -> Tensor:
        """Return part of an array with layers, as `read`; pos: places in what is stored."""
        axis = block_axis(name)
        if axis is None:
            axis, pos = 1, _ALL
        part = (layers, *[_ALL] * (axis - 1), pos)
        tensor = as_numbers(self.arrays[name], read_part(self.arrays[name], part, self.place))
        # writers refuse NaN, so a reader that finds one has lost data
        first_layer = range(self.shapes[name][0])[layers].start
        first_pos = range(self.shapes[name][axis])[pos].start
        if name in DENSE:
            first_pos += first_row(self.shapes[name])
        check_finite(name, tensor, self.where, layer=first_layer, pos=first_pos)
        return tensor

    def array(self, name: str) -> StoredArray:
        """Return an array that `read` reads."""
        if name == "o_proj" and self.projections is not None:
            return self.projections.array
        return self.arrays[name]

    def _check_probe(self) -> None:
        check_probe(self.header.probe, self.shapes, self.where)
        q = self.arrays["q"]
        for array in (self.arrays[name] for name in PROBE if name in self.arrays):
            types = array.dtype, array.source_dtype
            if types != (q.dtype, q.source_dtype):
                raise damaged(
                    f"{self.where}: {array.name} has types {types}, expected those of q, "
                    f"{(q.dtype, q.source_dtype)}"
                )

    def _find_projections(self) -> None:
        projections = find_projections(self.path, self.header.meta, self.where)
        if projections is None:
            return
        self.projections = projections
        self.shapes = {**self.shapes, "o_proj": projections.array.shape}
        check_shapes({x: n for x, n in self.shapes.items() if x != "tokens"}, self.where)
        dtypes = {**self.header.source_dtypes, "o_proj": projections.facts.source_dtype}
        self.header = replace(self.header, source_dtypes=dtypes)

    def _parse(self) -> dict[str, StoredArray]:
        arrays: dict[str, StoredArray] = {}
        listed = {key.partition("/")[0] for key in self.sizes or ()}
        for name in DIMENSIONS:
            document = find_document(self.place, f"{name}/zarr.json")
            if document is not None:
                version, rows = self.attributes["kvsim_format"], "left_out" in self.attributes
                arrays[name] = parse_array(name, document, self.where, version, rows=rows)
            elif name in listed:  # where files cannot be listed, the array is missing
                raise TraceError(
                    f"{self.where}: {name}/zarr.json is missing, expected a zarr group written by "
                    "kvsim; give the folder of a trace"
                )
        require_arrays(arrays, self.where)
        return arrays

    def _check(self) -> None:
        """Raise TraceError unless the arrays fit together and all their chunks are there."""
        floats = {name: shape for name, shape in self.shapes.items() if name != "tokens"}
        check_shapes(floats, self.where)
        version = self.attributes["kvsim_format"]
        expected = format_of(self.shapes, newest="sizes" in self.attributes)
        if version not in (NEWEST_VERSION, expected):
            sizes = self.shapes["k"][-1], self.shapes["v"][-1]
            raise damaged(
                f"{self.where}: kvsim_format is {version}, expected {expected} of keys and values "
                f"with {sizes} dimensions"
            )
        n_layers, _, n_pos, _ = self.shapes["q"]
        lengths = {"tokens": n_pos, "token_text": n_pos, "layer": n_layers}
        for name, length in lengths.items():
            if name in self.arrays and self.arrays[name].shape != (length,):
                raise damaged(
                    f"{self.where}: {name} has shape {self.arrays[name].shape}, expected "
                    f"{(length,)}"
                )
        n_tokens = self.attributes.get("n_tokens")
        if n_tokens != n_pos:
            raise damaged(
                f"{self.where}: n_tokens is {short_repr(n_tokens)}, but q has {n_pos} positions"
            )
        if self.sizes is not None:
            for array in self.arrays.values():
                check_chunks(array, self.sizes, self.where)


def _root_attributes(place: Place) -> dict[str, Any]:
    """Return the attributes of the group, once they have shown that the trace is usable."""
    where = str(place.path)
    root = find_document(place, "zarr.json")
    attributes = object_at(root or {}, "attributes")
    if root is None or type(attributes.get("kvsim_format")) is not int:
        reason = "zarr.json is missing" if root is None else "its zarr.json has no kvsim_format"
        raise TraceNotFoundError(
            f"{where} is not a kvsim trace: {reason}, expected a zarr group written by kvsim; "
            "give the folder of a trace"
        )
    check_format(attributes, where)
    if attributes.get("complete") is not True:
        raise TraceError(f"{where} is incomplete, expected a complete trace; record it again")
    kind = root.get("zarr_format"), root.get("node_type")
    if kind != (3, "group"):
        raise damaged(
            f"{where}: zarr_format and node_type are {short_repr(kind)}, expected 3 and 'group'"
        )
    if unknown := root.keys() - _ROOT_KEYS:
        raise TraceError(
            f"{where}: zarr.json has {short_repr(min(unknown))}, expected only "
            f"{', '.join(sorted(_ROOT_KEYS))}; install a newer kvsim or record the trace again"
        )
    digest = attributes.get("digest")
    if not (isinstance(digest, str) and re.fullmatch("sha256:[0-9a-f]{64}", digest)):
        raise damaged(f"{where} has no digest, expected one")
    check_attributes(attributes, where)
    for key, value in attributes.items():
        if key != "meta":  # the configuration of a model may hold an infinity
            check_numbers(value, f"attribute {short_repr(key)}", where)
    return attributes
