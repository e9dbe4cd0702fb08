"""Writing a trace: block by block into a hidden sibling, then published in one rename."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
import zarr
from torch import Tensor

from kvsim.errors import TraceError, TraceExistsError
from kvsim.interrupts import unbroken
from kvsim.schema import AXES, CHUNK, FORMAT_VERSION
from kvsim.store.checks import check_finite, stored_dtype
from kvsim.store.header import ContentDigest, Header
from kvsim.store.layout import (
    DENSE,
    ZarrArray,
    consolidation_allowed,
    create_array,
    pos_axis,
    read_json,
)

#: Largest magnitude that float16 holds.
FLOAT16_MAX = 65504.0

# Arrays that are not appended position by position, but written when everything else is there.
_LATE = (*DENSE, "o_proj")

# What renaming onto something that is there fails with.
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR)


class TraceWriter:
    """A trace on its way to `path`.

    Use it as a context manager; leaving it without `publish` removes what was written. Nothing is
    at `path`, or what was there before is, until `publish` returns.

    Args:
        path: where the trace will be.
        shapes: shape of each array with layers; the number of positions may be an upper bound.
        source_dtypes: dtype of each array in the model.
        layer_ids: the model's number of each layer.
        store_dtype: ``float16`` to store all but lse and attention in less than their precision.
        overwrite: replace a trace that is at `path`.

    Raises:
        TraceExistsError: something is at `path`, and it is no trace or `overwrite` is False.
    """

    def __init__(
        self,
        path: Path,
        *,
        shapes: Mapping[str, tuple[int, ...]],
        source_dtypes: Mapping[str, str],
        layer_ids: Sequence[int],
        store_dtype: str | None = None,
        overwrite: bool = False,
    ) -> None:
        if store_dtype not in (None, "float16"):
            raise TraceError(f"store_dtype is {store_dtype!r}, expected None (exact) or 'float16'")
        check_target(path, overwrite=overwrite)
        self.path, self.overwrite = path, overwrite
        self.layer_ids = tuple(layer_ids)
        self.folder = path.parent / _hidden(path, "tmp")
        self._digest = ContentDigest()
        self._arrays: dict[str, ZarrArray] = {}
        self._next: dict[str, list[int]] = {}
        self._committed = 0
        try:
            self._write(lambda: self._create(shapes, source_dtypes, store_dtype))
        except BaseException:  # an interrupt here comes before there is an __exit__ to clean up
            self._discard()
            raise

    def _create(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        source_dtypes: Mapping[str, str],
        store_dtype: str | None,
    ) -> None:
        """The hidden folder with its empty arrays."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._group = zarr.create_group(self.folder, zarr_format=3)
        self._set(kvsim_format=FORMAT_VERSION, complete=False, committed_tokens=0)
        for name, shape in shapes.items():
            source = source_dtypes[name]
            narrow = store_dtype is not None and name not in ("lse", *DENSE)
            dtype = torch.float16 if narrow else stored_dtype(source)
            self._arrays[name] = create_array(
                self._group, name, shape, str(dtype).removeprefix("torch."), source
            )
            self._next[name] = [0] * shape[0]
        layers = create_array(self._group, "layer", (len(self.layer_ids),), "int32", None)
        layers[:] = np.array(self.layer_ids, dtype=np.int32)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._discard()

    def _discard(self) -> None:
        if self.folder.exists():
            shutil.rmtree(self.folder, ignore_errors=True)

    def dtype(self, name: str) -> torch.dtype:
        """The dtype in which `name` is stored."""
        found: torch.dtype = getattr(torch, self._arrays[name].dtype.name)
        return found

    @property
    def n_pos(self) -> int:
        """Number of positions, or its upper bound before `set_length`."""
        return int(self._arrays["q"].shape[2])

    def set_length(self, n_pos: int) -> None:
        """Fix the number of positions; the last blocks may come after this, not before."""
        for name, array in self._arrays.items():
            shape = [
                # dense rows are all of the sequence, or no more than its last ones
                n_pos if axis == "pos" else min(n_pos, length) if axis == "row" else length
                for axis, length in zip(AXES[name], array.shape, strict=True)
            ]
            if tuple(shape) != array.shape:
                array.resize(tuple(shape))

    def append(self, name: str, layer: int, block: Tensor) -> None:
        """Store the next positions of one layer: block [head, pos, ...], `residual` [pos, hidden].

        A block has 256 positions, only the last one fewer.

        Raises:
            TraceError: NaN or infinity, or a number too large for float16 storage.
        """
        array, start = self._arrays[name], self._next[name][layer]
        axis = pos_axis(name)
        size = block.shape[axis]
        if size != CHUNK and start + size != self.n_pos:
            raise ValueError(f"a block of {size} positions, expected {CHUNK}, or the last")
        stored = block.to("cpu", self.dtype(name))
        self._check(name, layer, start, block, stored)
        values = stored.numpy()
        index: tuple[int | slice, ...] = (layer, *[slice(None)] * axis, slice(start, start + size))
        self._write(lambda: array.__setitem__(index, values))
        self._next[name][layer] = start + size
        self._digest.update(name, layer, values)
        self._write(self._commit)

    def _check(self, name: str, layer: int, start: int, block: Tensor, stored: Tensor) -> None:
        where = str(self.path)
        if stored.dtype == torch.float16 and block.dtype != torch.float16:
            largest = float(block.abs().max())
            if largest > FLOAT16_MAX:
                raise TraceError(
                    f"{where}: {name} reaches {largest:.6g} in layer {layer}, float16 holds at "
                    f"most {FLOAT16_MAX:.0f}; store it without store_dtype"
                )
        check_finite(name, stored.unsqueeze(0), where, layer=layer, pos=start)

    def _commit(self) -> None:
        written = self._next.items()
        committed = min(min(ends) for name, ends in written if name not in _LATE)
        if committed > self._committed:
            self._committed = committed
            self._set(committed_tokens=committed)

    def write_o_proj(self, layer: int, weights: Tensor) -> None:
        """Store the output projection of one layer: weights [qhead, dim, hidden].

        Raises:
            TraceError: NaN or infinity, or a number too large for float16 storage.
        """
        stored = weights.to("cpu", self.dtype("o_proj"))
        self._check("o_proj", layer, 0, weights, stored)
        values = stored.numpy()
        self._write(lambda: self._arrays["o_proj"].__setitem__(layer, values))
        self._digest.update("o_proj", layer, values)

    def write_attention(self, name: str, layer: int, start: int, rows: Tensor) -> None:
        """Store dense attention rows [qhead, row, pos] of one layer.

        name: the array, of `DENSE`. start: the place of the first row in it.
        """
        array, values = self._arrays[name], rows.to("cpu", self.dtype(name)).numpy()
        index = (layer, slice(None), slice(start, start + rows.shape[1]))
        self._write(lambda: array.__setitem__(index, values))

    def read_back(self, name: str, layer: int) -> Tensor:
        """One layer as it is stored [head, pos, ...]."""
        return torch.from_numpy(np.asarray(self._arrays[name][layer]))

    def publish(
        self,
        header: Header,
        *,
        tokens: np.ndarray[Any, Any] | None = None,
        token_text: Sequence[str] | None = None,
    ) -> Path:
        """Complete the trace and put it at `path`; gives the path.

        Raises:
            TraceError: a chunk is missing.
            TraceExistsError: something has come to be at `path` meanwhile.
        """
        self._write(lambda: self._publish(header, tokens, token_text))
        return self.path

    def _publish(
        self,
        header: Header,
        tokens: np.ndarray[Any, Any] | None,
        token_text: Sequence[str] | None,
    ) -> None:
        if tokens is not None:
            ids = tokens.astype(np.int32)
            self._whole("tokens", ids, "int32")
            self._digest.update_all("tokens", 0, ids, axis=0)
        if token_text is not None:
            _check_text(token_text, str(self.path))
            self._whole("token_text", np.array(list(token_text), dtype=object), "string")
        for name in sorted(self._group.array_keys()):
            self._require_chunks(name)
        shapes = {name: tuple(array.shape) for name, array in self._arrays.items()}
        if tokens is not None:
            shapes["tokens"] = tuple(tokens.shape)
        n_pos = self.n_pos
        n_layers, n_qheads, _, dim = shapes["q"]
        header.check(
            n_layers=n_layers, n_qheads=n_qheads, n_pos=n_pos, dim=dim, where=str(self.path)
        )
        self._set(
            **header.attributes(),
            n_tokens=n_pos,
            committed_tokens=n_pos,
            checksums=self._digest.checksums(),
            digest=self._digest.total(header, shapes),
            complete=True,
        )
        with consolidation_allowed():
            zarr.consolidate_metadata(self._group.store)
        _sync_tree(self.folder)
        self._rename()

    def _write(self, do: Callable[[], None]) -> None:
        """Write to the end, and turn what the disk has to say into one clear line."""
        try:
            unbroken(do)
        except TraceError:
            raise
        except OSError as error:
            raise TraceError(
                f"{self.path} cannot be written ({error.strerror or error}), nothing was "
                "published; free some space or give another output path"
            ) from error

    def _whole(self, name: str, values: np.ndarray[Any, Any], dtype: str) -> None:
        array = create_array(self._group, name, values.shape, dtype, None)
        array[:] = values

    def _require_chunks(self, name: str) -> None:
        array = self._group[name]
        if isinstance(array, zarr.Array) and array.nchunks_initialized != array.nchunks:
            raise TraceError(
                f"{self.path}: {name} has {array.nchunks_initialized} of {array.nchunks} chunks; "
                "nothing was published, write the missing blocks first"
            )

    def _set(self, **attributes: Any) -> None:
        self._group.update_attributes(attributes)

    def _rename(self) -> None:
        check_target(self.path, overwrite=self.overwrite)
        aside = self.path.parent / _hidden(self.path, "old")
        replaced = self.path.exists()
        if replaced:
            self.path.rename(aside)
        try:
            # onto a folder that is not empty this fails, so a race cannot lose anything either
            self.folder.rename(self.path)
        except BaseException as error:
            if replaced:
                aside.rename(self.path)
            if isinstance(error, OSError) and error.errno in _TAKEN:
                raise TraceExistsError(_exists(self.path)) from error
            raise
        _sync(self.path.parent)
        if replaced:
            shutil.rmtree(aside, ignore_errors=True)


