# ruff: noqa: INP001 - beside the script that it belongs to
"""What each constraint costs, and how far policies that obey it are from its optimum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

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
from kvsim.studies.price.constraints import CONSTRAINTS, optimum_under, terms_of
from kvsim.studies.price.sizes import threshold_of_size

#: Scorers of policies that are compared by default.
SCORERS = (
    *("h2o", "tova", "snapkv", "morphkv", "global_max"),
    *("expected_attention@kvpress", "keydiff"),
)
#: A policy around any scorer that obeys a constraint, and its parameters.
_MEAN, _ACROSS, _PAGES = {"reduction": "mean"}, {"across": "layers"}, {"prompt": "pages"}
POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "layer_budgets": ("adakv+{}", {}),
    "head_budgets": ("{}", {}),
    "layer_sets": ("union+{}", _MEAN),
    "layer_pages": ("paged+{}", _PAGES),
    "model_sets": ("union+{}", _MEAN | _ACROSS),
    "model_pages": (
        "paged+union+{}",
        _PAGES | {f"scorer__{name}": value for name, value in (_MEAN | _ACROSS).items()},
    ),
    "admission": ("dms+{}", {"window": 0}),
    "one_event": ("{}", {}),
}
METRICS = ("missing_mass", "output_error", "layer_error", "response_kl")

_TEXT = ("trace", "constraint", "policy", "metric")
_SCHEMA = dict.fromkeys(_TEXT, pl.String) | dict.fromkeys(("value", "open"), pl.Float64)


def prices(
    traces: Sequence[Trace],
    budget: int,
    interval: int = 32,
    scorers: Sequence[str] = SCORERS,
    *,
    judge: bool | str = False,
    constraints: Sequence[str] = tuple(CONSTRAINTS),
) -> tuple[pl.DataFrame, list[str]]:
    """Measure the optimum under each constraint, and policies that obey it.

    Lengths of policies are scaled to the budget. Of `dms`, the threshold is the one at which it
    ends with as many entries as the optimum may: chosen with hindsight.

    Args:
        traces: with a response each.
        budget: entries of a head on average, after each event.
        interval: rows between events, one of them after the prompt.
        scorers: names of scorers, around which the policies of constraints are built.
        judge: the model that judges, by name; True for that of each trace.
        constraints: names in `CONSTRAINTS`.

    Returns:
        A table of trace, constraint, policy ("optimum" for the optimum), metric, value, and `open`,
        the mass by which the optimum may miss the true one; and what has no rule for the budget.
    """
    rows: list[dict[str, Any]] = []
    remarks: list[str] = []
    for trace, name in product(traces, constraints):
        try:
            terms = terms_of(trace, name, budget, interval)
            with threads_for([trace]):
                best, gap = optimum_under(trace, name, **terms)
                records = [best, *_obeying(trace, name, terms, scorers, remarks)]
                values = [*_measured(trace, records, judge)]
        except KvsimError as error:
            remarks.append(f"{trace.name}: {name}: {error}")
            continue
        key = {"trace": trace.name, "constraint": name, "open": gap}
        rows += [key | value for value in values]
    return pl.DataFrame(rows, _SCHEMA), remarks


def _obeying(
    trace: Trace, constraint: str, terms: dict[str, Any], scorers: Sequence[str], remarks: list[str]
) -> Iterator[Record]:
    """Replay the policies that obey a constraint; adds a remark for each that has no rule."""
    form, settings = POLICIES.get(constraint, ("", {}))
    for scorer in scorers if form else ():
        name, params = form.format(scorer), settings
        try:
            if constraint == "admission":
                entries = terms["budget"]
                value = threshold_of_size(name, params, [trace], entries, size=_held, **terms)
                params = params | {"threshold": value}
            yield replay(trace, policy(name, **params).fitted(), prefill=True, **terms)
        except KvsimError as error:
            remarks.append(f"{trace.name}: {name}: {error}")


def _held(record: Record) -> float:
    """Entries of a head after the last event that later rows follow, mean over heads."""
    rows = Schedule(record.interval).rows(record.prompt_len, record.n_pos - 1)
    return float((record.evicted_at[..., : rows[-1] + 1] > rows[-1]).mean((0, 1)).sum())


def _measured(
    trace: Trace, records: Sequence[Record], judge: bool | str
) -> Iterator[dict[str, Any]]:
    """Yield policy, metric and value of each record."""
    numbered = [replace(record, policy=str(at)) for at, record in enumerate(records)]
    names = available([name for name in METRICS if name not in JUDGED], [trace])
    tables = [measure(trace, numbered, names)]
    if judge:
        from kvsim.runner.judging import judge_of  # noqa: PLC0415  transformers

        outcomes = judge_of(trace, "" if judge is True else judge, "cpu", None).outcomes(numbered)
        tables.append(measure_judged(trace, numbered, outcomes, METRICS[-1:]))
    for table in tables:
        for row in per_prompt(main_variants(table, METRICS)).iter_rows(named=True):
            label = records[int(row["policy"])].policy
            yield {"policy": label, "metric": row["metric"], "value": row["value"]}


def summary(table: pl.DataFrame, metric: str) -> pl.DataFrame:
    """Return what each constraint costs in a metric, mean over traces.

    Returns:
        Columns constraint, optimum (its value), cost (optimum less the free one), policy (the best
        that obeys the constraint, of all for "free"), value, and gap (value less the optimum under
        it); null where no policy obeys it.
    """
    means = table.filter(metric=metric).group_by("constraint", "policy", maintain_order=True)
    values = means.agg(pl.col("value").mean(), n=pl.len())
    of_optimum = pl.col("policy") == "optimum"
    optima = values.filter(of_optimum).select("constraint", "n", optimum="value")
    policies = values.filter(~of_optimum)
    every = policies.with_columns(constraint=pl.lit("free"))
    obeying = pl.concat([policies, every]).join(optima, on=["constraint", "n"])
    best = obeying.sort("value").group_by("constraint").first()
    free = optima.filter(constraint="free")["optimum"]
    cost = pl.col("optimum") - (free[0] if len(free) else None)
    joined = optima.join(best, on="constraint", how="left", suffix="_")
    gap = pl.col("value") - pl.col("optimum")
    return joined.select("constraint", "optimum", "policy", "value", cost=cost, gap=gap)
