"""A server of files on loopback."""

from __future__ import annotations

import functools
import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files, and lists of files unless told otherwise."""

    lists = True

    def log_message(self, *_):
        """Say nothing."""

    def list_directory(self, path):
        """A page with links, or nothing of that kind."""
        if self.lists:
            return super().list_directory(path)
        self.send_error(403)
        return None


@contextmanager
def served(folder: Path, handler: type[Quiet] = Quiet) -> Iterator[str]:
    """Serve a folder, and give its URL."""
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(handler, directory=folder)
    )
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()
