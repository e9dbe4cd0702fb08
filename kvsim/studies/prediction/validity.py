"""Predictive validity of a replay: its values next to values of the running model.

Functions take two Tables, or two lists of records, of the same traces, policies, budgets and
schedule: one of a replay (`kvsim.sweeps.replay_all`), one of live runs (`kvsim.live`). A cell is a
policy with its parameters at a budget. Cells of a prompt in which nothing is evicted say nothing
about a metric and are left out. Correlations are over policies at one budget: over several, the
budget itself would order both sides.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import polars as pl

from kvsim.analysis.arrays import Floats
from kvsim.analysis.attention.agreement import spearman
from kvsim.analysis.evidence import OUTCOMES
from kvsim.analysis.registry import METRICS
from kvsim.analysis.results import REQUESTED
from kvsim.analysis.significance import FEWEST, rank_correlation
from kvsim.analysis.summaries import KEYS, Interval, per_prompt
from kvsim.analysis.wide_table import wide
from kvsim.core.record import Record
from kvsim.errors import PolicyError

#: Metrics of a replay that may predict the outcome of a live run.
OFFLINE = (
    *("weighted_error", "layer_error", "layer_error_relative", "output_error", "concat_error"),
    *("retained_mass", "wipeout", "retained_iou", "needle_recall", "needle_wipeout"),
)
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
    """Rank correlation of each metric of the replay with each outcome of the live run, by budget.

    Positive where the replay orders policies as the model does: signs are turned by
    `Metric.better`. `random`, which orders itself last, does not count.

    Returns:
        A row per budget (as requested), metric and outcome: the numbers of `correlation`, over the
        `policies` (with parameters and schedule) and the `prompts` that have values of all of them.

    Raises:
        PolicyError: no cell of both Tables evicts anything.
    """
    kept, rows = evicting(replayed, live).filter(pl.col("policy") != "random"), []
    for name in offline:
        x = _joined(kept, x=(replayed, name))
        for outcome in outcomes if x.height else ():
            for (budget,), cells in _joined(x, y=(live, outcome)).group_by(
                "requested", maintain_order=True
            ):
                policies = cells.select(CELL).n_unique()
                whole = cells.filter(pl.len().over("trace") == policies).sort("trace", *CELL)
                values = (
                    _sign(metric) * whole[column].to_numpy().reshape(-1, policies)
                    for column, metric in (("x", name), ("y", outcome))
                )
                rows.append(
                    {"budget": budget, "metric": name, "outcome": outcome, "policies": policies}
                    | {"prompts": whole["trace"].n_unique()}
                    | correlation(*values)
                )
    return pl.DataFrame(rows, schema=_CORRELATIONS)


def correlation(x: Floats, y: Floats) -> dict[str, float | None]:
    """Spearman correlations over policies of values [prompt, policy] at one budget.

    Returns:
        `between`, of means over prompts, with the ends `low` and `high` of the interval of
        `rank_correlation`, where it has one, and `within`, the mean over prompts of the correlation
        within each. All None for fewer than `FEWEST` prompts or `POLICIES` policies; a prompt in
        which nothing varies does not count.
    """
    if len(x) < FEWEST or x.shape[1] < POLICIES:
        return dict.fromkeys(_NUMBERS)
    within = spearman(x, y)
    within = within[~np.isnan(within)]
    mean = within.mean() if len(within) >= FEWEST else np.nan
    numbers = zip(_NUMBERS, (*rank_correlation(x, y), float(mean)), strict=True)
    return {name: None if np.isnan(number) else number for name, number in numbers}


def errors_by_layer(
    replayed: pl.DataFrame, live: pl.DataFrame, metrics: Sequence[str] = ERRORS
) -> pl.DataFrame:
    """Errors of both loops in each layer, over the same prompts and cells.

    Returns:
        A row per metric and layer: `open`, `closed`, means over cells and prompts; `ratio`, `low`,
        `high`: the sum over cells in the live run by that in the replay, mean over prompts, with
        its 95 % bootstrap interval over them; `prompts`.

    Raises:
        PolicyError: no cell of both Tables evicts anything.
    """
    kept, rows = evicting(replayed, live), []
    for name in metrics:
        for layer in replayed.filter(metric=name)["layer"].unique().sort().drop_nulls():
            loops = (table.filter(layer=layer) for table in (replayed, live))
            tables = {loop: (table, name) for loop, table in zip(_LOOPS, loops, strict=True)}
            errors = _joined(kept, **tables)
            sums = errors.group_by("trace").agg(pl.col(_LOOPS).sum()).filter(pl.col("open") > 0)
            ratio = Interval.of((sums["closed"] / sums["open"]).to_numpy())
            rows.append(
                {
                    "metric": name,
                    "layer": layer,
                    **errors.select(pl.col(_LOOPS).mean()).row(0, named=True),
                }
                | {"ratio": ratio.mean, "low": ratio.low, "high": ratio.high, "prompts": ratio.n}
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
    return *cell, record.schedule


def _agreements(replayed: Record, lived: Record) -> Iterator[dict[str, Any]]:
    """Columns of the rows of each event."""
    places, heads = np.indices(replayed.evicted_at.shape[:2])
    layers, params = np.asarray(replayed.layers)[places], json.dumps(dict(replayed.params))
    terms: dict[str, Any] = {"params": params, "layer": layers, "head": heads}
    terms |= {name: getattr(replayed, name) for name in ("trace", "policy", "budget")}
    for row in sorted({*replayed.events, *lived.events}):
        a, b = (record.retained(row) for record in (replayed, lived))
        sizes = a.sum(-1), b.sum(-1)
        both, expected = (a & b).sum(-1), sizes[0] * sizes[1] / (row + 1)
        shares = [x / (sum(sizes) - x).clip(min=1) for x in (both, expected)]
        yield terms | {"event": row, "agreement": shares[0], "chance": shares[1]}


def cell_values(table: pl.DataFrame, name: str) -> pl.DataFrame:
    """Values of the main variant of a metric, one for each prompt and cell that evicts."""
    chosen = table.filter(
        pl.col("policy").is_not_null() & (pl.col("policy") != "full"),
        metric=name,
        variant=METRICS[name].main,
    )
    return per_prompt(chosen).select("trace", *CELL, "value").drop_nulls("value")


def evicting(replayed: pl.DataFrame, live: pl.DataFrame) -> pl.DataFrame:
    """Prompts and cells of both Tables in which the replay evicts something."""
    errors = cell_values(replayed, "output_error").filter(pl.col("value") > 0)
    keys = ["trace", *CELL]
    lived = live.with_columns(requested=REQUESTED).select(keys).unique()
    kept = errors.join(lived, on=keys, how="semi", nulls_equal=True, maintain_order="left")
    if not kept.height:
        raise PolicyError(
            "no cell of both Tables evicts anything; expected the same traces, policies, budgets "
            "and schedule in both, and output_error in that of the replay"
        )
    return kept.select(keys)


def _joined(kept: pl.DataFrame, **columns: tuple[pl.DataFrame, str]) -> pl.DataFrame:
    """Prompts and cells with a column of values for each Table and metric, where all have one."""
    for column, (table, name) in columns.items():
        values = cell_values(table, name).rename({"value": column})
        kept = kept.join(values, on=["trace", *CELL], nulls_equal=True, maintain_order="left")
    return kept


def _sign(name: str) -> int:
    return -1 if METRICS[name].better == "lower" else 1


#: Fewest policies of which a perfect order is beyond chance: 2 of the 5! orders.
POLICIES = 5

_LOOPS, _NUMBERS = ("open", "closed"), ("between", "low", "high", "within")
_CORRELATIONS = {
    **dict.fromkeys(("budget", "metric", "outcome"), pl.String),
    **dict.fromkeys(_NUMBERS, pl.Float64),
    **dict.fromkeys(("policies", "prompts"), pl.Int64),
}
_LAYERS = {
    "metric": pl.String,
    "layer": pl.Int64,
    **dict.fromkeys(("open", "closed", "ratio", "low", "high"), pl.Float64),
    "prompts": pl.Int64,
}
_AGREEMENT = {
    **dict.fromkeys(("trace", "policy", "params"), pl.String),
    **dict.fromkeys(("budget", "event", "layer", "head"), pl.Int64),
    **dict.fromkeys(("agreement", "chance"), pl.Float64),
}
