"""Prediction of the live divergence from the layer error of a replay, by a fitted curve.

The model: log KL is a function of log `layer_error` that never falls, of one prompt under one
policy at one budget. KL is `response_kl` in nats, no less than `FLOOR`, below which the model's
predictions hardly differ. The curve is an isotonic regression
of the means of up to `BINS` groups of equal size, linear between them.

The interval is conformal: its ends are quantiles of the residuals of prompts and policies that were
left out of the fit, for the user's are neither. A new policy is one more group of values, so with K
policies the interval holds LEVEL (K + 1) / K of the residuals, at most all of them (hierarchical
conformal prediction: Lee, Barber and Willett, arXiv 2306.06342). It covers at least `LEVEL` of the
values of policies and prompts like those of the fit, on the same model, most policies more often.
Outside the layer errors of the fit there is no estimate.

What the layer error adds is measured on the same left-out values, at each budget alone: the gain is
the share by which squared errors of log KL are smaller than those of the mean of the budget.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from itertools import chain, pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import polars as pl
import scipy

from kvsim.analysis.arrays import Bools, Floats
from kvsim.analysis.significance import FEWEST
from kvsim.core.digest import document_digest
from kvsim.core.parameters import Above, AtLeast, Finite, check_fields, integer, is_finite
from kvsim.core.trace import Trace
from kvsim.errors import NeedsError, OutputError, PolicyError, local_path
from kvsim.files import write_file
from kvsim.store.metadata import object_at
from kvsim.studies.prediction.validity import CELL, POLICIES, cell_values, evicting, resamples

#: Nats; smaller values count as this much.
FLOOR = 0.01
#: The share of new prompts and policies that intervals claim to cover.
LEVEL = 0.9
#: Groups of the curve, and the values of each at least.
BINS, LEAST = 24, 8
#: Folds of the prompts of a fit.
FOLDS = 5
#: Groups of the risk that an answer is lost.
RISKS = 8

_Positive = Annotated[float, Finite(), Above(0)]

_SHIPPED = Path(__file__).parent / "calibrations.json"


@dataclass(frozen=True)
class Estimate:
    """KL in nats with its interval; the risk that a right answer is lost, where it was measured."""

    kl: float
    low: float
    high: float
    risk: float | None = None
    risk_low: float | None = None
    risk_high: float | None = None


@dataclass(frozen=True)
class Curve:
    """The curve and its interval. errors, kl: its knots, ascending; kl in nats.

    below, above: factors from the curve to the ends of the interval. lowest, highest: layer errors
    of the fit. risk: groups by layer error, each [up to, share of answers lost, low, high]. gains:
    by budget, each [budget, gain over its mean, low, high], with a 95 % bootstrap interval over
    prompts and policies; empty where it was not measured.
    """

    errors: tuple[float, ...]
    kl: tuple[float, ...]
    below: _Positive
    above: _Positive
    lowest: _Positive
    highest: _Positive
    risk: tuple[tuple[float, float, float, float], ...] = ()
    gains: tuple[tuple[str, float, float, float], ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, "curve")

    def covers(self, error: float) -> bool:
        """Whether a layer error is within the range of the fit."""
        return self.lowest <= error <= self.highest

    def estimate(self, error: float) -> Estimate:
        """Estimate the KL. Raises PolicyError for a layer error outside the range of the fit."""
        if not self.covers(error):
            raise PolicyError(
                f"layer error {error:.3g} is outside the calibration, {self.lowest:.3g} to "
                f"{self.highest:.3g}; nothing is extrapolated: take another budget, or make a "
                "calibration with this one"
            )
        kl = float(np.exp(np.interp(np.log(error), np.log(self.errors), np.log(self.kl))))
        low, high = kl * self.below, max(kl * self.above, FLOOR)
        risk = next((bounds for upto, *bounds in self.risk if error <= upto), [None] * 3)
        return Estimate(kl, 0.0 if low <= FLOOR else low, high, *risk)


@dataclass(frozen=True)
class Calibration:
    """A curve, and the live runs that it was fitted on.

    config: digest of the model's configuration (`config_digest`). tokens: the shortest and the
    longest prompt with its response. interval, prefill: the schedule; interval None where policies
    kept their own. weights: their digest, where it is known.
    """

    model: str
    config: str
    prompts: Annotated[int, AtLeast(1)]
    policies: tuple[str, ...]
    budgets: tuple[str, ...]
    tokens: tuple[int, int]
    interval: Annotated[int, AtLeast(1)] | None
    prefill: bool | None
    curve: Curve
    weights: str | None = None

    @property
    def facts(self) -> _Facts:
        """Digests of the configuration and the weights of its model."""
        return self.config, self.weights

    def __post_init__(self) -> None:
        check_fields(self, "calibration")
        names, numbers = (*self.policies, *self.budgets), [*map(integer, self.tokens)]
        if not all(isinstance(x, str) for x in names) or len(numbers) != 2 or None in numbers:
            raise PolicyError(
                "calibration: policies, budgets or tokens are no such; expected lists of texts, "
                "and the tokens of the shortest and the longest prompt"
            )


def points(replayed: pl.DataFrame, live: pl.DataFrame) -> pl.DataFrame:
    """Return the points that a curve is fitted on, of the Tables of both loops.

    A row per prompt, policy and budget: `trace`, `policy`, `requested`, `error` (the layer error),
    `kl`, `lost` (1 where an answer that is right with the full cache is wrong, null without one).
    `random` does not count: it makes any number look predictive.
    """
    kept = evicting(replayed, live).filter(pl.col("policy") != "random")
    on = kept.columns
    for table, name, column in (
        (replayed, "layer_error", "error"),
        (live, "response_kl", "kl"),
        (live, "answer_kept", "lost"),
    ):
        values = cell_values(table, name).rename({"value": column})
        kept = kept.join(values, on=on, how="left", nulls_equal=True, maintain_order="left")
    kept = kept.drop_nulls(["error", "kl"])
    return kept.select("trace", "policy", "requested", "error", "kl", lost=1 - pl.col("lost"))


def fit(samples: pl.DataFrame) -> Curve:
    """Fit the curve on `points`.

    Raises PolicyError for fewer than `FEWEST` prompts or `POLICIES` policies: the interval is that
    of prompts and policies that were left out of the fit.
    """
    samples = samples.filter(pl.col("error") > 0)
    n_prompts, n_policies = (samples[name].n_unique() for name in ("trace", "policy"))
    if n_prompts < FEWEST or n_policies < POLICIES:
        raise PolicyError(
            f"{n_prompts} prompts and {n_policies} policies with layer_error and response_kl; "
            f"expected at least {FEWEST} and {POLICIES}, for the interval is that of new ones: "
            "run more of them"
        )
    errors, kl = samples["error"].to_numpy(), np.maximum(samples["kl"].to_numpy(), FLOOR)
    x, y = np.log(errors), np.log(kl)
    budget = (samples["requested"].rank("dense") - 1).to_numpy()
    residual, plain = np.full((2, len(x)), np.nan)
    for tested, fitted in _folds(samples):
        residual[tested] = y[tested] - np.interp(x[tested], *_isotonic(x[fitted], y[fitted]))
        for number in np.unique(budget[tested]):
            same = budget == number
            if (same & fitted).any():
                plain[same & tested] = y[same & tested] - y[same & fitted].mean()
    # quantiles that cover `LEVEL` of a new policy, as one more group of residuals
    level = min(1.0, LEVEL * (n_policies + 1) / n_policies)
    below, above = np.quantile(residual[~np.isnan(residual)], [(1 - level) / 2, (1 + level) / 2])
    knots, heights = _isotonic(x, y)
    return Curve(
        errors=tuple(np.exp(knots).tolist()),
        kl=tuple(np.exp(heights).tolist()),
        below=float(np.exp(below)),
        above=float(np.exp(above)),
        lowest=float(errors.min()),
        highest=float(errors.max()),
        risk=tuple(_risks(samples)),
        gains=tuple(_gains(samples.with_columns(residual=residual, plain=plain))),
    )


def predict(replayed: pl.DataFrame, calibration: Calibration) -> pl.DataFrame:
    """Estimate the live KL of each cell of the Table of a replay, from its `layer_error`.

    Returns:
        A row per policy, params, requested (the budget), interval and prefill: `error`, mean over
        `traces`; `kl`, `low`, `high` in nats and `risk`, `risk_low`, `risk_high`, means over them;
        `factor`: the ends of the interval are no further from `kl`, of no less than `FLOOR`;
        `outside`: null, or why there is no estimate: a trace whose layer error is outside. Means of
        the ends cover the mean of the values at least as often as each covers its own.
    """
    rows = []
    of = cell_values(replayed, "layer_error")
    for cell, group in of.group_by(CELL, maintain_order=True):
        errors = group["value"].to_list()
        row: dict[str, Any] = dict(zip(CELL, cell, strict=True))
        rows.append(row | {"error": float(np.mean(errors)), "traces": len(errors)})
        try:
            estimates = [
                calibration.curve.estimate(error) if error else Estimate(0.0, 0.0, 0.0)
                for error in errors
            ]
        except PolicyError as refused:
            rows[-1]["outside"] = str(refused)
            continue
        for name in _ESTIMATES:
            present = [x for each in estimates if (x := getattr(each, name)) is not None]
            rows[-1][name] = float(np.mean(present)) if present else None
        low, kl, high = (max(rows[-1][name], FLOOR) for name in ("low", "kl", "high"))
        rows[-1]["factor"] = max(kl / low, high / kl) if rows[-1]["kl"] else None
    return pl.DataFrame(rows, schema=_PREDICTIONS)


_ESTIMATES = tuple(each.name for each in fields(Estimate))
_PREDICTIONS: dict[str, Any] = {
    **dict.fromkeys(CELL, pl.String),
    "interval": pl.Int64,
    "prefill": pl.Boolean,
    "error": pl.Float64,
    "traces": pl.Int64,
    "outside": pl.String,
    **dict.fromkeys((*_ESTIMATES, "factor"), pl.Float64),
}


def _folds(samples: pl.DataFrame) -> Iterator[tuple[Bools, Bools]]:
    """Which rows are tested and which are fitted: other prompts and other policies."""
    prompt = (samples["trace"].rank("dense") - 1).to_numpy() % FOLDS
    policy = samples["policy"].to_numpy()
    for number in range(FOLDS):
        for name in np.unique(policy):
            tested = (prompt == number) & (policy == name)
            if tested.any():
                yield tested, (prompt != number) & (policy != name)


def _isotonic(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Knots of the curve."""
    order = np.argsort(x, kind="stable")
    bins = min(BINS, max(1, len(x) // LEAST))
    size, larger = divmod(len(x), bins)
    sizes = np.array([size + 1] * larger + [size] * (bins - larger))
    ends = [0, *sizes.cumsum().tolist()]
    knots, means = (
        np.array([np.add.reduce(values[start:end]) for start, end in pairwise(ends)]) / sizes
        for values in (x[order], y[order])
    )
    return knots, scipy.optimize.isotonic_regression(means, weights=sizes).x


def _gains(of: pl.DataFrame) -> Iterator[tuple[str, float, float, float]]:
    """By how much the curve is better than the mean of each budget; of: with errors of both."""
    of = of.drop_nans(["residual", "plain"])
    for (budget,), group in of.group_by("requested", maintain_order=True):
        places = [(group[name].rank("dense") - 1).to_numpy() for name in ("trace", "policy")]
        n, policies = (of.max() + 1 for of in places)
        squares = np.zeros((2, n, policies))
        for square, name in zip(squares, ("residual", "plain"), strict=True):
            np.add.at(square, tuple(places), group[name].to_numpy() ** 2)
        if n < FEWEST or policies < POLICIES or not squares[1].any():
            continue
        drawn, weights = resamples(n, policies)
        of_curve, of_mean = ((drawn @ square * weights).sum(1) for square in squares)
        gain = 1 - float(squares[0].sum() / squares[1].sum())
        yield (str(budget), gain, *np.quantile(1 - of_curve / of_mean, (0.025, 0.975)).tolist())


def _risks(samples: pl.DataFrame) -> Iterator[tuple[float, float, float, float]]:
    """Shares of lost answers in groups by layer error, with 95 % intervals.

    Those of Jeffreys (Brown, Cai and DasGupta 2001, Stat. Sci. 16:101), of as many draws as the
    group has prompts, for values of one prompt are alike.
    """
    judged = samples.drop_nulls("lost").sort("error")
    if judged["trace"].n_unique() < FEWEST:
        return
    for places in np.array_split(np.arange(judged.height), RISKS):
        group = judged[places]
        share, n = float(group["lost"].to_numpy().mean()), group["trace"].n_unique()
        shape = share * n + 0.5, (1 - share) * n + 0.5
        low, high = (float(scipy.stats.beta.ppf(end, *shape)) for end in (0.025, 0.975))
        yield float(group["error"][-1]), share, min(low, share), max(high, share)


def calibrate(replayed: pl.DataFrame, live: pl.DataFrame, traces: Sequence[Trace]) -> Calibration:
    """Fit a curve on both loops of traces of one model. Raises as `fit`, and for several models."""
    samples = points(replayed, live)
    names, facts = zip(*(_model(trace) for trace in traces), strict=True)
    models = _models(facts)
    if len(models) > 1:
        raise PolicyError(f"traces of {len(models)} models; expected one: a curve is of one model")
    ((config, weights),) = models
    schedules = live.filter(pl.col("policy").is_not_null()).select("interval", "prefill").unique()
    interval, prefill = schedules.row(0) if schedules.height == 1 else (None, None)
    sizes = [trace.n_pos for trace in traces]
    return Calibration(
        model=names[0],
        config=config,
        prompts=samples["trace"].n_unique(),
        policies=tuple(samples["policy"].unique(maintain_order=True)),
        budgets=tuple(samples["requested"].unique(maintain_order=True)),
        tokens=(min(sizes), max(sizes)),
        interval=interval,
        prefill=prefill,
        curve=fit(samples),
        weights=weights,
    )


def calibration_of(traces: Sequence[Trace], path: str | Path | None = None) -> Calibration:
    """Return the calibration of the model of traces: of a file, or one that ships with kvsim.

    Raises NeedsError where there is none of their model: a curve says nothing of other models.
    """
    names, facts = zip(*(_model(trace) for trace in traces), strict=True)
    models = _models(facts)
    if len(models) > 1:
        given = dict.fromkeys(map(_described, names, facts))
        raise NeedsError(
            f"traces of {' and '.join(given)}; expected one model: predict them one by one"
        )
    calibrations = read_calibrations(_SHIPPED if path is None else Path(path))
    fitting = [each for each in calibrations if len(_models([*models, each.facts])) == 1]
    if not fitting:
        available = ", ".join(_described(each.model, each.facts) for each in calibrations)
        raise NeedsError(
            f"no calibration is of {_described(names[0], *models)}, those there are of "
            f"{available}; a curve of one model says nothing of another: make one of your own with "
            "kvsim fidelity --calibration FILE"
        )
    return min(fitting, key=lambda each: each.weights is None)


@cache
def read_calibrations(path: Path) -> tuple[Calibration, ...]:
    """Read a file of calibrations. Raises NeedsError for any other file."""
    try:
        documents = [_tuples(each) for each in json.loads(path.read_text("utf-8"))]
        return tuple(Calibration(**{**x, "curve": _curve(x["curve"])}) for x in documents)
    except FileNotFoundError:
        raise NeedsError(f"there is no file {path}; expected what kvsim fidelity wrote") from None
    except (OSError, RecursionError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise NeedsError(
            f"{path} is no calibration ({type(error).__name__}); expected what kvsim fidelity "
            "--calibration wrote"
        ) from error


def write_calibrations(path: str | Path, calibrations: Sequence[Calibration]) -> None:
    """Write calibrations of several models as one JSON file. Raises OutputError if it cannot."""
    text = json.dumps([asdict(each) for each in calibrations], indent=1, allow_nan=False)
    write_file(local_path(path, OutputError), f"{text}\n", overwrite=True)


def _curve(document: Mapping[str, Any]) -> Curve:
    """Return a stored curve. Raises ValueError unless its knots and values are those of a fit."""
    curve = Curve(**document)
    knots, kl = curve.errors, curve.kl
    numbers = (*knots, *kl, *chain(*curve.risk, *(gain for _, *gain in curve.gains)))
    positive = all(map(is_finite, numbers)) and min((*knots, *kl)) > 0
    ascending = positive and all(list(x) == sorted(x) for x in (knots, kl))
    if len(knots) != len(kl) or not ascending or {*map(len, (*curve.risk, *curve.gains))} - {4}:
        raise ValueError("the knots of a curve are positive and ascend")
    return curve


def _tuples(x: Any) -> Any:
    """A document with tuples for lists."""
    if isinstance(x, dict):
        return {name: _tuples(part) for name, part in x.items()}
    return tuple(map(_tuples, x)) if isinstance(x, list) else x


#: Identity of a model: the digests of its configuration and of its weights.
_Facts = tuple[str, str | None]


def _model(trace: Trace) -> tuple[str, _Facts]:
    model = object_at(trace.meta, "model")
    name, weights = str(model.get("name", "an unknown model")), model.get("weights")
    return name, (config_digest(model), weights if isinstance(weights, str) else None)


def _models(facts: Iterable[_Facts]) -> set[_Facts]:
    """Return the different models; without a digest of weights, any of the configuration."""
    models = set(facts)
    known = {config for config, weights in models if weights is not None}
    return {each for each in models if each[1] is not None or each[0] not in known}


def _described(name: str, facts: _Facts) -> str:
    return name if facts[1] is None else f"{name} (weights {str(facts[1])[:19]})"


def config_digest(model: Mapping[str, Any]) -> str:
    """Return the digest of a model's configuration, of what `meta["model"]` of a trace says of it.

    The precision is left out. The digest in the trace itself may be of an earlier version of kvsim.
    """
    config = object_at(model, "config")
    compared = {name: x for name, x in config.items() if name not in ("architectures", "dtype")}
    return document_digest(compared)
