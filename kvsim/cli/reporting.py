"""`kvsim report`: run folders and traces as one page."""

from __future__ import annotations

from itertools import compress
from pathlib import Path
from typing import Annotated

import typer

from kvsim.cli.shared import Overwrite, path_option, paths_of, several
from kvsim.cli.show import bar


def report(
    given: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN|TRACE",
            help="Folders that `kvsim replay` or `live` wrote, and recorded traces to "
            "analyse, or the shipped 'sample' and 'sample-smollm2'; paths or URLs.",
        ),
    ],
    out: Annotated[Path, path_option("FILE", "The page to write.")] = Path("report.html"),
    metric: Annotated[
        list[str] | None,
        several(
            "NAME[,NAME...]",
            "Metrics beside the one that ranks; default: entries_seen,wipeout.",
        ),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Write results, figures and the papers' claims on them as one HTML page.

    Of runs: every policy with intervals over prompts. Of traces: what they say before any policy
    evicts. Traces next to runs have to be those that the runs replayed.
    """
    from kvsim.report import METRICS, write_report
    from kvsim.store import open_trace

    paths = paths_of(given)
    is_trace = [_is_trace(path) for path in paths]
    traces = [open_trace(path) for path in compress(paths, is_trace)]
    runs = list(compress(paths, (not each for each in is_trace)))
    with bar("steps") as progress:
        page = write_report(
            runs,
            out,
            metrics=metric or METRICS,
            traces=traces,
            overwrite=overwrite,
            progress=progress,
        )
    typer.echo(f"Written to {page}.")


def _is_trace(path: Path | str) -> bool:
    """Return whether a path or URL is meant as a trace, by its name or by what lies in it."""
    if isinstance(path, str):
        from kvsim.analysis.folder import is_run

        return not is_run(path)
    return path.suffix in (".zarr", ".zip") or (path / "zarr.json").is_file()
