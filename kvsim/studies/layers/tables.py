"""ASL's test of prompts at given budgets, and tables of it: per layer, trace, selection layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl

from kvsim.analysis.results import REQUESTED, wide
from kvsim.schema import FIDELITY
from kvsim.studies.layers.ranking import Curve

_OF_TRACE = {"trace": pl.String, "task": pl.String, "budget": pl.Int64, "share": pl.String}
#: Columns of `layer_table`.
LAYER_COLUMNS: dict[str, Any] = {
    **_OF_TRACE,
    **dict.fromkeys(("k", "layer"), pl.Int64),
    **dict.fromkeys(("variance", "relative_variance"), pl.Float64),
    "selected": pl.Boolean,
    "union": pl.Int64,
    **dict.fromkeys(("entropy", "entropy_uniform"), pl.Float64),
    **dict.fromkeys(("jaccard", "jaccard_chance"), pl.Float64),
    "fidelity": pl.Enum(FIDELITY),
}
#: Columns of `selection_table`.
SELECTION_COLUMNS: dict[str, Any] = {
    **_OF_TRACE,
    **dict.fromkeys(("k", "prompt_len", "n_layers", "first_layer", "look_back"), pl.Int64),
    "tau": pl.Float64,
    "layer": pl.Int64,
    "relative_variance": pl.Float64,
    "verdict": pl.String,
    "fidelity": pl.Enum(FIDELITY),
}


def _of_trace(curve: Curve) -> dict[str, Any]:
    """The columns that all rows share."""
    ranking = curve.ranking
    budget = {"budget": curve.budget, "share": curve.share, "k": curve.k}
    return {"trace": ranking.trace, "task": ranking.task, "fidelity": "exact"} | budget


def layer_table(curves: Sequence[Curve]) -> pl.DataFrame:
    """One row per trace, budget and layer; `LAYER_COLUMNS`.

    variance in squared ranks; relative_variance to that of the first layer that is tested; union:
    tokens that both are a mean over; entropy in nats, next to that of equal scores; jaccard with
    the layer before, next to chance.
    """
    parts = []
    for curve in curves:
        layers = np.arange(curve.n_layers)
        of_layers = {
            "layer": layers,
            "variance": curve.variance,
            "relative_variance": curve.relative,
            "selected": layers == curve.selected(),
            "union": np.where(np.isnan(curve.variance), np.nan, curve.union),
            "entropy": curve.ranking.entropy(),
            "entropy_uniform": float(np.log(curve.ranking.ranked)),
            "jaccard": curve.jaccard,
            "jaccard_chance": np.where(layers > 0, curve.jaccard_chance, np.nan),
        }
        parts.append(_of_trace(curve) | of_layers)
    return wide(parts, LAYER_COLUMNS)


def selection_table(curves: Sequence[Curve]) -> pl.DataFrame:
    """One row per trace and budget; `SELECTION_COLUMNS`.

    layer: the selection layer, null where nothing is dropped (verdict says why).
    relative_variance is that of this layer.
    """
    rows = []
    for curve in curves:
        layer = curve.selected()
        terms = ("n_layers", "first_layer", "look_back")
        row = _of_trace(curve) | {name: getattr(curve, name) for name in terms}
        row |= {
            "prompt_len": curve.ranking.prompt_len,
            "tau": curve.rule.tau,
            "layer": layer,
            "relative_variance": None if layer is None else float(curve.relative[layer]),
            "verdict": curve.verdict(),
        }
        rows.append(row)
    return pl.DataFrame(rows, schema=SELECTION_COLUMNS)


def distribution(selections: pl.DataFrame) -> pl.DataFrame:
    """Return how often each layer is selected, of a `selection_table`.

    One row per task, budget as requested, and selection layer, null for never; traces: how
    many select there; of: all traces of the task; mean_layer: over those that select.
    """
    budgets = selections.select(REQUESTED).to_series()
    in_order = budgets.cast(pl.Enum(budgets.unique(maintain_order=True)))
    keys = ["task", "budget"]
    return (
        selections.with_columns(budget=in_order)
        .with_columns(of=pl.len().over(keys), mean_layer=pl.col("layer").mean().over(keys))
        .group_by(*keys, "layer", "of", "mean_layer", "fidelity")
        .agg(traces=pl.len())
        .sort(*keys, "layer", nulls_last=True)
        .with_columns(pl.col("budget").cast(pl.String), pl.col("traces", "of").cast(pl.Int64))
        .select(*keys, "layer", "traces", "of", "mean_layer", "fidelity")
    )
