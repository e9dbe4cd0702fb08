"""Every number about a trace or a record.

arrays      types of arrays, and reductions of them
definition  a metric: its entry, and the Cells that it returns
subject     an Analysis of a trace and a Subject of a record, which metrics read
kept        kept sets
output      the attention output that is left
attention   full attention of a trace
prompt      ranks of the tokens of a prompt in each layer
registry    all metrics by name; each room has its entries in `metrics`
table       `measure`: a trace, or records of it, to a tidy Table
wide        tables of keys, dimensions and verdicts, for which a Table has no columns
results     the results of a Table, and their labels
summaries   means over prompts, their intervals, paired differences
fronts      which results no other one beats at what its cache costs
significance  whether differences are beyond chance, and how many prompts tell
evidence    what ranks policies
comparison  which policy is best at a budget, how sure that is, and what a budget buys
verdict     the answer of a comparison in a sentence per budget
validity    values of a replay next to those of the running model
prediction  live divergence from the layer error of a replay, with an interval
"""

from kvsim.analysis.attention.expectation import (
    Expectation,
    Projections,
    expected_and_observed,
    key_projections,
    key_table,
    projection_table,
)
from kvsim.analysis.attention.fit import NormalFit, fit_normal
from kvsim.analysis.attention.normality import (
    Histogram,
    Normality,
    histogram,
    normality_table,
    quantiles,
    state_normality,
    states,
)
from kvsim.analysis.attention.sparsity import (
    Sparsity,
    attention_sparsity,
    compressed_sparsity,
    sparsity_table,
)
from kvsim.analysis.attention.windows import Gaps, attention_gaps, overlap_table, window_overlap
from kvsim.analysis.definition import Metric
from kvsim.analysis.kept.bursts import Bursts, dense_share, dropped_bursts
from kvsim.analysis.kept.contents import (
    key_similarity,
    max_loop,
    punctuation_lift,
    repetition,
    retention_lift,
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
from kvsim.analysis.output.error import output_error
from kvsim.analysis.output.optimum import optimum
from kvsim.analysis.output.recall import Attended, attended
from kvsim.analysis.output.reconstruction import reconstruction_table
from kvsim.analysis.prompt.gold import answer_facts, check_positions, find_text
from kvsim.analysis.prompt.ranking import (
    Curve,
    Grid,
    Ranking,
    RankPattern,
    rank_pattern,
    ranking,
    window_attention,
)
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
from kvsim.core.outcome import OutputError

__all__ = ["COLUMNS", "METRICS", "Analysis", "Metric", "fidelity", "measure", "metric"]
__all__ += ["selection_fidelity"]
# kept sets
__all__ += ["Bursts", "Coverage", "LeavingSlots"]
__all__ += ["RetainedPositions", "RetentionRatio", "Segments", "SlotWipeout", "ams_segments"]
__all__ += ["dense_share", "dropped_bursts", "entries_seen", "kept_coverage", "key_similarity"]
__all__ += ["max_loop", "noted", "proxy_segments", "punctuation_lift", "repetition"]
__all__ += ["retained_iou", "retained_positions", "retention_lift", "retention_ratio", "steps"]
__all__ += ["value_norm_overlap", "wipeout"]
# the output that is left
__all__ += ["Attended", "OutputError", "attended", "optimum", "output_error"]
__all__ += ["reconstruction_table"]
# full attention
__all__ += ["Expectation", "Gaps", "Histogram", "NormalFit", "Normality", "Projections", "Sparsity"]
__all__ += ["attention_gaps", "attention_sparsity", "compressed_sparsity", "expected_and_observed"]
__all__ += ["fit_normal", "histogram", "key_projections", "key_table", "normality_table"]
__all__ += ["projection_table", "quantiles", "state_normality", "states", "window_overlap"]
# how layers rank a prompt
__all__ += ["Curve", "Diagnosis", "Grid", "RankPattern", "Ranking", "answer_facts"]
__all__ += ["check_positions", "diagnose", "distribution", "find_text", "layer_table"]
__all__ += ["overlap_table", "rank_pattern", "ranking", "selection_table", "sparsity_table"]
__all__ += ["task_of", "window_attention"]
