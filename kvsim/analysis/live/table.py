"""`measure_live`: runs of a model under policies, to a tidy Table as `measure` makes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import polars as pl

from kvsim.analysis.definition import Metric
from kvsim.analysis.live.outcome import LiveSubject
from kvsim.analysis.output.error import OutputError
from kvsim.analysis.registry import METRICS, metric
from kvsim.analysis.table import Block, blocks_of, subjects_of, table_of
from kvsim.errors import PolicyError

#: Metrics of rows that a live run has values of, beside those of sets and of kind "live".
LIVE_ROWS = ("output_error", "layer_error")


def measure_live(
    subjects: Sequence[LiveSubject], metrics: Sequence[str] | None = None, *, events: bool = False
) -> pl.DataFrame:
    """A Table of live runs of one trace, as `measure` makes it of replays; fidelity closed.

    metrics: by name; by default those of kind "live", those of sets that are quick, and the output
    error. Raises PolicyError for an unknown metric, or one of rows that only a replay has.
    """
    chosen = choose_live(metrics)
    trace = subjects[0].trace
    records = [subject.record for subject in subjects]
    replayed = subjects_of(trace, records, {}, "cpu", projected=False)
    blocks: list[Block] = []
    for live, subject in zip(subjects, replayed, strict=True):
        forced = live.outcome.forced
        for name, entry in chosen.items():
            if entry.kind == "live":
                blocks += blocks_of(live, name, entry, events=events)
            elif entry.kind == "sets":
                blocks += blocks_of(subject, name, entry, events=events)
            elif forced is not None and (name != "layer_error" or forced.output.added is not None):
                measured = replace(subject, output=partial(_same, forced.output))
                blocks += blocks_of(measured, name, entry, events=events)
    return table_of(blocks)


def _same(output: OutputError) -> OutputError:
    return output


def choose_live(metrics: Sequence[str] | None) -> dict[str, Metric]:
    """The metrics of a live run by name, or the default ones."""
    if metrics is None:
        return {
            name: entry
            for name, entry in METRICS.items()
            if entry.kind == "live" or (entry.kind == "sets" and entry.default) or name in LIVE_ROWS
        }
    chosen = {name: metric(name) for name in metrics}
    for name, entry in chosen.items():
        if entry.kind not in ("live", "sets") and name not in LIVE_ROWS:
            raise PolicyError(
                f"{name} is computed from recorded attention; expected a metric of a running "
                f"model: {', '.join(choose_live(None))}; take kvsim replay for {name}"
            )
    return chosen
