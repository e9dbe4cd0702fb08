"""Files: user files are read within bounds, outputs appear whole or not at all.

An output is written to a hidden folder next to its path, flushed to disk, and renamed. Until then
the content at the path does not change, whatever fails.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import signal
import stat
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from glob import escape
from multiprocessing import parent_process
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Literal

from kvsim.errors import KvsimError, OutputError

if sys.platform != "win32":
    import fcntl

#: Kind of a hidden folder: ``tmp`` is being written, ``old`` is being replaced.
Kind = Literal["tmp", "old"]

#: File in the hidden folder of an output, locked by the process that writes it.
LOCK = ".lock"

#: Most bytes of a document such as JSON.
DOCUMENT = 64 << 20

_READ = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)

#: Temporary files that test whether a folder is writable.
_PREFIX = ".kvsim-"

# Errors of locking on file systems without locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)

#: Written to test whether a folder is writable: one block, as the smallest file takes.
_TRIAL = bytes(4096)


def read_input(path: str | Path, limit: int = DOCUMENT) -> bytes:
    """Return the content of a file of untrusted size and kind; a pipe or device does not block.

    Raises OSError, also unless it is a regular file of at most `limit` bytes.
    """
    with open(path, "rb", opener=lambda name, _: os.open(name, _READ)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError("it is a pipe or a device, expected a regular file")
        if status.st_size > limit:
            raise OSError(f"it has {status.st_size} bytes, expected at most {limit}")
        return file.read(status.st_size)


def check_output(
    path: Path, *, overwrite: bool = False, advice: str = "give another --out, or --overwrite"
) -> None:
    """Raise OutputError if no file or new folder can be written to `path`; before any work.

    overwrite: a file at `path` may be replaced. advice: for users.
    """
    with writing(path):
        _check_free(path, overwrite=overwrite, advice=advice)
        check_writable(Path(os.path.realpath(path)).parent)


def check_writable(folder: Path) -> None:
    """Raise OutputError if nothing can be written to `folder`, which need not exist yet.

    A temporary file is written to the nearest folder that exists: permissions alone do not show
    that a disk is full or read-only.
    """
    nearest = folder
    try:
        nearest = next(part for part in (folder, *folder.absolute().parents) if part.exists())
        with TemporaryFile(dir=nearest, prefix=_PREFIX) as file:
            file.write(_TRIAL)
    except OSError as error:
        raise OutputError(
            f"{nearest} cannot be written to ({error.strerror or error}), expected a writable "
            "folder; give another output path"
        ) from error


def write_file(path: Path, content: bytes | str, *, overwrite: bool = False) -> None:
    """Write a file, text as UTF-8. Raises OutputError as `published` does."""
    with published(path, overwrite=overwrite) as draft:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)


def replace_file(path: Path, content: bytes) -> None:
    """Write or replace a file in one rename, not flushed; OSError where the system refuses."""
    draft = hidden(path, "tmp")
    try:
        draft.write_bytes(content)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


@contextmanager
def published(path: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Provide a path to write a file or a folder to; at the end, flush it and rename it to `path`.

    overwrite: replace a file at `path` by a file, or a folder by a folder; of a link, its target.

    Raises:
        OutputError: `path` exists, or the system refuses.
    """
    target = Path(os.path.realpath(path))  # renaming to a link would replace the link
    with writing(path), drafted(target) as folder:
        draft = folder / target.name
        yield draft
        sync_tree(draft)
        if not (overwrite and draft.is_dir() and target.is_dir()):
            _check_free(path, overwrite=overwrite, advice="give another path")
        with unbroken():
            put_in_place(draft, target, overwrite=overwrite)


@contextmanager
def drafted(target: Path) -> Iterator[Path]:
    """A hidden, locked folder next to an output; removed at its end, after a kill by the next."""
    folder = hidden(target, "tmp")
    remove_abandoned(target)
    try:
        folder.mkdir(parents=True)
        with (folder / LOCK).open("ab") as file:
            lock(file)
            yield folder
    finally:
        with unbroken():
            shutil.rmtree(folder, ignore_errors=True)


