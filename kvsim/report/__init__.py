"""`report`: runs and traces to one HTML page that needs nothing else, no network and no scripts.

A page on runs opens with the verdict, its table and figure; every metric follows. Of traces: what
they say before any policy evicts. Of both: the claims of the papers, and where all of it came from.
Every text from a run or a trace is escaped (`html`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import polars as pl

from kvsim.analysis.folder import Saved, joined, read_run
from kvsim.analysis.measuring import measure
from kvsim.analysis.registry import METRICS as ALL
from kvsim.analysis.registry import metric
from kvsim.analysis.results import check_distinct, check_models
from kvsim.analysis.subject import Analysis
from kvsim.analysis.table import in_order
from kvsim.core.trace import Trace
from kvsim.errors import NeedsError, OutputError, PolicyError, local_path
from kvsim.files import check_output, write_file
from kvsim.report.html import PAGE, lines
from kvsim.report.sections import sections
from kvsim.schema import visible

#: Called with (steps done, steps, current step).
Progress = Callable[[int, int, str], None]

#: Shown next to the metric that ranks.
METRICS = ("entries_seen", "wipeout")


def write_report(
    runs: Sequence[str | Path],
    out: str | Path,
    *,
    metrics: Sequence[str] = METRICS,
    traces: Sequence[Trace] = (),
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Write the page of runs and traces together.

    Args:
        runs: folders of runs.
        out: the file to write.
        metrics: besides the one that ranks; their main variants.
        traces: to analyse; with runs, only traces that they replayed.
        overwrite: replace a file at `out`.
        progress: called with (steps done, steps, current step).

    Raises:
        OutputError: `out` does not end in .html or .htm, exists, or cannot be written; a run cannot
            be read, or did not replay a given trace.
        TraceError: two traces have one name.
        PolicyError: there is neither run nor trace; two runs have different values for the same
            policy, parameters, schedule and trace; the runs have no values; a metric is unknown.
    """
    target = local_path(out, OutputError)
    check_output(target, overwrite=overwrite)
    for name in metrics:
        metric(name)
    if target.suffix.lower() not in (".html", ".htm"):
        raise OutputError(
            f"{out} is to be a report, which is an HTML page; expected FILE.html, or `kvsim "
            "compare RUN --format csv` for numbers"
        )
    saved = [read_run(run) for run in runs]
    write_file(target, page(saved, metrics, traces, progress), overwrite=overwrite)
    return target


def page(
    runs: Sequence[Saved],
    metrics: Sequence[str] = METRICS,
    traces: Sequence[Trace] = (),
    progress: Progress | None = None,
) -> str:
    """The HTML page of runs and traces; see `write_report`."""
    table, remarks = joined(runs)
    if not table["value"].count() and (runs or not traces):
        raise PolicyError("there is nothing to report; give a run with values or a trace")
    check_traces(traces, runs)
    measured = [_measured(table, traces, place, progress) for place in range(len(traces))]
    table = in_order([table, *measured]) if traces else table
    names = [trace.name for trace in traces] if len(traces) < 2 else [f"{len(traces)} traces"]
    title = ", ".join([*(run.path.name for run in runs), *names])
    # names and tokens are escaped as HTML, but a terminal or an editor acts on their controls
    body = lines(sections(table, runs, remarks, metrics, traces))
    return visible(PAGE.format(title=title, body=body))


def _measured(
    table: pl.DataFrame, traces: Sequence[Trace], place: int, progress: Progress | None
) -> pl.DataFrame:
    """What a Table does not have of a trace, as far as it was recorded."""
    there = {*table.filter(pl.col("policy").is_null(), trace=traces[place].name)["metric"]}
    names = [name for name, entry in ALL.items() if entry.kind == "trace" and name not in there]
    analysis, found = Analysis(traces[place]), []
    for done, name in enumerate(names):
        if progress is not None:
            total, what = len(traces) * len(names), f"{traces[place].name}: {name}"
            progress(place * len(names) + done, total, what)
        with suppress(NeedsError):
            found.append(measure(analysis, metrics=name))
    return in_order(found)


def check_traces(traces: Sequence[Trace], runs: Sequence[Saved]) -> None:
    """Raise for traces that no mean is over, or that the runs did not replay.

    Raises:
        TraceError: two traces have one name.
        PolicyError: the traces are of several models.
        OutputError: no given run replayed the trace, or it replayed another content.
    """
    check_distinct(traces)
    check_models(traces)
    replayed = [run.parameters.get("traces", {}) for run in runs]
    for trace in traces:
        found = {digests[trace.name] for digests in replayed if trace.name in digests}
        if runs and found != {trace.fingerprint}:
            names = dict.fromkeys(name for digests in replayed for name in digests)
            other = f" (there {found})" if found else ""
            raise OutputError(
                f"{trace.name} ({trace.fingerprint}) is not among the traces of "
                f"{', '.join(str(run.path) for run in runs)}: {', '.join(names) or 'none'}{other}; "
                "give the trace that was replayed, replay this one, or report it without the runs"
            )
