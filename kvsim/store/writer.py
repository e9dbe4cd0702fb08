"""Writing traces: block by block into a hidden folder, then published in one rename."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from filecmp import cmp
from pathlib import Path
from typing import Any, Self

import numpy as np
import zarr

from kvsim.core.checks import DTYPES, as_array, as_stored
from kvsim.core.digest import CHECKSUMMED, ContentDigest, content_digest, text_checksum
from kvsim.core.header import Header
from kvsim.core.lazy import Tensor, torch
from kvsim.core.left_out import LeftOut, held_parts
from kvsim.core.sources import ArraySource
from kvsim.core.trace import Trace
from kvsim.errors import TraceError, local_path
from kvsim.files import drafted, put_in_place, sync_tree, unbroken, writing
from kvsim.schema import AXES, CHUNK, axes_of
from kvsim.store.group import create_array, create_group, seal_group
from kvsim.store.layout import StoredArray, cut_shape, pos_axis, stored_arrays
from kvsim.store.opening import check_target
from kvsim.store.projections import Facts, move_projections, store_projections
from kvsim.store.reader import StoredTrace, attributes_of


class TraceWriter:
    """Writer of the trace at `path`.

    Use it as a context manager. `path` is not touched before `publish`. Leaving the context without
    `publish` removes the draft; after a kill the next writer to `path` removes it.

    Args:
        path: where the trace is published.
        shapes: shape of each array with layers; the number of positions may be an upper bound.
        source_dtypes: dtype of each array in the model.
        store_dtype: ``float16`` to store all but lse and attention in half precision.
        overwrite: replace a trace at `path`.
        left_out: rows that are never appended to q, attn_out, lse and gate.
        like: a trace in a folder; equal chunks are stored once, as hard links where the file system
            has them.
        shards: whether arrays with many chunks are sharded; shards are not linked.

    Raises TraceExistsError where `path` exists, and is not a trace or `overwrite` is False, and
    OutputError where the system refuses.
    """

    def __init__(
        self,
        path: Path,
        *,
        shapes: Mapping[str, tuple[int, ...]],
        source_dtypes: Mapping[str, str],
        store_dtype: str | None = None,
        overwrite: bool = False,
        left_out: LeftOut = None,
        like: Path | None = None,
        shards: bool = True,
    ) -> None:
        check_target(path, overwrite=overwrite)
        self.path, self.overwrite, self.store_dtype = path, overwrite, store_dtype
        self._digest, self._left_out, self._like = ContentDigest(), left_out, like
        self._arrays: dict[str, tuple[StoredArray, zarr.Array[Any]]] = {}
        self._next: dict[str, list[int]] = {}
        self._stored = stored_arrays(shapes, source_dtypes, store_dtype, left_out, shards=shards)

    def __enter__(self) -> Self:
        with self._writing(), ExitStack() as stack:
            self._draft = stack.enter_context(drafted(self.path))
            self.folder = self._draft / self.path.name
            self._group = create_group(self.folder)
            for each in self._stored:
                self._arrays[each.name] = each, self._create(each, each.name)
                self._next[each.name] = [0] * each.shape[0]
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _create(self, each: StoredArray, name: str, *, sharded: bool = False) -> zarr.Array[Any]:
        axes = axes_of(each.name, rows=self._left_out is not None)
        source = {"source_dtype": each.source_dtype} if each.source_dtype else {}
        facts = each.shape, each.dtype, each.chunks, axes, source
        return create_array(self._group, name, *facts, sharded=sharded)

    def set_length(self, n_pos: int) -> None:
        """Fix the number of positions, before the last, incomplete blocks."""
        for name, (each, array) in self._arrays.items():
            cut = replace(each, shape=cut_shape(name, each.shape, n_pos, self._left_out))
            with self._writing():
                array.resize(cut.shape)
            self._arrays[name] = cut, array

    def append(self, name: str, layer: int, block: Tensor) -> None:
        """Store the next positions of one layer: block [head, pos, ...], `residual` [pos, hidden].

        A block has 256 positions, only the last one fewer. Blocks of an array that was dropped are
        ignored. Raises TraceError for NaN or infinity, or a number too large for float16 storage.
        """
        if name not in self._next:
            return
        start, axis = self._next[name][layer], pos_axis(name)
        size, total = block.shape[axis], self._arrays[name][1].shape[axis + 1]
        if size != CHUNK and start + size != total:
            raise ValueError(f"a block of {size} positions, expected {CHUNK}, or the last")
        self.write_layer(name, layer, block, start)
        self._next[name][layer] = start + size

    def drop(self, name: str) -> None:
        """Remove an unusable array."""
        self._next.pop(name, None)
        self._arrays.pop(name, None)
        shutil.rmtree(self.folder / name, ignore_errors=True)

    def write_layer(self, name: str, layer: int, values: Tensor, start: int = 0) -> None:
        """Store one layer of an array, or of its positions from `start` on; raise as `append`."""
        each, array = self._arrays[name]
        dtype: torch.dtype = getattr(torch, each.number)
        stored = as_array(as_stored(name, values, dtype, str(self.path), layer=layer, pos=start))
        sizes = {"layer": 1} | dict(zip(AXES[name][1:], stored.shape, strict=True))
        first = {"layer": layer, "pos": start}
        at = (slice(first.get(axis, 0), first.get(axis, 0) + n) for axis, n in sizes.items())
        with self._writing():
            array[tuple(at)] = stored[None]
        self._digest.update(name, layer, stored)

    def copy(self, source: ArraySource, names: Iterable[str], n_pos: int) -> None:
        """Store arrays of a trace: positions before `n_pos`, and all of those without positions."""
        for name in names:
            parts = held_parts(name, range(n_pos), self._left_out)
            for layer in range(self._arrays[name][0].shape[0]):
                only = slice(layer, layer + 1)
                if "pos" not in AXES[name]:
                    self.write_layer(name, layer, source.read(name, only, slice(None))[0])
                    continue
                for part in parts:
                    for block in source.read(name, only, part)[0].split(CHUNK, pos_axis(name)):
                        self.append(name, layer, block)

    def write_projections(
        self,
        shape: Sequence[int],
        read: Callable[[int], Tensor],
        source_dtype: str,
        dtype: str | None = None,
    ) -> Facts:
        """Store output projections next to the trace, when it is published; see `Facts`.

        shape: [layer, qhead, dim, hidden]. read: returns one layer. Raises as `append`.
        """
        given = shape, read, source_dtype, dtype or self.store_dtype
        with self._writing():
            return store_projections(self.path.parent, self._draft, *given)

    def publish(
        self,
        header: Header,
        *,
        tokens: np.ndarray[Any, Any] | None = None,
        token_text: Sequence[str] | None = None,
    ) -> Path:
        """Complete the trace, move it to `path` and return the path.

        Raises TraceError for a trace that no reader would open, such as one without a chunk, and
        TraceExistsError if something has appeared at `path`.
        """
        with self._writing():
            shapes = {name: each.shape for name, (each, _) in self._arrays.items()}
            if tokens is not None:
                ids = tokens.astype(np.int32)
                self._create(StoredArray("tokens", ids.shape, "int32", ""), "tokens")[:] = ids
                shapes["tokens"] = ids.shape
                self._digest.update("tokens", 0, ids)
            checksums = {x: each for x, each in self._digest.checksums().items() if x in shapes}
            if token_text is not None:
                "".join(token_text).encode()  # ValueError for half of a character
                checksums["token_text"] = [text_checksum(token_text)]
            attributes = {
                **attributes_of(header),
                "digest": content_digest(header, shapes, self._digest.dtypes, checksums),
                "checksums": checksums,
                **({} if token_text is None else {"token_text": list(token_text)}),
            }
            self._shard()
            self._link()
            seal_group(self.folder, attributes)
            StoredTrace(self.folder)
            move_projections(self._draft, self.path.parent)
            sync_tree(self.folder)
            check_target(self.path, overwrite=self.overwrite)
            put_in_place(self.folder, self.path, overwrite=self.overwrite)
        return self.path

    def _shard(self) -> None:
        """Put the chunks of each layer of sharded arrays into one file."""
        for name, (each, array) in self._arrays.items():
            if each.sharded:
                whole = self._create(each, "whole", sharded=True)
                for layer in range(each.shape[0]):
                    whole[layer : layer + 1] = array[layer : layer + 1]
                shutil.rmtree(self.folder / name)
                (self.folder / "whole").rename(self.folder / name)

    def _link(self) -> None:
        """Replace chunks that another trace has by links to them, where links are supported."""
        for path in self.folder.rglob("c/**/*") if self._like is not None else ():
            other = Path(self._like or "", path.relative_to(self.folder))
            if path.is_file() and other.is_file() and cmp(path, other, shallow=False):
                link = path.with_name(f"{path.name}.link")
                with suppress(OSError):
                    os.link(other, link)
                    link.replace(path)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Write to the end despite interrupts; OutputError for what the system refuses."""
        with writing(self.path), unbroken():
            yield


