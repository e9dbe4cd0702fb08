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
) -> None:
    """Write results, figures and the papers' claims on them as one HTML page."""
    from kvsim.report import write_report

    typer.echo(f"Written to {write_report(runs, out)}.")
