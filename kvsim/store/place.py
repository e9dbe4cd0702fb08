"""Places of stored traces: a folder, or one zip whose members are the files, uncompressed."""

from __future__ import annotations

import errno
import io
import os
import re
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from reprlib import repr as short_repr
from typing import Protocol

from kvsim.errors import TraceError, TraceNotFoundError, error_line

_FLAGS = os.O_RDONLY
for _name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"):  # those of this system
    _FLAGS |= getattr(os, _name, 0)

#: How the name of a packed trace ends.
SUFFIX = ".zip"

#: Names of the members of a packed trace; none leads out of a folder.
MEMBER = re.compile(r"zarr\.json|[A-Za-z0-9_-]+/(?:zarr\.json|c(?:/[0-9]+)+)")

#: Most bytes of the table of contents: a million files.
_CONTENTS_LIMIT = 128 << 20

#: Bytes of a file that are copied at a time.
PIECE = 64 << 20

_FULL = 0xFFFFFFFF  # in place of a number that is in the 64-bit record


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
        """Return a file's content; FileNotFoundError; TraceError if unreadable or over `limit`."""

    def part(self, key: str, start: int, size: int) -> tuple[bytes, int]:
        """Return bytes of a file from `start` on, `size` or as many as there are, and its size.

        A negative `start` counts from its end. Raises as `read`.
        """

    def sizes(self) -> Mapping[str, int] | None:
        """Return the bytes of each file; None where files cannot be listed, as over HTTP."""


class Folder:
    """A trace in a local folder."""

    few_bytes = 1 << 20  # threads would cost more

    def __init__(self, path: Path) -> None:
        self.path = path
        self.readers = os.cpu_count() or 1

    def read(self, key: str, limit: int) -> bytes:
        """Return the content of a file; links are not followed, pipes do not block."""
        with self._opened(key) as (file, size):
            check_limit(str(self.path), key, size, limit)
            return file.read()

    def part(self, key: str, start: int, size: int) -> tuple[bytes, int]:
        """Return part of a file, and its size."""
        with self._opened(key) as (file, total):
            file.seek(from_end(start, total))
            return file.read(min(size, total)), total

    @contextmanager
    def _opened(self, key: str) -> Iterator[tuple[io.FileIO, int]]:
        try:
            handle = os.open(self.path / key, _FLAGS)
        except (FileNotFoundError, NotADirectoryError):
            raise FileNotFoundError(key) from None
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):  # a link; a socket
                raise self._not_regular(key) from error
            raise self._unreadable(key, error) from error
        try:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                raise self._not_regular(key)
            with open(handle, "rb", buffering=0, closefd=False) as file:
                yield file, status.st_size
        except OSError as error:
            raise self._unreadable(key, error) from error
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
                raise self._unreadable(prefix, error) from error
        return sizes

    def _not_regular(self, key: str) -> TraceError:
        return TraceError(
            f"{self.path}: {key!r} is not a regular file, expected files and folders only; "
            "if it is a link, copy the trace with `cp -rL`"
        )

    def _unreadable(self, key: str, error: OSError) -> TraceError:
        return TraceError(f"{self.path}: {key!r} is not readable ({error.strerror or error})")


def from_end(start: int, size: int) -> int:
    """Return where a part of a file begins; a negative `start` counts from its end."""
    return start if start >= 0 else max(0, size + start)


def damaged(what: str) -> TraceError:
    """Return the error of a trace that is not as it was written; what: where and what it is."""
    return TraceError(f"{what}; copy the trace again or record it again")


def check_limit(where: str, key: str, size: int, limit: int) -> None:
    """Raise TraceError if a file has more bytes than a trace can have at this key."""
    if size > limit:
        raise damaged(f"{where}: {key!r} has {size} bytes, expected at most {limit}")


