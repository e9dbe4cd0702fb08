"""`kvsim trace COMMAND`: work on traces as files."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from kvsim.cli.shared import Json, Overwrite, Stop, path_argument, path_option
from kvsim.cli.show import bar, echo_error, echo_json, echo_text, one_line
from kvsim.samples import SAMPLES, locate

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    help="Work on traces as files: recover, discard, compact, pack and unpack.",
)

DraftPath = Annotated[
    Path, path_argument("PATH", "The intended path of the trace, or the hidden folder next to it.")
]

Out = Annotated[
    Path | None, path_option("PATH", "Where to write it; next to the trace by default.")
]


@app.command()
def pack(
    trace: Annotated[
        str,
        typer.Argument(
            metavar="TRACE", help="The folder of a recorded trace, or the name of a shipped one."
        ),
    ],
    out: Out = None,
) -> None:
    """Write a trace as one file, TRACE.zip, which every command reads like a folder.

    Chunks are checked first. The same trace has the same bytes.
    """
    from kvsim.store import packing

    if trace in SAMPLES and out is None:
        out = Path(f"{trace}.zarr.zip")  # not next to the sample, inside the package
    packed = packing.pack(locate(trace), out)
    typer.echo(f"{packed}: {packed.stat().st_size / 1e6:.1f} MB")


@app.command()
def unpack(
    file: Annotated[Path, path_argument("FILE", "A local packed trace.")], out: Out = None
) -> None:
    """Write a packed trace as a folder again.

    A file that is not a complete packed trace is refused before anything is written.
    """
    from kvsim.store import packing

    typer.echo(str(packing.unpack(file, out)))


@app.command()
def compact(
    trace: Annotated[
        str, typer.Argument(metavar="TRACE", help="A trace with all rows, or the name of a sample.")
    ],
    out: Annotated[Path, path_option("PATH", "Where to write the trace.")],
    rows: Annotated[
        str, typer.Option(metavar="response[+N]", help="The rows that stay, as of `kvsim capture`.")
    ] = "response",
    overwrite: Overwrite = False,
) -> None:
    """Write a trace without the rows long before its response, as `kvsim capture --rows` does.

    Most policies and metrics read sums over these rows instead (docs/compact-traces.md).
    """
    from kvsim import store
    from kvsim.recorder.options import Options

    whole = store.open_trace(trace)
    stay = Options(rows=rows).rows_before
    path = whole.compacted(stay if stay is not None else 0).save(out, overwrite=overwrite)
    before, after = (store.describe(each)["bytes"] / 1e6 for each in (trace, path))
    echo_text(f"{path}: {after:.1f} MB, of {before:.1f} MB")


@app.command()
def recover(
    path: DraftPath,
    out: Annotated[
        Path | None, path_option("PATH", "Where to write the trace; default: its intended path.")
    ] = None,
    overwrite: Overwrite = False,
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
                path, out=out, overwrite=overwrite, progress=lambda n, of: report(n, of, str(path))
            )
    except KeyboardInterrupt:
        raise Stop("interrupted, the draft is kept; run the same command again", 130) from None
    facts = store.describe(trace)
    for draft in store.find_drafts(trace.parent):
        if draft.target == trace and draft.kind == "old":
            removal = f"kvsim trace discard {shlex.quote(str(draft.path))}"
            echo_error(f"note: {draft} is left over; `{removal}` removes it")
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
