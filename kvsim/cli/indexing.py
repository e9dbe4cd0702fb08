"""`kvsim traces`: what lies in a folder of traces."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvsim.cli.show import echo_json, echo_table, echo_text, one_line
from kvsim.cli.values import Json, OptionError, local_path
from kvsim.schema import LABELS

if TYPE_CHECKING:
    from kvsim.store.index import Entry


#: Hidden folders by their state, in words.
_STATES = {
    "writing": "being written",
    "unfinished": "unfinished",
    "replaced": "set aside",
    "superseded": "superseded",
}


def traces(
    folder: Annotated[
        Path, typer.Argument(parser=local_path, metavar="DIR", help="A folder with traces in it.")
    ],
    as_json: Json = False,
) -> None:
    """List the traces of a folder, and what is left of others.

    Folders and packed files, four folders deep. Each is opened, so that one without all of its
    files is found; what is in the files is read by `kvsim verify`.
    """
    if not folder.is_dir():
        found = "is a file" if folder.exists() else "does not exist"
        raise OptionError(f"{folder} {found}; expected a folder of traces")
    if (folder / "zarr.json").is_file():
        raise OptionError(f"{folder} is a trace itself; see `kvsim info`, or give its folder")

    from kvsim.store.index import index

    entries = index(folder)
    if as_json:
        echo_json({"folder": str(folder), "traces": [one.to_dict() for one in entries]})
        return
    whole, broken = ([one for one in entries if one.state == x] for x in ("whole", "broken"))
    hidden = [one for one in entries if one not in (*whole, *broken)]
    if whole:
        _table(whole)
        typer.echo()
    for one in broken:
        echo_text(f"cannot be opened: {one_line(one.reason)}")
    for one in hidden:
        echo_text(f"{one_line(one.path)}: {_hidden(one, folder)}")
    echo_text(_totals(whole, len(broken), hidden, str(folder)))


def _table(entries: Sequence[Entry]) -> None:
    used = [label for label in LABELS if any(label in one.labels for one in entries)]
    cut = any(one.stopped == "interrupted" for one in entries)
    rows = [
        [
            one.path,
            one.model or "-",
            *(str(one.labels.get(label, "-")) for label in used),
            one.answer or "-",
            *([one.stopped or "-"] if cut else ()),
            one.versions.get("kvsim", "-"),
            str(one.tokens),
            str(one.prompt_len),
            _layers(one),
            f"{one.bytes / 1e6:.1f}",
        ]
        for one in entries
    ]
    facts = [*used, "answer", *(["stopped"] if cut else ()), "kvsim"]
    headers = ["trace", "model", *facts, "tokens", "prompt", "layers", "MB"]
    echo_table(headers, rows, right=len(facts) + 2)


def _hidden(one: Entry, folder: Path) -> str:
    """What a hidden folder is, and what to do with it."""
    if one.state == "writing":
        return f"a capture is writing it, {one.tokens} tokens so far"
    path = one_line(shlex.quote(str(folder / one.path)))
    recover, discard = f"kvsim trace recover {path}", f"kvsim trace discard {path}"
    there = f"a trace of {one.place_tokens} tokens has its place"
    if one.state == "superseded":
        return f"{one.tokens} tokens, superseded: {there}; {discard} removes it"
    if one.state == "replaced":
        return f"was set aside for another trace; {recover} puts it back"
    if not one.tokens:
        return f"unfinished, without a token, nothing is lost with it; {discard} removes it"
    found = f"unfinished, {one.tokens} tokens are on disk"
    if one.place_tokens is not None:
        return f"{found}, {there}; {recover} --out OTHER"
    return f"{found}; {recover}"


def _layers(one: Entry) -> str:
    """Stored layers, of how many where some are left out."""
    if one.layers is None:
        return "-"
    some = one.model_layers is not None and one.model_layers != one.layers
    return f"{one.layers} of {one.model_layers}" if some else str(one.layers)


def _totals(whole: Sequence[Entry], broken: int, hidden: Sequence[Entry], folder: str) -> str:
    traces = "1 trace" if len(whole) == 1 else f"{len(whole)} traces"
    said = [f"{traces if whole else 'no trace'} in {folder}"]
    if whole:
        said.append(f"{sum(one.tokens or 0 for one in whole)} tokens")
        said.append(f"{sum(one.bytes for one in whole) / 1e6:.1f} MB")
    checked = [one.answer for one in whole if one.answer is not None]
    if checked:
        said.append(f"{checked.count('right')} of {len(checked)} answers right")
    interrupted = sum(one.stopped == "interrupted" for one in whole)
    if interrupted:
        said.append(f"{interrupted} interrupted")
    if broken:
        said.append(f"{broken} cannot be opened")
    for state, words in _STATES.items():
        count = sum(one.state == state for one in hidden)
        if count:
            said.append(f"{count} {words}")
    return ", ".join(said)
