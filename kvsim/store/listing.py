"""Which traces and run folders lie in a folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from kvsim.errors import TraceError
from kvsim.store.documents import find_document
from kvsim.store.packed import SUFFIX, Packed
from kvsim.store.place import Folder

#: How many folders deep is looked.
DEPTH = 4

Kind = Literal["trace", "run", "folder"]


def find_traces(root: Path) -> dict[str, Path]:
    """Traces below `root`, folders and packed ones, by their relative path.

    What is called ``*.zarr`` or ``*.zarr.zip`` is one, whole or not, so that a damaged trace is
    found too; of other names, whatever says of itself that it is one. What is hidden, as a trace
    on its way is, and what lies inside a trace or a run is left out.
    """
    return _named(root, "trace")


def find_folders(root: Path) -> list[Path]:
    """`root` and the folders below it in which traces may lie."""
    return [root, *(path for path, kind in _walk(root, DEPTH - 1) if kind == "folder")]


def find_runs(root: Path) -> dict[str, Path]:
    """Run folders below `root` (they hold a run.json), by their relative path."""
    return _named(root, "run")


def _named(root: Path, wanted: Kind) -> dict[str, Path]:
    found = (path for path, kind in _walk(root, DEPTH) if kind == wanted)
    return {path.relative_to(root).as_posix(): path for path in found}


def _walk(folder: Path, depth: int) -> Iterator[tuple[Path, Kind]]:
    """What lies below a folder, in order of names; not what is in a trace or a run."""
    for path in sorted(folder.iterdir()):
        kind = None if path.name.startswith(".") or path.is_symlink() else _kind(path)
        if kind is None:
            continue
        yield path, kind
        if kind == "folder" and depth > 1:
            yield from _walk(path, depth - 1)


def _kind(path: Path) -> Kind | None:
    """What a path is, None for other files."""
    if path.is_dir():
        if (path / "run.json").is_file():
            return "run"
        return "trace" if path.suffix == ".zarr" or _says_so(path) else "folder"
    if path.suffix == SUFFIX and path.is_file():
        return "trace" if path.stem.endswith(".zarr") or _says_so(path) else None
    return None


def _says_so(path: Path) -> bool:
    """Whether the metadata of a group is there and is that of a trace."""
    if path.is_dir() and not (path / "zarr.json").is_file():
        return False
    try:
        place = Folder(path) if path.is_dir() else Packed(path)
        root = find_document(place, "zarr.json", str(path))
    except TraceError:
        return False
    attributes = None if root is None else root.get("attributes")
    return isinstance(attributes, dict) and "kvsim_format" in attributes
