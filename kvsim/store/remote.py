"""Traces behind URLs: read over HTTP or through fsspec, written with their root metadata last."""

from __future__ import annotations

import contextlib
import http
import http.client
import re
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from kvsim.errors import KvsimError, TraceError, TraceExistsError, error_line
from kvsim.store.place import PIECE, Folder, Place, check_limit, from_end

#: Files that are on their way at the same time.
_READERS = 16

#: Seconds without an answer.
_TIMEOUT = 60

#: Fewest bytes a second of a server that keeps a request longer than `_TIMEOUT`.
_SLOWEST = 1000

_ROOT = "zarr.json"


class Web:
    """A trace behind an HTTP URL: files are requested by name and cannot be listed."""

    readers = _READERS
    few_bytes = 0

    def __init__(self, url: str) -> None:
        self.path = url

    def read(self, key: str, limit: int) -> bytes:
        """Return the content of a file."""
        data, _ = self._request(key, limit)
        check_limit(self.path, key, len(data), limit)
        return data

    def part(self, key: str, start: int, size: int) -> tuple[bytes, int]:
        """Return part of a file, and its size; TraceError for a server that sends whole files."""
        span = f"{start}-{start + size - 1}" if start >= 0 else str(start)
        data, sent = self._request(key, size, {"Range": f"bytes={span}"})
        total = re.fullmatch(r"bytes \d+-\d+/(\d{1,18})", sent or "")
        if total is None or len(data) > size:
            raise TraceError(
                f"{self.path}: the server does not send parts of {key!r}, expected one that "
                "supports range requests; use another server, or download the trace"
            )
        return data, int(total[1])

    def _request(
        self, key: str, limit: int, headers: Mapping[str, str] | None = None
    ) -> tuple[bytes, str | None]:
        """Return an answer, `limit` + 1 bytes of it at most, and which range of the file it is."""
        parts = _split(self.path)
        path = f"{parts.path.rstrip('/')}/{key}"
        url = parts._replace(path=path).geturl()
        watch, data = _Watch(), bytearray()
        try:
            opener = urllib.request.build_opener(watch)
            request = urllib.request.Request(url, headers=dict(headers or {}))  # noqa: S310  HTTP
            with watch, opener.open(request, timeout=_TIMEOUT) as response:
                sent = response.headers["Content-Range"]
                if headers and response.status != http.HTTPStatus.PARTIAL_CONTENT:
                    return b"", None
                while len(data) <= limit and (part := response.read1(limit + 1 - len(data))):
                    data += part
                    watch.received = len(data)
                if len(data) <= limit and response.length:
                    raise http.client.IncompleteRead(bytes(data), response.length)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code in (404, 410):
                raise FileNotFoundError(key) from None
            raise TraceError(f"{url} is not readable (HTTP {error.code} {error.reason})") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = "the server is too slow" if watch.expired else error_line(error)
            raise TraceError(
                f"{url} is not readable ({reason}), expected a server that has the "
                "trace; check the URL and the network"
            ) from error
        return bytes(data), sent

    def sizes(self) -> None:
        """Return None: HTTP has no lists of files."""


