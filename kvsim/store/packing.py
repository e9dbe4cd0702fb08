"""A trace as one file: a zip whose members are the files of the trace, not compressed again."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvsim.errors import TraceError, TraceExistsError, TraceNotFoundError
from kvsim.schema import is_url
from kvsim.store.chunks import check_chunk
from kvsim.store.documents import brief, said
from kvsim.store.interrupts import unbroken
from kvsim.store.place import Folder, check_limit
from kvsim.store.publication import check_writable
from kvsim.store.reader import StoredTrace

#: How the name of a packed trace ends.
SUFFIX = ".zip"

#: Most bytes of the table of contents: a million files.
_CONTENTS_LIMIT = 128 << 20

#: What the members of a packed trace are called; nothing that could leave a folder.
_MEMBER = re.compile(r"zarr\.json|[A-Za-z0-9_-]+/(?:zarr\.json|c(?:/[0-9]+)+)")

_FULL = 0xFFFFFFFF  # what stands where a number needs the 64-bit record


class Packed:
    """A packed trace on this machine.

    Raises:
        TraceNotFoundError: it is no zip, or one without the metadata of a group.
        TraceError: it is damaged, or has members that no packed trace has.
    """

    few_bytes = Folder.few_bytes

    def __init__(self, path: Path) -> None:
        self.path = path
        self.readers = os.cpu_count() or 1
        with _one_line(str(path)):
            with path.open("rb") as file:
                if file.read(2) != b"PK":
                    raise _no_trace(path, "it is no zip")
            _check_contents(path)
            with zipfile.ZipFile(path) as archive:
                if "zarr.json" not in archive.NameToInfo:
                    raise _no_trace(path, "no zarr.json is in it")
                self._members = _checked(archive, str(path), path.stat().st_size)

    def read(self, key: str, limit: int) -> bytes:
        """All of a member."""
        member = self._members.get(key)
        if member is None:
            raise FileNotFoundError(key)
        check_limit(str(self.path), key, member.file_size, limit)
        with _one_line(str(self.path)), self.path.open("rb") as file:
            # a member has its name and its length once more, before its bytes
            file.seek(member.header_offset)
            head = file.read(30 + len(key))
            if head[:4] != b"PK\x03\x04" or head[30:] != key.encode():
                raise zipfile.BadZipFile(f"member {key} is not where it should be")
            file.seek(struct.unpack_from("<H", head, 28)[0], os.SEEK_CUR)
            data = file.read(member.file_size)
            if zlib.crc32(data) != member.CRC:
                raise zipfile.BadZipFile(f"member {key} is damaged")
        return data

    def sizes(self) -> dict[str, int]:
        """The size of each member in bytes."""
        return {key: member.file_size for key, member in self._members.items()}


def pack(path: str | Path, out: str | Path | None = None) -> Path:
    """Write the trace in the folder `path` as one file; gives its path.

    The same trace gives the same bytes. What does not belong to a trace is left out.

    Args:
        path: a folder with a trace.
        out: the file, the folder's name and ``.zip`` by default.

    Raises:
        TraceExistsError: something is at `out`.
        TraceError: the trace cannot be opened, one of its chunks is damaged, or the file cannot be
            written.
    """
    stored = _open(path, "pack")
    place = stored.place
    if not isinstance(place, Folder):
        raise TraceError(f"{stored.where} is packed already, expected the folder of a trace")
    target = Path(out) if out is not None else place.path.with_name(place.path.name + SUFFIX)
    _check_target(target)
    for array in stored.arrays.values():
        for index in array.indices():
            check_chunk(array, index, place, stored.where)
    sizes = place.sizes()

    def write(hidden: Path) -> None:
        with zipfile.ZipFile(hidden, "x", zipfile.ZIP_STORED) as archive:
            for key in sorted(filter(_MEMBER.fullmatch, sizes)):
                member = zipfile.ZipInfo(key)  # of 1980: no time of day is in it
                member.external_attr = (stat.S_IFREG | 0o644) << 16
                member.create_system = 3
                archive.writestr(member, place.read(key, sizes[key]))

    return _publish(target, write)


def unpack(path: str | Path, out: str | Path | None = None) -> Path:
    """Write the packed trace `path` as a folder; gives its path.

    Args:
        path: a packed trace.
        out: the folder, the file's name without ``.zip`` by default.

    Raises:
        TraceExistsError: something is at `out`.
        TraceError: the file is damaged or no packed trace, or the folder cannot be written;
            nothing is left then.
    """
    stored = _open(path, "unpack")
    place = stored.place
    if not isinstance(place, Packed):
        raise TraceError(f"{stored.where} is a folder, expected a packed trace to unpack")
    name = place.path.name
    plain = name.removesuffix(SUFFIX) if name.endswith(SUFFIX) else f"{name}.zarr"
    target = Path(out) if out is not None else place.path.with_name(plain)
    _check_target(target)

    def write(hidden: Path) -> None:
        for key, size in place.sizes().items():
            file = hidden / key
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(place.read(key, size))

    return _publish(target, write)


def _open(path: str | Path, to: str) -> StoredTrace:
    if isinstance(path, str) and is_url(path):
        raise TraceError(f"{path} is a URL, expected a trace on this machine to {to}; download it")
    return StoredTrace(path)


def _publish(target: Path, write: Callable[[Path], None]) -> Path:
    """Write to a hidden sibling, flush it, and rename it to `target`, where nothing may be."""
    hidden = target.parent / f".{target.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        with _system_asked(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            unbroken(lambda: write(hidden))
            _flush(hidden)
            _check_free(target)
            hidden.rename(target)
            _flush(target.parent, deep=False)
    finally:
        with suppress(OSError):  # a disk for reading only refuses to remove what is not there
            if hidden.is_dir():
                shutil.rmtree(hidden, ignore_errors=True)
            hidden.unlink(missing_ok=True)
    return target


def _check_target(target: Path) -> None:
    """Raise TraceError unless `target` is free and can be written to, before any work."""
    with _system_asked(target):
        _check_free(target)
        check_writable(target.parent)


@contextmanager
def _system_asked(target: Path) -> Iterator[None]:
    """Turn what the system refuses into one clear line."""
    try:
        yield
    except TraceError:
        raise
    except OSError as error:
        raise TraceError(
            f"{target} cannot be written ({error.strerror or error}), nothing was published; "
            "free some space or give another output path (--out)"
        ) from error


def _flush(path: Path, *, deep: bool = True) -> None:
    """Wait until a file, or a folder with what is in it, is on the disk."""
    for one in [path, *(path.rglob("*") if deep else ())]:
        handle = os.open(one, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _check_free(target: Path) -> None:
    if target.exists() or target.is_symlink():
        raise TraceExistsError(f"{target} exists, expected a free path; give another one (--out)")


def _no_trace(path: Path, found: str) -> TraceNotFoundError:
    return TraceNotFoundError(
        f"{path} is no kvsim trace: {found}, expected a folder or what `kvsim trace pack` writes"
    )


def _check_contents(path: Path) -> None:
    """Refuse a table of contents that is larger than that of any trace, before it is read."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 42))
        tail = file.read()
        end = tail[-22:]
        if len(end) < 22 or end[:4] != b"PK\x05\x06":
            raise zipfile.BadZipFile("it does not end as a zip without a comment does")
        length = struct.unpack_from("<I", end, 12)[0]
        if _FULL in struct.unpack_from("<II", end, 12) or end[10:12] == b"\xff\xff":
            if tail[:4] != b"PK\x06\x07":
                raise zipfile.BadZipFile("its 64-bit record is missing")
            file.seek(min(struct.unpack_from("<Q", tail, 8)[0], size))
            record = file.read(56)
            if len(record) < 56:
                raise zipfile.BadZipFile("its 64-bit record is cut")
            length = struct.unpack_from("<Q", record, 40)[0]
    if length > _CONTENTS_LIMIT:
        raise zipfile.BadZipFile(f"its table of contents has {length} bytes")


