"""The curve from layer error to live KL: what it estimates, covers and refuses."""

from __future__ import annotations

import dataclasses
import itertools
import json

import numpy as np
import polars as pl
import pytest
from scipy.stats import beta

from kvsim.analysis.registry import METRICS
from kvsim.analysis.table import in_order
from kvsim.errors import NeedsError, PolicyError
from kvsim.studies.prediction.prediction import (
    FLOOR,
    Calibration,
    calibrate,
    calibration_of,
    fit,
    points,
    predict,
    read_calibrations,
    write_calibrations,
)

POLICIES = ("tova", "knorm", "h2o", "keydiff", "snapkv", "cake")


def planted(prompts=20, seed=0, spread=0.2, policies=POLICIES):
    """Points on KL = 0.02 error ** 1.5, with factors of chance by prompt, policy and cell."""
    rng = np.random.default_rng(seed)
    of_policy = {name: rng.normal(0, spread) for name in policies}
    rows = []
    for prompt in range(prompts):
        of_prompt = rng.normal(0, spread)
        for policy, budget in itertools.product(policies, (16, 32, 64)):
            error = float(np.exp(rng.uniform(0, 4)))
            factor = np.exp(of_prompt + of_policy[policy] + rng.normal(0, spread))
            kl = 0.02 * error**1.5 * factor
            lost = float(error > 20) if prompt % 2 else None
            rows.append(
                {"trace": f"p{prompt:02}", "policy": policy, "requested": str(budget)}
                | {"error": error, "kl": kl, "lost": lost}
            )
    return pl.DataFrame(rows, schema_overrides={"lost": pl.Float64})


def test_the_curve_is_the_planted_one():
    """Without chance, the estimate is the planted power law, and the interval is narrow."""
    curve = fit(planted(prompts=40, spread=0.0))
    for error in (3.0, 10.0, 30.0):
        estimate = curve.estimate(error)

        assert estimate.kl == pytest.approx(0.02 * error**1.5, rel=0.1)
        assert estimate.low <= estimate.kl <= estimate.high
        assert estimate.high / estimate.low < 1.6


def test_the_curve_never_falls_and_small_kl_is_counted_as_the_floor():
    """Knots ascend in both; a KL of 1e-9 is one of `FLOOR`, whose interval begins at 0."""
    of = planted().with_columns(kl=pl.when(pl.col("error") < 3).then(1e-9).otherwise(pl.col("kl")))
    curve = fit(of)
    least = curve.estimate(curve.lowest)

    assert np.all(np.diff(curve.errors) > 0)
    assert np.all(np.diff(curve.kl) >= 0)
    assert least.kl == pytest.approx(FLOOR)
    assert least.low == 0


def test_the_interval_is_that_of_policies_left_out():
    """Policies with curves of their own widen it, which residuals of the fit would not show."""
    curves = [fit(planted(prompts=30, spread=spread)) for spread in (0.05, 0.4)]
    widths = [curve.above / curve.below for curve in curves]

    assert widths[1] > 3 * widths[0]
    residuals = []
    of = planted(prompts=30, spread=0.4)
    for name in POLICIES:  # a plain loop over what was left out, without the folds of prompts
        others = fit(of.filter(pl.col("policy") != name))
        for row in of.filter(policy=name).to_dicts():
            if others.covers(row["error"]):
                at = others.estimate(row["error"]).kl
                residuals.append(np.log(max(row["kl"], FLOOR) / at))
    expected = np.exp(max(residuals) - min(residuals))  # 0.9 * 7 / 6 is more than all

    assert widths[1] == pytest.approx(expected, rel=0.25)


def test_the_risk_of_a_lost_answer():
    """Of prompts that say what is right: 0 below the planted limit, 1 above it, with intervals."""
    curve = fit(planted())
    lowest = planted().drop_nulls("lost").sort("error").head(23)  # of 180 values in 8 groups
    prompts = lowest["trace"].n_unique()

    assert prompts < 11
    assert curve.risk[0][0] == lowest["error"][-1]
    assert curve.risk[0][3] == pytest.approx(beta.ppf(0.975, 0.5, prompts + 0.5))
    assert curve.estimate(2.0).risk == 0
    assert curve.estimate(50.0).risk == 1
    assert len(curve.risk) == 8
    assert fit(planted().with_columns(lost=pl.lit(None, pl.Float64))).risk == ()
    for upto, share, low, high in curve.risk:
        assert low <= share <= high
        assert 0.1 < high - low < 0.7  # ten prompts, also where all answers are lost
        assert curve.lowest <= upto <= curve.highest


