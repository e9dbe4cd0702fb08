"""Places of stored traces: what reads the files of a trace, and a folder as the simplest."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from kvsim.errors import TraceError

_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Place(Protocol):
    """The files of a trace by their keys, such as ``q/c/0/0/3/0``; read-only."""

    @property
    def path(self) -> Path | str:
        """The path, or the URL."""

    @property
    def readers(self) -> int:
        """Number of files worth reading in parallel, 1 or more."""

    @property
    def few_bytes(self) -> int:
        """Fewer bytes than this are read one file after another."""

    def read(self, key: str, limit: int) -> bytes:
        """Return the content of a file.

        Raises:
            FileNotFoundError: it does not exist.
            TraceError: it has more than `limit` bytes, is not a regular file, or is not readable.
        """

    def sizes(self) -> Mapping[str, int] | None:
        """Return the size of each file in bytes; None where files cannot be listed, as over HTTP.

        Raises:
            TraceError: something is neither a file nor a folder.
        """


class Folder:
    """A trace in a local folder."""

    few_bytes = 1 << 20  # threads would cost more

    def __init__(self, path: Path) -> None:
        self.path = path
        self.readers = os.cpu_count() or 1

    def read(self, key: str, limit: int) -> bytes:
        """Return the content of a file; links are not followed, pipes do not block."""
        try:
            handle = os.open(self.path / key, _FLAGS)
        except (FileNotFoundError, NotADirectoryError):
            raise FileNotFoundError(key) from None
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):  # a link; a socket
                raise self._not_regular(key) from error
            raise _unreadable(str(self.path), key, error) from error
        try:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                raise self._not_regular(key)
            check_limit(str(self.path), key, status.st_size, limit)
            with open(handle, "rb", buffering=0, closefd=False) as file:
                return file.read()
        except OSError as error:
            raise _unreadable(str(self.path), key, error) from error
        finally:
            os.close(handle)

    def sizes(self) -> dict[str, int]:
        """Return the size of each file in bytes."""
        sizes: dict[str, int] = {}
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
                            sizes[key] = entry.stat(follow_symlinks=False).st_size
                        else:
                            raise self._not_regular(key)
            except OSError as error:
                raise _unreadable(str(self.path), prefix, error) from error
        return sizes

    def _not_regular(self, key: str) -> TraceError:
        return TraceError(
            f"{self.path}: {key!r} is not a regular file, expected files and folders only; "
            "if it is a link, copy the trace with `cp -rL`"
        )


def _unreadable(where: str, key: str, error: OSError) -> TraceError:
    return TraceError(f"{where}: {key!r} is not readable ({error.strerror or error})")


def check_limit(where: str, key: str, size: int, limit: int) -> None:
    """Raise TraceError if a file has more bytes than a trace can have at this key."""
    if size > limit:
        raise TraceError(
            f"{where}: {key!r} has {size} bytes, expected at most {limit}; "
            "copy the trace again or record it again"
        )
