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
    if path.is_dir():
        if (path / "run.json").is_file():
            return "run"
        return "trace" if path.suffix == ".zarr" or _is_marked(path) else "folder"
    if path.suffix == SUFFIX and path.is_file():
        return "trace" if path.stem.endswith(".zarr") or _is_marked(path) else None
    return None


def _is_marked(path: Path) -> bool:
    """Whether a path has the metadata of a trace."""
    if path.is_dir() and not (path / "zarr.json").is_file():
        return False
    try:
        place = Folder(path) if path.is_dir() else Packed(path)
        root = find_document(place, "zarr.json", str(path))
    except TraceError:
        return False
    return "kvsim_format" in object_at(root or {}, "attributes")
