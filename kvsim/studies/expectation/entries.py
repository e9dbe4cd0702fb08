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


def _expected(traces: Sequence[Trace], _: Sequence[str]) -> Any:
    """Return expected and observed attention of the first trace."""
    from kvsim.studies.expectation.expectation import expected_and_observed

    return expected_and_observed(traces[0])


def _trace_table(traces: Sequence[Trace], metrics: Sequence[str]) -> pl.DataFrame:
    """Return metrics of traces alone; attention expected from the first fifth, as in the paper."""
    from kvsim.analysis.measuring import measure
    from kvsim.analysis.subject import Analysis
    from kvsim.analysis.table import in_order
    from kvsim.studies.expectation.expectation import Queries, queries

    tables = []
    for trace in traces:
        own = Queries(trace, cut=trace.n_pos // 5)
        if own.expectation is None:
            raise PolicyError(
                f"{trace.name}: attention cannot be compared with what is expected; expected more "
                "than 30 tokens and no sliding windows"
            )
        tables.append(measure(Analysis(trace, given={queries: own}), metrics=metrics))
    return in_order(tables)


_figure = partial(Figure, "kvsim.studies.expectation.figures")

FIGURES: Final[Mapping[str, Figure]] = {
    "expected_observed": _figure(
        "Expected against observed attention on each key, after each step of the expectation.",
        ("trace",), ("layers",), "Expected Attention, Fig. 10",
        prepare=_expected),
    "agreement_steps": _figure(
        "Agreement of expected and observed attention after each step of the expectation.",
        ("traces",), ("layers",), metrics=("expectation_steps",), prepare=_trace_table),
}  # fmt: skip
