"""Summaries of a Table: means over prompts, and their intervals.

Prompts are the unit. Values are first averaged over layers, heads and events within a trace (or
summed over layers by `Metric.layers`, or taken at the last event by `Metric.over_events`), so that
a long trace counts as much as a short one (macro average). Intervals describe the variation over
prompts, not over models or training seeds. A trace without a value of a metric is counted as
requested and not measured, never as zero.

Functions take a Table (`kvsim.measure`, or of a sweep), and as `by` more columns that split results
(`split_by`), such as `layer`, `turn` or `domain`. Intervals are 95 % bootstrap intervals over
traces, null for fewer than 6 (`significance.few`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from kvsim.analysis.arrays import Floats
from kvsim.analysis.folder import Tabular, as_table
from kvsim.analysis.registry import METRICS, metric
from kvsim.analysis.results import REQUESTED, mixed
from kvsim.analysis.significance import FEWEST
from kvsim.core.arguments import listed
from kvsim.errors import PolicyError, suggest
from kvsim.schema import FIDELITY

RESAMPLES = 4000

#: Values that differ by at most this share are equal, because sums depend on their order.
ROUNDING = 1e-6

# Limit of resampled values in memory.
_DRAWN = 1 << 22

#: Columns that distinguish results of a trace; `requested` is the requested budget.
KEYS = ("policy", "params", "requested", "interval", "prefill", "metric", "variant", "unit")
STAGES = ("early", "middle", "late")


def sees_more(seen: str, by: Sequence[str]) -> pl.Expr:
    """Whether rows see over 5 % more entries (column `seen`) than under another policy of a group.

    by: columns of a group. False where `seen` is null.
    """
    return (pl.col(seen) > 1.05 * pl.col(seen).min().over(by)).fill_null(value=False)


@dataclass(frozen=True)
class Interval:
    """A mean over prompts and its 95 % bootstrap interval; `n` prompts had a value."""

    mean: float
    low: float
    high: float
    n: int

    @classmethod
    def of_each(cls, rows: Sequence[Floats]) -> list[Interval]:
        """Intervals of many results, each with one value per prompt [prompt], NaN for missing ones.

        Percentiles of the means of 4,000 resamples of the prompts, the same for equal numbers of
        prompts (Efron 1979, Ann. Statist. 7:1). Fewer than 6 prompts have a mean and no interval.
        """
        present = [values[~np.isnan(values)] for values in rows]
        sizes = np.array([len(values) for values in present], np.int64)
        intervals = [cls(np.nan, np.nan, np.nan, 0)] * len(present)
        for size in np.unique(sizes[sizes > 0]).tolist():
            places = np.flatnonzero(sizes == size)
            values = np.stack([present[place] for place in places])
            numbers = np.stack([values.mean(1), *_bootstrap(values)], axis=1)
            # rounding may move a mean of equal values past them
            numbers = numbers.clip(*(edge(1, keepdims=True) for edge in (values.min, values.max)))
            for place, (mean, low, high) in zip(places, numbers.tolist(), strict=True):
                intervals[place] = cls(mean, low, high, size)
        return intervals

    def text(self, form: str) -> str:
        """The mean, and the interval in brackets where there is one; empty without a value."""
        if not self.n:
            return ""
        sign = form[: form[:1] in "+- "]
        form = f"{sign}z{form[len(sign) :]}"  # no minus before a rounded 0
        mean, low, high = (format(x, form) for x in (self.mean, self.low, self.high))
        return mean if np.isnan(self.low) else f"{mean} [{low}, {high}]"


def _bootstrap(values: Floats) -> tuple[Floats, Floats]:
    """Ends of the 95 % percentile intervals of means of [result, prompt]; NaN for too few."""
    if values.shape[1] < FEWEST:
        return (np.full(len(values), np.nan),) * 2
    n, tail = values.shape[1], (1 - 0.95) / 2
    rng, batch = np.random.default_rng(0), max(1, _DRAWN // values.size)
    drawn = (
        rng.integers(0, n, (min(batch, RESAMPLES - start), n))
        for start in range(0, RESAMPLES, batch)
    )
    means = np.concatenate([np.mean(values[:, places], axis=2) for places in drawn], axis=1)
    low, high = np.quantile(means, (tail, 1 - tail), axis=1)
    return low, high


def stages(table: pl.DataFrame, n_layers: int | None = None) -> pl.DataFrame:
    """Return the Table with a column `stage`; null where a value has no layer.

    Early, middle or late: the first and the last round(2 L / 7) layers, and those between. AMS,
    arXiv 2605.23200, Table 14: 0-7, 8-19 and 20-27 of 28.

    n_layers: of the model; by default one more than the last layer of each trace.
    """
    layer = pl.col("layer").cast(pl.Int64)
    total = layer.max().over("trace") + 1 if n_layers is None else pl.lit(n_layers)
    edge = (2 * total / 7).round()
    outer = pl.when(layer < edge).then(pl.lit("early")).when(layer >= total - edge)
    stage = pl.when(layer < total).then(outer.then(pl.lit("late")).otherwise(pl.lit("middle")))
    return table.with_columns(stage=stage.cast(pl.Enum(STAGES)))


def main_variants(table: pl.DataFrame, metrics: Iterable[str]) -> pl.DataFrame:
    """Return the values of the main variants of metrics of policies."""
    wanted = (
        (pl.col("metric") == name) & (pl.col("variant") == metric(name).main) for name in metrics
    )
    return table.filter(
        pl.col("policy").is_not_null() & pl.any_horizontal(pl.lit(value=False), *wanted)
    )


#: Columns that values of the heads of one layer share.
_LAYER = (
    *("trace", "policy", "params", "budget", "share", "interval", "prefill"),
    *("metric", "variant", "unit", "layer"),
)


def over_events(table: pl.DataFrame) -> pl.DataFrame:
    """The Table as without `events`; metrics that list each event (`over_events`) are left out."""
    of = {name: entry.over_events for name, entry in METRICS.items() if entry.over_events != "mean"}
    last, each = (pl.col("metric").is_in([x for x in of if of[x] == k]) for k in ("last", "each"))
    table, event = table.filter(~each), pl.col("event")
    latest = event.max().over(*_LAYER)
    table = table.filter(~(last & (event < latest)).fill_null(value=False)).with_row_index("_row")
    listed = ~last & event.is_not_null()
    place = [name for name in table.columns if name not in ("_row", "event", "value", "chance")]
    kept = pl.col("_row").min(), event.first(), pl.col("value", "chance").mean()
    means = table.filter(listed).group_by(place).agg(*kept).select(table.columns)
    return pl.concat([table.filter(~listed), means]).sort("_row").drop("_row")


def per_prompt(table: pl.DataFrame, by: str | Sequence[str] = ()) -> pl.DataFrame:
    """Return one row per trace and result: the mean over layers, heads and events.

    Layers of a metric whose `Metric.layers` is "sum" are added up, and of one whose
    `Metric.over_events` is "last" the last event counts, unless `by` names the event.

    Returns:
        Columns `by`, `KEYS`, `trace`, `value`, `chance`, and `fidelity`, the weakest of the values.

    Raises:
        PolicyError: the values have no common mean (`mixed`).
    """
    table, by = split_by(table, by)
    if remark := mixed(table, by):
        raise PolicyError(remark)
    if "event" not in by:
        table = over_events(table)
    keys = [*by, *KEYS, "trace"]
    return (
        over_layers(table.with_columns(requested=REQUESTED), keys)
        .group_by(keys, maintain_order=True)
        .agg(pl.col("value").mean(), pl.col("chance").mean(), WEAKEST)
    )


def over_layers(table: pl.DataFrame, keys: Sequence[str]) -> pl.DataFrame:
    """The Table with values scaled so that the mean over a result is the value of all its layers.

    keys: columns that distinguish results. Only metrics whose layers are summed change.
    """
    added_up = [name for name, entry in METRICS.items() if entry.layers == "sum"]
    summed = table["metric"].is_in(added_up)
    if not summed.any():
        return table
    in_layer = list(dict.fromkeys([*keys, "layer"]))
    value = pl.col("value")
    times = value.count().over(keys) / value.count().over(in_layer)
    scaled = table.filter(summed).select(value * times)["value"]
    return table.with_columns(table["value"].clone().scatter(summed.arg_true(), scaled))


#: Fidelities from the strongest; a mean has the weakest of its values.
_STRENGTH = pl.Enum((FIDELITY[0], *FIDELITY[:0:-1]))
_LABEL = pl.Enum(FIDELITY)
_LEVEL = pl.col("fidelity").cast(pl.String).cast(_STRENGTH)
#: The weakest label of several values.
WEAKEST = _LEVEL.max().cast(pl.String).cast(_LABEL)


def averages(
    table: Tabular,
    by: str | Sequence[str] = (),
    *,
    metrics: str | Sequence[str] | None = None,
) -> pl.DataFrame:
    """Return means over prompts with their 95 % intervals, one row per result.

    Args:
        table: of `kvsim.measure`, or a run or its folder.
        by: columns of the Table to split results by, or `stage` (early, middle and late layers).
        metrics: by name, their main variants; by default every value of the Table.

    Returns:
        Columns `by`, `KEYS`, `mean`, `low`, `high`, `n` measured traces `of` all requested ones,
        `chance` (mean), `fidelity`.

    Example:
        >>> run = kvsim.sweep(traces="sample", policies=["tova", "h2o"], budgets=64)
        >>> means = kvsim.averages(run, by="stage", metrics="output_error")
        >>> means.filter(policy="h2o")["stage"].to_list()
        ['early', 'middle', 'late']
    """
    table, by = split_by(as_table(table), by)
    if metrics is not None:
        table = main_variants(table, listed(metrics))
    values = per_prompt(table, by)
    # values without a policy are of every trace
    traces = pl.col("trace").n_unique()
    every = traces.over(*by) if by else traces
    counts = pl.when(pl.col("policy").is_null()).then(every).otherwise(traces.over(*by, *KEYS[:5]))
    values = values.with_columns(of=counts)
    more = [pl.col("of").first().cast(pl.Int64), pl.col("chance").mean(), WEAKEST]
    keys = [*by, *KEYS]
    grouped = values.group_by(keys, maintain_order=True).agg(*more, _values=pl.col("value"))
    rows = [x.to_numpy().astype(np.float64) for x in grouped["_values"]]  # NaN for null
    numbers = pl.DataFrame([vars(x) for x in Interval.of_each(rows)], schema=_NUMBERS)
    return grouped.with_columns(numbers.with_columns(pl.selectors.float().fill_nan(None))).select(
        *keys, *_NUMBERS, pl.exclude(*keys, *_NUMBERS, "_values")
    )


def split_by(table: pl.DataFrame, by: str | Sequence[str]) -> tuple[pl.DataFrame, list[str]]:
    """Return the Table with the columns `by`, and the names of the ones that `KEYS` lacks.

    Values without a stage are left out. Raises PolicyError where the Table lacks a column, and for
    a column of values.
    """
    given: list[str] = listed(by)
    names = [*dict.fromkeys(given)]
    if "stage" in names and "stage" not in table:
        table = stages(table).drop_nulls("stage")
    columns = [name for name in table.columns if name not in ("value", "chance", "fidelity")]
    if missing := [name for name in names if name not in columns]:
        raise PolicyError(
            f"the table has no column {missing[0]!r}{suggest(missing[0], [*columns, 'stage'])} to "
            f"split by; it has {', '.join(columns)}"
        )
    return table, [name for name in names if name not in (*KEYS, "trace")]


_NUMBERS = {"mean": pl.Float64, "low": pl.Float64, "high": pl.Float64, "n": pl.Int64}


#: Metrics of the cost of a cache, and their axis labels.
COSTS = {
    "entries_seen": "entries that a row sees, mean",
    "bytes_held": "bytes of the cache, mean over rows",
    "bytes_read": "bytes of the cache that a row reads, mean",
}


def against_entries(means: pl.DataFrame, name: str, cost: str = "entries_seen") -> pl.DataFrame:
    """Return the means of one metric with the cost of the cache, and the Pareto front.

    Args:
        means: of `averages`, with the metric and with the cost.
        name: of the metric.
        cost: one of `COSTS`; by default the visible entries of a row.

    Returns:
        The rows of the metric with a cost, with its mean `seen`, and `best`, whether the result is
        on the front; always False for a metric without a better direction.
    """
    keys = [key for key in KEYS[:5] if key in means.columns]  # columns of the result
    sizes = means.filter(metric=cost).select(*keys, seen="mean")
    sizes = sizes.drop_nulls("seen")
    points = means.filter(metric=name).join(sizes, on=keys, nulls_equal=True, maintain_order="left")
    better = METRICS[name].better
    best = front(points, higher=better == "higher") & (better is not None)
    return points.with_columns(best=best)


def front(points: pl.DataFrame, *, higher: bool = False) -> pl.Series:
    """Return which points (`seen`, `mean`) no other point beats in one and matches in the other.

    higher: a larger mean is better. Means that differ only by rounding are equal.
    """
    seen = points["seen"].to_numpy()
    loss = points["mean"].to_numpy() * (-1 if higher else 1)
    rounding = ROUNDING * abs(loss)
    as_good = (seen[:, None] <= seen) & (loss[:, None] <= loss + rounding)
    better = (seen[:, None] < seen) | (loss[:, None] < loss - rounding)
    return pl.Series(~(as_good & better).any(0))
