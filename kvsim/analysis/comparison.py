"""Comparison of the policies of a Table by a metric, at each budget.

Prompts are the unit, as in `summaries`: values are averaged within a prompt first. Each budget is
judged separately, over the prompts with a value of every policy there (`verdict`). With labelled
tasks, each task has the same weight in a mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl

from kvsim.analysis.arrays import Floats, Strings
from kvsim.analysis.evidence import EVIDENCE, ranking, shared
from kvsim.analysis.folder import Tabular, runs_of, together
from kvsim.analysis.registry import metric as metric_named
from kvsim.analysis.results import HELD, REQUESTED, is_live, labelled, mixed
from kvsim.analysis.significance import ALPHA, FEWEST, excess, holm, sign_flip, weights
from kvsim.analysis.summaries import (
    KEYS,
    WEAKEST,
    Interval,
    main_variants,
    per_prompt,
    sees_more,
)
from kvsim.analysis.verdict import Scale, Verdict, even, judged, none_of, task_labels
from kvsim.errors import PolicyError, suggest
from kvsim.schema import FIDELITY, first_of, plural

#: Default margin: a policy that is worse than the best by at most this share is as good.
MARGIN = 0.1

#: Columns of `Comparison.table`, one row per policy and budget, and task where there are several.
COLUMNS: dict[str, Any] = {
    **dict.fromkeys(("policy", "params", "requested", "task"), pl.String),
    "entries": pl.Float64,
    "per_query_head": pl.Boolean,
    "access": pl.String,
    "interval": pl.Int64,
    "prefill": pl.Boolean,
    **dict.fromkeys(("metric", "unit"), pl.String),
    "fidelity": pl.Enum(FIDELITY),
    "rank": pl.Int64,
    **dict.fromkeys(("mean", "low", "high"), pl.Float64),
    **dict.fromkeys(("n", "leads", "rank_low", "rank_high"), pl.Int64),
    "p_best": pl.Float64,
    "could_be_best": pl.Boolean,
    "worse_by": pl.Float64,
    "as_good": pl.Boolean,
    "against": pl.String,
    **dict.fromkeys(("difference", "p", "p_holm"), pl.Float64),
    # of two policies; `equal` where no prompt shows a difference
    "verdict": pl.Enum(("better", "worse", "equivalent", "undecided", "equal")),
    "seen": pl.Float64,
    "unfair": pl.Boolean,
}


@dataclass(frozen=True)
class Comparison:
    """The outcome of `compare`.

    table: rows by budget, task and rank, with the columns listed at `compare`. verdicts: one per
    budget with two policies. better: the direction in which `metric` is better. scale: the margin,
    and whether it and `worse_by` are shares or in the unit of the metric. traces: the prompts of
    any mean. remarks: limits of the comparison and of its runs. unranked: candidates without a
    value of `metric`.
    """

    table: pl.DataFrame
    verdicts: tuple[Verdict, ...]
    metric: str
    better: str
    against: str | None
    scale: Scale
    traces: tuple[str, ...]
    remarks: tuple[str, ...]
    unranked: tuple[str, ...]

    @property
    def overall(self) -> pl.DataFrame:
        """The rows over all tasks."""
        return self.table.filter(pl.col("task").is_null())

    def __repr__(self) -> str:
        policies = ", ".join(self.table["policy"].unique(maintain_order=True))
        return f"Comparison({self.metric}: {policies}; {plural(len(self.traces), 'prompt')})"


def compare(
    table: Tabular,
    metric: str | None = None,
    *,
    against: str | None = None,
    margin: float | None = None,
) -> Comparison:
    """Compare the policies of a Table by a metric, each budget separately, over the same prompts.

    References (policies that no budget binds, and policies that look ahead) are listed without a
    rank and compared with nothing, unless `against` names one.

    Args:
        table: of `kvsim.measure` or a sweep, with several traces as prompts; or a run, or its
            folder.
        metric: by name, one with a better direction; its main variant. By default the best evidence
            that all runs have (`kvsim.analysis.evidence`).
        against: the label of a policy to compare each other policy with (`tova`, or `ams
            (window=8)` where the Table has several of one name).
        margin: a policy is as good as the best if it is worse by at most this share, 0.1 by
            default. For a metric with values below 0 it is in the unit of the metric, without a
            default.

    Returns:
        A Comparison. Its table has rows for each policy (its label, `params`, schedule) and budget
        (`requested`, and its mean in `entries`), over all prompts (`task` is null) and in each
        task. Columns: `rank`; the `mean` over `n` prompts, or over tasks, with its 95 % bootstrap
        interval; `leads`, the number of prompts on which no other policy is better; `rank_low` and
        `rank_high`, the first and the last possible rank (from 12 prompts on). From 6 prompts on:
        `p_best`, the p-value of being a best policy; `could_be_best`, whether it is in the set that
        holds a best one with 95 %; `worse_by`, a 95 % bound on how much worse than the best it is;
        `as_good`, whether that is within the margin. `seen` is the mean number of visible entries
        of a row, `unfair` whether it is over 5 % more than under another policy at this budget.
        With `against`: the paired `difference`, its p-value and the corrected p-value, the
        `verdict`.

    Raises:
        PolicyError: the metric has no better direction or the Table no values of it, its values
            have no common mean (`kvsim.analysis.results.mixed`), no prompt has values of all
            policies, or the Table has no policy `against`.

    Example:
        >>> run = kvsim.sweep(traces="sample", policies=["tova", "h2o"], budgets=64)
        >>> kvsim.compare(run).overall.select("policy", "rank").rows()
        [('h2o', 1), ('tova', 2)]
    """
    runs, remarks = runs_of(table), list[str]()
    table, of_runs = together(runs)
    if remark := mixed(table):
        raise PolicyError(remark)
    if metric is None:
        common, remarks = shared([run.table for run in runs])
        metric = common or next(ranking(table), EVIDENCE[0 if is_live(table) else -1])
    entry = metric_named(metric)
    if entry.better is None:
        raise PolicyError(
            f"{metric} has no better direction, so it ranks nothing; expected another metric, see "
            "`kvsim metrics`"
        )
    table = labelled(table)
    outside = set(table.filter(pl.col("looks_ahead") | ~HELD)["policy"])
    means = _means_of(table, metric)
    names = means["policy"].unique(maintain_order=True).to_list()
    if against is not None and against not in names:
        raise PolicyError(
            f"no policy {against!r}{suggest(against, names)} to compare with; there is "
            f"{', '.join(names)}"
        )
    relative = not (entry.unit.startswith("signed") or bool((means["value"] < 0).any()))
    margin = MARGIN if margin is None and relative else margin
    scale = Scale(entry.better == "higher", relative, margin)
    parts = means.partition_by("requested", maintain_order=True)
    budgets = [*filter(None, (_budget_of(part, outside, remarks) for part in parts))]
    if not budgets:
        raise PolicyError(
            f"no prompt has a value of {metric} for every policy of a budget; compare runs of the "
            "same prompts, or fewer policies"
        )
    each: list[tuple[Budget, Verdict | None]] = []
    for x in budgets:
        of = x.results["policy"].to_list()[: x.ranked]
        verdict = judged(x.requested, of, x.values[: x.ranked], x.tasks, scale) if of else None
        each.append((x, verdict))
    sizes = {tuple(x[name] for name in _AT): x for x in _sizes(table, metric, budgets).to_dicts()}
    pairs = {} if against is None else _against(budgets, against, scale)
    found = list[dict[str, Any]]()
    for row in (row for pair in each for row in _rows(*pair)):
        at = row["policy"], row["requested"]
        found.append({**row, **sizes[at], **(pairs.get(at, {}) if row.get("task") is None else {})})
    rows = pl.DataFrame(found, schema=COLUMNS)
    seen = pl.when(pl.col("rank").is_not_null()).then("seen")
    rows = rows.with_columns(_seen=seen).with_columns(unfair=sees_more("_seen", _OF_TASK))
    rows = rows.drop("_seen").sort(
        *("entries", "requested", "task", "rank"),
        nulls_last=[True, True, False, True],
        maintain_order=True,
    )
    unfair = {*rows.filter("unfair").select(_AT).iter_rows()}
    verdicts = tuple(
        replace(x, unfair=tuple(y for y in x.best or x.first if (y, x.requested) in unfair))
        for _, x in each
        if x is not None and len(x.standings) > 1
    )
    if references := [name for name in names if name in outside]:
        remarks.append(
            f"{', '.join(references)}: listed without a rank, because no budget binds a reference "
            "or it looks ahead"
        )
    results = table.drop_nulls(["policy", "value"]).with_columns(requested=REQUESTED)
    for name, column in (("budget", "requested"), ("prompt", "trace")):
        there = results[column].unique(maintain_order=True).drop_nulls()
        if lost := [x for x in there if x not in {*means[column]}]:
            remarks.append(
                f"{plural(len(lost), name)} without a value of {metric}: {first_of(lost, 5)}"
            )
    measured = results["policy"].unique(maintain_order=True)
    return Comparison(
        table=rows,
        verdicts=verdicts,
        metric=metric,
        better=entry.better,
        against=against,
        scale=scale,
        traces=tuple(sorted({trace for budget in budgets for trace in budget.traces})),
        remarks=tuple(dict.fromkeys([*remarks, *of_runs])),
        unranked=tuple(name for name in measured if name not in names and name not in outside),
    )


#: Largest share of its budget's prompts that a ranked policy may lack; with more it is left out.
_GAPS = 0.2


@dataclass(frozen=True)
class Budget:
    """Values of one budget [result, prompt]: of ranked policies, then of references.

    Prompts are those with a value of every ranked policy. tasks: the task of each, if several.
    """

    requested: str
    results: pl.DataFrame
    ranked: int
    values: Floats
    traces: tuple[str, ...]
    tasks: Strings | None

    @property
    def weights(self) -> Floats:
        """Weights of prompts with which the mean over prompts is the mean over tasks."""
        return len(self.traces) * weights(len(self.traces), self.tasks)


def _means_of(table: pl.DataFrame, metric: str) -> pl.DataFrame:
    """Return one row per result and prompt with a value; NaN counts as missing."""
    values = main_variants(table, [metric])
    means = per_prompt(values)
    if "task" in table:  # turns may have several
        task = pl.col("task").drop_nulls()
        task = pl.when(task.n_unique() == 1).then(task.first())
        means = means.join(values.group_by("trace").agg(task), "trace", maintain_order="left")
    means = means.with_columns(pl.col("value").cast(pl.Float64).fill_nan(None)).drop_nulls("value")
    if means.height:
        return means
    measured = table.drop_nulls(["policy", "value"])["metric"].unique(maintain_order=True)
    raise PolicyError(
        f"the table has no value of {metric} for any policy; it has "
        f"{', '.join(measured) or 'none of any metric'}; finish the run, replay with --metric "
        f"{metric}, or compare by another metric"
    )


def _budget_of(means: pl.DataFrame, outside: set[str], remarks: list[str]) -> Budget | None:
    """Values of a budget; None where no prompt has a value of every ranked policy."""
    results, traces = means.select(KEYS).unique(maintain_order=True), means["trace"].unique().sort()
    tasks = dict(means.select("trace", "task").iter_rows()) if "task" in means else {}
    cells = results.join(traces.to_frame(), how="cross", maintain_order="left_right").join(
        means, on=[*KEYS, "trace"], how="left", nulls_equal=True, maintain_order="left"
    )
    values = cells["value"].fill_null(np.nan).to_numpy().reshape(results.height, -1)
    size = results["requested"][0]
    candidate = ~results["policy"].is_in(list(outside)).to_numpy()
    known = np.isfinite(values)
    some = known[candidate].any(0) if candidate.any() else known.any(0)
    finite = candidate & ~np.isinf(values).any(1)
    enough = finite & (known[:, some].mean(1) >= 1 - _GAPS)
    ranked = enough if enough.sum() > 1 else finite
    for at in np.flatnonzero(candidate & ~ranked):
        why = "is infinite" if np.isinf(values[at]).any() else "is missing"
        where = first_of(traces.filter(some & ~known[at]).to_list())
        remarks.append(
            f"{results['policy'][int(at)]} is left out at budget {size}: its value {why} on {where}"
        )
    shared = some & known[ranked].all(0) & (ranked.any() | ~candidate.any())
    if not shared.any():
        return None
    if lost := traces.filter(some & ~shared).to_list():
        lacking = results["policy"].filter(ranked & ~known[:, (some & ~shared).argmax()])[0]
        remarks.append(
            f"{plural(len(lost), 'prompt')} left out at budget {size}, because not every policy "
            f"has a value: {first_of(lost)} ({lacking} has none)"
        )
    order = np.concatenate([np.flatnonzero(ranked), np.flatnonzero(~ranked)])
    prompts = tuple(traces.filter(shared))
    return Budget(
        requested=size,
        results=results[order],
        ranked=int(ranked.sum()),
        values=values[order][:, shared],
        traces=prompts,
        tasks=task_labels([tasks.get(trace) for trace in prompts]),
    )


_AT, _OF_TASK = ("policy", "requested"), ("requested", "task")


def _rows(budget: Budget, verdict: Verdict | None) -> list[dict[str, Any]]:
    """Rows over all tasks, then of each task: ranked policies by rank, then the others."""
    facts = {row["policy"]: row for row in budget.results.iter_rows(named=True)}
    rows = [
        facts[standing["policy"]] | standing | {"task": each.task, "n": each.prompts}
        for each in ([verdict, *verdict.tasks] if verdict else [])
        for standing in each.standings
    ]
    others = budget.weights * budget.values[budget.ranked :]
    ends = Interval.of_each([*np.where(np.isfinite(others), others, np.nan)])
    for name, end in zip([*facts][budget.ranked :], ends, strict=True):
        rows.append(facts[name] | {x: none_of(y) for x, y in vars(end).items()})
    return rows


def _sizes(table: pl.DataFrame, metric: str, budgets: Sequence[Budget]) -> pl.DataFrame:
    """By policy and budget: entries, fidelity and entries seen, over the prompts of the budget."""
    pairs = [(x.requested, trace) for x in budgets for trace in x.traces]
    kept = pl.DataFrame(pairs, {"requested": pl.String, "trace": pl.String}, orient="row")
    table = table.with_columns(requested=REQUESTED).join(kept, on=["requested", "trace"])
    counted = table.drop_nulls("policy").unique([*_AT, "trace"]).group_by(_AT)
    sizes = counted.agg(
        pl.col("per_query_head").any(),
        pl.col("access").first(),
        pl.col("budget").mean().alias("entries"),
        pl.len().alias("n"),
    )
    levels = main_variants(table, [metric]).drop_nulls("value").group_by(_AT).agg(WEAKEST)
    seen = per_prompt(main_variants(table, ["entries_seen"])).drop_nulls("value")
    whole = pl.when(pl.col("n") == pl.col("seen").list.len()).then(pl.col("seen").list.mean())
    sizes = sizes.join(levels, on=_AT, how="left")
    sizes = sizes.join(seen.group_by(_AT).agg(seen="value"), on=_AT, how="left")
    return sizes.select(*_AT, "per_query_head", "access", "entries", "fidelity", seen=whole)


def _against(
    budgets: Sequence[Budget], base: str, scale: Scale
) -> dict[tuple[str, str], dict[str, Any]]:
    """Differences of ranked policies to another one, with p-values corrected for their number."""
    found, gaps = dict[tuple[str, str], dict[str, Any]](), list[Floats]()
    for budget in budgets:
        names = budget.results["policy"].to_list()
        values = dict(zip(names, even(budget.values), strict=True))
        other = values.get(base, np.array([np.nan]))
        for name in names[: budget.ranked] if np.isfinite(other).all() else []:
            if name == base:
                continue
            two, alike = np.stack([values[name], other], axis=1), False
            if scale.relative and scale.margin is not None and len(two) >= FEWEST:
                far = excess(two, budget.tasks, higher=scale.higher)
                alike = bool((far <= scale.margin).all())
            verdict = "equivalent" if alike else "undecided"
            found[name, budget.requested] = {"against": base, "verdict": verdict}
            gaps.append(budget.weights * (two[:, 0] - two[:, 1]))
    p = np.array([sign_flip(gap[None])[0] for gap in gaps])
    numbers = zip(found.values(), gaps, p.tolist(), holm(p).tolist(), strict=True)
    for row, gap, of_one, corrected in numbers:
        row |= {"p": of_one, "p_holm": corrected, "difference": gap.mean()}
        if not gap.any():
            row["verdict"] = "equal"
        elif corrected <= ALPHA:
            row["verdict"] = "better" if (gap.mean() > 0) == scale.higher else "worse"
    return found
