"""Metrics of segments: those of AMS, and runs of kept entries as a proxy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.analysis.arrays import Floats
from kvsim.analysis.definition import Cells, Metric
from kvsim.analysis.kept.chance import mean_run, n_runs
from kvsim.analysis.subject import Layers, Subject
from kvsim.studies.segments.segments import (
    AMS,
    PROXY,
    Segments,
    ams_segments,
    noted,
    proxy_segments,
)

#: Notes of events about how the budget is allocated to segments.
QUOTA_NOTES = ("quota_by_mass", "quota_minimum", "infeasible")
#: Notes about the segments.
SEGMENT_NOTES = frozenset({"segment_length"})


def segments(subject: Subject) -> list[tuple[Layers, str, Segments]]:
    """Return (layers, kind, segments) of the policy or of runs of kept entries, never compared."""
    cut = {layer: ams_segments(subject.record, layer) for layer in subject.record.layers}
    runs = ((layers, proxy_segments(evicted_at)) for layers, evicted_at in subject.layer_groups)
    return [
        *(([layer], AMS, each) for layer, each in cut.items() if each is not None),
        *((layers, PROXY, each) for layers, each in runs),
    ]


def _segment_count(subject: Subject) -> Iterator[Cells]:
    for layers, kind, found in subject.of(segments):
        count = found.count.astype(np.float64)
        yield Cells(layers, count, "head", kind, found.chance(n_runs), found.rows)


def _segment_length(subject: Subject) -> Iterator[Cells]:
    for layers, kind, found in subject.of(segments):
        mean = f"{kind},mean"
        yield Cells(layers, found.length, "head", mean, found.chance(mean_run), found.rows)
        yield Cells(layers, found.pooled_length, "head", f"{kind},pooled")


def _boundary_shift(subject: Subject) -> Iterator[Cells]:
    for layers, kind, found in subject.of(segments):
        if found.shift is not None:
            yield Cells(layers, found.shift, "head", kind, events=found.rows[:-1])


def _quota_share(subject: Subject) -> Iterator[Cells]:
    for layer in subject.record.layers:
        notes = [noted(subject.record, layer, name) for name in QUOTA_NOTES]
        if all(notes):
            mass, minimum, infeasible = map(_by_event, notes)
            shares = {"mass": mass, "minimum": minimum, "rounding": 1.0 - mass - minimum}
            for variant, values in (shares | {"infeasible": infeasible}).items():
                yield Cells(layer, values, "head", variant, events=np.array([*notes[0]]))


def _suffix_mass(subject: Subject) -> Iterator[Cells]:
    for layer in subject.record.layers:
        if mass := noted(subject.record, layer, "suffix_mass"):
            yield Cells(layer, _by_event(mass), "head", events=np.array([*mass]))


def _by_event(notes: Mapping[int, NDArray[Any]]) -> Floats:
    """Notes of heads [H] at each event; [H, E]."""
    return np.stack([*notes.values()], axis=-1).astype(np.float64)


METRICS: Mapping[str, Metric] = {
    "segment_count": Metric(
        "segments into which a policy cuts the cache at an event; or else runs of kept entries",
        "sets", "segments", None, "AMS, Table 14", _segment_count, main=AMS, notes=SEGMENT_NOTES,
        after="burst_share"),
    "segment_length": Metric(
        "entries of such a segment: mean over events, and over all segments",
        "sets", "entries", None, "AMS, Table 14", _segment_length, main=f"{AMS},mean",
        notes=SEGMENT_NOTES, after="segment_count"),
    "boundary_shift": Metric(
        "positions from a segment's start to the nearest one of the event before",
        "sets", "entries", None, "named by AMS, defined here", _boundary_shift, main=AMS,
        notes=SEGMENT_NOTES, after="segment_length"),
    "quota_share": Metric(
        "share of the budget that segments get by their mass, as a minimum, by rounding",
        "sets", "share", None, "kvsim, of AMS", _quota_share, main="mass",
        notes=frozenset(QUOTA_NOTES), after="boundary_shift"),
    "suffix_mass": Metric(
        "share of the mass, by which segments are cut, that lies on the window's own entries",
        "sets", "share", None, "kvsim, of AMS", _suffix_mass, notes=frozenset({"suffix_mass"}),
        after="quota_share"),
}  # fmt: skip
