"""The figures of the study, as `kvsim plot` and `kvsim.plots` have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from kvsim.errors import PolicyError
from kvsim.plots.registry import Figure

if TYPE_CHECKING:
    import polars as pl

    from kvsim.core.trace import Trace


def _expectation(traces: Sequence[Trace], _: Sequence[str]) -> Any:
    from kvsim.studies.expectation.expectation import expected_and_observed

    return expected_and_observed(traces[0])


def _normality(traces: Sequence[Trace], _: Sequence[str]) -> Any:
    from kvsim.studies.expectation.normality import state_normality

    return state_normality(traces[0])


def _projections(traces: Sequence[Trace], _: Sequence[str]) -> Any:
    from kvsim.studies.expectation.expectation import key_projections

    return key_projections(traces[0])


def _trace_table(traces: Sequence[Trace], metrics: Sequence[str]) -> pl.DataFrame:
    """Return metrics of traces alone; attention expected from the first fifth, as in the paper."""
    from kvsim.analysis.subject import Analysis
    from kvsim.analysis.table import in_order, measure
    from kvsim.studies.expectation.queries import Queries, queries

    tables = []
    for trace in traces:
        own = Queries(trace, cut=trace.n_pos // 5)
        if "expectation" in own.left_out:
            raise PolicyError(
                f"{trace.name}: attention cannot be compared with what is expected, because of "
                f"{own.left_out['expectation']}; give another trace"
            )
        tables.append(measure(Analysis(trace, given={queries: own}), metrics=metrics))
    return in_order(tables)


_expected = partial(Figure, "kvsim.studies.expectation.figures")
_queries = partial(Figure, "kvsim.studies.expectation.normality_figures")

FIGURES: Final[Mapping[str, Figure]] = {
    "expected_observed": _expected(
        "Expected against observed attention on each key, after each step of the expectation.",
        ("trace",), ("layers",), "Expected Attention, Fig. 10", prepare=_expectation),
    "agreement_steps": _expected(
        "Agreement of expected and observed attention after each step of the expectation.",
        ("traces",), ("layers",), metrics=("expectation_steps",), prepare=_trace_table),
    "attention_loss": _expected(
        "Observed attention lost as keys are removed in the order of each step.",
        ("traces",), ("layers",), metrics=("attention_loss",), prepare=_trace_table),
    "normal_distance": _queries(
        "Distance of each head's queries from normal.",
        ("trace",), prepare=_normality),
    "projection_gap": _queries(
        "Mean exponential of the projections of queries on keys, next to normal projections.",
        ("trace",), prepare=_projections),
}  # fmt: skip
