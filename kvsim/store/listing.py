"""Which traces and run folders lie in a folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

#: How many folders deep is looked.
DEPTH = 4


def find_traces(root: Path) -> dict[str, Path]:
    """Folders below `root` that are called ``*.zarr`` and are no records, by their relative path.

    Whether one is whole is not looked at, so that a damaged trace is found too. What is hidden, as
    a trace on its way is, and what lies inside a trace or a run is left out.
    """
    return _named(root, (path for path in _walk(root, DEPTH) if path.suffix == ".zarr"))


def find_folders(root: Path) -> list[Path]:
    """`root` and the folders below it in which traces may lie."""
    return [root, *(path for path in _walk(root, DEPTH - 1) if not _is_whole(path))]


def find_runs(root: Path) -> dict[str, Path]:
    """Run folders below `root` (they hold a run.json), by their relative path."""
    return _named(root, (path for path in _walk(root, DEPTH) if (path / "run.json").is_file()))


def _named(root: Path, found: Iterator[Path]) -> dict[str, Path]:
    return {path.relative_to(root).as_posix(): path for path in found}


def _walk(folder: Path, depth: int) -> Iterator[Path]:
    """Folders below a folder in order of their names; not what is in a trace or a run."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or not path.is_dir() or path.is_symlink():
            continue
        yield path
        if depth > 1 and not _is_whole(path):
            yield from _walk(path, depth - 1)


def _is_whole(path: Path) -> bool:
    """Whether a folder is a trace or a run, in which no others lie."""
    return path.suffix == ".zarr" or (path / "run.json").is_file()
