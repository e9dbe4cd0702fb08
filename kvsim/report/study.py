"""What a report says of traces, as numbers: each is analysed once, the first kept for figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import polars as pl

from kvsim.analysis.attention.expectation import expectation_table, loss_table
from kvsim.analysis.findings import FINDINGS, Analysis
from kvsim.analysis.output.reconstruction import RECONSTRUCTION_COLUMNS, reconstruction_table
from kvsim.analysis.prompt.tables import Diagnosis, diagnose
from kvsim.analysis.results import check_distinct
from kvsim.core.policy import Policy
from kvsim.core.trace import Trace
from kvsim.errors import OutputError, PolicyError
from kvsim.policies import policy
from kvsim.report.runs import Saved

#: Called with (steps done, steps, what is being done).
Progress = Callable[[int, int, str], None]

#: What is evicted once for the reconstruction error: the methods of Expected Attention's Fig. 6.
METHODS = ("expected_attention", "snapkv", "tova", "keydiff", "knorm", "streaming_llm")
#: Shares that they evict.
RATIOS = (0.25, 0.5, 0.75)


@dataclass(frozen=True)
class Study:
    """Traces as a report shows them.

    first: of the trace that stands for the others where a figure shows one. findings: a Table of
    all. steps, losses: `expectation_table` and `loss_table` of those that have a response.
    diagnoses: of those that can be ranked, at each k. errors: `reconstruction_table`; refused: why
    some of its cells are missing. left_out: of each trace which analyses there are none of, and
    why (`Analysis.left_out`).
    """

    traces: tuple[Trace, ...]
    first: Analysis
    findings: pl.DataFrame
    steps: pl.DataFrame
    losses: pl.DataFrame
    diagnoses: tuple[Diagnosis, ...]
    errors: pl.DataFrame
    refused: tuple[str, ...]
    left_out: tuple[Mapping[str, str], ...]


def study(traces: Sequence[Trace], progress: Progress | None = None) -> Study:
    """Analyse at least one trace; of all but the first only tables and ranks are kept."""
    report = progress or _silent
    steps = len(FINDINGS) + 1
    policies = [policy(name) for name in METHODS]
    analyses: list[Analysis] = []
    found, expected, losses, errors = ([] for _ in range(4))
    diagnoses: list[Diagnosis] = []
    refused: dict[str, None] = {}
    left_out: list[Mapping[str, str]] = []
    for place, trace in enumerate(traces):

        def each(done: int, _: int, what: str, before: int = place * steps) -> None:
            report(before + done, len(traces) * steps, what)

        analysis = Analysis(trace)
        found.append(analysis.findings(progress=each))
        each(len(FINDINGS), 0, f"{trace.name}: reconstruction error")
        known = [] if analysis.expectation is None else [analysis.expectation]
        expected.append(expectation_table(known))
        losses.append(loss_table(known))
        diagnoses += _diagnoses(analysis)
        left_out.append(analysis.left_out)
        errors.append(_reconstructed(trace, policies, refused))
        analyses = analyses or [analysis]
    return Study(
        traces=tuple(traces),
        first=analyses[0],
        findings=pl.concat(found),
        steps=pl.concat(expected),
        losses=pl.concat(losses),
        diagnoses=tuple(diagnoses),
        errors=pl.concat(errors),
        refused=tuple(refused),
        left_out=tuple(left_out),
    )


def check_traces(traces: Sequence[Trace], runs: Sequence[Saved]) -> None:
    """Raise where traces could not be told apart, or are not those that the runs replayed.

    Raises:
        TraceError: two traces have one name.
        OutputError: runs are given, and a trace is in none of them, or its content is another one.
    """
    check_distinct(traces)
    known = [(run, run.parameters.get("traces", {})) for run in runs]
    for trace in traces:
        if runs and not any(trace.name in own for _, own in known):
            listed = ", ".join(dict.fromkeys(name for _, own in known for name in own)) or "none"
            raise OutputError(
                f"{trace.name} is not among the traces of {_named(runs)}: {listed}; leave it out, "
                "replay it, or report it without the runs"
            )
        for run, own in known:
            digest = own.get(trace.name, trace.digest)
            if digest != trace.digest:
                raise OutputError(
                    f"{trace.name} has the digest {trace.digest}, but {run.path} replayed a trace "
                    f"of this name with {digest}; give that trace, or replay this one"
                )


def _named(runs: Iterable[Saved]) -> str:
    return ", ".join(str(run.path) for run in runs)


def budget_of(k: int | str) -> str:
    """What a budget is called that leaves k tokens beside ASL's window."""
    return f"{k} + window"


def _diagnoses(analysis: Analysis) -> Iterator[Diagnosis]:
    """At each k."""
    if analysis.ranking is not None:
        for asked, curve in analysis.curves():
            share = budget_of(asked)
            yield diagnose(analysis.trace, analysis.ranking, curve.budget, share=share)


def _reconstructed(
    trace: Trace, policies: Sequence[Policy], refused: dict[str, None]
) -> pl.DataFrame:
    """`reconstruction_table` of what can be evicted; why the rest cannot goes into `refused`."""
    try:
        return reconstruction_table(trace, policies, RATIOS)
    except PolicyError:
        found = [pl.DataFrame(schema=RECONSTRUCTION_COLUMNS)]
    for one, ratio in product(policies, RATIOS):
        try:
            found.append(reconstruction_table(trace, [one], [ratio]))
        except PolicyError as error:
            refused[str(error)] = None
    return pl.concat(found)


def _silent(done: int, total: int, what: str) -> None:
    """No progress."""
