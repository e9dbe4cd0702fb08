"""Diagnostics: why a policy chose what it chose, from the trace alone.

    ranking   how each layer ranks the tokens of a prompt, and ASL's test on these ranks
    gold      the tokens that an answer needs
    report    both together as tables: one row per layer, one per trace, one per selection layer
    layers    overlap and sparsity of attention, and patterns of ranks, at the knobs of a reader
    findings  these, and those below, as named values of one Table per trace

What Expected Attention expects, and why it may be wrong:

    expectation     expected beside observed attention, and the steps in which they part
    normality       how each dimension of the queries is distributed; `fit` has the effect sizes
    projections     what the method needs of that, key by key
    reconstruction  how far outputs move if a policy evicts once

Everything here but the last is a property of full attention over recorded queries and keys, so
every number is `exact`: a live run that has not selected yet has the same. Reconstruction is open
loop behind the first layer, and its table says so.
"""

from kvsim.diagnostics.expectation import (
    Expectation,
    expectation_table,
    expected_and_observed,
    key_table,
    loss_table,
)
from kvsim.diagnostics.findings import FINDINGS, Analysis, Finding, findings
from kvsim.diagnostics.fit import NormalFit, fit_normal
from kvsim.diagnostics.gold import answer_facts, check_positions, find_text
from kvsim.diagnostics.layers import RankPattern, overlap_table, rank_pattern, sparsity_table
from kvsim.diagnostics.normality import (
    Histogram,
    Normality,
    histogram,
    normality_table,
    quantiles,
    state_normality,
    states,
)
from kvsim.diagnostics.projections import Projections, key_projections, projection_table
from kvsim.diagnostics.ranking import Curve, Grid, Ranking, ranking, window_attention
from kvsim.diagnostics.reconstruction import reconstruction_table
from kvsim.diagnostics.report import (
    Diagnosis,
    diagnose,
    distribution,
    layer_table,
    selection_table,
    task_of,
)

__all__ = [
    "FINDINGS",
    "Analysis",
    "Curve",
    "Diagnosis",
    "Expectation",
    "Finding",
    "Grid",
    "Histogram",
    "NormalFit",
    "Normality",
    "Projections",
    "RankPattern",
    "Ranking",
    "answer_facts",
    "check_positions",
    "diagnose",
    "distribution",
    "expectation_table",
    "expected_and_observed",
    "find_text",
    "findings",
    "fit_normal",
    "histogram",
    "key_projections",
    "key_table",
    "layer_table",
    "loss_table",
    "normality_table",
    "overlap_table",
    "projection_table",
    "quantiles",
    "rank_pattern",
    "ranking",
    "reconstruction_table",
    "selection_table",
    "sparsity_table",
    "state_normality",
    "states",
    "task_of",
    "window_attention",
]
