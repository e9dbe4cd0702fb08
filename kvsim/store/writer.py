"""Writing traces: block by block into a hidden folder, then published in one rename."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import numpy as np

from kvsim.core.attention import Formula, attention_weights
from kvsim.core.checks import DTYPES, as_array, as_stored
from kvsim.core.digest import CHECKSUMMED, ContentDigest
from kvsim.core.header import Header
from kvsim.core.lazy import Tensor, torch
from kvsim.core.left_out import LeftOut, held_parts
from kvsim.core.sources import ArraySource
from kvsim.core.trace import Trace
from kvsim.errors import TraceError, TraceExistsError, local_path
from kvsim.files import LOCK, hidden, lock, remove_abandoned, unbroken
from kvsim.schema import AXES, CHUNK, format_of, is_url
from kvsim.store.chunks import as_numbers
from kvsim.store.draft import Group
from kvsim.store.layout import cut_shape, pos_axis, stored_arrays
from kvsim.store.projections import Facts, copy_projections, store_projections, upload_projections
from kvsim.store.publication import check_target, complete, put, remove_trace, write_whole
from kvsim.store.remote import check_free, upload


class TraceWriter:
    """Writer of the trace at `path`.

    Use it as a context manager. `path` is not touched before `publish`. Leaving the context without
    `publish` removes what was written; the next writer to `path` removes what a kill has left.

    Args:
        path: where the trace is published.
        shapes: shape of each array with layers; the number of positions may be an upper bound.
        source_dtypes: dtype of each array in the model.
        layer_ids: the model's number of each layer.
        newest: the header will have something that only the newest format can say.
        store_dtype: ``float16`` to store all but lse and attention in half precision.
        overwrite: replace a trace that is at `path`.
        left_out: rows that are never appended to q, attn_out, lse and gate.
        like: a trace in a folder; chunks that are the same in both are stored once, as hard links
            where the file system has them.
        shards: whether arrays with many chunks are sharded; chunks in shards are not linked.

    Raises:
        TraceExistsError: something is at `path`, and it is not a trace or `overwrite` is False.
    """

    def __init__(
        self,
        path: Path,
        *,
        shapes: Mapping[str, tuple[int, ...]],
        source_dtypes: Mapping[str, str],
        layer_ids: Sequence[int],
        newest: bool = False,
        store_dtype: str | None = None,
        overwrite: bool = False,
        left_out: LeftOut = None,
        like: Path | None = None,
        shards: bool = True,
    ) -> None:
        if store_dtype not in (None, "float16"):
            raise TraceError(f"store_dtype is {store_dtype!r}, expected None (exact) or 'float16'")
        check_target(path, overwrite=overwrite)
        self.path, self.overwrite, self.store_dtype = path, overwrite, store_dtype
        self.layer_ids = tuple(layer_ids)
        self.folder = hidden(path, "tmp")
        self._digest, self._left_out = ContentDigest(), left_out
        self._group = Group(self.folder, like)
        self._next: dict[str, list[int]] = {}
        self._kept = ""
        try:
            with self._writing():
                remove_abandoned(path)
                self.folder.mkdir(parents=True)
                self._lock = (self.folder / LOCK).open("ab")
                lock(self._lock, wait=True)
                arrays = stored_arrays(shapes, source_dtypes, store_dtype, left_out, shards=shards)
                newest |= any(each.sharded or each.number == "bfloat16" for each in arrays)
                self._group.set(
                    kvsim_format=format_of(shapes, newest=newest),
                    complete=False,
                    **({} if left_out is None else {"left_out": list(left_out)}),
                )
                for each in arrays:
                    declared = each.dtype.name, each.source_dtype
                    self._group.create(each.name, each.shape, *declared, sharded=each.sharded)
                    self._next[each.name] = [0] * each.shape[0]
                write_whole(self._group, "layer", np.array(self.layer_ids, np.int32), "int32")
        except BaseException:  # an interrupt here comes before __exit__ could clean up
            self._discard()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._kept:
            self._discard()

    def _discard(self) -> None:
        with suppress(OSError, AttributeError):  # interrupted before there is a lock
            self._lock.close()
        with suppress(OSError):
            remove_trace(self.folder)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype in which `name` is stored."""
        dtype: torch.dtype = getattr(torch, self._group.arrays[name].number)
        return dtype

    @property
    def n_pos(self) -> int:
        """Number of positions, or its upper bound before `set_length`."""
        return self._group.arrays["k"].shape[2]

    def set_length(self, n_pos: int) -> None:
        """Fix the number of positions; last blocks that are not full must come after this."""
        for name in self._next:
            array = self._group.arrays[name]
            shape = cut_shape(name, array.shape, n_pos, self._left_out)
            if shape != array.shape:
                with self._writing():
                    self._group.resize(name, shape)

    def append(self, name: str, layer: int, block: Tensor) -> None:
        """Store the next positions of one layer: block [head, pos, ...], `residual` [pos, hidden].

        A block has 256 positions, only the last one fewer. Blocks of an array that was dropped are
        ignored. Raises TraceError for NaN or infinity, or a number too large for float16 storage.
        """
        if name not in self._next:
            return
        start = self._next[name][layer]
        axis = pos_axis(name)
        size, total = block.shape[axis], self._group.arrays[name].shape[axis + 1]
        if size != CHUNK and start + size != total:
            raise ValueError(f"a block of {size} positions, expected {CHUNK}, or the last")
        self.write_layer(name, layer, block, start)
        self._next[name][layer] = start + size

    def drop(self, name: str) -> None:
        """Remove an array, or projections, that turned out to be unusable."""
        self._next.pop(name, None)
        self._digest.forget(name)
        with self._writing():
            self._group.remove(name)

    def write_layer(self, name: str, layer: int, values: Tensor, start: int = 0) -> None:
        """Store one layer of an array, or of its positions from `start` on; raise as `append`."""
        dtype, where = self.dtype(name), str(self.path)
        array = as_array(as_stored(name, values, dtype, where, layer=layer, pos=start))
        with self._writing():
            self._group.write(name, array[None], layer=layer, pos=start)
        self._digest.update(name, layer, array)

    def copy(self, source: ArraySource, names: Iterable[str], n_pos: int) -> None:
        """Store arrays of a trace: positions before `n_pos`, and all of those without positions."""
        for name in names:
            parts = held_parts(name, range(n_pos), self._left_out)
            for layer in range(len(self.layer_ids)):
                only = slice(layer, layer + 1)
                if "pos" not in AXES[name]:
                    self.write_layer(name, layer, source.read(name, only, slice(None))[0])
                    continue
                for part in parts:
                    for block in source.read(name, only, part)[0].split(CHUNK, pos_axis(name)):
                        self.append(name, layer, block)

    def write_projections(
        self, shape: Sequence[int], read: Callable[[int], Tensor], source_dtype: str
    ) -> Facts:
        """Store output projections next to the trace, when it is published; see `Facts`.

        shape: [layer, qhead, dim, hidden]. read: returns one layer. Raises as `append`.
        """
        with self._writing():
            return store_projections(
                *(self.path.parent, shape, read, source_dtype, self.store_dtype), draft=self.folder
            )

    def write_attention(self, name: str, formulas: Sequence[Formula]) -> None:
        """Store dense attention, the array `name`, of all layers, as it follows from q, k, lse.

        formulas: those of the layers. All other blocks have been appended.
        """
        first, at = self.n_pos - self._group.arrays[name].shape[2], torch.arange(self.n_pos)
        for layer, formula in enumerate(formulas):
            part = [slice(layer, layer + 1)]
            q, k, lse = (
                as_numbers(self._group.arrays[x], self._group.read(x, part)[0])
                for x in ("q", "k", "lse")
            )
            q, k = q.to(lse.dtype), k.to(lse.dtype)
            for start in range(first, self.n_pos, CHUNK):
                rows = slice(start, min(start + CHUNK, self.n_pos))
                weights = attention_weights(q[:, rows], k, lse[:, rows], formula, at[rows], at)
                values = weights.to("cpu", self.dtype(name)).numpy()
                with self._writing():
                    self._group.write(name, values[None], layer=layer, row=start - first)

    def publish(
        self,
        header: Header,
        *,
        tokens: np.ndarray[Any, Any] | None = None,
        token_text: Sequence[str] | None = None,
    ) -> Path:
        """Complete the trace, move it to `path` and return the path.

        Raises TraceError if a chunk is missing, and TraceExistsError if something has appeared at
        `path`; the whole trace then stays in the hidden folder that the error names.
        """
        with self._writing():
            complete(self._group, header, self._digest, tokens, token_text, str(self.path))
            self._kept = f"the whole trace is {self.folder}, rename it, or "
            self._lock.close()
            (self.folder / LOCK).unlink()
            put(self._group, self.path, overwrite=self.overwrite)
        return self.path

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Write to the end despite interrupts; raise TraceError, with one line, for disk errors."""
        try:
            with unbroken():
                yield
        except TraceExistsError as error:
            if not self._kept:
                raise
            raise TraceExistsError(f"{error}; {self._kept}remove it") from error
        except OSError as error:
            raise TraceError(
                f"{self.path} cannot be written ({error.strerror or error}); "
                f"{self._kept}free some space or give another output path"
            ) from error


def save_trace(trace: Trace, path: str | Path, *, overwrite: bool = False) -> Path | str:
    """Write a trace to `path` in the format of `docs/trace-format.md` and return the path.

    Stores the arrays that the trace has, including attention output and log-sum-exp; dense
    attention, which follows from them, is left out. Output projections next to it are stored next
    to `path`. What is stored in half precision stays so.

    Args:
        trace: in memory or stored.
        path: a new folder, or a URL of a store, such as ``s3://bucket/x.zarr``.
        overwrite: replace a trace at `path`; not for a URL.

    Raises:
        TraceError: the trace has some rows of a sequence alone (`Trace.only`); the format has no
            place for their positions.
        TraceExistsError: something is at `path`, and it is not a trace or `overwrite` is False.
    """
    if not torch.equal(trace.positions, torch.arange(trace.n_pos)):
        raise TraceError(
            f"{trace.name} has {trace.n_pos} rows of a longer sequence; expected all of them, save "
            "the trace that it was taken from"
        )
    if is_url(path):
        check_free(str(path), overwrite=overwrite)
        with TemporaryDirectory(prefix="kvsim-") as staging:
            saved = Path(save_trace(trace, Path(staging, "trace")))
            upload_projections(saved.parent, str(path).rstrip("/").rpartition("/")[0])
            return upload(saved, str(path))
    target = local_path(path, TraceError)
    source, header = trace.source, trace.header
    projections = getattr(source, "projections", None)  # next to a stored trace
    names = [name for name in CHECKSUMMED[1:] if trace.has(name)]
    if projections is not None:
        names.remove("o_proj")
        copy_projections(projections, target.parent)
    dtypes = {name: header.source_dtypes.get(name, DTYPES[trace.dtype]) for name in names}
    left_out = header.left_out
    stored = source.read("q", slice(0, 1), slice(0, 1)).dtype
    narrow = stored == torch.float16 and dtypes["q"] != "float16"
    with TraceWriter(
        target,
        shapes={name: source.shapes[name] for name in names},
        source_dtypes=dtypes,
        layer_ids=header.layer_ids,
        newest=bool(header.sizes),
        store_dtype="float16" if narrow else None,
        overwrite=overwrite,
        left_out=left_out,
    ) as writer:
        writer.copy(source, names, trace.n_pos)
        tokens = None if trace.tokens is None else trace.tokens.numpy()
        return writer.publish(header, tokens=tokens, token_text=trace.token_text)
