"""Traces as users name them anywhere: by path, URL, folder, wildcards, or the name of a sample."""

from __future__ import annotations

import glob
import reprlib
from collections.abc import Iterable
from pathlib import Path

from kvsim.core.arguments import listed
from kvsim.core.trace import Trace
from kvsim.errors import TraceError, TraceNotFoundError

#: A trace, its path or URL, or the name of a sample.
TraceLike = Trace | str | Path
#: One or several, of which a path may be that of a folder of traces or have wildcards.
Traces = TraceLike | Iterable[TraceLike]


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
    """Return traces, each opened if need be; of a folder those in it, by name."""
    traces: list[Trace] = []
    several: list[TraceLike] = listed(given)
    for each in several:
        paths = paths_of(each) if isinstance(each, str | Path) else [each]
        traces += [as_trace(path) for path in paths]
    return traces


def paths_of(given: str | Path) -> list[Path | str]:
    """The paths and URLs of a path: itself or a folder's traces; TraceNotFoundError without any."""
    from kvsim.samples import locate  # noqa: PLC0415  a trace in memory needs neither
    from kvsim.store.index import find  # noqa: PLC0415

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
