"""Publication of a trace: completed in its hidden folder, then renamed to its path."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvsim import files
from kvsim.core.digest import CHECKSUMMED, ContentDigest, text_checksum
from kvsim.core.header import Header
from kvsim.core.left_out import whole_shapes
from kvsim.core.probe import check_probe
from kvsim.errors import OutputError, TraceError, TraceExistsError
from kvsim.files import hidden, move, sync, sync_tree
from kvsim.store.draft import Group
from kvsim.store.metadata import decode_document, group_attributes, whole_attributes
from kvsim.store.place import Folder
from kvsim.store.projections import move_projections

# Errors of renaming to a path that exists.
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR)


def check_target(path: Path, *, overwrite: bool) -> None:
    """Raise TraceExistsError unless a trace may be written to `path`."""
    if not (path.exists() or path.is_symlink()):
        return
    if not overwrite:
        raise TraceExistsError(_exists(path))
    marked = False
    if path.is_dir() and not path.is_symlink():
        with contextlib.suppress(TraceError):
            marked = "kvsim_format" in group_attributes(Folder(path))
    if not marked:
        raise TraceExistsError(
            f"{path} exists and is not a kvsim trace, expected a free path or a trace to "
            "overwrite; give another path, or move away what is there"
        )


def check_writable(folder: Path) -> None:
    """Raise TraceError if no trace can be written to `folder`, which need not exist yet."""
    try:
        files.check_writable(folder)
    except OutputError as error:
        raise TraceError(str(error)) from error


def complete(
    group: Group,
    header: Header,
    digest: ContentDigest,
    tokens: np.ndarray[Any, Any] | None,
    token_text: Sequence[str] | None,
    where: str,
) -> None:
    """Write tokens and attributes, at last; TraceError for what is missing or does not fit."""
    if tokens is not None:
        ids = tokens.astype(np.int32)
        write_whole(group, "tokens", ids, "int32")
        digest.update_all("tokens", 0, ids, axis=0)
    checksums = digest.checksums()
    if token_text is not None:
        _check_text(token_text, where)
        checksums["token_text"] = [text_checksum(token_text)]
        write_whole(group, "token_text", np.array(list(token_text), dtype=object), "string")
    for name in sorted(group.arrays):
        require_chunks(group, name, where, "write the missing blocks first")
    shapes = group.shapes
    floats = {name: x for name, x in shapes.items() if name in CHECKSUMMED and name != "tokens"}
    whole = whole_shapes(floats, header.left_out, where)
    header.check(whole, where)
    check_probe(header.probe, whole, where)
    total = digest.total(header, shapes)
    document = group.seal(whole_attributes(header, shapes, group.version, checksums, total))
    try:
        decode_document(document)
    except ValueError as error:
        raise TraceError(
            f"{where}: what describes it {error}; nothing was published, change its `meta`"
        ) from error


def put(group: Group, path: Path, *, overwrite: bool) -> None:
    """Flush a complete trace to disk and move it to `path`, after its output projections.

    Raises TraceExistsError if something has appeared at `path`, TraceError if the trace is at
    `path` but perhaps not on disk, and OSError where the disk refuses; the trace then stays where
    it was.
    """
    group.consolidate()
    sync_tree(group.folder)
    move_projections(group.folder, path.parent)
    _rename(group.folder, path, overwrite=overwrite)


def require_chunks(group: Group, name: str, where: str, advice: str) -> None:
    """Raise TraceError, with `advice`, if a chunk of an array is missing."""
    written, expected = group.written(name), group.arrays[name].nchunks
    if written != expected:
        raise TraceError(
            f"{where}: {name} has {written} of {expected} chunks; nothing was published, {advice}"
        )


def write_whole(group: Group, name: str, values: np.ndarray[Any, Any], dtype: str) -> None:
    """Write an array without a layer axis, which is one chunk; dtype is a name or ``string``."""
    group.create(name, values.shape, dtype)
    group.write(name, values)


def _check_text(texts: Sequence[str], where: str) -> None:
    """Raise TraceError for text that UTF-8 cannot hold."""
    for place, text in enumerate(texts):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TraceError(
                f"{where}: the text of token {place} is {text!a}, half of a character; expected "
                "text that UTF-8 can hold, nothing was published"
            ) from error


def _rename(folder: Path, path: Path, *, overwrite: bool) -> None:
    """Rename `folder` to `path`; an old trace there is set aside before and removed after."""
    check_target(path, overwrite=overwrite)
    aside = hidden(path, "old")
    try:
        if overwrite:
            move(folder, path, aside)
        else:  # fails where a folder that is not empty has appeared meanwhile
            folder.rename(path)
    except OutputError as error:
        raise TraceError(str(error)) from error
    except OSError as error:
        if error.errno in _TAKEN:
            raise TraceExistsError(_exists(path)) from error
        raise
    try:
        sync(path.parent)
    except OSError as error:
        kept = f", and the trace that it replaced is {aside}" if aside.exists() else ""
        raise TraceError(
            f"{path} is written, but could not be flushed to disk "
            f"({error.strerror or error}){kept}; check it with `kvsim verify`"
        ) from error
    if aside.exists():
        with contextlib.suppress(OSError):
            remove_trace(aside)


def remove_trace(folder: Path) -> None:
    """Remove a trace or a draft, its root first: after a kill there is no trace."""
    (folder / "zarr.json").unlink(missing_ok=True)
    shutil.rmtree(folder)


def _exists(path: Path) -> str:
    return f"{path} exists, expected a free path; give another one, or overwrite=True (--overwrite)"
