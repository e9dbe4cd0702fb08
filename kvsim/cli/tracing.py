"""`kvsim trace COMMAND`: work on traces as files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvsim.cli import sharing
from kvsim.cli.show import bar, echo_json, echo_text, one_line
from kvsim.cli.values import Json, Stop, path_argument, path_option

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    help="Work on traces as files: recover, discard, pack and unpack.",
)

DraftPath = Annotated[
    Path,
    path_argument("PATH", "The intended path of the trace, or the hidden folder next to it."),
]

app.command()(sharing.pack)
app.command()(sharing.unpack)


@app.command()
def recover(
    path: DraftPath,
    out: Annotated[
        Path | None, path_option("PATH", "Where to write the trace; default: its intended path.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a trace at that path.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Make a trace of what an interrupted capture has left behind.

    The trace has the tokens that were written completely, in blocks of 256, exactly as in an
    uninterrupted capture.
    """
    from kvsim import store

    try:
        with bar("layers") as report:
            trace = store.recover(
                path, out=out, overwrite=overwrite, progress=lambda *of: report(*of, str(path))
            )
    except KeyboardInterrupt:
        raise Stop("interrupted, the draft is kept; run the same command again", 130) from None
    facts = store.describe(trace)
    if as_json:
        echo_json({"trace": facts})
        return
    prompt, total = facts["prompt_len"], facts["tokens"]
    echo_text(f"{trace}: {total} tokens (prompt {prompt}, response {total - prompt})")
    for note in facts["notes"]:
        echo_text(f"  note: {note}")


@app.command()
def discard(path: DraftPath) -> None:
    """Remove what an interrupted capture has left behind, instead of recovering it.

    A draft that is being written is refused; a trace at its intended path is not touched.
    """
    from kvsim import store

    draft = store.discard(path)
    echo_text(f"removed {one_line(str(draft.path))} ({draft.tokens} tokens)")