def _check_text(texts: Sequence[str], where: str) -> None:
    """Raise TraceError for a text that UTF-8 cannot hold."""
    for place, text in enumerate(texts):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TraceError(
                f"{where}: the text of token {place} is {text!a}, half of a character; expected "
                "text that UTF-8 can hold, nothing was published"
            ) from error


def write_trace(
    path: Path,
    header: Header,
    *,
    shapes: Mapping[str, tuple[int, ...]],
    compute_dtype: str,
    read: Callable[[str, int], Tensor],
    token_text: Sequence[str] | None,
    overwrite: bool,
) -> Path:
    """Write arrays that are at hand, layer by layer: read(name, layer) has no layer axis."""
    arrays = {name: shape for name, shape in shapes.items() if name != "tokens"}
    sources = {name: header.source_dtypes.get(name, compute_dtype) for name in arrays}
    with TraceWriter(
        path, shapes=arrays, source_dtypes=sources, layer_ids=header.layer_ids, overwrite=overwrite
    ) as writer:
        for name, shape in arrays.items():
            for layer in range(shape[0]):
                if name == "o_proj":
                    writer.write_o_proj(layer, read(name, layer))
                    continue
                for block in read(name, layer).split(CHUNK, dim=pos_axis(name)):
                    writer.append(name, layer, block)
        tokens = read("tokens", 0).numpy() if "tokens" in shapes else None
        return writer.publish(header, tokens=tokens, token_text=token_text)


