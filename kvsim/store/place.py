"""Where the files of a stored trace are: a folder, one packed file, or a URL."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from kvsim.errors import TraceError, TraceNotFoundError
from kvsim.schema import is_url

_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Place(Protocol):
    """The files of a trace by their keys, such as ``q/c/0/0/3/0``; they are only ever read."""

    @property
    def path(self) -> Path | str:
        """The path, or the URL."""

    @property
    def readers(self) -> int:
        """How many files are worth reading side by side, 1 or more."""

    @property
    def few_bytes(self) -> int:
        """Reading fewer bytes than these is done one file after another."""

    def read(self, key: str, limit: int) -> bytes:
        """All of a file.

        Raises:
            FileNotFoundError: there is none.
            TraceError: it has more than `limit` bytes, is no plain file, or cannot be read.
        """

    def sizes(self) -> Mapping[str, int] | None:
        """The size of each file in bytes; None where files cannot be listed, as over HTTP.

        Raises:
            TraceError: there are other things than files and folders.
        """


class Folder:
    """A trace in a folder of this machine."""

    few_bytes = 1 << 20  # threads would cost more

    def __init__(self, path: Path) -> None:
        self.path = path
        self.readers = os.cpu_count() or 1

    def read(self, key: str, limit: int) -> bytes:
        """All of a file; a link is not followed, and nothing that could block is waited for."""
        try:
            handle = os.open(self.path / key, _FLAGS)
        except (FileNotFoundError, NotADirectoryError):
            raise FileNotFoundError(key) from None
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):  # a link; a socket
                raise self._strange(key) from error
            raise _unreadable(str(self.path), key, error) from error
        try:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode):
                raise self._strange(key)
            check_limit(str(self.path), key, found.st_size, limit)
            with open(handle, "rb", buffering=0, closefd=False) as file:
                return file.read()
        except OSError as error:
            raise _unreadable(str(self.path), key, error) from error
        finally:
            os.close(handle)

    def sizes(self) -> dict[str, int]:
        """The size of each file in bytes."""
        found: dict[str, int] = {}
        folders = [""]
        while folders:
            prefix = folders.pop()
            try:
                with os.scandir(self.path / prefix) as entries:
                    for entry in entries:
                        key = prefix + entry.name
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(f"{key}/")
                        elif entry.is_file(follow_symlinks=False):
                            found[key] = entry.stat(follow_symlinks=False).st_size
                        else:
                            raise self._strange(key)
            except OSError as error:
                raise _unreadable(str(self.path), prefix, error) from error
        return found

    def _strange(self, key: str) -> TraceError:
        return TraceError(
            f"{self.path}: {key!r} is no plain file, a trace holds files and folders alone; "
            "if it is a link to one, copy the trace with `cp -rL`"
        )


def _unreadable(where: str, key: str, error: OSError) -> TraceError:
    return TraceError(f"{where}: {key!r} is not readable ({error.strerror or error})")


def check_limit(where: str, key: str, size: int, limit: int) -> None:
    """Raise TraceError for a file of more bytes than anything of a trace has in its place."""
    if size > limit:
        raise TraceError(
            f"{where}: {key!r} has {size} bytes, expected at most {limit}; "
            "copy the trace again or record it again"
        )


def find_place(path: str | Path) -> Place:
    """The place of the trace at a path: a folder, a packed trace (`kvsim trace pack`), or a URL.

    Raises:
        TraceNotFoundError: there is nothing.
        TraceError: it is no folder and no packed trace.
    """
    if isinstance(path, str) and is_url(path):
        from kvsim.store.remote import find_remote  # noqa: PLC0415  fsspec is an optional extra

        return find_remote(path)
    path = Path(path)
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        ways = "record one with `kvsim capture`"
        if path == Path("sample"):
            ways += ", or kvsim.open_trace(kvsim.sample_trace()) opens the one that ships"
        raise TraceNotFoundError(f"{path} does not exist, expected a trace; {ways}") from error
    if stat.S_ISDIR(mode):
        return Folder(path)
    if stat.S_ISREG(mode):
        from kvsim.store.packing import Packed  # noqa: PLC0415  packing reads traces itself

        return Packed(path)
    raise TraceError(f"{path} is neither a file nor a folder, expected a trace")
