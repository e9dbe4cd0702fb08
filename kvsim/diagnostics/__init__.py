"""Diagnostics: why a policy chose what it chose, from the trace alone.

    ranking   how each layer ranks the tokens of a prompt, and ASL's test on these ranks
    gold      the tokens that an answer needs
    report    both together as tables: one row per layer, one per trace, one per selection layer

Everything here is a property of full attention over recorded queries and keys, so every number is
`exact`: a live run that has not selected yet has the same.
"""

from kvsim.diagnostics.gold import answer_facts, check_positions, find_text
from kvsim.diagnostics.ranking import Curve, Grid, Ranking, ranking, window_attention
from kvsim.diagnostics.report import (
    Diagnosis,
    diagnose,
    distribution,
    layer_table,
    selection_table,
    task_of,
)

__all__ = [
    "Curve",
    "Diagnosis",
    "Grid",
    "Ranking",
    "answer_facts",
    "check_positions",
    "diagnose",
    "distribution",
    "find_text",
    "layer_table",
    "ranking",
    "selection_table",
    "task_of",
    "window_attention",
]
