"""Metrics: what a Record says about a Trace, as numbers.

`retention` reads kept sets, `output` recomputes attention over what rows see, `overlap` looks at
the trace alone; `catalogue` names them all and `table` makes tidy tables.
"""

from kvsim.metrics.bursts import Bursts, dense_share, dropped_bursts
from kvsim.metrics.catalogue import METRICS, Metric, metric
from kvsim.metrics.coverage import Coverage, RetainedPositions, kept_coverage, retained_positions
from kvsim.metrics.intermittence import Gaps, attention_gaps
from kvsim.metrics.output import OutputError, output_error
from kvsim.metrics.overlap import window_overlap
from kvsim.metrics.recall import Attended, attended
from kvsim.metrics.regions import steps
from kvsim.metrics.retention import (
    RetentionRatio,
    entries_seen,
    retained_iou,
    retention_ratio,
    wipeout,
)
from kvsim.metrics.segments import Segments, ams_segments, noted, proxy_segments
from kvsim.metrics.similarity import KeySimilarity, key_similarity
from kvsim.metrics.slots import LeavingSlots, SlotWipeout
from kvsim.metrics.sparsity import Sparsity, attention_sparsity, compressed_sparsity
from kvsim.metrics.table import COLUMNS, fidelity, measure, selection_fidelity
from kvsim.metrics.text import max_loop, punctuation_lift, repetition, retention_lift
from kvsim.metrics.values import NormOverlap, value_norm_overlap

__all__ = [
    "COLUMNS",
    "METRICS",
    "Attended",
    "Bursts",
    "Coverage",
    "Gaps",
    "KeySimilarity",
    "LeavingSlots",
    "Metric",
    "NormOverlap",
    "OutputError",
    "RetainedPositions",
    "RetentionRatio",
    "Segments",
    "SlotWipeout",
    "Sparsity",
    "ams_segments",
    "attended",
    "attention_gaps",
    "attention_sparsity",
    "compressed_sparsity",
    "dense_share",
    "dropped_bursts",
    "entries_seen",
    "fidelity",
    "kept_coverage",
    "key_similarity",
    "max_loop",
    "measure",
    "metric",
    "noted",
    "output_error",
    "proxy_segments",
    "punctuation_lift",
    "repetition",
    "retained_iou",
    "retained_positions",
    "retention_lift",
    "retention_ratio",
    "selection_fidelity",
    "steps",
    "value_norm_overlap",
    "window_overlap",
    "wipeout",
]
