"""What lies in a folder of traces, whole or not: each is opened, and no q, k or v is read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvsim.errors import TraceError
from kvsim.store.listing import find_folders, find_traces
from kvsim.store.reader import StoredTrace
from kvsim.store.recovery import Draft, find_drafts

#: Of a trace: it opens, or does not. Of a hidden folder: it is on its way, or nobody writes it any
#: more, or it was set aside for another, or a whole trace has its place.
State = Literal["whole", "broken", "writing", "unfinished", "replaced", "superseded"]


@dataclass(frozen=True)
class Entry:
    """One trace of a folder, or what is left of one.

    Attributes:
        path: below the folder that was looked at.
        state: `whole` if it opens (`kvsim verify` reads the rest), else `broken`; of hidden
            folders, `writing` for a trace on its way, `unfinished` for one that nobody writes any
            more, `replaced` for one that was set aside for another, and `superseded` for both
            where a whole trace, of no fewer tokens than are unfinished, has their place.
        reason: why it does not open: the error, with `path` for the trace.
        bytes: on disk.
        tokens: prompt and response; of an unfinished one, those that are safe on disk.
        place_tokens: of hidden folders, the tokens of the whole trace that has their place.
        prompt_len: tokens of the prompt.
        stopped: why its response ended, `interrupted` for a trace that was recovered.
        layers: stored ones.
        model_layers: how many the model has.
        model: its name.
        labels: of the prompt.
        answer: `right`, `wrong`, or `none` in the response; None if it was not checked.
        versions: of what recorded it.
    """

    path: str
    state: State
    bytes: int
    reason: str = ""
    tokens: int | None = None
    place_tokens: int | None = None
    prompt_len: int | None = None
    stopped: str | None = None
    layers: int | None = None
    model_layers: int | None = None
    model: str | None = None
    labels: Mapping[str, str | int] = field(default_factory=dict)
    answer: Literal["right", "wrong", "none"] | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)


def index(folder: str | Path) -> list[Entry]:
    """Every trace below `folder`, and every unfinished one, in order of their paths.

    Opens each trace, which reads its metadata and asks the file system for the sizes of its files.
    """
    root = Path(folder)
    found = {name: _trace(name, path) for name, path in find_traces(root).items()}
    drafts = [
        _draft(draft, root, found) for folder in find_folders(root) for draft in find_drafts(folder)
    ]
    return sorted([*found.values(), *drafts], key=lambda one: one.path)


def _trace(name: str, path: Path) -> Entry:
    try:
        stored = StoredTrace(path)
    except TraceError as error:
        return Entry(name, "broken", _bytes(path), str(error).replace(str(path), name, 1))
    meta = stored.header.meta
    model = _entry(meta, "model")
    n_layers, _, n_pos, _ = stored.shapes["q"]
    stopped = _entry(meta, "generation").get("stopped")
    return Entry(
        name,
        "whole",
        _bytes(path) if path.is_file() else sum((stored.sizes or {}).values()),
        tokens=n_pos,
        prompt_len=stored.header.prompt_len,
        stopped=str(stopped) if stopped is not None else None,
        layers=n_layers,
        model_layers=_number(model.get("layers")),
        model=str(model["name"]) if "name" in model else None,
        labels=stored.header.labels,
        answer=_answer(_entry(meta, "answer_check")),
        versions={key: str(value) for key, value in _entry(meta, "versions").items()},
    )


def _answer(check: Mapping[str, Any]) -> Literal["right", "wrong", "none"] | None:
    if not isinstance(check.get("right"), bool):
        return None
    if check.get("answer") is None:
        return "none"
    return "right" if check["right"] else "wrong"


def _draft(draft: Draft, root: Path, traces: Mapping[str, Entry]) -> Entry:
    """An entry for a hidden folder beside `traces`, which are known by their paths."""
    there = traces.get(draft.target.relative_to(root).as_posix())
    tokens = None if there is None or there.state != "whole" else there.tokens
    state: State = "replaced" if draft.kind == "old" else "unfinished"
    if draft.writing:
        state = "writing"
    elif tokens is not None and (draft.kind == "old" or draft.tokens <= tokens):
        state = "superseded"
    return Entry(
        draft.path.relative_to(root).as_posix(),
        state,
        _bytes(draft.path),
        tokens=draft.tokens,
        place_tokens=tokens,
    )


def _bytes(path: Path) -> int:
    """The size of a file or of all in a folder; what a writer moves away meanwhile is nothing."""
    size = path.stat().st_size if path.is_file() else 0
    for root, _, names in os.walk(path):
        for name in names:
            with suppress(FileNotFoundError):
                size += Path(root, name).stat().st_size
    return size


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _entry(document: Mapping[str, Any], key: str) -> dict[str, Any]:
    """An object of the metadata; empty where a foreign writer put something else."""
    value = document.get(key)
    return value if isinstance(value, dict) else {}
