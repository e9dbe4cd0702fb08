"""Reading a stored trace: metadata first and by hand, so that nothing unknown is ever decoded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zarr
from torch import Tensor

from kvsim.errors import TraceError, TraceNotFoundError
from kvsim.schema import AXES, FORMAT_VERSION
from kvsim.store.checks import check_finite, check_shapes, first_row
from kvsim.store.header import Header
from kvsim.store.layout import (
    DENSE,
    DIMENSIONS,
    REQUIRED,
    ZarrArray,
    check_array_metadata,
    read_json,
)

_ALL = slice(None)

#: Arrays that must be finite, so that a NaN means a chunk that was lost.
_FINITE = ("q", "k", "v", "attn_out", "lse", *DENSE, "o_proj", "residual")


class StoredTrace:
    """The arrays and the header of the trace at `path`, a source for `kvsim.trace.Trace`.

    Raises:
        TraceNotFoundError: there is nothing at `path`.
        TraceError: no trace, incomplete, a newer format, a missing chunk, or wrong shapes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.where = str(path)
        self.attributes = _root_attributes(path)
        self.arrays = self._open()
        self._shapes = {
            name: tuple(array.shape)
            for name, array in self.arrays.items()
            if name not in ("layer", "token_text")
        }
        self._check()
        sources = {
            name: str(array.attrs.get("source_dtype", array.dtype.name))
            for name, array in self.arrays.items()
            if name in _FINITE
        }
        layer_ids = tuple(int(layer) for layer in self._decode("layer", (_ALL,)))
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
        return [str(text) for text in self._decode("token_text", (_ALL,))]

    def read(self, name: str, layers: slice, pos: slice) -> Tensor:
        """Part of an array in its stored dtype, decoding only the chunks that it touches."""
        if AXES[name][0] != "layer":
            return torch.from_numpy(self._decode(name, (pos,)))
        axis = next((i for i, axis in enumerate(AXES[name]) if axis in ("row", "pos")), 1)
        if "pos" not in AXES[name]:
            pos = _ALL
        values = self._decode(name, (layers, *[_ALL] * (axis - 1), pos))
        tensor = torch.from_numpy(values)
        if name in _FINITE:
            first_layer = range(self._shapes[name][0])[layers].start
            first_pos = range(self._shapes[name][axis])[pos].start
            if name in DENSE:
                first_pos += first_row(self._shapes[name])
            check_finite(name, tensor, self.where, layer=first_layer, pos=first_pos)
        return tensor

    def _open(self) -> dict[str, ZarrArray]:
        with self._metadata():
            group = zarr.open_group(self.path, mode="r", zarr_format=3, use_consolidated=False)
        arrays: dict[str, ZarrArray] = {}
        for name in DIMENSIONS:
            folder = self.path / name
            if not folder.is_dir():
                continue
            check_array_metadata(name, read_json(folder / "zarr.json", self.where), self.where)
            with self._metadata():
                array = group[name]
            if not isinstance(array, zarr.Array):
                raise TraceError(f"{self.where}: {name} is no array; record the trace again")
            arrays[name] = array
        missing = [name for name in REQUIRED if name not in arrays]
        if missing:
            raise TraceError(
                f"{self.where}: no array {', '.join(missing)}, expected {', '.join(REQUIRED)}; "
                "record the trace again"
            )
        return arrays

    @contextmanager
    def _metadata(self) -> Iterator[None]:
        """Turn what zarr says about metadata that it cannot use into one clear line."""
        try:
            yield
        except (ValueError, TypeError, KeyError, AttributeError, NotImplementedError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise TraceError(
                f"{self.where}: its metadata is not usable ({reason}), expected what "
                "docs/trace-format.md describes; record the trace again"
            ) from error

    def _check(self) -> None:
        for name, array in self.arrays.items():
            names = array.metadata.dimension_names  # type: ignore[union-attr]  # version 3 only
            if names != DIMENSIONS[name] or array.ndim != len(DIMENSIONS[name]):
                raise TraceError(
                    f"{self.where}: {name} has dimensions {names}, expected {DIMENSIONS[name]}; "
                    "record the trace again"
                )
            if array.nchunks_initialized != array.nchunks:
                raise TraceError(
                    f"{self.where}: {name} has {array.nchunks_initialized} of {array.nchunks} "
                    f"chunks{_first_missing(self.path / name, array)}, expected all; "
                    "copy the trace again or record it again"
                )
        floats = {name: shape for name, shape in self._shapes.items() if name != "tokens"}
        check_shapes(floats, self.where)
        n_pos = self._shapes["q"][2]
        for name in ("tokens", "token_text"):
            if name in self.arrays and self.arrays[name].shape != (n_pos,):
                raise TraceError(
                    f"{self.where}: {name} has shape {self.arrays[name].shape}, expected "
                    f"{(n_pos,)}; record the trace again"
                )
        if self.attributes.get("n_tokens") != n_pos:
            raise TraceError(
                f"{self.where}: n_tokens is {self.attributes.get('n_tokens')!r}, but q has {n_pos} "
                "positions; record the trace again"
            )

    def _decode(self, name: str, index: tuple[slice, ...]) -> np.ndarray[Any, Any]:
        try:
            return np.asarray(self.arrays[name][index])
        except (ValueError, RuntimeError, OSError, EOFError) as error:
            # zarr's codecs report a wrong checksum or a truncated chunk with these
            reason = " ".join(str(error).split())
            raise TraceError(
                f"{self.where}: a chunk of {name} is damaged ({reason}), expected data that its "
                "checksum fits; copy the trace again or record it again"
            ) from error


def _root_attributes(path: Path) -> dict[str, Any]:
    """Attributes of the group, after everything that decides whether this is a usable trace."""
    where = str(path)
    if not path.exists():
        raise TraceNotFoundError(
            f"{where} does not exist, expected a trace; record one with `kvsim capture`"
        )
    if not path.is_dir():
        raise TraceError(f"{where} is a file, expected the folder of a trace")
    root = read_json(path / "zarr.json", where)
    attributes = root.get("attributes")
    version = attributes.get("kvsim_format") if isinstance(attributes, dict) else None
    if not isinstance(attributes, dict) or not isinstance(version, int):
        raise TraceError(
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
            f"{where} is incomplete ({attributes.get('committed_tokens', 0)} tokens were written), "
            "expected a finished trace; `kvsim trace recover` makes one of what was written"
        )
    if not isinstance(attributes.get("digest"), str):
        raise TraceError(f"{where} has no digest, expected one; record it again")
    return attributes


def _first_missing(folder: Path, array: ZarrArray) -> str:
    """`, the first missing is c/0/0/3/0` where that can be told."""
    for index in np.ndindex(*array.cdata_shape):
        key = "c/" + "/".join(map(str, index))
        if not (folder / key).is_file():
            return f", the first missing is {key}"
    return ""
