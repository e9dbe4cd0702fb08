"""Figures. The only place that knows matplotlib.

    records   what was kept, what was lost, how far the output moved
    layers    how the layers rank the tokens of a prompt, and where ASL selects
    summary   policies against each other over budgets
    attention whether attention comes back to its keys, and how sparse it is
    strips    what is held after an event, and the long runs that were dropped
    segments  how attention mass cuts the cache, and what each piece may keep
    sets      where in the text kept entries lie, and how much of them stays
    expectation  what Expected Attention expects beside what happens, and what its errors cost
    text      the text by what became of its tokens, and which tokens are kept
    normality    how queries are distributed, beside the normal distribution that fits them

Every function returns a matplotlib Figure and touches no global state; `save` writes it.
"""

from kvsim.plots.attention import overlap_curves, sparsity_by_layer
from kvsim.plots.expectation import (
    agreement_steps,
    attention_loss,
    expected_observed,
    reconstruction_error,
)
from kvsim.plots.layers import (
    gold_recall,
    layer_attention,
    layer_overlap,
    rank_bumps,
    rank_pattern,
    selection_grid,
    selection_histogram,
    variance_curves,
)
from kvsim.plots.normality import (
    normal_distance,
    projection_gap,
    state_quantiles,
    state_ridges,
)
from kvsim.plots.records import NEEDED, error_over_rows, retention_map
from kvsim.plots.saving import save
from kvsim.plots.segments import mass_curve
from kvsim.plots.sets import iou_by, middle_coverage, position_density
from kvsim.plots.strips import bursts
from kvsim.plots.summary import over_budgets, pareto
from kvsim.plots.text import lift_bars, token_html, token_text

__all__ = [
    "NEEDED",
    "agreement_steps",
    "attention_loss",
    "bursts",
    "error_over_rows",
    "expected_observed",
    "gold_recall",
    "iou_by",
    "layer_attention",
    "layer_overlap",
    "lift_bars",
    "mass_curve",
    "middle_coverage",
    "normal_distance",
    "over_budgets",
    "overlap_curves",
    "pareto",
    "position_density",
    "projection_gap",
    "rank_bumps",
    "rank_pattern",
    "reconstruction_error",
    "retention_map",
    "save",
    "selection_grid",
    "selection_histogram",
    "sparsity_by_layer",
    "state_quantiles",
    "state_ridges",
    "token_html",
    "token_text",
    "variance_curves",
]