def check_target(path: Path, *, overwrite: bool) -> None:
    """Raise TraceExistsError unless a trace may be written to `path`."""
    if not (path.exists() or path.is_symlink()):
        return
    if not overwrite:
        raise TraceExistsError(_exists(path))
    marked = False
    if path.is_dir() and not path.is_symlink():
        with contextlib.suppress(TraceError, AttributeError):
            root = read_json(path / "zarr.json", str(path))
            marked = "kvsim_format" in root.get("attributes", {})
    if not marked:
        raise TraceExistsError(
            f"{path} exists and is no kvsim trace, expected a free path or a trace to overwrite; "
            "give another path, or move away what is there"
        )


def _exists(path: Path) -> str:
    return f"{path} exists, expected a free path; give another one, or overwrite=True (--overwrite)"


def _hidden(path: Path, kind: str) -> str:
    return f".{path.name}.{kind}-{os.getpid()}-{secrets.token_hex(4)}"


def _sync_tree(folder: Path) -> None:
    folders: list[Path] = []
    files: list[Path] = []
    for root, _, names in os.walk(folder):
        folders.append(Path(root))
        files += [Path(root, name) for name in names]
    # side by side, because each waits for the disk
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(_sync, files))
        list(pool.map(_sync, folders))


def _sync(path: Path) -> None:
    """Flush a file or folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
