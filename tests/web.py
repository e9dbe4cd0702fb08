"""A server of files on loopback, and a reader of pages."""

import functools
import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
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


class Reader(HTMLParser):
    """Tags with their attributes, text, and the cells of each table, by the heading above it."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text, self.tables, self._heading, self._inside = [], "", {}, "", ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        """A tag."""
        self.tags.append((tag, dict(attrs)))
        self._inside = {"h2": "h2", "td": "td"}.get(tag, self._inside)
        if tag == "h2":
            self._heading = ""
        if tag == "tr":
            self.tables.setdefault(self._heading, []).append([])
        if tag == "td":
            self.tables[self._heading][-1].append("")

    def handle_endtag(self, tag):
        """The end of one."""
        self._inside = "" if tag == self._inside else self._inside

    def handle_data(self, data):
        """Text between tags."""
        self.text += data
        if self._inside == "h2":
            self._heading += data
        if self._inside == "td":
            self.tables[self._heading][-1][-1] += data

    def row(self, heading, *first):
        """The first row of a section's tables that starts with these cells."""
        return next(r for r in self.tables[heading] if r[: len(first)] == list(first))
