"""Every number about a trace, a record or both, and the tables that they reach users in.

registry   what is measured, by name
table      `measure`: records to a tidy Table
kept       kept sets: what stays, what is lost, where
output     the attention output that is left
attention  full attention of a trace, and what is expected of it
prompt     how layers rank the tokens of a prompt
summaries  means over prompts, their intervals, paired differences
"""

from kvsim.analysis.attention.expectation import (
    Expectation,
    expectation_table,
    expected_and_observed,
    key_table,
    loss_table,
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
from kvsim.analysis.findings import FINDINGS, Analysis, Finding, findings
from kvsim.analysis.kept.bursts import Bursts, dense_share, dropped_bursts
from kvsim.analysis.kept.coverage import (
    Coverage,
    RetainedPositions,
    kept_coverage,
    retained_positions,
)
from kvsim.analysis.kept.regions import steps
from kvsim.analysis.kept.retention import (
    RetentionRatio,
    entries_seen,
    retained_iou,
    retention_ratio,
    wipeout,
)
from kvsim.analysis.kept.segments import Segments, ams_segments, noted, proxy_segments
from kvsim.analysis.kept.similarity import KeySimilarity, key_similarity
from kvsim.analysis.kept.slots import LeavingSlots, SlotWipeout
from kvsim.analysis.kept.text import max_loop, punctuation_lift, repetition, retention_lift
from kvsim.analysis.kept.values import NormOverlap, value_norm_overlap
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
from kvsim.analysis.registry import METRICS, Metric, metric
from kvsim.analysis.table import COLUMNS, fidelity, measure, selection_fidelity

__all__ = [
    "COLUMNS",
    "FINDINGS",
    "METRICS",
    "Analysis",
    "Attended",
    "Bursts",
    "Coverage",
    "Curve",
    "Diagnosis",
    "Expectation",
    "Finding",
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
    "expectation_table",
    "expected_and_observed",
    "fidelity",
    "find_text",
    "findings",
    "fit_normal",
    "histogram",
    "kept_coverage",
    "key_projections",
    "key_similarity",
    "key_table",
    "layer_table",
    "loss_table",
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
