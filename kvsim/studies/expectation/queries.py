"""Expected and observed attention of a trace, and the distribution of its queries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from kvsim.analysis.arrays import Floats
from kvsim.analysis.kept.retention import SINK
from kvsim.analysis.subject import Analysis
from kvsim.core.trace import Trace
from kvsim.studies.expectation.expectation import (
    LEAST_SAMPLES,
    Expectation,
    Projections,
    expected_and_observed,
    key_projections,
    state_normality,
)


@dataclass(frozen=True)
class Queries:
    """The queries of a trace, and the attention that they are expected to pay.

    cut: where the past ends, of whose keys attention is expected; the end of the prompt if None.

    An analysis that the trace is too short for, or that is not defined where layers have sliding
    windows or several sizes, is None or empty.
    """

    trace: Trace
    device: str = "cpu"
    cut: int | None = None

    @cached_property
    def expectation(self) -> Expectation | None:
        """Attention on the keys of the past: what later rows do and what is expected of them."""
        trace = self.trace
        cut = trace.prompt_len if self.cut is None else self.cut
        if not SINK + 2 <= cut < trace.n_pos or trace.windowed:
            return None
        return expected_and_observed(trace, cut, sink=SINK, device=self.device)

    @cached_property
    def projections(self) -> Mapping[int, Projections]:
        """Projections of queries on keys, with the sinks' (0) and without them (`SINK`)."""
        return {
            skip: key_projections(self.trace, skip=skip, device=self.device)
            for skip in (0, SINK)
            if self.trace.n_pos >= skip + 2 and not self.trace.windowed
        }

    @cached_property
    def distance(self) -> Floats | None:
        """Distance from normal of queries before RoPE, behind the sinks; [layer, qhead, dim]."""
        trace = self.trace
        if trace.n_pos < SINK + LEAST_SAMPLES or len(trace.readable) < trace.n_layers:
            return None
        return state_normality(trace, skip=SINK)


def queries(analysis: Analysis) -> Queries:
    """Return the queries of an analysed trace; the past is its prompt."""
    return Queries(analysis.trace, analysis.device)
