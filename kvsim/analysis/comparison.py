"""The best policy at a budget, how sure that is, and the gain of a larger budget.

Prompts are the unit, as in `summaries`: values are averaged within a prompt first. All means of a
comparison are over the same prompts, those that every result has a value for.

Differences are tested by flipping signs, and p-values corrected for the number of comparisons
(`significance`). Where the best policy is that of the data, every pair of policies counts as
compared, at every budget: the best of many equal ones looks better than each of the others by
chance.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import polars as pl
import scipy

from kvsim.analysis.arrays import Floats
from kvsim.analysis.evidence import EVIDENCE, ranking
from kvsim.analysis.folder import Tabular, as_table
from kvsim.analysis.fronts import front
from kvsim.analysis.registry import metric as metric_named
from kvsim.analysis.results import (
    HELD,
    REQUESTED,
    extent,
    is_live,
    labelled,
    mixed,
    of_policies,
)
from kvsim.analysis.significance import (
    ALPHA,
    FEWEST,
    holm,
    prompts_needed,
    sign_flip,
    undecidable,
)
from kvsim.analysis.summaries import (
    KEYS,
    ROUNDING,
    WEAKEST,
    Interval,
    layers_of,
    main_variants,
    per_prompt,
    sees_more,
    uneven,
)
from kvsim.core.delegates import Displayed
from kvsim.core.parameters import is_finite
from kvsim.errors import PolicyError, suggest
from kvsim.schema import FIDELITY, PREFILL, first_of, plural, schedule

VERDICTS = ("better", "worse", "undecided", "equal")

#: Columns of `Comparison.table`, one row per policy and budget.
COLUMNS: dict[str, Any] = {
    **dict.fromkeys(("policy", "params", "requested"), pl.String),
    "entries": pl.Float64,
    "per_query_head": pl.Boolean,
    "interval": pl.Int64,
    "prefill": pl.Boolean,
    **dict.fromkeys(("metric", "unit"), pl.String),
    "fidelity": pl.Enum(FIDELITY),
    "rank": pl.Int64,
    **dict.fromkeys(("mean", "low", "high"), pl.Float64),
    **dict.fromkeys(("n", "leads"), pl.Int64),
    "against": pl.String,
    **dict.fromkeys(("difference", "difference_low", "difference_high"), pl.Float64),
    **dict.fromkeys(("p", "p_holm"), pl.Float64),
    "verdict": pl.Enum(VERDICTS),
    "needed": pl.Int64,
    "seen": pl.Float64,
    **dict.fromkeys(("unfair", "front"), pl.Boolean),
    "wipeout": pl.Float64,
    "wipeout_front": pl.Boolean,
    "bound": pl.Float64,
    **dict.fromkeys(("meets", "smallest"), pl.Boolean),
}


@dataclass(frozen=True)
class Comparison(Displayed):
    """The outcome of `compare`.

    table: one row per policy and budget, by budget and rank; its columns are those of `compare`.
    better: the direction in which `metric` is better. traces: the prompts behind every mean.
    comparisons: the number that p-values are corrected for. remarks: limits of the comparison.
    unranked: candidates without a value of `metric`. evidence: by other metrics of `EVIDENCE`, the
    best of the ranked policies at each budget, over the same prompts.
    """

    table: pl.DataFrame
    metric: str
    better: str
    against: str | None
    target: float | None
    traces: tuple[str, ...]
    comparisons: int
    remarks: tuple[str, ...]
    unranked: tuple[str, ...]
    evidence: Mapping[str, Mapping[str, tuple[str, ...]]]

    def __repr__(self) -> str:
        return f"Comparison({self.metric!r}, {extent(self.table)}, prompts={len(self.traces)})"


def compare(
    table: Tabular,
    metric: str | None = None,
    *,
    against: str | None = None,
    target: float | None = None,
) -> Comparison:
    """Compare the policies of a Table by a metric, at each budget, over the same prompts.

    References, that is policies that no budget binds and those that look ahead, are listed without
    a rank and compared with nothing, unless `against` names one.

    Args:
        table: of `kvsim.measure` or a sweep, with several traces as prompts; or a run, or its
            folder.
        metric: by name, one with a better direction; its main variant. By default the first of
            `ranking`.
        against: the policy that others are compared with, as it is labelled (`tova`, or
            `ams (window=8)` where the Table has several of one name); by default, at each budget,
            the best one.
        target: the value that the metric is to stay below, or above where higher is better.

    Returns:
        A Comparison. Its table has for each policy (its label, `params`, schedule) and budget (as
        `requested`, and its mean in `entries`; `per_query_head`, where each query head has as
        many): `rank`; the `mean` over `n` prompts with its 95 %
        bootstrap interval; `leads`, on how many prompts no other is better; the paired `difference`
        to `against` with its interval, its p-value and that after correction, the `verdict`, and
        where it is undecided how many prompts are `needed` if the difference stays as it is (at
        most 10,000); `seen`, the mean entries that a row sees, and whether they are over 5 % more
        than under another policy at this budget (`unfair`); whether no other result has both fewer
        of them and a better mean (`front`), or less `wipeout` (`wipeout_front`). With a
        target: `bound`, the worse end of the 95 % t interval of the mean, whether this budget and
        all larger ones keep it on the right side (`meets`), and whether none is smaller
        (`smallest`).

    Raises:
        PolicyError: the metric has no better direction or the Table no values of it, no mean is
            over its values (`kvsim.analysis.results.mixed`), no prompt has values of all policies,
            `against` is none of them, or `target` is no finite number.
    """
    table = as_table(table)
    if remark := mixed(table):
        raise PolicyError(remark)
    metric = metric or next(ranking(table), EVIDENCE[0 if is_live(table) else -1])
    entry = metric_named(metric)
    if entry.better is None:
        raise PolicyError(
            f"{metric} has no better direction, so it ranks nothing; expected another metric, see "
            "`kvsim metrics`"
        )
    if target is not None and not is_finite(target):
        raise PolicyError(f"target is {target!r}; expected a value of {metric}, a finite number")
    higher = entry.better == "higher"
    table = labelled(table)
    facts = of_policies(table, "looks_ahead", "bounds", "per_query_head")
    outside = set(facts.filter(pl.col("looks_ahead") | ~HELD)["policy"])
    rows, values, traces, remarks = _values(table, metric)
    names = rows["policy"].unique(maintain_order=True).to_list()
    measured = table.drop_nulls(["policy", "value"])["policy"].unique(maintain_order=True)
    unranked = [x for x in measured if x not in names and x not in outside]
    if against is not None and against not in names:
        raise PolicyError(
            f"no policy {against!r}{suggest(against, names)} to compare with; there is "
            f"{', '.join(names)}"
        )
    references = [name for name in names if name in outside]
    ranked = ~rows["policy"].is_in(references).to_numpy()
    rows = _ranked(rows, values, ranked, higher=higher)
    rows, comparisons = _tested(rows, values, ranked, against, higher=higher)
    rows = _on_fronts(rows, table, traces, ranked, higher=higher)
    if target is not None:
        rows = _at_target(rows, values, ranked, target, higher=higher)
    remarks += _remarks(rows, references, comparisons)
    remarks += filter(None, [uneven(layers_of(table.filter(metric=metric)))])
    typed = [
        (pl.col(name) if name in rows else pl.lit(None)).cast(kind).alias(name)
        for name, kind in COLUMNS.items()
    ]
    rows = rows.select(typed).sort(
        "entries", "requested", "rank", nulls_last=True, maintain_order=True
    )
    candidates = rows.drop_nulls("rank")["policy"].to_list()
    shared = table.filter(pl.col("trace").is_in(traces), pl.col("policy").is_in(candidates))
    size = len(candidates), len(traces)
    leaders = {x: _leaders(shared, x, size) for x in EVIDENCE if x != metric}
    return Comparison(
        *(rows, metric, entry.better, against, target, traces, comparisons, tuple(remarks)),
        *(tuple(unranked), {x: each for x, each in leaders.items() if each}),
    )


def _leaders(table: pl.DataFrame, metric: str, size: tuple[int, int]) -> dict[str, tuple[str, ...]]:
    """The policies with the lowest mean at each budget; none unless all results [size] have one."""
    try:
        rows, values, _, _ = _values(table, metric)
    except PolicyError:
        return {}
    if values.shape != size:
        return {}
    rank, _ = _ranks(rows, values, np.ones(rows.height, bool), higher=False)
    first = rows.filter(pl.Series(rank == 1))
    best = first.group_by("requested", maintain_order=True).agg("policy")
    return {budget: tuple(names) for budget, names in best.iter_rows()}


def _values(
    table: pl.DataFrame, metric: str
) -> tuple[pl.DataFrame, Floats, tuple[str, ...], list[str]]:
    """Results with their budgets, their values [result, prompt], the prompts, and remarks."""
    of_metric = per_prompt(main_variants(table, [metric]))
    means = of_metric.drop_nulls("value")
    if not means.height:
        measured = table.drop_nulls(["policy", "value"])["metric"].unique(maintain_order=True)
        if measured.is_empty():
            raise PolicyError("the table has no results of policies, expected some; finish the run")
        raise PolicyError(
            f"the table has no value of {metric} for any policy; it has {', '.join(measured)}; "
            f"replay with --metric {metric}, or compare by another metric"
        )
    rows = means.select(KEYS).unique(maintain_order=True)
    names = means["trace"].unique(maintain_order=True)
    cells = rows.select(KEYS).join(names.to_frame(), how="cross", maintain_order="left_right")
    cells = cells.join(
        means.with_columns(pl.col("value").fill_nan(None)),
        on=[*KEYS, "trace"],
        how="left",
        nulls_equal=True,
        maintain_order="left",
    )
    values = cells["value"].fill_null(np.nan).to_numpy().reshape(rows.height, -1)
    shared = ~np.isnan(values).any(0)
    if not shared.any():
        raise PolicyError(
            f"no prompt has a value of {metric} for every policy and budget; compare runs of the "
            "same prompts, or fewer policies or budgets"
        )
    traces, left_out, remarks = names.filter(shared), names.filter(~shared).to_list(), []
    among = pl.col("trace").is_in(traces.to_list())
    sizes = (
        table.filter(among)
        .select("policy", "trace", "budget", "per_query_head", requested=REQUESTED)
        .unique()
        .group_by("policy", "requested")
        .agg(pl.col("per_query_head").any(), entries=pl.col("budget").mean())
    )
    weakest = of_metric.filter(among).group_by(KEYS).agg(WEAKEST)
    rows = rows.join(sizes, on=["policy", "requested"], how="left", maintain_order="left")
    rows = rows.join(weakest, on=KEYS, how="left", nulls_equal=True, maintain_order="left")
    if left_out:
        cell = cells.filter(pl.col("value").is_null(), trace=left_out[0]).row(0, named=True)
        remarks.append(
            f"{plural(len(left_out), 'prompt')} left out, because not every policy has a value: "
            f"{first_of(left_out)} ({cell['policy']} at budget {cell['requested']} has none)"
        )
    return rows, values[:, shared], tuple(traces), remarks


def _ranked(
    rows: pl.DataFrame, values: Floats, ranked: np.ndarray, *, higher: bool
) -> pl.DataFrame:
    """The results with their ranks, means, intervals and number of prompts that they lead on."""
    rank, leads = _ranks(rows, values, ranked, higher=higher)
    numbers = pl.DataFrame([vars(interval) for interval in Interval.of_each(list(values))])
    numbers = numbers.with_columns(rank=rank, leads=leads)
    return rows.with_columns(numbers.with_columns(pl.selectors.float().fill_nan(None)))


def _ranks(
    rows: pl.DataFrame, values: Floats, ranked: np.ndarray, *, higher: bool
) -> tuple[Floats, Floats]:
    """Rank of each result at its budget, and on how many prompts it leads; NaN for references."""
    better = _even(-values if higher else values)  # lower is better from here on
    means = _even(better.mean(1, keepdims=True))[:, 0]
    rank, leads = np.full((2, len(values)), np.nan)
    for places in _by_budget(rows, ranked):
        rank[places] = 1 + np.searchsorted(np.sort(means[places]), means[places])
        leads[places] = (better[places] == better[places].min(0)).sum(1)
    return rank, leads


def _even(values: Floats) -> Floats:
    """Values of results in prompts, equal where they differ by no more than rounding."""
    order = values.argsort(0, kind="stable")
    rising = np.take_along_axis(values, order, 0)
    for lower, upper in pairwise(rising):
        upper[...] = np.where(upper - lower <= ROUNDING * np.abs(upper), lower, upper)
    even = np.empty_like(values)
    np.put_along_axis(even, order, rising, 0)
    return even


def _by_budget(rows: pl.DataFrame, chosen: np.ndarray) -> list[np.ndarray]:
    """Places of the chosen results, by budget as requested."""
    sizes = rows["requested"].to_numpy()
    return [
        places
        for size in dict.fromkeys(sizes.tolist())
        if len(places := np.flatnonzero((sizes == size) & chosen))
    ]


def _tested(
    rows: pl.DataFrame, values: Floats, ranked: np.ndarray, against: str | None, *, higher: bool
) -> tuple[pl.DataFrame, int]:
    """The results with their differences to the base of their budget; the number of comparisons."""
    values, policies = _even(values), rows["policy"].to_numpy()
    pairs: list[tuple[int, int]] = []
    bases: dict[int, int] = {}
    for places in _by_budget(rows, ranked | (policies == against)):
        if against is None:
            pairs += combinations(places.tolist(), 2)
            base = places[rows["rank"].to_numpy()[places].argmin()]
        else:
            named = places[policies[places] == against]
            if not len(named):  # not replayed at this budget
                continue
            base = named[0]
            pairs += [(place, int(base)) for place in places.tolist() if place != base]
        bases |= {place: int(base) for place in places.tolist() if place != base}
    gaps = np.array([values[a] - values[b] for a, b in pairs]).reshape(-1, values.shape[1])
    p = sign_flip(gaps)
    corrected = dict(zip(pairs, zip(p.tolist(), holm(p).tolist(), strict=True), strict=True))
    tested: list[dict[str, object]] = [{} for _ in range(rows.height)]
    compared = [values[place] - values[base] for place, base in bases.items()]
    ends = Interval.of_each(compared)
    for (place, base), gap, end in zip(bases.items(), compared, ends, strict=True):
        p_values = corrected.get((place, base)) or corrected[base, place]
        verdict = _verdict(gap, p_values[1], higher=higher)
        undecided = verdict == "undecided" and len(gap) > 1
        needed = prompts_needed(gap, ALPHA / len(pairs)) if undecided else None
        cells = (policies[base], end.mean, end.low, end.high, *p_values, verdict, needed)
        tested[place] = dict(zip(_OF_PAIR, cells, strict=True))
    columns = pl.DataFrame(tested, schema={name: COLUMNS[name] for name in _OF_PAIR})
    return rows.with_columns(columns.with_columns(pl.selectors.float().fill_nan(None))), len(pairs)


_OF_PAIR = (
    *("against", "difference", "difference_low", "difference_high"),
    *("p", "p_holm", "verdict", "needed"),
)


def _verdict(gap: Floats, p: float, *, higher: bool) -> str:
    if not gap.any():
        return "equal"
    if p > ALPHA:
        return "undecided"
    return "better" if (gap.mean() > 0) == higher else "worse"


def _on_fronts(
    rows: pl.DataFrame,
    table: pl.DataFrame,
    traces: Sequence[str],
    ranked: np.ndarray,
    *,
    higher: bool,
) -> pl.DataFrame:
    """The results with entries seen and wipe-out, means over the same prompts, and the fronts."""
    keys, names = KEYS[:5], {"seen": "entries_seen", "wipeout": "wipeout"}
    values = per_prompt(
        main_variants(table, names.values()).filter(pl.col("trace").is_in(traces))
    ).drop_nulls("value")
    of = {column: pl.col("value").filter(pl.col("metric") == x) for column, x in names.items()}
    # null unless every prompt has a value
    whole = {x: pl.when(each.len() == len(traces)).then(each.mean()) for x, each in of.items()}
    means = values.group_by(keys).agg(**whole)
    rows = rows.join(means, on=keys, how="left", nulls_equal=True, maintain_order="left")
    rows = rows.with_columns(pl.when(pl.Series(ranked)).then("seen").alias("_seen"))
    rows = rows.with_columns(unfair=sees_more("_seen", ["requested"]))
    size = "seen" if rows.filter(ranked)["seen"].null_count() == 0 else "entries"
    for column, name, most in (("mean", "front", higher), ("wipeout", "wipeout_front", False)):
        best = np.full(rows.height, None, object)
        places = np.flatnonzero(ranked & rows[column].is_not_null().to_numpy())
        points = rows[places].select(seen=size, mean=column)
        best[places] = front(points, higher=most).to_list()
        rows = rows.with_columns(pl.Series(name, best.tolist(), pl.Boolean))
    return rows


def _at_target(
    rows: pl.DataFrame, values: Floats, ranked: np.ndarray, target: float, *, higher: bool
) -> pl.DataFrame:
    """The results with the bound of their mean, and which budgets keep it on the target's side.

    Budgets are tested from the largest one down until one fails, so that no correction for their
    number is due (Maurer, Hothorn and Lehmacher 1995). Null for fewer than `FEWEST` prompts.
    """
    n = values.shape[1]
    bound = np.full(len(values), np.nan)
    if n >= FEWEST:
        reach = -scipy.special.stdtrit(n - 1, 0.025) * values.std(1, ddof=1) / np.sqrt(n)
        bound = values.mean(1) + (-reach if higher else reach)
    inside = bound > target if higher else bound < target
    meets, smallest = (np.full(len(values), None, object) for _ in range(2))
    policies, entries = rows["policy"].to_numpy(), rows["entries"].to_numpy()
    decided = policies[ranked].tolist() if n >= FEWEST else []
    for name in dict.fromkeys(decided):
        places = np.flatnonzero((policies == name) & ranked)
        places = places[np.argsort(-entries[places], kind="stable")]
        kept = np.logical_and.accumulate(inside[places])
        meets[places] = kept
        smallest[places] = kept & ~np.append(kept[1:], False)
    return rows.with_columns(
        pl.Series("bound", bound, nan_to_null=True),
        pl.Series("meets", meets.tolist(), pl.Boolean),
        pl.Series("smallest", smallest.tolist(), pl.Boolean),
    )


def _remarks(rows: pl.DataFrame, references: Sequence[str], comparisons: int) -> list[str]:
    """Limits of a comparison, a sentence each without its full stop."""
    remarks = list(filter(None, [undecidable(rows["n"][0], comparisons)]))
    if references:
        remarks.append(
            f"{', '.join(references)}: listed without a rank, because no budget binds a reference "
            "or it looks ahead"
        )
    schedules: dict[str, dict[str, None]] = {}
    columns = ("policy", "params", "interval", "prefill")
    for name, params, interval, prefill in rows.drop_nulls("rank").select(columns).iter_rows():
        given = {x: value for x, value in json.loads(params).items() if x in PREFILL}
        after = schedule(interval, prefill=bool(prefill), **given)
        schedules.setdefault(after, {})[name] = None
    if len(schedules) > 1:
        parts = "; ".join(f"{', '.join(names)} after {at}" for at, names in schedules.items())
        remarks.append(f"policies evicted after different rows, which may show: {parts}")
    return remarks
