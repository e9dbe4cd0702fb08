"""ASL's test of prompts at given budgets, and tables of it: per layer, trace, selection layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl

from kvsim.analysis.results import REQUESTED
from kvsim.schema import FIDELITY
from kvsim.studies.layers.ranking import Curve


def _row(curve: Curve, **values: Any) -> dict[str, Any]:
    """The columns that all rows of a curve share, around those that differ."""
    ranking = curve.ranking
    size = {"budget": curve.budget, "share": curve.share, "k": curve.k}
    return {"trace": ranking.trace, "task": ranking.task, **size, **values, "fidelity": "exact"}


def _typed(table: pl.DataFrame, **types: Any) -> pl.DataFrame:
    """The table without NaN, and with types where values do not say them."""
    kinds: Any = {"share": pl.String, "fidelity": pl.Enum(FIDELITY), **types}
    return table.with_columns(pl.selectors.float().fill_nan(None)).cast(kinds)


def layer_table(curves: Sequence[Curve]) -> pl.DataFrame:
    """One row per trace, budget and layer.

    variance in squared ranks; relative_variance to that of the first layer that is tested; union:
    tokens that both are a mean over; entropy in nats, next to that of equal scores; jaccard with
    the layer before, next to chance.
    """
    parts = []
    for curve in curves:
        layers = np.arange(curve.n_layers)
        of_layers = _row(
            curve,
            layer=layers,
            variance=curve.variance,
            relative_variance=curve.relative,
            selected=layers == curve.selected(),
            union=np.where(np.isnan(curve.variance), np.nan, curve.union),
            entropy=curve.ranking.entropy(),
            entropy_uniform=float(np.log(curve.ranking.ranked)),
            jaccard=curve.jaccard,
            jaccard_chance=np.where(layers > 0, curve.jaccard_chance, np.nan),
        )
        parts.append(_typed(pl.DataFrame(of_layers), union=pl.Int64))
    return pl.concat(parts)


def selection_table(curves: Sequence[Curve]) -> pl.DataFrame:
    """One row per trace and budget.

    layer: the selection layer, null where nothing is dropped (verdict says why).
    relative_variance is that of this layer.
    """
    rows = []
    for curve in curves:
        layer = curve.selected()
        terms = {name: getattr(curve, name) for name in ("n_layers", "first_layer", "look_back")}
        row = _row(
            curve,
            prompt_len=curve.ranking.prompt_len,
            **terms,
            tau=curve.rule.tau,
            layer=layer,
            relative_variance=None if layer is None else float(curve.relative[layer]),
            verdict=curve.verdict(),
        )
        rows.append(row)
    table = pl.DataFrame(rows, infer_schema_length=None)
    return _typed(table, layer=pl.Int64, relative_variance=pl.Float64)


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
