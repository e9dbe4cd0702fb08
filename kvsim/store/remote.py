"""Stores behind URLs: HTTP, which is read-only, and all that fsspec opens."""

from __future__ import annotations

import asyncio
import http.client
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from zarr.abc.store import (
    ByteRequest,
    OffsetByteRequest,
    RangeByteRequest,
    Store,
    SuffixByteRequest,
)
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype
from zarr.storage import FsspecStore, MemoryStore

from kvsim.errors import KvsimError, TraceError, TraceExistsError, error_line

#: Seconds without an answer.
_TIMEOUT = 60


class Web(MemoryStore):
    """Files behind an HTTP URL, which cannot be listed."""

    def __init__(self, url: str) -> None:
        super().__init__(read_only=True)
        self._url = url.rstrip("/")

    async def get(
        self,
        key: str,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        """Return a file, or part of it; None where the server has none."""
        part, most = None, -1
        if isinstance(byte_range, RangeByteRequest):
            part, most = f"{byte_range.start}-{byte_range.end - 1}", byte_range.end
        elif isinstance(byte_range, OffsetByteRequest):
            part = f"{byte_range.offset}-"
        elif isinstance(byte_range, SuffixByteRequest):
            part = f"-{byte_range.suffix}"
        data = await asyncio.to_thread(_download, f"{self._url}/{key}", part, most)
        if data is None:
            return None
        return (prototype or default_buffer_prototype()).buffer.from_bytes(data)


def _download(url: str, part: str | None, most: int) -> bytes | None:
    request = urllib.request.Request(url, headers={"Range": f"bytes={part}"} if part else {})  # noqa: S310  HTTP
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT) as response:  # noqa: S310
            data: bytes = response.read(most)
            if part is None or response.status == 206:
                return data
    except urllib.error.HTTPError as error:
        error.close()
        if error.code in (404, 410):
            return None
        raise
    except http.client.HTTPException as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
    start, _, end = part.partition("-")  # the server sends whole files
    return data[int(start) : int(end) + 1 if end else None] if start else data[-int(end) :]


def open_url(url: str) -> Store:
    """Return the store behind a URL; TraceError if no package opens it, or it is one file."""
    if url.endswith(".zip"):
        raise TraceError(f"{url} is one file, which can only be read here; download it first")
    if is_web(url):
        return Web(url)
    filesystem(url)
    return FsspecStore.from_url(url.rstrip("/"), read_only=True)


def is_web(url: str) -> bool:
    """Whether a URL is one of HTTP, which is read-only."""
    return url.lower().startswith(("http://", "https://"))


def check_free(url: str, *, overwrite: bool) -> None:
    """Raise TraceError unless a trace can be written to `url`, TraceExistsError if it is taken."""
    if is_web(url):
        raise TraceError(f"{url}: HTTP is read-only; write to a folder or to a store, as s3://")
    if overwrite:
        raise TraceError(f"{url}: stores cannot rename; remove what is there, or give another URL")
    system, root = filesystem(url)
    with _errors(url):
        system.invalidate_cache()
        if system.exists(root) and system.ls(root):
            raise TraceExistsError(f"{url} exists, expected a free URL; give another URL")


def upload(folder: Path, url: str) -> str:
    """Upload the trace in a folder to `url`, the document of its group last, and return the URL.

    If that fails, the uploaded files are removed. Raises as `check_free`, and TraceError where the
    store cannot be written to.
    """
    check_free(url, overwrite=False)
    system, root = filesystem(url)
    keys = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    try:
        with _errors(url):
            for key in sorted(keys, key=lambda key: key == "zarr.json"):
                system.makedirs(f"{root}/{key}".rpartition("/")[0], exist_ok=True)
                system.put_file(str(folder / key), f"{root}/{key}")
    except BaseException:
        with suppress(OSError, ValueError, RuntimeError):
            system.rm(root, recursive=True)
        raise
    return url


def filesystem(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL, and the path in it; TraceError if none fits."""
    try:
        from fsspec.core import url_to_fs  # noqa: PLC0415  an optional extra
    except ImportError as error:
        raise TraceError(f"{url} needs fsspec; `pip install 'kvsim[remote]'`") from error
    try:
        system, root = url_to_fs(url.rstrip("/"))
    except (ImportError, ValueError, TypeError, OSError) as error:
        raise TraceError(f"{url} is not a URL that fsspec opens ({error_line(error)})") from error
    if "file" in system.protocol or "local" in system.protocol:
        raise TraceError(f"{url} is local; give its path, without file://")
    return system, root


@contextmanager
def _errors(url: str) -> Iterator[None]:
    """Raise TraceError, with one line, for an error of a store."""
    try:
        yield
    except KvsimError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        raise TraceError(
            f"{url} cannot be written ({error_line(error)}); check the URL and the network"
        ) from error