def test_nothing_is_extrapolated():
    """Layer errors outside the fit have no estimate, and too little to fit on is refused."""
    curve = fit(planted())

    for error in (curve.lowest / 2, curve.highest * 2):
        with pytest.raises(PolicyError, match="nothing is extrapolated"):
            curve.estimate(error)
    with pytest.raises(PolicyError, match="5 prompts and 6 policies"):
        fit(planted(prompts=5))
    with pytest.raises(PolicyError, match="20 prompts and 4 policies"):
        fit(planted(policies=POLICIES[:4]))


def test_the_gain_is_that_over_the_mean_of_the_budget():
    """At each budget, over values of prompts and policies that both fits left out, by a loop."""
    of = planted(prompts=11).with_columns(
        kl=pl.col("kl") * pl.col("requested").cast(pl.Float64) / 32
    )
    found = {budget: (gain, low, high) for budget, gain, low, high in fit(of).gains}
    rows = of.with_columns(fold=pl.col("trace").str.slice(1).cast(pl.Int64) % 5)
    squares = {budget: np.zeros((2, 11, 6)) for budget in ("16", "32", "64")}
    for fold, policy in itertools.product(range(5), POLICIES):
        others = rows.filter(pl.col("fold") != fold, pl.col("policy") != policy)
        curve = fit(others)
        for row in rows.filter(fold=fold, policy=policy).to_dicts():
            x = np.interp(np.log(row["error"]), np.log(curve.errors), np.log(curve.kl))
            same = np.log(
                np.maximum(others.filter(requested=row["requested"])["kl"].to_numpy(), FLOOR)
            )
            place = (int(row["trace"][1:]), POLICIES.index(policy))
            y = np.log(max(row["kl"], FLOOR))
            squares[row["requested"]][(slice(None), *place)] = (y - x) ** 2, (y - same.mean()) ** 2

    assert list(found) == ["16", "32", "64"]
    for budget, (gain, low, high) in found.items():
        of_curve, of_mean = squares[budget]
        assert gain == pytest.approx(1 - of_curve.sum() / of_mean.sum())
        rng = np.random.default_rng(1)
        drawn = [
            1 - of_curve[at].sum() / of_mean[at].sum()
            for at in (
                np.ix_(rng.integers(11, size=11), rng.integers(6, size=6)) for _ in range(2000)
            )
        ]
        assert (low, high) == pytest.approx(tuple(np.quantile(drawn, [0.025, 0.975])), abs=0.05)
    assert min(low for _, low, _ in found.values()) > 0.5


def test_an_error_that_says_nothing_has_no_gain():
    """Where KL depends on the budget alone, its mean is as good; equal KL has no gain to name."""
    rng = np.random.default_rng(0)
    of = planted().with_columns(
        kl=pl.col("requested").cast(pl.Float64) / 16 * np.exp(rng.normal(0, 0.1, 360))
    )

    assert all(gain <= 0 for _, gain, _, _ in fit(of).gains)
    assert fit(of.with_columns(kl=pl.lit(1.0))).gains == ()


def tables(of):
    """The Tables of both loops that have these points."""
    rows = [
        row | {"params": "{}", "interval": 8, "prefill": True, "budget": int(row["requested"])}
        for row in of.to_dicts()
    ]

    def table(metrics, fidelity):
        return in_order(
            [
                pl.DataFrame(rows)
                .with_columns(value=value, fidelity=pl.lit(fidelity), layer=pl.lit(0))
                .with_columns(metric=pl.lit(name), variant=pl.lit(METRICS[name].main))
                .with_columns(unit=pl.lit(METRICS[name].unit))
                .drop("requested", "error", "kl", "lost")
                for name, value in metrics.items()
            ]
        )

    error = pl.col("error")
    replayed = table({"layer_error": error, "output_error": error / 100}, "open")
    return replayed, table(
        {"response_kl": pl.col("kl"), "answer_kept": 1 - pl.col("lost")}, "closed"
    )


@dataclasses.dataclass
class Traced:
    """What a calibration reads of a trace."""

    config: str = "1"
    n_pos: int = 100
    weights: str | None = None

    @property
    def meta(self):
        """Where a trace says which model it is of."""
        known = {} if self.weights is None else {"weights": self.weights}
        return {"model": {"name": f"model {self.config}", "config": {"size": self.config}, **known}}


