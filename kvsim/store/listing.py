"""Search of a folder for traces and run folders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from kvsim.errors import TraceError
from kvsim.store.documents import find_document, object_at
from kvsim.store.packed import SUFFIX, Packed
from kvsim.store.place import Folder

#: Depth of the search.
DEPTH = 4

Kind = Literal["trace", "run", "folder"]


def find_traces(root: Path) -> dict[str, Path]:
    """Return traces below `root`, folders and packed ones, by their relative path.

    ``*.zarr`` and ``*.zarr.zip`` count as traces, whole or not, so that damaged ones are listed;
    of other names, those whose metadata is that of a trace. Hidden folders (drafts), and whatever
    is inside a trace or a run, are left out.
    """
    return _named(root, "trace")


def find_folders(root: Path) -> list[Path]:
    """Return `root` and the folders below it that may hold traces."""
    return [root, *(path for path, kind in _walk(root, DEPTH - 1) if kind == "folder")]


def find_runs(root: Path) -> dict[str, Path]:
    """Return run folders below `root` (with a run.json), by their relative path."""
    return _named(root, "run")


def _named(root: Path, wanted: Kind) -> dict[str, Path]:
    paths = (path for path, kind in _walk(root, DEPTH) if kind == wanted)
    return {path.relative_to(root).as_posix(): path for path in paths}


def _walk(folder: Path, depth: int) -> Iterator[tuple[Path, Kind]]:
    """Yield the paths below a folder by name; traces and runs are not entered."""
    for path in sorted(folder.iterdir()):
        kind = None if path.name.startswith(".") or path.is_symlink() else _kind(path)
        if kind is None:
            continue
        yield path, kind
        if kind == "folder" and depth > 1:
            yield from _walk(path, depth - 1)


def _kind(path: Path) -> Kind | None:
    """Return the kind of a path, None for other files."""
    packed = path.suffix == SUFFIX and path.is_file()
    if not (packed or path.is_dir()):
        return None
    if (path / "run.json").is_file():
        return "run"
    if (path.stem if packed else path.name).endswith(".zarr"):
        return "trace"
    try:
        root = find_document(Packed(path) if packed else Folder(path), "zarr.json", str(path))
    except TraceError:
        root = None
    if "kvsim_format" in object_at(root or {}, "attributes"):
        return "trace"
    return None if packed else "folder"