def _check_free(path: Path, *, overwrite: bool, advice: str) -> None:
    """Raise OutputError if something is at `path`, unless it is a file that may be replaced."""
    if (path.is_symlink() or path.exists()) and not (overwrite and path.is_file()):
        kind = " and is not a file" if overwrite else ""
        raise OutputError(f"{path} exists{kind}; {advice}, nothing was changed")


def put_in_place(draft: Path, target: Path, *, overwrite: bool) -> None:
    """Rename `draft` to `target`, and flush it; replaced content is set aside until then.

    Raises OSError where the system refuses and nothing has changed, else OutputError.
    """
    aside = hidden(target, "old")
    if target.is_file() and draft.is_file():
        shutil.copymode(target, draft)
    if overwrite and target.is_dir():
        target.rename(aside)
    try:  # fails where a folder that is not empty has appeared meanwhile
        draft.replace(target)
    except BaseException:
        if aside.exists():
            with _left(target, aside, "cannot be put back"):
                aside.rename(target)
        raise
    with _left(target, aside, "is written, but could not be flushed to disk"):
        sync(target.parent)
    shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def _left(target: Path, aside: Path, problem: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        old = f", what was there is {aside}" if aside.exists() else ""
        raise OutputError(
            f"{target} {problem} ({error.strerror or error}){old}; check the disk"
        ) from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise OutputError where the system refuses an output, which is as it was."""
    try:
        yield
    except KvsimError:
        raise
    except OSError as error:
        raise OutputError(
            f"{path} cannot be written ({error.strerror or error}), nothing was changed; "
            "free some space, change the permissions or give another path"
        ) from error


def hidden(path: Path, kind: Kind) -> Path:
    """Return a new hidden path next to `path`, for a file or folder that is replaced or new."""
    return path.parent / f".{path.name}.{kind}-{os.getpid()}-{secrets.token_hex(4)}"


def remove_abandoned(path: Path) -> None:
    """Remove the hidden folders of outputs to `path` whose processes were killed."""
    for folder in path.parent.glob(f".{escape(path.name)}.tmp-*"):
        with suppress(OSError), (folder / LOCK).open("r+b") as file:
            if lock(file) and sys.platform != "win32":  # which has no such locks
                shutil.rmtree(folder)


def lock(file: Any) -> bool:
    """Lock an open file; False if another process has locked it.

    Windows has no such locks: there it is always free.
    """
    if sys.platform != "win32":
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            if error.errno not in _NO_LOCKS:
                raise
    return True


@contextmanager
def unbroken() -> Iterator[None]:
    """Run a block to its end; an interrupt or a request to end meanwhile is raised after it.

    A file is then whole, and what is being replaced is either old or new. Python interrupts the
    main thread only, so other threads just run the block.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    if threading.current_thread() is not threading.main_thread() or None in before.values():
        yield
        return
    pending: list[int] = []
    for number in before:
        signal.signal(number, lambda number, _: pending.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for each in dict.fromkeys(pending):
            signal.raise_signal(each)


def end_with_parent() -> None:
    """End this process, started by multiprocessing, as soon as the one that started it has died."""
    parent = parent_process()

    def wait() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)  # whatever the other threads are doing

    threading.Thread(target=wait, daemon=True).start()


def sync_tree(path: Path) -> None:
    """Flush a file, or a folder with everything in it, to disk."""
    folders: list[Path] = []
    files = [path] if path.is_file() else []
    for root, _, names in os.walk(path):
        folders.append(Path(root))
        files += [Path(root, name) for name in names]
    # in parallel, because each waits for the disk
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(sync, files))
        list(pool.map(sync, folders))


def sync(path: Path) -> None:
    """Flush a file or folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
