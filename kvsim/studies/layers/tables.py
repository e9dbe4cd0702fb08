"""ASL's test of prompts at given budgets, and tables of it: per layer, trace, selection layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import polars as pl

from kvsim.analysis.arrays import Floats, share
from kvsim.analysis.results import REQUESTED, task_of, wide
from kvsim.core.trace import Trace
from kvsim.policies.asl import Selecting
from kvsim.schema import FIDELITY
from kvsim.studies.layers.ranking import Curve, Ranking

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


@dataclass(frozen=True)
class Diagnosis:
    """One trace at one budget.

    task: the group of traces. share: the budget as a share of the trace, if it was requested so.
    """

    ranking: Ranking
    curve: Curve
    task: str = ""
    share: str | None = None

    @property
    def trace(self) -> str:
        """The trace's name."""
        return self.ranking.trace

    @property
    def requested(self) -> str:
        """The budget as requested."""
        return self.share or str(self.curve.budget)

    @property
    def layer(self) -> int | None:
        """The selection layer."""
        return self.curve.selected()

    @property
    def union(self) -> Floats:
        """Tokens that the variance is a mean over, over k; [L], NaN as the variance."""
        return np.where(np.isnan(self.curve.variance), np.nan, self.curve.union / self.curve.k)

    @property
    def union_chance(self) -> float:
        """The union of so many independent random rankings, over k."""
        ranked, k = self.ranking.ranked, self.curve.k
        # a token is in none of the first k of independent random rankings with this probability
        absent: float = (1 - k / ranked) ** self.curve.look_back
        return ranked * (1 - absent) / k

    @cached_property
    def jaccard(self) -> Floats:
        """|A and B| / |A or B| [L] of first k tokens and the layer before's; NaN without any."""
        top = (self.ranking.ranks <= self.curve.k).numpy()
        both, either = (top[1:] & top[:-1]).sum(-1), (top[1:] | top[:-1]).sum(-1)
        return np.concatenate([[np.nan], share(both, either)])

    @property
    def jaccard_chance(self) -> float:
        """The index of two sets of k tokens that share as many as expected, k * k / m."""
        k = self.curve.k
        shared = k * k / self.ranking.ranked
        return shared / (2 * k - shared) if k else float("nan")

    def of_trace(self) -> dict[str, Any]:
        """The columns that all rows share."""
        budget = {"budget": self.curve.budget, "share": self.share, "k": self.curve.k}
        return {"trace": self.trace, "task": self.task, "fidelity": "exact"} | budget


def diagnose(
    trace: Trace,
    ranking: Ranking,
    budget: int,
    *,
    share: str | None = None,
    rule: Selecting | None = None,
) -> Diagnosis:
    """One trace at one budget, from its ranking; no array of the trace is read again.

    rule: with another tau, first layer or
    look-back than the ranking's; see `Ranking.curve`.
    """
    return Diagnosis(ranking, ranking.curve(budget, rule), task_of(trace), share)


def layer_table(diagnoses: Sequence[Diagnosis]) -> pl.DataFrame:
    """One row per trace, budget and layer; `LAYER_COLUMNS`.

    variance in squared ranks; relative_variance to that of the first layer that is tested; union:
    tokens that both are a mean over; entropy in nats, next to that of equal scores; jaccard with
    the layer before, next to chance.
    """
    parts = []
    for diagnosis in diagnoses:
        curve = diagnosis.curve
        layers = np.arange(curve.n_layers)
        of_layers = {
            "layer": layers,
            "variance": curve.variance,
            "relative_variance": curve.relative,
            "selected": layers == (-1 if diagnosis.layer is None else diagnosis.layer),
            "union": np.where(np.isnan(curve.variance), np.nan, curve.union),
            "entropy": diagnosis.ranking.entropy(),
            "entropy_uniform": float(np.log(diagnosis.ranking.ranked)),
            "jaccard": diagnosis.jaccard,
            "jaccard_chance": np.where(layers > 0, diagnosis.jaccard_chance, np.nan),
        }
        parts.append(diagnosis.of_trace() | of_layers)
    return wide(parts, LAYER_COLUMNS)


def selection_table(diagnoses: Sequence[Diagnosis]) -> pl.DataFrame:
    """One row per trace and budget; `SELECTION_COLUMNS`.

    layer: the selection layer, null where nothing is dropped (verdict says why).
    relative_variance is that of this layer.
    """
    rows = []
    for diagnosis in diagnoses:
        curve, layer = diagnosis.curve, diagnosis.layer
        terms = ("prompt_len", "n_layers", "first_layer", "look_back")
        row = diagnosis.of_trace() | {name: getattr(curve, name) for name in terms}
        row |= {
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