class Packed:
    """A local packed trace.

    Raises TraceNotFoundError for a file that is no zip or no trace, and TraceError where it is
    damaged or has members that no packed trace has.
    """

    few_bytes = Folder.few_bytes

    def __init__(self, path: Path) -> None:
        self.path = path
        self.readers = os.cpu_count() or 1
        with _zip_errors(str(path)):
            _check_contents(path)
            with zipfile.ZipFile(path) as archive:
                if "zarr.json" not in archive.NameToInfo:
                    raise _no_trace(path, "it has no zarr.json")
                self._members = _checked(archive, str(path), path.stat().st_size)

    def read(self, key: str, limit: int) -> bytes:
        """Return the content of a member."""
        member = self._members.get(key)
        if member is None:
            raise FileNotFoundError(key)
        check_limit(str(self.path), key, member.file_size, limit)
        data, _ = self.part(key, 0, member.file_size)
        with _zip_errors(str(self.path)):
            if zlib.crc32(data) != member.CRC:
                raise zipfile.BadZipFile(f"member {key} is damaged")
        return data

    def part(self, key: str, start: int, size: int) -> tuple[bytes, int]:
        """Return part of a member, and its size; its checksum is not compared."""
        member = self._members.get(key)
        if member is None:
            raise FileNotFoundError(key)
        start = from_end(start, member.file_size)
        with _zip_errors(str(self.path)), self.path.open("rb") as file:
            # the name and the length of a member are repeated before its bytes
            file.seek(member.header_offset)
            head = file.read(30 + len(key))
            if head[:4] != b"PK\x03\x04" or head[30:] != key.encode():
                raise zipfile.BadZipFile(f"member {key} is not where it should be")
            file.seek(struct.unpack_from("<H", head, 28)[0] + start, os.SEEK_CUR)
            return file.read(max(0, min(size, member.file_size - start))), member.file_size

    def sizes(self) -> dict[str, int]:
        """Return the size of each member in bytes."""
        return {key: member.file_size for key, member in self._members.items()}


def _no_trace(path: Path, reason: str) -> TraceNotFoundError:
    return TraceNotFoundError(
        f"{path} is not a kvsim trace: {reason}, expected a folder or what `kvsim trace pack` "
        "writes"
    )


def _check_contents(path: Path) -> None:
    """Raise BadZipFile for a table of contents larger than any trace has, before it is read."""
    with path.open("rb") as file:
        if file.read(2) != b"PK":
            raise _no_trace(path, "it is not a zip")
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 42))
        tail = file.read()
        end = tail[-22:]
        if len(end) < 22 or end[:4] != b"PK\x05\x06":
            raise zipfile.BadZipFile("its end is not that of a zip without a comment")
        length = struct.unpack_from("<I", end, 12)[0]
        if _FULL in struct.unpack_from("<II", end, 12) or end[10:12] == b"\xff\xff":
            if tail[:4] != b"PK\x06\x07":
                raise zipfile.BadZipFile("its 64-bit record is missing")
            file.seek(min(struct.unpack_from("<Q", tail, 8)[0], size))
            record = file.read(56)
            if len(record) < 56:
                raise zipfile.BadZipFile("its 64-bit record is truncated")
            length = struct.unpack_from("<Q", record, 40)[0]
    if length > _CONTENTS_LIMIT:
        raise zipfile.BadZipFile(f"its table of contents has {length} bytes")


def _checked(archive: zipfile.ZipFile, where: str, size: int) -> dict[str, zipfile.ZipInfo]:
    """Return the members by name: regular files that share no bytes."""
    members = archive.infolist()

    def refuse(member: zipfile.ZipInfo, reason: str) -> TraceError:
        return TraceError(
            f"{where}: member {short_repr(member.filename)} {reason}, expected those of a trace "
            "as `kvsim trace pack` writes them"
        )

    names: set[str] = set()
    for member in members:
        name = member.orig_filename
        if not MEMBER.fullmatch(name) or name != member.filename:
            raise refuse(member, "has no place in a trace")
        if name.casefold() in names:
            raise refuse(member, "appears twice")
        names.add(name.casefold())
        if stat.S_IFMT(member.external_attr >> 16) not in (0, stat.S_IFREG):
            raise refuse(member, "is not a regular file")
        if not member.file_size:
            raise refuse(member, "is empty")
        if member.flag_bits & 0x1:
            raise refuse(member, "is encrypted")
        if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
            raise refuse(member, "is compressed")
    end = size
    for member in sorted(members, key=lambda member: member.header_offset, reverse=True):
        last = member.header_offset + 30 + len(member.filename) + member.file_size
        if member.header_offset < 0 or last > end:
            raise refuse(member, "shares bytes with another")
        end = member.header_offset
    return {member.filename: member for member in members}


@contextmanager
def _zip_errors(where: str) -> Iterator[None]:
    """Raise TraceError for what zipfile raises for unusable files, later versions and bad names."""
    try:
        yield
    except TraceError:
        raise
    except (zipfile.BadZipFile, NotImplementedError, OSError, ValueError) as error:
        raise TraceError(
            f"{where} is not a usable packed trace ({error_line(error)}), expected a folder or "
            "what `kvsim trace pack` writes"
        ) from error
