"""What lies in a folder of traces, from what each says of itself: no array is opened."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvsim.errors import TraceError
from kvsim.schema import FORMAT_VERSION
from kvsim.store.header import labels_of
from kvsim.store.layout import read_json
from kvsim.store.listing import find_folders, find_traces
from kvsim.store.recovery import Draft, find_drafts


@dataclass(frozen=True)
class Entry:
    """One trace of a folder, or what is left of one.

    Attributes:
        path: below the folder that was looked at.
        state: `whole` as far as its metadata tells (`kvsim verify` reads the rest), `broken` if it
            cannot be opened; of hidden folders, `writing` for a trace on its way, `unfinished` for
            one that nobody writes any more, `replaced` for one that was set aside for another.
        reason: why it cannot be opened, in few words.
        bytes: on disk.
        tokens: prompt and response; of an unfinished one, those that are safe on disk.
        prompt_len: tokens of the prompt.
        layers: stored ones.
        model_layers: how many the model has.
        model: its name.
        labels: of the prompt.
        answer: `right`, `wrong`, or `none` in the response; None if it was not checked.
        versions: of what recorded it.
    """

    path: str
    state: Literal["whole", "broken", "writing", "unfinished", "replaced"]
    bytes: int
    reason: str = ""
    tokens: int | None = None
    prompt_len: int | None = None
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

    Reads the group's metadata of each trace and asks the file system for sizes.
    """
    root = Path(folder)
    found = [_trace(name, path) for name, path in find_traces(root).items()]
    drafts = (draft for folder in find_folders(root) for draft in find_drafts(folder))
    found += [_draft(draft, draft.path.relative_to(root).as_posix()) for draft in drafts]
    return sorted(found, key=lambda one: one.path)


def _trace(name: str, path: Path) -> Entry:
    size = _bytes(path)
    try:
        root = read_json(path / "zarr.json", name)
    except TraceError:
        there = (path / "zarr.json").exists()
        reason = "zarr.json is damaged" if there else "no zarr.json"
        return Entry(name, "broken", size, reason)
    attributes = _entry(root, "attributes")
    reason = _problem(attributes)
    if reason:
        return Entry(name, "broken", size, reason)
    meta = _entry(attributes, "meta")
    model = _entry(meta, "model")
    return Entry(
        name,
        "whole",
        size,
        tokens=attributes["n_tokens"],
        prompt_len=attributes["prompt_len"],
        layers=_layers(root, path),
        model_layers=_number(model.get("layers")),
        model=str(model["name"]) if "name" in model else None,
        labels=labels_of(meta),
        answer=_answer(_entry(meta, "answer_check")),
        versions={key: str(value) for key, value in _entry(meta, "versions").items()},
    )


def _problem(attributes: Mapping[str, Any]) -> str:
    """Why a trace with such attributes cannot be opened; empty if it can, as far as they tell."""
    version = _number(attributes.get("kvsim_format"))
    if version is None:
        return "no kvsim trace"
    if version > FORMAT_VERSION:
        return f"format {version}, this kvsim knows up to {FORMAT_VERSION}"
    if attributes.get("complete") is not True:
        return f"incomplete, {attributes.get('committed_tokens', 0)} tokens were written"
    missing = [key for key in ("n_tokens", "prompt_len") if _number(attributes.get(key)) is None]
    return f"no {' and '.join(missing)}" if missing else ""


def _answer(check: Mapping[str, Any]) -> Literal["right", "wrong", "none"] | None:
    if not isinstance(check.get("right"), bool):
        return None
    if check.get("answer") is None:
        return "none"
    return "right" if check["right"] else "wrong"


def _draft(draft: Draft, name: str) -> Entry:
    state: Literal["replaced", "unfinished", "writing"] = "unfinished"
    if draft.writing:
        state = "writing"
    elif draft.kind == "old":
        state = "replaced"
    return Entry(name, state, _bytes(draft.path), tokens=draft.tokens)


def _layers(root: Mapping[str, Any], path: Path) -> int | None:
    """How many layers are stored: from the consolidated metadata, else from that of q."""
    known = _entry(_entry(root, "consolidated_metadata"), "metadata")
    shape = _entry(known, "q").get("shape")
    if shape is None:
        try:
            shape = read_json(path / "q" / "zarr.json", "").get("shape")
        except TraceError:
            return None
    return _number(shape[0]) if isinstance(shape, list) and shape else None


def _bytes(folder: Path) -> int:
    """The size of everything in a folder; what a writer moves away meanwhile counts nothing."""
    size = 0
    for root, _, names in os.walk(folder):
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
