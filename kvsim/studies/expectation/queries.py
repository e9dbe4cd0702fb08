"""Expected and observed attention of a trace, and the distribution of its queries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from kvsim.analysis.kept.retention import SINK
from kvsim.analysis.subject import Analysis
from kvsim.core.trace import Trace
from kvsim.engine.source import windows
from kvsim.studies.expectation.expectation import (
    Expectation,
    Projections,
    expected_and_observed,
    key_projections,
)
from kvsim.studies.expectation.normality import LEAST_SAMPLES, Normality, state_normality


@dataclass(frozen=True)
class Queries:
    """The queries of a trace, and the attention that they are expected to pay.

    cut: where the past ends, of whose keys attention is expected; the end of the prompt if None.

    An analysis that the trace is too short for, or that is not defined where some layers have a
    sliding window, is None or empty; `left_out` says why.
    """

    trace: Trace
    device: str = "cpu"
    cut: int | None = None

    @property
    def left_out(self) -> Mapping[str, str]:
        """Why an analysis is None or empty, by its name: what the trace lacks, or has."""
        trace, n = self.trace, self.trace.n_pos
        past = trace.prompt_len if self.cut is None else self.cut
        window = bool(trace.windowed), windows(trace)
        part, later = ("prompt", "response") if self.cut is None else ("past", "row after the cut")
        least = SINK + LEAST_SAMPLES
        checks = {
            "expectation": [
                (past < SINK + 2, f"a {part} of {past} tokens, fewer than {SINK + 2}"),
                (past >= n, f"no {later}"),
                window,
            ],
            "projections": [(n < SINK + 2, f"{n} tokens, fewer than {SINK + 2}"), window],
            "normality": [
                (n < least, f"{n} tokens, fewer than {least}"),
                (len(trace.readable) < trace.n_layers, "layers of several sizes"),
            ],
        }
        # the first reason of several
        return {
            name: why for name, of_name in checks.items() for fails, why in of_name[::-1] if fails
        }

    @cached_property
    def expectation(self) -> Expectation | None:
        """Attention on the keys of the past: what later rows do and what is expected of them."""
        if "expectation" in self.left_out:
            return None
        cut = self.trace.prompt_len if self.cut is None else self.cut
        return expected_and_observed(self.trace, cut, sink=SINK, device=self.device)

    @cached_property
    def projections(self) -> Mapping[int, Projections]:
        """Projections of queries on keys, with the sinks' (0) and without them (`SINK`)."""
        return {
            skip: key_projections(self.trace, skip=skip, device=self.device)
            for skip in (0, SINK)
            if self.trace.n_pos >= skip + 2 and not self.trace.windowed
        }

    @cached_property
    def normality(self) -> Normality | None:
        """Distance from normal of queries before RoPE, behind the sinks."""
        return None if "normality" in self.left_out else state_normality(self.trace, skip=SINK)


def queries(analysis: Analysis) -> Queries:
    """Return the queries of an analysed trace; the past is its prompt."""
    return Queries(analysis.trace, analysis.device)
