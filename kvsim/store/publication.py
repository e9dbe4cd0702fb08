"""Where a trace may be written."""

from __future__ import annotations

import json
from pathlib import Path

from kvsim import files
from kvsim.errors import TraceExistsError
from kvsim.schema import object_at


def check_target(path: Path, *, overwrite: bool) -> None:
    """Raise TraceExistsError unless a trace may be written to `path`."""
    if not (path.exists() or path.is_symlink()):
        return
    if not overwrite:
        raise TraceExistsError(f"{path} exists, expected a free path; give another, or --overwrite")
    if path.is_symlink() or not is_marked(path):
        raise TraceExistsError(
            f"{path} exists and is not a kvsim trace, expected a free path or a trace to "
            "overwrite; give another path, or move away what is there"
        )


def is_marked(folder: Path) -> bool:
    """Whether a folder has the metadata of a trace, of any version."""
    try:
        document = json.loads(files.read_input(folder / "zarr.json"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(document, dict) and "kvsim_format" in object_at(document, "attributes")
