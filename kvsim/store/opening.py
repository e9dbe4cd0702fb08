"""Traces as users name them anywhere, by path, URL, folder, wildcards or sample; free paths."""

from __future__ import annotations

import glob
import json
import reprlib
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from kvsim.core.arguments import listed
from kvsim.core.trace import Trace
from kvsim.errors import TraceError, TraceExistsError, TraceNotFoundError
from kvsim.schema import PROJECTIONS, object_at

#: A trace, its path or URL, or the name of a sample.
TraceLike = Trace | str | Path
#: One or several, of which a path may be that of a folder of traces or have wildcards.
Traces = TraceLike | Iterable[TraceLike]

Kind = Literal["trace", "run", "folder"]


def as_trace(given: TraceLike) -> Trace:
    """Return a trace, opened by path, URL or name (`open_trace`); TraceError for anything else."""
    if isinstance(given, Trace):
        return given
    if isinstance(given, str | Path):
        from kvsim.store.reader import open_trace  # noqa: PLC0415  zarr is loaded by the first use

        return open_trace(given)
    raise TraceError(
        f"trace is {reprlib.repr(given)}; expected a Trace of kvsim.open_trace, its path or URL"
    )


def as_traces(given: Traces) -> list[Trace]:
    """Return traces, each opened if necessary; of a folder the traces in it, by name."""
    traces: list[Trace] = []
    several: list[TraceLike] = listed(given)
    for each in several:
        paths = paths_of(each) if isinstance(each, str | Path) else [each]
        traces += [as_trace(path) for path in paths]
    return traces


def paths_of(given: str | Path) -> list[Path | str]:
    """Paths and URLs of a path: itself or a folder's traces; TraceNotFoundError without any."""
    from kvsim.samples import locate  # noqa: PLC0415  a trace in memory needs none

    path = locate(given)
    if isinstance(path, str):
        return [path]
    if glob.has_magic(str(path)) and not path.exists():
        matches = sorted(glob.glob(str(path)))  # noqa: PTH207  the folder may have wildcards too
        if not matches:
            raise TraceNotFoundError(f"no path is like {path}; expected traces")
        return [Path(match) for match in matches]
    if path.is_dir() and not any((path / name).exists() for name in ("zarr.json", "run.json")):
        return [*find(path, "trace", 1).values()] or [path]
    return [path]


def find(root: Path, kind: Kind, depth: int = 4) -> dict[str, Path]:
    """Return traces, folders and packed ones, or runs below `root`, by their relative path.

    depth: levels of folders to search, 1 for only `root`. ``*.zarr`` and ``*.zarr.zip`` count as
    traces, whole or not, so that damaged ones are listed; of other names, those whose metadata is
    that of a trace. Hidden folders, and whatever is inside a trace or a run, are left out.
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
    from kvsim.files import read_input  # noqa: PLC0415  as above

    try:
        document = json.loads(read_input(folder / "zarr.json"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(document, dict) and "kvsim_format" in object_at(document, "attributes")
