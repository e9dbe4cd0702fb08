"""Traces behind URLs: read over HTTP or through fsspec, written with their root metadata last."""

from __future__ import annotations

import contextlib
import http.client
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvsim.errors import TraceError, TraceExistsError
from kvsim.store.documents import said
from kvsim.store.place import Folder, Place, check_limit

#: Files that are on their way at the same time.
_READERS = 16

#: Seconds without an answer.
_TIMEOUT = 60

_ROOT = "zarr.json"


class Web:
    """A trace behind an HTTP URL, of which one file after another can be asked for by name."""

    readers = _READERS
    few_bytes = 0

    def __init__(self, url: str) -> None:
        self.path = url

    def read(self, key: str, limit: int) -> bytes:
        """All of a file."""
        parts = _split(self.path)
        path = f"{parts.path.rstrip('/')}/{key}"
        url = parts._replace(path=path).geturl()
        try:
            with urllib.request.urlopen(url, timeout=_TIMEOUT) as answer:  # noqa: S310  http alone
                data: bytes = answer.read(limit + 1)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code in (404, 410):
                raise FileNotFoundError(key) from None
            raise TraceError(f"{url} is not readable (HTTP {error.code} {error.reason})") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise TraceError(
                f"{url} is not readable ({said(error)}), expected a server that has the trace; "
                "check the URL and the network"
            ) from error
        check_limit(self.path, key, len(data), limit)
        return data

    def sizes(self) -> None:
        """HTTP has no lists of files."""


class Remote:
    """A trace in a store that fsspec knows, such as ``s3://bucket/run.zarr``."""

    readers = _READERS
    few_bytes = 0

    def __init__(self, url: str) -> None:
        self.path = url
        self._system, self._root = _filesystem(url)
        self._sizes: dict[str, int] = {}

    def read(self, key: str, limit: int) -> bytes:
        """All of a file."""
        path = f"{self._root}/{key}"
        with _one_line(self.path, "read"):
            size = self._sizes[key] if key in self._sizes else self._system.info(path)["size"]
            check_limit(self.path, key, size, limit)
            data: bytes = self._system.cat_file(path)
        return data

    def sizes(self) -> dict[str, int]:
        """The size of each file in bytes."""
        with _one_line(self.path, "read"):
            self._system.invalidate_cache()
            found = self._system.find(self._root, detail=True)
        start = len(self._root) + 1
        self._sizes = {path[start:]: int(one["size"]) for path, one in found.items()}
        return self._sizes


def find_remote(url: str) -> Place:
    """The place behind a URL.

    Raises:
        TraceError: a URL that kvsim cannot read, and what is missing for that.
    """
    if _split(url).path.endswith(".zip"):
        raise TraceError(
            f"{url} is one packed file, which is read on this machine alone; download it first"
        )
    return Web(url) if _is_web(url) else Remote(url)


def check_free(url: str, *, overwrite: bool) -> None:
    """Raise TraceError unless a trace can be written to `url`, where nothing may be.

    Raises:
        TraceExistsError: something is there.
    """
    if _is_web(url):
        raise TraceError(f"{url}: HTTP is for reading; write to a folder or to a store, as s3://")
    if overwrite:
        raise TraceError(
            f"{url}: a store has no renaming, so that nothing is overwritten there; "
            "remove what is there, or give another URL"
        )
    system, root = _filesystem(url)
    with _one_line(url, "written"):
        system.invalidate_cache()
        try:
            taken = bool(system.find(root, maxdepth=1, withdirs=True))
        except FileNotFoundError:
            taken = False
    if taken:
        raise TraceExistsError(f"{url} exists, expected a free place; give another URL")


def upload(folder: Path, url: str) -> str:
    """Write the trace in a folder to `url`, what says that it is complete last; gives the URL.

    If that fails, what was written is removed again; if even that does, no reader takes what is
    left for a trace.

    Raises:
        TraceExistsError: something is there.
        TraceError: the store cannot be written to.
    """
    check_free(url, overwrite=False)
    system, root = _filesystem(url)
    place = Folder(folder)
    sizes = place.sizes()

    def put(key: str) -> None:
        system.pipe_file(f"{root}/{key}", place.read(key, sizes[key]))

    try:
        with _one_line(url, "written"):
            system.makedirs(root, exist_ok=True)
            with ThreadPoolExecutor(_READERS) as pool:
                for _ in pool.map(put, sorted(sizes.keys() - {_ROOT})):
                    pass
            put(_ROOT)
    except BaseException:
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            system.rm(root, recursive=True)
        raise
    return url


def _split(url: str) -> urllib.parse.SplitResult:
    try:
        return urllib.parse.urlsplit(url)
    except ValueError as error:
        raise TraceError(f"{url} is no URL ({said(error)}); expected one or a path") from error


def _is_web(url: str) -> bool:
    return _split(url).scheme.lower() in ("http", "https")


def _filesystem(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the path in it."""
    try:
        from fsspec.core import url_to_fs  # noqa: PLC0415  an optional extra
    except ImportError as error:
        raise TraceError(f"{url} takes fsspec; `pip install 'kvsim[remote]'`") from error
    try:
        system, root = url_to_fs(url.rstrip("/"))
    except ImportError as error:
        raise TraceError(f"{url} takes a driver that is not installed ({said(error)})") from error
    except (ValueError, TypeError, OSError) as error:
        raise TraceError(f"{url} is no place that fsspec knows ({said(error)})") from error
    if "file" in system.protocol or "local" in system.protocol:
        raise TraceError(f"{url} is on this machine; give its path, without file://")
    return system, root


@contextmanager
def _one_line(url: str, what: str) -> Iterator[None]:
    """Turn what a store has to say into one clear line."""
    try:
        yield
    except (TraceError, FileNotFoundError):
        raise
    except (OSError, ValueError, RuntimeError) as error:
        raise TraceError(
            f"{url} cannot be {what} ({said(error)}); check the URL and the network"
        ) from error
