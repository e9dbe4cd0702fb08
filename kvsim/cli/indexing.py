"""`kvsim traces`: what lies in a folder of traces."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvsim.cli.show import echo_json, echo_table, echo_text, one_line
from kvsim.cli.values import Json, OptionError
from kvsim.schema import LABELS

if TYPE_CHECKING:
    from kvsim.store.index import Entry


def traces(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder with traces in it.")],
    as_json: Json = False,
) -> None:
    """List the traces of a folder, and what is left of others.

    Reads what each trace says of itself and none of its arrays: `kvsim verify` does. Looks four
    folders deep.
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
    whole, broken, unfinished = (
        [one for one in entries if one.state == state]
        for state in ("whole", "broken", "unfinished")
    )
    if whole:
        _table(whole)
        typer.echo()
    for one in broken:
        echo_text(f"{one_line(one.path)}: cannot be opened, {one.reason}")
    for one in unfinished:
        recover = f"kvsim trace recover {one_line(str(folder / one.path))}"
        echo_text(
            f"{one_line(one.path)}: unfinished, {one.tokens} tokens are on disk; unless a capture "
            f"is writing it now, {recover if one.tokens else 'nothing is lost with it'}"
        )
    echo_text(_totals(whole, len(broken), len(unfinished), str(folder)))


def _table(entries: Sequence[Entry]) -> None:
    used = [label for label in LABELS if any(label in one.labels for one in entries)]
    rows = [
        [
            one.path,
            one.model or "-",
            *(str(one.labels.get(label, "-")) for label in used),
            one.answer or "-",
            one.versions.get("kvsim", "-"),
            str(one.tokens),
            str(one.prompt_len),
            _layers(one),
            f"{one.bytes / 1e6:.1f}",
        ]
        for one in entries
    ]
    headers = ["trace", "model", *used, "answer", "kvsim", "tokens", "prompt", "layers", "MB"]
    echo_table(headers, rows, right=len(used) + 4)


def _layers(one: Entry) -> str:
    """Stored layers, of how many where some are left out."""
    if one.layers is None:
        return "-"
    some = one.model_layers is not None and one.model_layers != one.layers
    return f"{one.layers} of {one.model_layers}" if some else str(one.layers)


def _totals(whole: Sequence[Entry], broken: int, unfinished: int, folder: str) -> str:
    count = "1 trace" if len(whole) == 1 else f"{len(whole)} traces"
    said = [f"{count if whole else 'no trace'} in {folder}"]
    if whole:
        said.append(f"{sum(one.tokens or 0 for one in whole)} tokens")
        said.append(f"{sum(one.bytes for one in whole) / 1e6:.1f} MB")
    checked = [one.answer for one in whole if one.answer is not None]
    if checked:
        said.append(f"{checked.count('right')} of {len(checked)} answers right")
    if broken:
        said.append(f"{broken} cannot be opened")
    if unfinished:
        said.append(f"{unfinished} unfinished")
    return ", ".join(said)
