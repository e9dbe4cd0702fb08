"""`kvsim report`: run folders as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="Folders that `kvsim replay --out` wrote.")
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The page to write.")] = Path(
        "report.html"
    ),
    base: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="The policy beside which the others stand; default: the first."
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the page that is there.")
    ] = False,
) -> None:
    """Write results, figures and the papers' claims on them as one HTML page."""
    from kvsim.report import write_report

    typer.echo(f"Written to {write_report(runs, out, base, overwrite=overwrite)}.")