def test_a_calibration_is_fitted_stored_and_read(tmp_path):
    """From the Tables of both loops to a file and back; it predicts the cells of a replay."""
    of = planted()
    replayed, live = tables(of)
    calibration = calibrate(replayed, live, [Traced(n_pos=90), Traced(n_pos=120)])
    write_calibrations(tmp_path / "one.json", [calibration])
    again = calibration_of([Traced()], tmp_path / "one.json")
    estimates = predict(replayed, again)
    row = estimates.filter(policy="tova", requested="32").row(0, named=True)
    single = [
        calibration.curve.estimate(error)
        for error in of.filter(policy="tova", requested="32")["error"]
    ]

    assert points(replayed, live).sort(pl.all()).equals(of.sort(pl.all()))
    assert isinstance(again, Calibration)
    assert again == calibration
    assert (again.prompts, again.tokens, again.interval) == (20, (90, 120), 8)
    assert again.budgets == ("16", "32", "64")
    assert row["kl"] == pytest.approx(np.mean([each.kl for each in single]))
    assert row["high"] == pytest.approx(np.mean([each.high for each in single]))
    assert row["traces"] == 20
    assert row["factor"] == pytest.approx(max(row["high"] / row["kl"], row["kl"] / row["low"]))
    chance = [
        pl.concat([each, each.filter(policy="tova").with_columns(policy=pl.lit("random"))])
        for each in (replayed, live)
    ]
    assert points(*chance).height == of.height  # random does not count


def test_estimates_outside_are_left_out():
    """Cells outside say why; cells that evict nothing have no divergence."""
    of = planted()
    replayed, live = tables(of)
    calibration = calibrate(replayed, live, [Traced()])
    far = replayed.with_columns(value=pl.when(pl.col("policy") == "tova").then(1e6).otherwise(0.0))
    rows = {row["policy"]: row for row in predict(far, calibration).to_dicts()}

    assert rows["tova"]["kl"] is None
    assert "nothing is extrapolated" in rows["tova"]["outside"]
    assert (rows["knorm"]["kl"], rows["knorm"]["high"]) == (0, 0)
    assert rows["knorm"]["factor"] is None


def test_other_weights_are_another_model(tmp_path):
    """Neither fitted together nor predicted; a trace that says nothing of them is of any."""
    tables_of = tables(planted())
    base, tuned, older = (Traced(weights=weights) for weights in ("base", "tuned", None))
    path = tmp_path / "two.json"
    curves = [calibrate(*tables_of, [older, trace]) for trace in (base, tuned)]
    write_calibrations(path, curves)

    assert [each.weights for each in curves] == ["base", "tuned"]
    assert calibration_of([tuned, older], path) == curves[1]
    assert calibration_of([older], path) == curves[0]
    with pytest.raises(PolicyError, match="traces of 2 models"):
        calibrate(*tables_of, [older, base, tuned])
    with pytest.raises(NeedsError, match=r"of model 1 \(weights base\) and model 1 \(weights"):
        calibration_of([base, tuned], path)
    with pytest.raises(NeedsError, match=r"no calibration is of model 1 \(weights other\), those"):
        calibration_of([Traced(weights="other")], path)
    write_calibrations(tmp_path / "old.json", [calibrate(*tables_of, [older])])
    assert calibration_of([tuned], tmp_path / "old.json").weights is None
    write_calibrations(tmp_path / "both.json", [calibrate(*tables_of, [older]), curves[1]])
    assert calibration_of([tuned], tmp_path / "both.json") == curves[1]


def test_other_models_and_files_are_refused(tmp_path):
    """One line says whose calibration there is, and how to make one."""
    replayed, live = tables(planted())
    path = tmp_path / "one.json"
    write_calibrations(path, [calibrate(replayed, live, [Traced()])])
    (tmp_path / "bad.json").write_text("[{}]")

    with pytest.raises(
        NeedsError, match="no calibration is of model 2, those there are of model 1"
    ):
        calibration_of([Traced("2")], path)
    with pytest.raises(NeedsError, match="traces of model 1 and model 2; expected one model"):
        calibration_of([Traced(), Traced("2")], path)
    with pytest.raises(PolicyError, match="traces of 2 models"):
        calibrate(replayed, live, [Traced(), Traced("2")])
    (document,) = json.loads(path.read_text())
    curve = document["curve"]
    for name, knots in {"empty.json": [], "falling.json": curve["errors"][::-1]}.items():
        spoiled = {**document, "curve": {**curve, "errors": knots}}
        (tmp_path / name).write_text(json.dumps([spoiled]))
    for name in ("bad.json", "none.json", "empty.json", "falling.json"):
        with pytest.raises(NeedsError, match="expected what kvsim fidelity"):
            read_calibrations(tmp_path / name)
