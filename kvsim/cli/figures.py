"""The data that `kvsim plot` draws a figure from, each computed when a figure asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import polars as pl

    from kvsim.analysis.attention.expectation import Expectation
    from kvsim.analysis.attention.normality import Normality
    from kvsim.analysis.attention.projections import Projections
    from kvsim.core.record import Record
    from kvsim.core.trace import Trace
    from kvsim.plots.registry import Figure


@dataclass(frozen=True)
class Data:
    """Everything that a figure can take as an input; names are those of `plots.registry.Input`.

    Attributes:
        traces: all that were given; none where runs were.
        records: replays of the traces.
        table: of the sweep or the runs, or the errors of single evictions.
        remarks: what users should know of the replays.
    """

    traces: Sequence[Trace] = ()
    records: Sequence[Record] = ()
    table: Any = None  # a DataFrame where the figure needs one
    remarks: Sequence[str] = field(default=())

    def arguments(self, figure: Figure) -> list[Any]:
        """Return the positional arguments of a figure."""
        return [
            self.trace_table(figure.metrics) if name == "trace_table" else getattr(self, name)
            for name in figure.inputs
        ]

    @property
    def trace(self) -> Trace:
        """The only trace."""
        return self.traces[0]

    @property
    def record(self) -> Record:
        """The only record."""
        return self.records[0]

    @property
    def plans(self) -> Record:
        """The only record, with its Plans."""
        return self.records[0]

    @property
    def evictions(self) -> pl.DataFrame:
        """Errors of single evictions."""
        table: pl.DataFrame = self.table
        return table

    @property
    def expectation(self) -> Expectation:
        """Expected and observed attention of the only trace."""
        from kvsim.analysis.attention.expectation import expected_and_observed

        return expected_and_observed(self.trace)

    @property
    def normality(self) -> Normality:
        """Distances from normal of the queries of the only trace."""
        from kvsim.analysis.attention.normality import state_normality

        return state_normality(self.trace)

    @property
    def projections(self) -> Projections:
        """Projections of queries on keys of the only trace."""
        from kvsim.analysis.attention.projections import key_projections

        return key_projections(self.trace)

    def trace_table(self, metrics: Sequence[str]) -> pl.DataFrame:
        """Return metrics of the traces alone.

        Attention is expected from the first fifth of each trace, as in the paper.
        """
        import polars as pl

        from kvsim.analysis import Analysis, measure
        from kvsim.errors import PolicyError

        analyses = [Analysis(trace, cut=trace.n_pos // 5) for trace in self.traces]
        for analysis in analyses:
            if "expectation" in analysis.left_out:
                raise PolicyError(
                    f"{analysis.trace.name}: attention cannot be compared with what is expected, "
                    f"because of {analysis.left_out['expectation']}; give another trace"
                )
        return pl.concat(measure(analysis, metrics=metrics) for analysis in analyses)
