"""Reading a stored trace: metadata first and by hand, so that nothing unknown is ever decoded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvsim.errors import TraceError, TraceNotFoundError
from kvsim.schema import AXES, FORMAT_VERSION
from kvsim.store.checks import check_finite, check_shapes, first_row
from kvsim.store.chunks import check_chunks, read_part
from kvsim.store.documents import brief, check_numbers, find_document, read_document
from kvsim.store.header import Header
from kvsim.store.layout import DENSE, DIMENSIONS, REQUIRED
from kvsim.store.metadata import StoredArray, check_extensions, parse_array
from kvsim.store.place import Place, find_place

_ALL = slice(None)

#: Arrays that must be finite: a writer refuses NaN.
_FINITE = ("q", "k", "v", "attn_out", "lse", *DENSE, "o_proj", "residual")


class StoredTrace:
    """The arrays and the header of the trace at `path`, a source for `kvsim.core.trace.Trace`.

    path: a folder, a packed trace, or a URL.

    Raises:
        TraceNotFoundError: there is nothing at `path`, or nothing that says it is a trace.
        TraceError: incomplete, a newer format, a missing chunk, wrong shapes, or anything
            that docs/trace-format.md does not allow.
    """

    def __init__(self, path: str | Path) -> None:
        self.place = find_place(path)
        self.path = self.place.path
        self.where = str(self.path)
        self.attributes = _root_attributes(self.place, self.where)
        self.sizes = self.place.sizes()
        self.arrays = self._parse()
        self._shapes = {
            name: array.shape
            for name, array in self.arrays.items()
            if name not in ("layer", "token_text")
        }
        self._check()
        sources = {
            name: array.source_dtype or array.dtype.name
            for name, array in self.arrays.items()
            if name in _FINITE
        }
        layer_ids = tuple(int(layer) for layer in self._read("layer", (_ALL,)))
        self.header = Header.from_attributes(
            self.attributes, layer_ids=layer_ids, source_dtypes=sources, where=self.where
        )
        n_layers, n_qheads, n_pos, dim = self._shapes["q"]
        self.header.check(
            n_layers=n_layers, n_qheads=n_qheads, n_pos=n_pos, dim=dim, where=self.where
        )

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of each array that `read` gives."""
        return self._shapes

    @property
    def compute_dtype(self) -> torch.dtype:
        """float64 where q, k or v is stored so, else float32."""
        double = any(self.arrays[name].dtype == np.float64 for name in "qkv")
        return torch.float64 if double else torch.float32

    @property
    def digest(self) -> str:
        """The digest that the writer recorded."""
        return str(self.attributes["digest"])

    @cached_property
    def token_text(self) -> list[str] | None:
        """The text of each token, or None."""
        if "token_text" not in self.arrays:
            return None
        return [str(text) for text in self._read("token_text", (_ALL,))]

    def read(self, name: str, layers: slice, pos: slice) -> Tensor:
        """Part of an array in its stored dtype, decoding only the chunks that it touches."""
        if AXES[name][0] != "layer":
            tokens = torch.from_numpy(self._read(name, (pos,)))
            if (tokens < 0).any():
                raise TraceError(
                    f"{self.where}: {name} has {int(tokens.min())}, expected numbers of 0 or more; "
                    "record the trace again"
                )
            return tokens
        axis = next((i for i, axis in enumerate(AXES[name]) if axis in ("row", "pos")), 1)
        if "pos" not in AXES[name]:
            pos = _ALL
        values = self._read(name, (layers, *[_ALL] * (axis - 1), pos))
        tensor = torch.from_numpy(values)
        if name in _FINITE:
            first_layer = range(self._shapes[name][0])[layers].start
            first_pos = range(self._shapes[name][axis])[pos].start
            if name in DENSE:
                first_pos += first_row(self._shapes[name])
            check_finite(name, tensor, self.where, layer=first_layer, pos=first_pos)
        return tensor

    def _parse(self) -> dict[str, StoredArray]:
        """What the metadata of each known array says."""
        arrays: dict[str, StoredArray] = {}
        listed = {key.partition("/")[0] for key in self.sizes or ()}
        for name in DIMENSIONS:
            # where nothing says what is there, what cannot be found is not there
            read = read_document if name in listed else find_document
            document = read(self.place, f"{name}/zarr.json", self.where)
            if document is not None:
                arrays[name] = parse_array(name, document, self.where)
        missing = [name for name in REQUIRED if name not in arrays]
        if missing:
            raise TraceError(
                f"{self.where}: no array {', '.join(missing)}, expected {', '.join(REQUIRED)}; "
                "record the trace again"
            )
        return arrays

    def _check(self) -> None:
        """Whether the arrays fit together and all their chunks are there."""
        floats = {name: shape for name, shape in self._shapes.items() if name != "tokens"}
        check_shapes(floats, self.where)
        n_layers, _, n_pos, _ = self._shapes["q"]
        lengths = {"tokens": n_pos, "token_text": n_pos, "layer": n_layers}
        for name, length in lengths.items():
            if name in self.arrays and self.arrays[name].shape != (length,):
                raise TraceError(
                    f"{self.where}: {name} has shape {self.arrays[name].shape}, expected "
                    f"{(length,)}; record the trace again"
                )
        if self.attributes.get("n_tokens") != n_pos:
            raise TraceError(
                f"{self.where}: n_tokens is {brief(self.attributes.get('n_tokens'))}, but q has "
                f"{n_pos} positions; record the trace again"
            )
        if self.sizes is not None:
            for array in self.arrays.values():
                check_chunks(array, self.sizes, self.where)

    def _read(self, name: str, part: tuple[slice, ...]) -> np.ndarray[Any, Any]:
        return read_part(self.arrays[name], part, self.place, self.where)


def _root_attributes(place: Place, where: str) -> dict[str, Any]:
    """Attributes of the group, after everything that decides whether this is a usable trace."""
    root = find_document(place, "zarr.json", where)
    if root is None:
        raise TraceNotFoundError(
            f"{where} is no kvsim trace: zarr.json is missing, expected a zarr group written by "
            "kvsim; give the folder of a trace"
        )
    attributes = root.get("attributes")
    version = attributes.get("kvsim_format") if isinstance(attributes, dict) else None
    if not isinstance(attributes, dict) or type(version) is not int or version < 1:
        raise TraceNotFoundError(
            f"{where} is no kvsim trace: its zarr.json has no kvsim_format; "
            "give the folder of a trace"
        )
    if version > FORMAT_VERSION:
        raise TraceError(
            f"{where} has format version {version}, this kvsim knows up to {FORMAT_VERSION}; "
            "install a newer kvsim"
        )
    if attributes.get("complete") is not True:
        raise TraceError(
            f"{where} is incomplete ({brief(attributes.get('committed_tokens', 0))} tokens were "
            "written), expected a finished trace; `kvsim trace recover` makes one of what was "
            "written"
        )
    kind = root.get("zarr_format"), root.get("node_type")
    if kind != (3, "group"):
        raise TraceError(
            f"{where}: zarr_format and node_type are {brief(kind)}, expected 3 and 'group'; "
            "record the trace again"
        )
    check_extensions(
        root,
        ("zarr_format", "node_type", "attributes", "consolidated_metadata"),
        "the group",
        where,
    )
    digest = attributes.get("digest")
    if not (isinstance(digest, str) and re.fullmatch("sha256:[0-9a-f]{64}", digest)):
        raise TraceError(f"{where} has no digest, expected one; record it again")
    for key, value in attributes.items():
        if key != "meta":  # the configuration of a model may hold an infinity
            check_numbers(value, f"attribute {brief(key)}", where)
    return attributes
