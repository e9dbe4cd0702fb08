"""`kvsim report`: run folders and traces as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvsim.cli.show import bar
from kvsim.cli.values import Overwrite, path_option, paths_of


def report(
    given: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN|TRACE",
            help="Folders that `kvsim replay --out` wrote, and recorded traces to analyse, or "
            "the shipped 'sample' and 'sample-smollm2'.",
        ),
    ],
    out: Annotated[Path, path_option("FILE", "The page to write.")] = Path("report.html"),
    base: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="The policy beside which the others stand; default: the first."
        ),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Write results, figures and the papers' claims on them as one HTML page.

    Of runs: every policy with intervals over prompts. Of traces: what they say before any policy
    evicts. Traces beside runs have to be those that the runs replayed.
    """
    from kvsim.report import write_report
    from kvsim.store import open_trace

    paths = paths_of(given)
    traces = [open_trace(path) for path in paths if _is_trace(path)]
    runs = [Path(path) for path in paths if not _is_trace(path)]
    with bar("steps") as progress:
        page = write_report(runs, out, base, traces=traces, overwrite=overwrite, progress=progress)
    typer.echo(f"Written to {page}.")


def _is_trace(path: Path | str) -> bool:
    """Whether a path is meant as a trace, by its name or by what lies in it; a URL always is."""
    if isinstance(path, str):
        return True
    return path.suffix in (".zarr", ".zip") or (path / "zarr.json").is_file()
