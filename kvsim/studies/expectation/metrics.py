"""Metrics of Expected Attention's assumptions on queries and attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from kvsim.analysis.arrays import mean_known
from kvsim.analysis.definition import Cells, Metric
from kvsim.analysis.kept.retention import SINK
from kvsim.analysis.subject import Analysis
from kvsim.studies.expectation.expectation import (
    LEAST_SAMPLES,
    STEPS,
    key_gaps,
    ks_by_chance,
    prompt_expectation,
    state_normality,
)


def _expected(steps: Sequence[str]) -> Callable[[Analysis], Iterator[Cells]]:
    """Rank correlations after some steps; the variant of several is the step."""

    def cells(analysis: Analysis) -> Iterator[Cells]:
        if (expectation := analysis.of(prompt_expectation)) is not None:
            for step in steps:
                for layer, by_head in enumerate(expectation.spearman[STEPS.index(step)]):
                    yield Cells(layer, by_head, "qhead", step if len(steps) > 1 else "")

    return cells


def _projection_gap(analysis: Analysis) -> Iterator[Cells]:
    trace = analysis.trace
    for skip in (0, SINK) if not trace.windowed else ():
        if trace.n_pos < skip + 2:
            continue
        off = np.abs(np.median(key_gaps(trace, skip=skip, device=analysis.device), axis=(1, 2)))
        for layer, value in enumerate(off):
            yield Cells(layer, value.reshape(1), variant=f"skip={skip}")


def _distance(analysis: Analysis) -> Iterator[Cells]:
    trace = analysis.trace
    short = trace.n_pos < SINK + LEAST_SAMPLES or len(trace.readable) < trace.n_layers
    for layer, by_head in enumerate(() if short else state_normality(trace, skip=SINK)):
        chance = np.full(len(by_head), ks_by_chance(trace.n_pos - SINK))
        yield Cells(layer, mean_known(by_head), "qhead", chance=chance)


#: Queries of the past, which the trace may have left out.
_ROWS = ("all_rows",)

METRICS: Mapping[str, Metric] = {
    "expectation": Metric(
        "rank correlation over the prompt's keys of expected attention with the attention "
        "of the response",
        "trace", "correlation", None, "Expected Attention, Fig. 10",
        _expected(STEPS[-1:]), default=False,
        arrays=_ROWS, after="attention_return"),
    "expectation_steps": Metric(
        "rank correlation over the prompt's keys with the attention of the response, after each "
        "assumption on the way from observed to expected attention",
        "trace", "correlation", None, "kvsim, after Expected Attention",
        _expected(STEPS), main=STEPS[-1], default=False,
        arrays=_ROWS, after="expectation"),
    "projection_gap": Metric(
        "a key's log mean exponential over queries, minus that of normal queries: median over "
        "heads and keys, and its distance from 0",
        "trace", "nats", None, "Expected Attention, eq. 7", _projection_gap,
        main=f"skip={SINK}", default=False,
        arrays=_ROWS, after="expectation_steps"),
    "normal_distance": Metric(
        "Kolmogorov-Smirnov distance of queries before RoPE from normal, mean over dimensions, "
        "next to the distance of normal samples",
        "trace", "share", None, "Expected Attention, Fig. 7 to 9", _distance, default=False,
        arrays=_ROWS, after="projection_gap"),
}  # fmt: skip
