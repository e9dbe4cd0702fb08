"""Every number about a trace or a record.

definition  a metric: its entry, and the Cells that it returns
subject     what metrics read: an Analysis of a trace, a Subject of a record
kept        kept sets
output      the attention output that is left
attention   full attention of a trace
prompt      how layers rank the tokens of a prompt
registry    all metrics by name; each room has its entries in `metrics`
table       `measure`: a trace, or records of it, to a tidy Table
wide        tables of keys, dimensions and verdicts, for which a Table has no columns
results     which results a Table holds
summaries   means over prompts, their intervals, paired differences
tiles       large arrays as pictures
"""

import warnings
from importlib import import_module

from kvsim.analysis.attention.expectation import (
    Expectation,
    expected_and_observed,
    key_table,
)
from kvsim.analysis.attention.fit import NormalFit, fit_normal
from kvsim.analysis.attention.intermittence import Gaps, attention_gaps
from kvsim.analysis.attention.normality import (
    Histogram,
    Normality,
    histogram,
    normality_table,
    quantiles,
    state_normality,
    states,
)
from kvsim.analysis.attention.overlap import window_overlap
from kvsim.analysis.attention.projections import Projections, key_projections, projection_table
from kvsim.analysis.attention.sparsity import Sparsity, attention_sparsity, compressed_sparsity
from kvsim.analysis.definition import Metric
from kvsim.analysis.kept.bursts import Bursts, dense_share, dropped_bursts
from kvsim.analysis.kept.contents import (
    KeySimilarity,
    NormOverlap,
    key_similarity,
    value_norm_overlap,
)
from kvsim.analysis.kept.coverage import (
    Coverage,
    RetainedPositions,
    kept_coverage,
    retained_positions,
)
from kvsim.analysis.kept.retention import (
    RetentionRatio,
    entries_seen,
    retained_iou,
    retention_ratio,
    steps,
    wipeout,
)
from kvsim.analysis.kept.segments import Segments, ams_segments, noted, proxy_segments
from kvsim.analysis.kept.slots import LeavingSlots, SlotWipeout
from kvsim.analysis.kept.text import max_loop, punctuation_lift, repetition, retention_lift
from kvsim.analysis.output.error import OutputError, output_error
from kvsim.analysis.output.recall import Attended, attended
from kvsim.analysis.output.reconstruction import reconstruction_table
from kvsim.analysis.prompt.gold import answer_facts, check_positions, find_text
from kvsim.analysis.prompt.layers import RankPattern, overlap_table, rank_pattern, sparsity_table
from kvsim.analysis.prompt.ranking import Curve, Grid, Ranking, ranking, window_attention
from kvsim.analysis.prompt.tables import (
    Diagnosis,
    diagnose,
    distribution,
    layer_table,
    selection_table,
    task_of,
)
from kvsim.analysis.registry import METRICS, metric
from kvsim.analysis.subject import Analysis
from kvsim.analysis.table import COLUMNS, fidelity, measure, selection_fidelity

#: Names of the last release, see `kvsim.analysis.former`.
_FORMER = ("FINDINGS", "Finding", "expectation_table", "findings", "loss_table")

__all__ = [
    "COLUMNS",
    "METRICS",
    "Analysis",
    "Attended",
    "Bursts",
    "Coverage",
    "Curve",
    "Diagnosis",
    "Expectation",
    "Gaps",
    "Grid",
    "Histogram",
    "KeySimilarity",
    "LeavingSlots",
    "Metric",
    "NormOverlap",
    "NormalFit",
    "Normality",
    "OutputError",
    "Projections",
    "RankPattern",
    "Ranking",
    "RetainedPositions",
    "RetentionRatio",
    "Segments",
    "SlotWipeout",
    "Sparsity",
    "ams_segments",
    "answer_facts",
    "attended",
    "attention_gaps",
    "attention_sparsity",
    "check_positions",
    "compressed_sparsity",
    "dense_share",
    "diagnose",
    "distribution",
    "dropped_bursts",
    "entries_seen",
    "expected_and_observed",
    "fidelity",
    "find_text",
    "fit_normal",
    "histogram",
    "kept_coverage",
    "key_projections",
    "key_similarity",
    "key_table",
    "layer_table",
    "max_loop",
    "measure",
    "metric",
    "normality_table",
    "noted",
    "output_error",
    "overlap_table",
    "projection_table",
    "proxy_segments",
    "punctuation_lift",
    "quantiles",
    "rank_pattern",
    "ranking",
    "reconstruction_table",
    "repetition",
    "retained_iou",
    "retained_positions",
    "retention_lift",
    "retention_ratio",
    "selection_fidelity",
    "selection_table",
    "sparsity_table",
    "state_normality",
    "states",
    "steps",
    "task_of",
    "value_norm_overlap",
    "window_attention",
    "window_overlap",
    "wipeout",
]


def __getattr__(name: str) -> object:
    """A name of the last release, with a warning (PEP 562)."""
    if name not in _FORMER:
        raise AttributeError(f"module 'kvsim.analysis' has no attribute {name!r}")
    former = import_module("kvsim.analysis.former")
    warnings.warn(
        f"kvsim.analysis.{name} goes with the next release; use {former.INSTEAD[name]}",
        DeprecationWarning,
        stacklevel=2,
    )
    value: object = getattr(former, name)
    return value
