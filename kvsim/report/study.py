"""The material of a report: traces, analysed once; figures show the first of several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import polars as pl

from kvsim.analysis.folder import Saved
from kvsim.analysis.output.reconstruction import RECONSTRUCTION_COLUMNS, reconstruction_table
from kvsim.analysis.registry import METRICS
from kvsim.analysis.results import check_distinct, check_models
from kvsim.analysis.subject import Analysis
from kvsim.analysis.table import in_order, measure
from kvsim.core.policy import Policy
from kvsim.core.trace import Trace
from kvsim.errors import OutputError, PolicyError
from kvsim.policies import policy
from kvsim.report.section import Section

#: Called with (steps done, steps, current step).
Progress = Callable[[int, int, str], None]

#: Policies of the reconstruction error: the methods of Expected Attention's Fig. 6.
METHODS = ("expected_attention", "snapkv", "tova", "keydiff", "knorm", "streaming_llm")
#: Shares that they evict.
RATIOS = (0.25, 0.5, 0.75)


@dataclass(frozen=True)
class Study:
    """Traces as a report shows them.

    first: of the trace that stands for the others where a figure shows one. table: the metrics of
    all traces that a Table of records lacks. collected: of each trace what sections collect, by
    `Section.collect`. errors: `reconstruction_table`; refused: why some of its cells are missing.
    left_out: of each trace which parts are missing, and why (`Section.left_out`).
    """

    traces: Sequence[Trace]
    first: Analysis
    table: pl.DataFrame
    collected: Mapping[Callable[[Analysis], Any], Sequence[Any]]
    errors: pl.DataFrame
    refused: Sequence[str]
    left_out: Sequence[Mapping[str, str]]


def study(
    traces: Sequence[Trace], sections: Iterable[Section], progress: Progress | None = None
) -> Study:
    """Analyse at least one trace; of all but the first only tables and ranks are kept."""
    report = progress or (lambda *_: None)
    # the others are in the Tables of runs
    measured = [name for name, x in METRICS.items() if x.kind == "trace" and not x.default]
    steps = len(measured) + 1
    policies = [policy(name) for name in METHODS]
    first, tables, errors, left_out = Analysis(traces[0]), [], [], []
    sections = list(sections)
    collected: dict[Callable[[Analysis], Any], list[Any]] = {
        section.collect: [] for section in sections if section.collect is not None
    }
    refused: dict[str, None] = {}
    for place, trace in enumerate(traces):

        def step(done: int, _: int, what: str, before: int = place * steps) -> None:
            report(before + done, len(traces) * steps, what)

        analysis = Analysis(trace) if place else first
        tables.append(measure(analysis, metrics=measured, progress=step))
        step(len(measured), 0, f"{trace.name}: reconstruction error")
        for collect, results in collected.items():
            results.append(collect(analysis))
        missing = [each.left_out(analysis) for each in sections if each.left_out is not None]
        left_out.append({part: why for each in missing for part, why in each.items()})
        errors.append(_reconstructed(trace, policies, refused))
    table, error = in_order(tables), pl.concat(errors)
    return Study(traces, first, table, collected, error, list(refused), left_out)


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
        if runs and not any(trace.name in digests for _, digests in replayed):
            names = dict.fromkeys(name for _, digests in replayed for name in digests)
            listed, paths = ", ".join(names) or "none", ", ".join(str(run.path) for run in runs)
            raise OutputError(
                f"{trace.name} is not among the traces of {paths}: {listed}; leave it out, "
                "replay it, or report it without the runs"
            )
        for run, digests in replayed:
            digest = digests.get(trace.name, trace.fingerprint)
            if digest != trace.fingerprint:
                raise OutputError(
                    f"{trace.name} has the fingerprint {trace.fingerprint}, but {run.path} has "
                    f"results of a trace of this name with {digest}; give that trace, or replay "
                    "this one"
                )


def _reconstructed(
    trace: Trace, policies: Sequence[Policy], refused: dict[str, None]
) -> pl.DataFrame:
    """`reconstruction_table` of what can be evicted; why the rest cannot goes into `refused`."""
    try:
        return reconstruction_table(trace, policies, RATIOS)
    except PolicyError:
        tables = [pl.DataFrame(schema=RECONSTRUCTION_COLUMNS)]
    for name, ratio in product(policies, RATIOS):
        try:
            tables.append(reconstruction_table(trace, [name], [ratio]))
        except PolicyError as error:
            refused[str(error)] = None
    return pl.concat(tables)
