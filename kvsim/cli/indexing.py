"""`kvsim traces`: the traces and drafts of a folder."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvsim.cli.show import echo_json, echo_table, echo_text, one_line
from kvsim.cli.values import Json, OptionError, path_argument
from kvsim.schema import LABELS, plural

if TYPE_CHECKING:
    from kvsim.store.index import Entry


def traces(
    folder: Annotated[Path, path_argument("DIR", "A folder with traces.")],
    as_json: Json = False,
) -> None:
    """List the traces of a folder, and the drafts of interrupted captures.

    Folders and packed files, four folders deep. Each is opened, which finds missing files; `kvsim
    verify` reads their content.
    """
    if not folder.is_dir():
        problem = "is a file" if folder.exists() else "does not exist"
        raise OptionError(f"{folder} {problem}; expected a folder of traces")
    if (folder / "zarr.json").is_file():
        raise OptionError(f"{folder} is a trace; use `kvsim info`, or give its parent folder")

    from kvsim.store.index import index

    entries = index(folder)
    if as_json:
        echo_json({"folder": str(folder), "traces": [entry.to_dict() for entry in entries]})
        return
    whole = [entry for entry in entries if entry.state == "whole"]
    broken = [entry for entry in entries if entry.state == "broken"]
    hidden = [entry for entry in entries if entry.state not in ("whole", "broken")]
    if whole:
        _table(whole)
        typer.echo()
    for entry in broken:
        echo_text(f"cannot be opened: {one_line(entry.reason)}")
    for entry in hidden:
        echo_text(f"{one_line(entry.path)}: {_advice(entry, folder)}")
    echo_text(_totals(whole, len(broken), hidden, str(folder)))


def _table(entries: Sequence[Entry]) -> None:
    used = [label for label in LABELS if any(label in entry.labels for entry in entries)]
    cut = any(entry.stopped == "interrupted" for entry in entries)
    rows = [
        [
            entry.path,
            entry.model or "-",
            *(str(entry.labels.get(label, "-")) for label in used),
            entry.answer or "-",
            *([entry.stopped or "-"] if cut else ()),
            entry.versions.get("kvsim", "-"),
            str(entry.tokens),
            str(entry.prompt_len),
            _layers(entry),
            f"{entry.bytes / 1e6:.1f}",
        ]
        for entry in entries
    ]
    columns = [*used, "answer", *(["stopped"] if cut else ()), "kvsim"]
    headers = ["trace", "model", *columns, "tokens", "prompt", "layers", "MB"]
    echo_table(headers, rows, right=len(columns) + 2)


def _advice(entry: Entry, folder: Path) -> str:
    """Return the state of a draft, and what to do with it."""
    if entry.state == "writing":
        return f"a capture is writing it, {entry.tokens} tokens so far"
    path = one_line(shlex.quote(str(folder / entry.path)))
    recover, discard = f"kvsim trace recover {path}", f"kvsim trace discard {path}"
    taken = f"a trace of {entry.place_tokens} tokens is at its path"
    if entry.state == "superseded":
        return f"{entry.tokens} tokens, superseded: {taken}; {discard} removes it"
    if entry.state == "replaced":
        return f"was set aside for another trace; {recover} moves it back"
    if not entry.tokens:
        return f"unfinished, without tokens; {discard} removes it"
    state = f"unfinished, {entry.tokens} tokens are on disk"
    if entry.place_tokens is not None:
        return f"{state}, {taken}; {recover} --out OTHER"
    return f"{state}; {recover}"


def _layers(entry: Entry) -> str:
    """Return the number of layers, of how many if some are not stored."""
    if entry.layers is None:
        return "-"
    partial = entry.model_layers is not None and entry.model_layers != entry.layers
    return f"{entry.layers} of {entry.model_layers}" if partial else str(entry.layers)


def _totals(whole: Sequence[Entry], broken: int, hidden: Sequence[Entry], folder: str) -> str:
    parts = [f"{plural(len(whole), 'trace') if whole else 'no trace'} in {folder}"]
    if whole:
        parts.append(f"{sum(entry.tokens or 0 for entry in whole)} tokens")
        parts.append(f"{sum(entry.bytes for entry in whole) / 1e6:.1f} MB")
    checked = [entry.answer for entry in whole if entry.answer is not None]
    if checked:
        parts.append(f"{checked.count('right')} of {len(checked)} answers right")
    states = Counter(entry.state for entry in hidden)
    counts = {
        "interrupted": sum(entry.stopped == "interrupted" for entry in whole),
        "cannot be opened": broken,
        "being written": states["writing"],
        "unfinished": states["unfinished"],
        "set aside": states["replaced"],
        "superseded": states["superseded"],
    }
    return ", ".join([*parts, *(f"{count} {state}" for state, count in counts.items() if count)])