def save_trace(trace: Trace, path: str | Path, *, overwrite: bool = False) -> Path:
    """Write a trace to `path` in the format of `docs/trace-format.md` and return the path.

    Stores the arrays that the trace has, including attention output and log-sum-exp; dense
    attention, which follows from them, is left out. Output projections next to it are stored next
    to `path`. Half precision stays half precision.

    Args:
        trace: in memory or stored.
        path: a new folder.
        overwrite: replace a trace at `path`.

    Raises:
        TraceError: the trace has only some rows of a sequence (`core.parts.of_rows`), whose
            positions the format cannot store.
        TraceExistsError: `path` exists, and is not a trace or `overwrite` is False.

    Example:
        >>> trace = kvsim.open_trace(kvsim.sample_trace())
        >>> kvsim.open_trace(kvsim.save_trace(trace, "copy.zarr")).digest == trace.digest
        True
    """
    if not torch.equal(trace.positions, torch.arange(trace.n_pos)):
        raise TraceError(
            f"{trace.name} has {trace.n_pos} rows of a longer sequence; expected all of them, save "
            "the trace that it was taken from"
        )
    target = local_path(path, TraceError)
    source, header = trace.source, trace.header
    projections = getattr(source, "projections", None)  # next to a stored trace
    names = [name for name in CHECKSUMMED[1:] if trace.has(name)]
    if projections is not None:
        names.remove("o_proj")
    dtypes = {name: header.source_dtypes.get(name, DTYPES[trace.dtype]) for name in names}
    stored = source.read("q", slice(0, 1), slice(0, 1)).dtype
    narrow = stored == torch.float16 and dtypes["q"] != "float16"
    with TraceWriter(
        target,
        shapes={name: source.shapes[name] for name in names},
        source_dtypes=dtypes,
        store_dtype="float16" if narrow else None,
        overwrite=overwrite,
        left_out=header.left_out,
    ) as writer:
        writer.copy(source, names, trace.n_pos)
        if projections is not None:
            facts = projections.facts
            writer.write_projections(
                facts.shape,
                lambda layer: projections.read(slice(layer, layer + 1))[0],
                facts.source_dtype,
                facts.dtype,
            )
        tokens = None if trace.tokens is None else trace.tokens.numpy()
        return writer.publish(header, tokens=tokens, token_text=trace.token_text)
