"""Sections of a report, and their material: traces, analysed once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import polars as pl

from kvsim.analysis.folder import Saved
from kvsim.analysis.measuring import measure
from kvsim.analysis.registry import METRICS
from kvsim.analysis.results import check_distinct, check_models
from kvsim.analysis.subject import Analysis
from kvsim.analysis.table import in_order
from kvsim.core.trace import Trace
from kvsim.errors import OutputError

#: Called with (steps done, steps, current step).
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Section:
    """A section of a page.

    write: returns it as HTML, from a `Study` (of "traces") or the Table of all runs and traces (of
    "results"); empty where it has nothing to say. after: the section of traces that it follows.
    collect: what it needs of each trace, which `Study.collected` has.
    """

    write: Callable[[Any], str]
    of: Literal["traces", "results"] = "traces"
    after: str = ""
    collect: Callable[[Analysis], Any] | None = None


@dataclass(frozen=True)
class Study:
    """Traces as a report shows them.

    first: of the trace that stands for the others where a figure shows one. table: the metrics of
    all traces that a Table of records lacks. collected: of each trace what sections collect, by
    `Section.collect`.
    """

    traces: Sequence[Trace]
    first: Analysis
    table: pl.DataFrame
    collected: Mapping[Callable[[Analysis], Any], Sequence[Any]]


def study(
    traces: Sequence[Trace], sections: Iterable[Section], progress: Progress | None = None
) -> Study:
    """Analyse at least one trace; of all but the first only tables and ranks are kept."""
    # the others are in the Tables of runs
    measured = [name for name, x in METRICS.items() if x.kind == "trace" and not x.default]
    first, tables = Analysis(traces[0]), []
    collected: dict[Callable[[Analysis], Any], list[Any]] = {
        section.collect: [] for section in sections if section.collect is not None
    }
    for place, trace in enumerate(traces):

        def step(done: int, _: int, what: str, before: int = place * len(measured)) -> None:
            if progress is not None:
                progress(before + done, len(traces) * len(measured), what)

        analysis = Analysis(trace) if place else first
        tables.append(measure(analysis, metrics=measured, progress=step))
        for collect, results in collected.items():
            results.append(collect(analysis))
    return Study(traces, first, in_order(tables), collected)


def check_traces(traces: Sequence[Trace], runs: Sequence[Saved]) -> None:
    """Raise for traces of one name, or traces that the runs did not replay.

    Or where no mean is over them.

    Raises:
        TraceError: two traces have one name.
        PolicyError: the traces are of several models.
        OutputError: runs are given, and a trace is in none of them, or its content is another one.
    """
    check_distinct(traces)
    check_models(traces)
    replayed = [(run, run.parameters.get("traces", {})) for run in runs]
    for trace in traces:
        found = {digests[trace.name] for _, digests in replayed if trace.name in digests}
        if runs and found != {trace.fingerprint}:
            names = dict.fromkeys(name for _, digests in replayed for name in digests)
            other = f" (there {found})" if found else ""
            raise OutputError(
                f"{trace.name} ({trace.fingerprint}) is not among the traces of "
                f"{', '.join(str(run.path) for run, _ in replayed)}: {', '.join(names) or 'none'}"
                f"{other}; give the trace that was replayed, replay "
                "this one, or report it without the runs"
            )
