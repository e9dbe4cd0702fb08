"""Measurements of a model, as the Tables of both loops that `kvsim.analysis` reads."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import polars as pl

from fidelity_page.plan import Study
from kvsim.analysis.prediction import FLOOR, Curve, fit, points
from kvsim.analysis.registry import METRICS
from kvsim.analysis.table import in_order

#: Share of kept entries that both loops keep: no metric of kvsim, for it takes two records.
AGREEMENT = "kept_agreement"


@dataclass(frozen=True)
class Loops:
    """Everything of one model: `rows` as `measure_prompt` stores them, and the two Tables."""

    study: Study
    rows: pl.DataFrame

    @property
    def prompts(self) -> int:
        """Prompts that were measured."""
        return self.rows["prompt"].n_unique()

    @property
    def replayed(self) -> pl.DataFrame:
        """The Table of the replay."""
        return self._table("open")

    @property
    def live(self) -> pl.DataFrame:
        """The Table of the live runs."""
        return self._table("closed")

    def points(self, metric: str = "layer_error") -> pl.DataFrame:
        """Return what a curve is fitted on, or the same of another metric of the replay."""
        return points(self.replayed, self.live, metric)

    def _table(self, loop: str) -> pl.DataFrame:
        plan = self.study.prompts
        rows = self.rows.filter(pl.col("loop") == loop, pl.col("metric") != AGREEMENT)
        main = pl.col("metric").replace_strict({name: one.main for name, one in METRICS.items()})
        unit = pl.col("metric").replace_strict({name: one.unit for name, one in METRICS.items()})
        params = {policy.name: json.dumps(dict(policy.params)) for policy in self.study.policies}
        return in_order(
            [
                rows.with_columns(
                    trace=pl.format("{}-{}", pl.lit(plan.model), "prompt"),
                    params=pl.col("policy").replace_strict(params),
                    interval=pl.lit(plan.interval),
                    prefill=pl.lit(plan.prefill),
                    variant=main,
                    unit=unit,
                    fidelity=pl.lit(loop),
                )
            ]
        )


@dataclass(frozen=True)
class Coverage:
    """How a curve did on what it was not fitted on.

    n: values that it has an estimate of, of all; covered: share of them inside the interval; least:
    that of the prompt, policy or budget with the lowest; factor: median factor between KL and its
    estimate; cells: share of means over prompts, of a policy at a budget, inside the mean interval.
    """

    n: int
    of: int
    covered: float
    least: float
    factor: float
    cells: float


def coverage(of: pl.DataFrame, *by: str) -> Coverage:
    """Leave out each group in turn, fit on the others, and test on it.

    by: columns; with several of them the fit is on what shares no group with the tested values.
    """
    tested = []
    for group in of.select(by).unique(maintain_order=True).iter_rows():
        same = [pl.col(name) == value for name, value in zip(by, group, strict=True)]
        curve = fit(of.filter(~pl.any_horizontal(same)))
        tested.append(judged(curve, of.filter(same)))
    return summary(pl.concat(tested, how="diagonal_relaxed"), by[-1])


def summary(tested: pl.DataFrame, by: str) -> Coverage:
    """Return the shares of judged values that are covered."""
    inside = tested.drop_nulls("inside")
    cells = inside.group_by("policy", "asked").agg(pl.col("kl", "low", "high").mean())
    between = (cells["low"] <= cells["kl"]) & (cells["kl"] <= cells["high"])
    return Coverage(
        n=inside.height,
        of=tested.height,
        covered=_share(inside["inside"]),
        least=_share(inside.group_by(by).agg(pl.col("inside").mean())["inside"].sort().head(1)),
        factor=_share(inside["factor"].sort()[inside.height // 2 :].head(1)),
        cells=_share(between),
    )


def _share(values: pl.Series) -> float:
    return float(np.mean(values.to_numpy())) if len(values) else float("nan")


def judged(curve: Curve, of: pl.DataFrame) -> pl.DataFrame:
    """Points with their estimate, `inside`, whether the interval has the KL, and `factor`.

    KL is no less than the floor of the curve. Columns are null where the curve has no estimate.
    """
    rows = []
    for row in of.to_dicts():
        row |= {"inside": None, "factor": None, "kl": max(row["kl"], FLOOR)}
        if curve.covers(row["error"]):
            estimate = curve.estimate(row["error"])
            row |= {"low": estimate.low, "high": estimate.high}
            row["inside"] = estimate.low <= row["kl"] <= estimate.high
            row["factor"] = float(np.exp(abs(np.log(row["kl"] / estimate.kl))))
        rows.append(row)
    types = {"inside": pl.Boolean, **dict.fromkeys(("low", "high", "factor", "kl"), pl.Float64)}
    return pl.DataFrame(rows, schema_overrides=types, infer_schema_length=None)
