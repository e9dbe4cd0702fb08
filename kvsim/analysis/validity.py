"""Predictive validity of a replay: its values next to those of the running model.

Functions take two Tables, or two lists of records, of the same traces, policies, budgets and
schedule: one of a replay (`kvsim.sweeps.replay_all`), one of live runs (`kvsim.live`). A cell is a
policy with its parameters at a budget. Cells of a prompt in which nothing is evicted say nothing
about a metric and are left out. Intervals are 95 % bootstrap intervals over prompts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import polars as pl

from kvsim.analysis.arrays import Floats, Ints
from kvsim.analysis.attention.agreement import spearman
from kvsim.analysis.registry import METRICS
from kvsim.analysis.results import REQUESTED
from kvsim.analysis.significance import FEWEST
from kvsim.analysis.summaries import KEYS, RESAMPLES, Interval, per_prompt
from kvsim.analysis.wide import wide
from kvsim.core.record import Record
from kvsim.errors import PolicyError

#: Metrics of a replay that may predict the outcome of a live run.
OFFLINE = (
    *("layer_error", "layer_error_relative", "output_error", "concat_error"),
    *("concat_error_absolute", "retained_mass", "topk_recall", "wipeout", "retained_iou"),
    *("needle_recall", "needle_wipeout", "global_eviction", "oracle_regret"),
)
#: Outcomes of a live run.
OUTCOMES = ("response_kl", "nll_increase", "top_agreement", "answer_right")

#: Errors that both loops have in each layer.
ERRORS = ("output_error", "layer_error")

#: Columns that distinguish cells.
CELL = KEYS[:5]


def rank_correlations(
    replayed: pl.DataFrame,
    live: pl.DataFrame,
    outcomes: Sequence[str] = OUTCOMES,
    offline: Sequence[str] = OFFLINE,
) -> pl.DataFrame:
    """Spearman correlation of each metric of the replay with each outcome of the live run.

    Positive where the replay orders cells as the model does: signs are turned by `Metric.better`.

    Returns:
        A row per metric and outcome that have values: `between`, `between_low`, `between_high`, the
        correlation over cells of their means over prompts; `within`, `within_low`, `within_high`,
        the mean over prompts of the correlation over the cells of a prompt; `cells`, `prompts`,
        and `varied`, the prompts in which both vary. Null where there are not three cells, or
        nothing varies.

    Raises:
        PolicyError: no cell of both Tables evicts anything.
    """
    kept, rows = evicting(replayed, live), []
    of_replay = {name: cell_values(replayed, name) for name in offline}
    of_live = {name: cell_values(live, name) for name in outcomes}
    for name, x in of_replay.items():
        for outcome, y in of_live.items():
            values = _matrices(kept, x, y)
            if values[0].size:
                named = {"metric": name, "outcome": outcome}
                rows.append(named | _correlation(*values, _direction(name) * _direction(outcome)))
    return pl.DataFrame(rows, schema=_CORRELATIONS)


def errors_by_layer(
    replayed: pl.DataFrame, live: pl.DataFrame, metrics: Sequence[str] = ERRORS
) -> pl.DataFrame:
    """Errors of both loops in each layer, over the same prompts and cells.

    Returns:
        A row per metric and layer: `open`, `closed`, means over cells and prompts; `ratio`, `low`,
        `high`: the sum over cells in the live run by that in the replay, mean over prompts;
        `between`: the rank correlation over cells of their means over prompts; `prompts`.

    Raises:
        PolicyError: no cell of both Tables evicts anything.
    """
    kept, rows = evicting(replayed, live), []
    for name in metrics:
        layers = replayed.filter(metric=name)["layer"].unique().sort().drop_nulls()
        for layer in layers:
            loops = (cell_values(table.filter(layer=layer), name) for table in (replayed, live))
            x, y = _matrices(kept, *loops)
            if not x.size:
                continue
            open_, closed = np.nansum(x, axis=1), np.nansum(y, axis=1)
            ratio = Interval.of(closed[open_ > 0] / open_[open_ > 0])
            rows.append(
                {"metric": name, "layer": layer, "open": np.nanmean(x), "closed": np.nanmean(y)}
                | {"ratio": ratio.mean, "low": ratio.low, "high": ratio.high, "prompts": ratio.n}
                | {"between": float(_spearman(_means(x)[None], _means(y)[None])[0])}
            )
    return pl.DataFrame(rows, schema=_LAYERS).fill_nan(None)


def kept_agreement(replayed: Iterable[Record], live: Iterable[Record]) -> pl.DataFrame:
    """Agreement of the kept sets of both loops after each event, of each layer and head.

    Returns:
        A row per trace, cell, event, layer and head: `agreement`, |A and B| / |A or B| of the two
        kept sets, and `chance`, the same of two random sets of their sizes that share as many
        entries as expected. Events are those of either loop.

    Raises:
        PolicyError: no record of one loop has its counterpart in the other.
    """
    lived = {_key(record): record for record in live}
    pairs = [(each, lived[_key(each)]) for each in replayed if _key(each) in lived]
    if not pairs:
        raise PolicyError(
            "no record of the replay has its live run; expected the same traces, policies, "
            "budgets and schedule in both"
        )
    return wide((part for pair in pairs for part in _agreements(*pair)), _AGREEMENT)


def _key(record: Record) -> tuple[object, ...]:
    params = json.dumps(dict(record.params), sort_keys=True)
    cell = record.trace, record.digest, record.policy, params, record.budget, record.layers
    return *cell, record.interval, record.prefill, record.compress


def _agreements(replayed: Record, lived: Record) -> Iterator[dict[str, Any]]:
    """Columns of the rows of each event."""
    places, heads = np.indices(replayed.evicted_at.shape[:2])
    layers, params = np.asarray(replayed.layers)[places], json.dumps(dict(replayed.params))
    of: dict[str, Any] = {name: getattr(replayed, name) for name in ("trace", "policy", "budget")}
    of |= {"params": params, "layer": layers, "head": heads}
    for row in sorted({*replayed.events, *lived.events}):
        a, b = (record.retained(row) for record in (replayed, lived))
        sizes = a.sum(-1), b.sum(-1)
        both, expected = (a & b).sum(-1), sizes[0] * sizes[1] / (row + 1)
        shares = [x / (sum(sizes) - x).clip(min=1) for x in (both, expected)]
        yield of | {"event": row, "agreement": shares[0], "chance": shares[1]}


def cell_values(table: pl.DataFrame, name: str) -> pl.DataFrame:
    """Values of the main variant of a metric, one for each prompt and cell that evicts."""
    of = table.filter(
        pl.col("policy").is_not_null() & (pl.col("policy") != "full"),
        metric=name,
        variant=METRICS[name].main,
    )
    return per_prompt(of).select("trace", *CELL, "value").drop_nulls("value")


def evicting(replayed: pl.DataFrame, live: pl.DataFrame) -> pl.DataFrame:
    """Prompts and cells of both Tables in which the replay evicts something."""
    errors = cell_values(replayed, "output_error").filter(pl.col("value") > 0)
    of = ["trace", *CELL]
    lived = live.with_columns(asked=REQUESTED).select(of).unique()
    kept = errors.join(lived, on=of, how="semi", nulls_equal=True, maintain_order="left")
    if not kept.height:
        raise PolicyError(
            "no cell of both Tables evicts anything; expected the same traces, policies, budgets "
            "and schedule in both, and output_error in that of the replay"
        )
    return kept.select(of)


def _matrices(kept: pl.DataFrame, x: pl.DataFrame, y: pl.DataFrame) -> tuple[Floats, Floats]:
    """Values of both [prompt, cell], NaN where one of them has none."""
    on = ["trace", *CELL]
    pairs = kept
    for name, values in (("x", x), ("y", y)):
        pairs = pairs.join(
            values.rename({"value": name}), on=on, nulls_equal=True, maintain_order="left"
        )
    rows, columns = (
        np.unique([str(row) for row in pairs.select(names).rows()], return_inverse=True)[1]
        for names in (["trace"], CELL)
    )
    out = np.full((2, rows.max(initial=-1) + 1, columns.max(initial=-1) + 1), np.nan)
    out[:, rows, columns] = pairs.select("x", "y").to_numpy().T
    return out[0], out[1]


def _direction(name: str) -> int:
    return -1 if METRICS[name].better == "lower" else 1


def _correlation(x: Floats, y: Floats, sign: int) -> dict[str, float | int | None]:
    """Correlations between cells and within prompts of values [prompt, cell]."""
    n = len(x)
    within = Interval.of(sign * _spearman(x, y))
    numbers = {"within": within.mean, "within_low": within.low, "within_high": within.high}
    numbers["between"] = sign * _spearman(_means(x)[None], _means(y)[None])[0]
    drawn = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), RESAMPLES)
    resampled = sign * _spearman(_means(x, drawn), _means(y, drawn))
    resampled = resampled[~np.isnan(resampled)]
    if n >= FEWEST and len(resampled):
        numbers["between_low"], numbers["between_high"] = np.quantile(resampled, [0.025, 0.975])
    filled = {name: None if np.isnan(x) else float(x) for name, x in numbers.items()}
    return filled | {"cells": x.shape[1], "prompts": n, "varied": within.n}


def _means(values: Floats, drawn: Floats | Ints | None = None) -> Floats:
    """Means over prompts of [prompt, cell], each prompt as often as it was drawn [..., prompt]."""
    weights = np.ones(len(values)) if drawn is None else drawn
    present = ~np.isnan(values)
    with np.errstate(invalid="ignore"):  # a cell that no prompt of a resample has is NaN
        out: Floats = (weights @ np.where(present, values, 0)) / (weights @ present)
    return out


def _spearman(x: Floats, y: Floats) -> Floats:
    """Spearman correlation of each row [n, cell], NaN left out; NaN where one is constant."""
    out = np.full(len(x), np.nan)
    missing = np.isnan(x) | np.isnan(y)
    whole = ~missing.any(1)
    if whole.any() and x.shape[1] >= _LEAST:
        out[whole] = spearman(x[whole], y[whole])
    for row in np.flatnonzero(~whole):
        there = ~missing[row]
        if there.sum() >= _LEAST:
            out[row] = spearman(x[row, there], y[row, there])
    return out


#: Cells of which a rank correlation says something.
_LEAST = 3

_CORRELATIONS = {
    **dict.fromkeys(("metric", "outcome"), pl.String),
    **dict.fromkeys(("between", "between_low", "between_high"), pl.Float64),
    **dict.fromkeys(("within", "within_low", "within_high"), pl.Float64),
    **dict.fromkeys(("cells", "prompts", "varied"), pl.Int64),
}
_LAYERS = {
    "metric": pl.String,
    "layer": pl.Int64,
    **dict.fromkeys(("open", "closed", "ratio", "low", "high", "between"), pl.Float64),
    "prompts": pl.Int64,
}
_AGREEMENT = {
    **dict.fromkeys(("trace", "policy", "params"), pl.String),
    **dict.fromkeys(("budget", "event", "layer", "head"), pl.Int64),
    **dict.fromkeys(("agreement", "chance"), pl.Float64),
}