class _Watch(
    urllib.request.HTTPHandler, urllib.request.HTTPSHandler, urllib.request.HTTPRedirectHandler
):
    """Opens connections, and shuts one that gets less than `_SLOWEST` bytes a second after a while.

    The timeout of a socket is for silence alone: single bytes could hold a read for hours.
    Redirects lead to HTTPS, or from HTTP to HTTP: urllib would follow one to FTP.
    """

    def __init__(self) -> None:
        super().__init__()
        self._connection: socket.socket | None = None
        self.received, self.expired = 0, False
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        threading.Thread(target=self._run, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _run(self) -> None:
        start = time.monotonic()
        while not self._ended.wait(_TIMEOUT):
            if self.received < _SLOWEST * (time.monotonic() - start):
                self.expired = True
                self._shut()
                return

    def _shut(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(self._connection, socket.SHUT_RDWR)

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        if _split(newurl).scheme.lower() not in ("https", req.type):
            fp.close()
            raise urllib.error.URLError(f"it redirects to {newurl}")
        return super().redirect_request(req, fp, code, msg, headers, newurl)

    def http_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(self._watched(http.client.HTTPConnection), req)

    def https_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(self._watched(http.client.HTTPSConnection), req)

    def _watched(self, kind: Callable[..., http.client.HTTPConnection]) -> Any:
        def connection(*args: Any, **keywords: Any) -> http.client.HTTPConnection:
            client = kind(*args, **keywords)
            connect = client.connect

            def connecting() -> None:
                connect()
                self._connection = client.sock
                if self.expired:
                    self._shut()

            client.connect = connecting  # type: ignore[method-assign]  # of this one
            return client

        return connection


class Remote:
    """A trace in a store that fsspec supports, such as ``s3://bucket/run.zarr``."""

    readers = _READERS
    few_bytes = 0

    def __init__(self, url: str) -> None:
        self.path = url
        self._system, self._root = filesystem(url)
        self._sizes: dict[str, int] = {}

    def read(self, key: str, limit: int) -> bytes:
        """Return the content of a file."""
        with store_errors(self.path, "read"):
            check_limit(self.path, key, self._size(key), limit)
            data: bytes = self._system.cat_file(f"{self._root}/{key}")
        return data

    def part(self, key: str, start: int, size: int) -> tuple[bytes, int]:
        """Return part of a file, and its size."""
        with store_errors(self.path, "read"):
            total = self._size(key)
            start = from_end(start, total)
            path, end = f"{self._root}/{key}", min(start + size, total)
            data: bytes = self._system.cat_file(path, start=start, end=end) if start < end else b""
        return data, total

    def _size(self, key: str) -> int:
        if key in self._sizes:
            return self._sizes[key]
        return int(self._system.info(f"{self._root}/{key}")["size"])

    def sizes(self) -> dict[str, int]:
        """Return the size of each file in bytes."""
        with store_errors(self.path, "read"):
            self._system.invalidate_cache()
            files = self._system.find(self._root, detail=True)
        start = len(self._root) + 1
        self._sizes = {path[start:]: int(info["size"]) for path, info in files.items()}
        return self._sizes


def find_remote(url: str) -> Place:
    """Return the place behind a URL; TraceError if kvsim or a missing package cannot read it."""
    if _split(url).path.endswith(".zip"):
        raise TraceError(
            f"{url} is a packed file, which can only be read locally; download it first"
        )
    return Web(url) if is_web(url) else Remote(url)


def check_free(url: str, *, overwrite: bool) -> None:
    """Raise TraceError unless a trace can be written to `url`, TraceExistsError if it is taken."""
    if is_web(url):
        raise TraceError(f"{url}: HTTP is read-only; write to a folder or to a store, as s3://")
    if overwrite:
        raise TraceError(
            f"{url}: stores cannot rename, so nothing is overwritten there; "
            "remove what is there, or give another URL"
        )
    system, root = filesystem(url)
    with store_errors(url, "written"):
        system.invalidate_cache()
        try:
            taken = bool(system.find(root, maxdepth=1, withdirs=True))
        except FileNotFoundError:
            taken = False
    if taken:
        raise TraceExistsError(f"{url} exists, expected a free URL; give another URL")


def upload(folder: Path, url: str) -> str:
    """Upload the trace in a folder to `url`, its root metadata last, and return the URL.

    If that fails, the uploaded files are removed; if that fails too, no reader takes the rest for a
    trace. Raises as `check_free`, and TraceError where the store cannot be written to.
    """
    check_free(url, overwrite=False)
    system, root = filesystem(url)
    place = Folder(folder)
    sizes = place.sizes()

    def put(key: str) -> None:
        if sizes[key] > PIECE:  # a shard
            system.put_file(str(folder / key), f"{root}/{key}")
        else:
            system.pipe_file(f"{root}/{key}", place.read(key, sizes[key]))

    try:
        with store_errors(url, "written"):
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
        raise TraceError(
            f"{url} is not a URL ({error_line(error)}); expected one or a path"
        ) from error


def is_web(url: str) -> bool:
    """Whether a URL is one of HTTP, which is read-only."""
    return _split(url).scheme.lower() in ("http", "https")


def filesystem(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL, and the path in it; TraceError if none fits."""
    try:
        from fsspec.core import url_to_fs  # noqa: PLC0415  an optional extra
    except ImportError as error:
        raise TraceError(f"{url} needs fsspec; `pip install 'kvsim[remote]'`") from error
    try:
        system, root = url_to_fs(url.rstrip("/"))
    except (ImportError, ValueError, TypeError, OSError) as error:
        missing = "needs a driver that is not installed"
        reason = missing if isinstance(error, ImportError) else "is not a URL that fsspec supports"
        raise TraceError(f"{url} {reason} ({error_line(error)})") from error
    if "file" in system.protocol or "local" in system.protocol:
        raise TraceError(f"{url} is local; give its path, without file://")
    return system, root


@contextmanager
def store_errors(url: str, what: str) -> Iterator[None]:
    """Raise TraceError, with one line, for an error of a store."""
    try:
        yield
    except (KvsimError, FileNotFoundError):
        raise
    except (OSError, ValueError, RuntimeError) as error:
        raise TraceError(
            f"{url} cannot be {what} ({error_line(error)}); check the URL and the network"
        ) from error
