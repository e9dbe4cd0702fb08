"""Index of a folder of traces and runs; of traces, no q, k or v is read."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvsim.errors import TraceError
from kvsim.schema import PROJECTIONS, object_at
from kvsim.store.publication import is_marked

#: Depth of the search.
DEPTH = 4

Kind = Literal["trace", "run", "folder"]

#: State of a trace: it opens, or it does not.
State = Literal["whole", "broken"]


@dataclass(frozen=True)
class Entry:
    """One trace of a folder.

    Attributes:
        path: relative to the folder.
        state: `whole` if it opens (`kvsim verify` reads the rest), else `broken`.
        reason: why it does not open: the error message, with `path` for the trace.
        bytes: size on disk.
        tokens: prompt and response.
        prompt_len: tokens of the prompt.
        stopped: why the response ended.
        layers: number of stored layers.
        model_layers: number of layers of the model.
        model: name of the model.
        labels: labels of the prompt.
        answer: `right`, `wrong`, or `none` in the response; None if it was not checked.
        versions: versions of the packages that recorded it.
        projections: the folder next to it that has its output projections, None if it names none.
    """

    path: str
    state: State
    bytes: int
    reason: str = ""
    tokens: int | None = None
    prompt_len: int | None = None
    stopped: str | None = None
    layers: int | None = None
    model_layers: int | None = None
    model: str | None = None
    labels: Mapping[str, str | int | float] = field(default_factory=dict)
    answer: Literal["right", "wrong", "none"] | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    projections: str | None = None


def index(folder: str | Path) -> list[Entry]:
    """Every trace below `folder`, by path, from metadata and sizes of files alone."""
    root = Path(folder)
    traces = [_trace(name, path) for name, path in find_traces(root).items()]
    return sorted(traces, key=lambda entry: entry.path)


def shared_projections(folder: str | Path) -> dict[str, int]:
    """Return the size in bytes of each folder of output projections below `folder`, by path."""
    root = Path(folder)
    return {
        path.relative_to(root).as_posix(): _bytes(path)
        for inner in find_folders(root)
        for path in sorted(inner.iterdir())
        if PROJECTIONS.fullmatch(path.name)
    }


def _trace(name: str, path: Path) -> Entry:
    from kvsim.store.projections import Facts  # noqa: PLC0415  zarr
    from kvsim.store.reader import StoredTrace  # noqa: PLC0415  zarr

    try:
        stored = StoredTrace(path)
    except TraceError as error:
        return Entry(name, "broken", _bytes(path), str(error).replace(str(path), name, 1))
    meta = stored.header.meta
    model, facts = object_at(meta, "model"), Facts.named(meta, name)
    n_layers, _, n_pos, _ = stored.shapes["q"]
    stopped = object_at(meta, "generation").get("stopped")
    return Entry(
        name,
        "whole",
        _bytes(path) if path.is_file() else sum(stored.sizes.values()),
        tokens=n_pos,
        prompt_len=stored.header.prompt_len,
        stopped=str(stopped) if stopped is not None else None,
        layers=n_layers,
        model_layers=model["layers"] if type(model.get("layers")) is int else None,
        model=str(model["name"]) if "name" in model else None,
        labels=stored.header.labels,
        answer=_answer(object_at(meta, "answer_check")),
        versions={key: str(value) for key, value in object_at(meta, "versions").items()},
        projections=None if facts is None else facts.folder,
    )


def _answer(check: Mapping[str, Any]) -> Literal["right", "wrong", "none"] | None:
    if not isinstance(check.get("right"), bool):
        return None
    if check.get("answer") is None:
        return "none"
    return "right" if check["right"] else "wrong"


def _bytes(path: Path) -> int:
    """Return the size of a file or a folder; files that disappear meanwhile count 0."""
    size = path.stat().st_size if path.is_file() else 0
    for root, _, names in os.walk(path):
        for name in names:
            with suppress(FileNotFoundError):
                size += Path(root, name).stat().st_size
    return size


def find_traces(root: Path, depth: int = DEPTH) -> dict[str, Path]:
    """Return traces below `root`, folders and packed ones, by their relative path.

    depth: levels of folders that are entered, 1 for `root` alone. ``*.zarr`` and ``*.zarr.zip``
    count as traces, whole or not, so that damaged ones are listed; of other names, those whose
    metadata is that of a trace. Hidden folders, and whatever is inside a trace or a run, are left
    out.
    """
    return _named(root, "trace", depth)


def find_folders(root: Path) -> list[Path]:
    """Return `root` and the folders below it that may hold traces."""
    return [root, *_named(root, "folder", DEPTH - 1).values()]


def find_runs(root: Path) -> dict[str, Path]:
    """Return run folders below `root` (with a run.json), by their relative path."""
    return _named(root, "run", DEPTH)


def _named(root: Path, wanted: Kind, depth: int) -> dict[str, Path]:
    paths = (path for path, kind in _walk(root, depth) if kind == wanted)
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
