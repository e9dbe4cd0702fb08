"""`kvsim trace COMMAND`: work on traces as files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvsim.cli.shared import Overwrite, path_argument, path_option
from kvsim.cli.show import echo_text
from kvsim.samples import SAMPLES, locate

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    help="Work on traces as files: compact, pack and unpack.",
)

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
