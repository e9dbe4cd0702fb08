"""The folder of a sweep behind a URL of a store, such as ``s3://bucket/run``.

A store has neither renames nor locks, but an object appears whole. So a part counts once its JSON
file is there, which is written last and has the SHA-256 of the others; and tasks cannot be claimed:
of two processes that compute one at the same time, the later one writes the same files again.
To share the work, give each process a shard.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path

from kvsim.analysis.folder import CONFIG, RECORDS, RUN
from kvsim.errors import OutputError, local_path
from kvsim.schema import is_url
from kvsim.store.remote import filesystem, is_web, store_errors
from kvsim.sweeps.output import PARTS
from kvsim.sweeps.shards import Kept, Shards

#: Files of a part; the last one makes it one.
_SUFFIXES = (".parquet", ".records", ".json")


def kept_in(out: str | Path | None) -> Kept:
    """What keeps a sweep: memory, a folder, or the store of a URL; OutputError if none can be."""
    if out is None:
        return Kept()
    return Store(str(out)) if is_url(out) else Shards(local_path(out, OutputError))


class Store(Shards):
    """The folder of a sweep in a store, through a copy on this machine that ends with the process.

    Files are fetched as they are needed, and sent as they are written.
    """

    def __init__(self, url: str) -> None:
        if is_web(url):
            raise OutputError(f"{url}: HTTP is read-only; give a folder or a store, as s3://")
        self._system, self._root = filesystem(url, OutputError)
        copy = tempfile.mkdtemp(prefix="kvsim-sweep-")
        weakref.finalize(self, shutil.rmtree, copy, ignore_errors=True)
        super().__init__(Path(copy), url)

    def has_begun(self) -> bool:
        """Whether the store has the configuration of a sweep, which is fetched."""
        self._fetch(CONFIG)
        return super().has_begun()

    def scan(self) -> None:
        """Fetch what has been finished since the last time."""
        for name in self._names(PARTS):
            if name.endswith(".json"):
                self.look(name.removesuffix(".json"))

    def look(self, key: str) -> bool:
        """Whether a task has been finished, by this process or another one."""
        if not (self.folder / PARTS / f"{key}.json").exists():
            document = self._content(f"{PARTS}/{key}.json")
            if document is None:
                return False
            self._fetch(*(f"{PARTS}/{key}{suffix}" for suffix in _SUFFIXES[:-1]))
            self._keep(f"{PARTS}/{key}.json", document)
        return super().look(key)

    def send(self, *names: str) -> None:
        """Send files and folders, in this order; an older run ends before a new one begins."""
        with store_errors(self.where, "written", OutputError):
            if RUN in names:
                self._remove(RUN)
                self._remove(RECORDS)
            for name in names:
                path = self.folder / name
                if path.is_dir():
                    self._remove(name)
                for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
                    if file.is_file():
                        target = f"{self._root}/{file.relative_to(self.folder).as_posix()}"
                        self._system.makedirs(target.rpartition("/")[0], exist_ok=True)
                        self._system.pipe_file(target, file.read_bytes())

    def withdraw(self) -> None:
        """Remove what was sent of a run of which nothing is done."""
        if self._withdrawn and not self._used():
            self._remove("")

    def is_empty(self) -> bool:
        """Whether nothing is there."""
        return not self._names("")

    def _remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._system.rm(f"{self._root}/{name}", recursive=True)

    def _names(self, folder: str) -> list[str]:
        """Return the names in a folder, none where there is no such folder."""
        with store_errors(self.where, "read", OutputError):
            self._system.invalidate_cache()
            try:
                paths = self._system.ls(f"{self._root}/{folder}".rstrip("/"), detail=False)
            except FileNotFoundError:
                return []
        return sorted(str(path).rstrip("/").rpartition("/")[2] for path in paths)

    def _content(self, name: str) -> bytes | None:
        with store_errors(self.where, "read", OutputError):
            try:
                content: bytes = self._system.cat_file(f"{self._root}/{name}")
            except FileNotFoundError:
                return None
        return content

    def _fetch(self, *names: str) -> None:
        """Copy the files that are there."""
        for name in names:
            content = self._content(name)
            if content is not None:
                self._keep(name, content)

    def _keep(self, name: str, content: bytes) -> None:
        with self.writing():
            (self.folder / name).parent.mkdir(exist_ok=True)
            (self.folder / name).write_bytes(content)
