"""What each constraint costs, and how far policies that obey it are from its optimum."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import polars as pl

from kvsim.analysis.live.table import measure_judged
from kvsim.analysis.summaries import main_variants, per_prompt
from kvsim.analysis.table import JUDGED, available, measure
from kvsim.core.policy import Schedule
from kvsim.core.record import Record
from kvsim.core.threads import threads_for
from kvsim.core.trace import Trace
from kvsim.engine.replay import replay
from kvsim.errors import KvsimError
from kvsim.policies.naming import policy
from kvsim.studies.price.constraints import (
    CONSTRAINTS,
    Constraint,
    optimum_under,
    prompt_budget,
)
from kvsim.studies.price.sizes import fitted

#: Scorers of policies that are compared by default.
SCORERS = (
    "h2o",
    "tova",
    "snapkv",
    "morphkv",
    "global_max",
    "expected_attention@kvpress",
    "keydiff",
)
#: What the optimum is called among policies.
OPTIMUM = "optimum"
METRICS = ("missing_mass", "output_error", "layer_error", "response_kl")

_VALUE = ("policy", "metric", "value")
_SCHEMA = {
    **dict.fromkeys(("trace", "constraint", "policy"), pl.String),
    "budget": pl.Int64,
    "metric": pl.String,
    **dict.fromkeys(("value", "open"), pl.Float64),
}


class Priced(NamedTuple):
    """Values of optima and policies, and what could not be replayed.

    table: trace, constraint, policy ("optimum" for the optimum), budget (of the prompt alone under
    `one_event`), metric, value, and `open`, the mass by which the optimum may miss the true one.
    """

    table: pl.DataFrame
    remarks: tuple[str, ...]


def prices(
    traces: Sequence[Trace],
    budget: int,
    interval: int = 32,
    scorers: Sequence[str] = SCORERS,
    *,
    judge: bool | str = False,
    constraints: Sequence[str] = tuple(CONSTRAINTS),
    progress: Callable[[int, int, str], None] | None = None,
) -> Priced:
    """Measure the optimum under each constraint, and policies that obey it.

    Lengths of policies are scaled to the budget. Of `dms`, the threshold is the one at which it
    ends with as many entries as the optimum may: chosen with hindsight.

    Args:
        traces: with a response each.
        budget: entries of a head on average, after each event.
        interval: rows between events, one of them after the prompt.
        scorers: names of scorers, around which the policies of constraints are built.
        judge: the model that judges, by name; True for that of each trace.
        constraints: names in `CONSTRAINTS`; by default all.
        progress: called with (constraints done, constraints, current one).
    """
    rows: list[dict[str, Any]] = []
    remarks: dict[str, None] = {}
    steps = [(trace, name) for trace in traces for name in constraints]
    for done, (trace, name) in enumerate(steps):
        if progress is not None:
            progress(done, len(steps), f"{trace.name}: {name}")
        constraint = CONSTRAINTS[name]
        try:
            size = prompt_budget(trace, budget, interval) if constraint.single else budget
            with threads_for([trace]):
                best, gap = optimum_under(trace, constraint, size, interval)
                records = [best, *_records(trace, constraint, size, interval, scorers, remarks)]
                values = [*_measured(trace, records, judge)]
        except KvsimError as error:
            remarks[f"{trace.name}: {name}: {error}"] = None
            continue
        key = {"trace": trace.name, "constraint": name, "budget": size, "open": gap}
        rows += [key | dict(zip(_VALUE, value, strict=True)) for value in values]
    return Priced(pl.DataFrame(rows, _SCHEMA), tuple(remarks))


def _records(
    trace: Trace,
    constraint: Constraint,
    budget: int,
    interval: int,
    scorers: Sequence[str],
    remarks: dict[str, None],
) -> Iterator[Record]:
    """Replay the policies that obey a constraint; adds a remark for each that has no rule."""
    interval = trace.n_pos if constraint.single else interval
    for scorer in scorers if constraint.policy else ():
        name, params = constraint.policy.format(scorer), dict(constraint.params)
        try:
            if constraint.once:
                params |= {"window": 0}
                params["threshold"] = fitted(
                    *(name, [trace], budget),
                    budget=budget,
                    interval=interval,
                    params=params,
                    size=_held,
                )
            built = policy(name, **params).fitted()
            yield replay(trace, built, budget, interval=interval, prefill=True)
        except KvsimError as error:
            remarks[f"{trace.name}: {name}: {error}"] = None


def _held(record: Record) -> float:
    """Entries of a head after the last event that later rows follow, mean over heads."""
    rows = Schedule(record.interval).rows(record.prompt_len, record.n_pos - 1)
    return float((record.evicted_at[..., : rows[-1] + 1] > rows[-1]).mean((0, 1)).sum())


def _measured(
    trace: Trace, records: Sequence[Record], judge: bool | str
) -> Iterator[tuple[str, str, float]]:
    """Yield policy, metric and value of each record."""
    numbered = [replace(record, policy=str(at)) for at, record in enumerate(records)]
    names = available([name for name in METRICS if name not in JUDGED], [trace])
    tables = [measure(trace, numbered, names)]
    if judge:
        from kvsim.runner.judging import judge_of  # noqa: PLC0415  transformers

        judging = judge_of(trace, "" if judge is True else str(judge), "cpu", None)
        outcomes = judging.outcomes(numbered)
        tables.append(measure_judged(trace, numbered, outcomes, [METRICS[-1]]))
    for table in tables:
        values = per_prompt(main_variants(table, METRICS))
        for at, metric, value in values.select("policy", "metric", "value").rows():
            yield records[int(at)].policy, metric, value


def summary(table: pl.DataFrame, metric: str) -> pl.DataFrame:
    """Return what each constraint costs in a metric, mean over traces.

    Returns:
        Columns constraint, optimum (its value), cost (optimum less the free one), policy (the best
        that obeys the constraint, of all for "free"), value, and gap (value less the optimum under
        it); null where no policy obeys it.
    """
    means = (
        table.filter(metric=metric)
        .group_by("constraint", "policy", maintain_order=True)
        .agg(pl.col("value").mean(), n=pl.len())
    )
    optima = means.filter(policy=OPTIMUM).select("constraint", "n", optimum="value")
    policies = means.filter(pl.col("policy") != OPTIMUM)
    every = policies.with_columns(constraint=pl.lit("free"))
    obeying = pl.concat([policies, every]).join(optima, on=["constraint", "n"])
    best = obeying.sort("value").group_by("constraint").first()
    free = optima.filter(constraint="free")["optimum"]
    joined = optima.drop("n").join(
        best.select("constraint", "policy", "value"), on="constraint", how="left"
    )
    return joined.with_columns(
        cost=pl.col("optimum") - (free[0] if len(free) else None),
        gap=pl.col("value") - pl.col("optimum"),
    ).select("constraint", "optimum", "cost", "policy", "value", "gap")
