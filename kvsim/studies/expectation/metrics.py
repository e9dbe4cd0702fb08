"""Metrics of what Expected Attention expects of queries and attention."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from kvsim.analysis.arrays import Floats, mean_known
from kvsim.analysis.definition import Cells, Metric
from kvsim.analysis.kept.retention import SINK
from kvsim.analysis.subject import Analysis
from kvsim.studies.expectation.expectation import STEPS, Expectation
from kvsim.studies.expectation.normality import ks_by_chance
from kvsim.studies.expectation.queries import queries

#: (variant, values [layer, qhead], what chance gives) of an Expectation.
Values = Callable[[Expectation], Iterable[tuple[str, Floats, float | None]]]


def _expected(values: Values) -> Callable[[Analysis], Iterator[Cells]]:
    def cells(analysis: Analysis) -> Iterator[Cells]:
        if (expectation := analysis.of(queries).expectation) is not None:
            for variant, by_layer, chance in values(expectation):
                for layer, by_head in enumerate(by_layer):
                    random = None if chance is None else np.full(by_head.shape, chance)
                    yield Cells(layer, by_head, "qhead", variant, random)

    return cells


def _steps(values: Floats) -> Iterator[tuple[str, Floats, None]]:
    """Values [step, layer, qhead] of each step."""
    return ((step, by_layer, None) for step, by_layer in zip(STEPS, values, strict=True))


def _projection_gap(analysis: Analysis) -> Iterator[Cells]:
    for skip, projections in analysis.of(queries).projections.items():
        off = np.abs(np.median(projections.gap - projections.normal_gap, axis=(1, 2)))
        for layer, value in enumerate(off):
            yield Cells(layer, value.reshape(1), variant=f"skip={skip}")


def _distance(analysis: Analysis) -> Iterator[Cells]:
    normality = analysis.of(queries).normality
    if normality is None:
        return
    distance = normality.distance
    chance = np.full(distance.shape[1], ks_by_chance(normality.samples))
    for layer, by_head in enumerate(distance):
        yield Cells(layer, mean_known(by_head), "qhead", chance=chance)


#: Queries of the past, which the trace may have left out.
_ROWS = ("all_rows",)

METRICS: Mapping[str, Metric] = {
    "expectation": Metric(
        "rank correlation over the prompt's keys of expected attention with what the response "
        "attends to",
        "trace", "correlation", None, "Expected Attention, Fig. 10",
        _expected(lambda expectation: [("", expectation.spearman[-1], None)]), default=False,
        arrays=_ROWS, after="attention_return"),
    "expectation_steps": Metric(
        "rank correlation over the prompt's keys with what the response attends to, after each "
        "assumption on the way from observed to expected attention",
        "trace", "correlation", None, "kvsim, after Expected Attention",
        _expected(lambda expectation: _steps(expectation.spearman)), main=STEPS[-1], default=False,
        arrays=_ROWS, after="expectation"),
    "projection_gap": Metric(
        "a key's log mean exponential over queries less that of normal ones: median over heads and "
        "keys, and its distance from 0",
        "trace", "nats", None, "Expected Attention, eq. 7", _projection_gap,
        main=f"skip={SINK}", default=False,
        arrays=_ROWS, after="expectation_steps"),
    "normal_distance": Metric(
        "Kolmogorov-Smirnov distance of queries before RoPE from normal, mean over dimensions, "
        "next to that of normal samples",
        "trace", "share", None, "Expected Attention, Fig. 7 to 9", _distance, default=False,
        arrays=_ROWS, after="projection_gap"),
}  # fmt: skip