def _checked(archive: zipfile.ZipFile, where: str, size: int) -> dict[str, zipfile.ZipInfo]:
    """The members of a packed trace by name, all of them plain files of their own bytes."""
    members = archive.infolist()

    def refuse(member: zipfile.ZipInfo, found: str) -> TraceError:
        return TraceError(
            f"{where}: member {brief(member.filename)} {found}, expected the files of a trace as "
            "`kvsim trace pack` writes them"
        )

    names: set[str] = set()
    for member in members:
        name = member.orig_filename
        if not _MEMBER.fullmatch(name) or name != member.filename:
            raise refuse(member, "has no place in a trace")
        if name.casefold() in names:
            raise refuse(member, "is there twice")
        names.add(name.casefold())
        if stat.S_IFMT(member.external_attr >> 16) not in (0, stat.S_IFREG):
            raise refuse(member, "is no plain file")
        if member.flag_bits & 0x1:
            raise refuse(member, "is encrypted")
        if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
            raise refuse(member, "is compressed")
    end = size
    for member in sorted(members, key=lambda one: one.header_offset, reverse=True):
        last = member.header_offset + 30 + len(member.filename) + member.file_size
        if member.header_offset < 0 or last > end:
            raise refuse(member, "shares bytes with another")
        end = member.header_offset
    return {member.filename: member for member in members}


@contextmanager
def _one_line(where: str) -> Iterator[None]:
    """Turn what zipfile says of a file that it cannot use into one clear line."""
    try:
        yield
    except TraceError:
        raise
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, OSError, ValueError) as error:
        raise TraceError(
            f"{where} is no usable packed trace ({said(error)}), expected a folder or what "
            "`kvsim trace pack` writes"
        ) from error
