"""Publication of a trace: a complete hidden folder is renamed to its path."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

from kvsim import files
from kvsim.errors import OutputError, TraceError, TraceExistsError
from kvsim.files import hidden, move, sync
from kvsim.schema import object_at

# Errors of renaming to a path that exists.
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR)


def check_target(path: Path, *, overwrite: bool) -> None:
    """Raise TraceExistsError unless a trace may be written to `path`."""
    if not (path.exists() or path.is_symlink()):
        return
    if not overwrite:
        raise TraceExistsError(_exists(path))
    if path.is_symlink() or not is_marked(path):
        raise TraceExistsError(
            f"{path} exists and is not a kvsim trace, expected a free path or a trace to "
            "overwrite; give another path, or move away what is there"
        )


def is_marked(folder: Path) -> bool:
    """Whether a folder has the metadata of a trace, of any version."""
    try:
        document = json.loads(files.read_input(folder / "zarr.json"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(document, dict) and "kvsim_format" in object_at(document, "attributes")


def check_writable(folder: Path) -> None:
    """Raise TraceError if no trace can be written to `folder`, which need not exist yet."""
    try:
        files.check_writable(folder)
    except OutputError as error:
        raise TraceError(str(error)) from error


def rename(folder: Path, path: Path, *, overwrite: bool) -> None:
    """Rename a complete trace to `path`; an old trace there is replaced.

    Raises TraceExistsError if something has appeared at `path`, and OSError where the disk refuses.
    """
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
            f"{path} is written, but could not be flushed to disk ({error.strerror or error}){kept}"
        ) from error
    shutil.rmtree(aside, ignore_errors=True)


def _exists(path: Path) -> str:
    return f"{path} exists, expected a free path; give another one, or overwrite=True (--overwrite)"
