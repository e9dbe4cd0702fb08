"""Traces and runs in a folder, and where a trace may be written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from kvsim import files
from kvsim.errors import TraceExistsError
from kvsim.schema import PROJECTIONS, object_at

Kind = Literal["trace", "run", "folder"]


def find(root: Path, kind: Kind, depth: int = 4) -> dict[str, Path]:
    """Return traces, folders and packed ones, or runs below `root`, by their relative path.

    depth: levels of folders that are entered, 1 for `root` alone. ``*.zarr`` and ``*.zarr.zip``
    count as traces, whole or not, so that damaged ones are listed; of other names, those whose
    metadata is that of a trace. Hidden folders, and whatever is inside a trace or a run, are left
    out.
    """
    found: dict[str, Path] = {}
    for path in sorted(root.iterdir()):
        of_path = None if path.name.startswith(".") or path.is_symlink() else _kind(path)
        if of_path == kind:
            found[path.name] = path
        elif of_path == "folder" and depth > 1:
            inside = find(path, kind, depth - 1)
            found |= {f"{path.name}/{name}": each for name, each in inside.items()}
    return found


def _kind(path: Path) -> Kind | None:
    if path.is_file():
        return "trace" if path.name.endswith(".zarr.zip") else None
    if not path.is_dir() or PROJECTIONS.fullmatch(path.name):
        return None
    if (path / "run.json").is_file():
        return "run"
    if path.name.endswith(".zarr"):
        whole = (path / "zarr.json").exists() or not any(path.glob("*.zarr*"))
        return "trace" if whole else "folder"  # of several prompts, recorded under such a name
    return "trace" if is_marked(path) else "folder"


def check_target(path: Path, *, overwrite: bool) -> None:
    """Raise TraceExistsError unless a trace may be written to `path`."""
    if not (path.exists() or path.is_symlink()):
        return
    if not overwrite or path.is_symlink() or not is_marked(path):
        kind = " and is not a kvsim trace" if overwrite else ""
        raise TraceExistsError(
            f"{path} exists{kind}, expected a free path; give another, or --overwrite a trace; "
            "kvsim capture --resume keeps traces that are there"
        )


def is_marked(folder: Path) -> bool:
    """Whether a folder has the metadata of a trace, of any version."""
    try:
        document = json.loads(files.read_input(folder / "zarr.json"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(document, dict) and "kvsim_format" in object_at(document, "attributes")
