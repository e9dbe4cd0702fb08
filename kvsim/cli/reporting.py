"""`kvsim report`: run folders and traces as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvsim.cli.shared import Overwrite, path_option, paths_of, several
from kvsim.progress import progress_bar


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
    from kvsim.analysis.folder import is_run
    from kvsim.report import METRICS, write_report
    from kvsim.store.reader import open_trace

    paths = paths_of(given)
    runs = [x for x in paths if is_run(x) or Path(x).suffix == ".parquet"]
    traces = [open_trace(path) for path in paths if path not in runs]
    with progress_bar("steps") as progress:
        options: dict[str, Any] = {"metrics": metric or METRICS, "traces": traces}
        page = write_report(runs, out, **options, overwrite=overwrite, progress=progress)
    typer.echo(f"Written to {page}.")
