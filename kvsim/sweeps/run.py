"""Many policies and budgets over many traces, into one Table and one run folder."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import polars as pl

from kvsim.analysis.definition import Metric
from kvsim.analysis.registry import METRICS
from kvsim.analysis.results import FACTS, REQUESTED, of_model, of_policies
from kvsim.analysis.summaries import last_events, level_shares, main_variants, over_layers
from kvsim.analysis.table import BESIDE, OF_RECORD, REGRET, check_arrays, choose, names_of
from kvsim.core.arguments import resolve_budget, share_of
from kvsim.core.policy import Policy
from kvsim.core.trace import Trace
from kvsim.errors import ConfigError, PolicyError
from kvsim.schema import schedule
from kvsim.sweeps.cells import Cell

#: Rows between events of policies that are compared, unless an interval is given.
INTERVAL = 32

#: Rows that see this many times the budget on a paper's schedule are remarked on.
_FAR = 1.5

#: What replaces the schedules of policies: interval, prefill and compress, each None where a
#: policy's own stays.
Terms = tuple[int | None, bool | None, Literal["prompt", "context", "both"] | None]


def described(terms: Terms) -> dict[str, Any]:
    """What replaces the schedules of policies, ready for JSON."""
    return dict(zip(("interval", "prefill", "compress"), terms, strict=True))


def shared_prefill(interval: int | None, prefill: bool | None) -> bool | None:
    """Whether the prefill event fires where policies are compared; None is each policy's own.

    An interval stands for one schedule, so it brings the prefill event along for all policies,
    also for those whose own schedule leaves it out, unless `prefill` decides.
    """
    return True if interval is not None and prefill is None else prefill


def shared_terms(
    policies: Sequence[Policy], terms: Terms, *, own_schedule: bool = False
) -> tuple[Terms, str]:
    """One schedule for policies that are compared, and a remark if none was given.

    Without an interval, two or more policies act after the prompt and every `INTERVAL` rows,
    whichever they are, so that the numbers of one do not depend on the others; one policy keeps
    that of its paper. own_schedule: each keeps its own. Raises ConfigError for an interval beside
    that.
    """
    interval, prefill, compress = terms
    if own_schedule and interval is not None:
        raise ConfigError(
            f"an interval of {interval} and own schedules exclude each other; give one of them"
        )
    alone = all(policy == policies[0] for policy in policies)
    if interval is not None or own_schedule or alone:
        return (interval, shared_prefill(interval, prefill), compress), ""
    shared = shared_prefill(INTERVAL, prefill)
    after = schedule(INTERVAL, prefill=bool(shared), compress=compress or "prompt")
    remark = (
        f"all policies act on one schedule ({after}): --interval N gives another, --own-schedule "
        "each that of its paper"
    )
    return (INTERVAL, shared, compress), remark


def cell_remarks(cells: Sequence[Cell]) -> tuple[str, ...]:
    """Return what readers of results of these cells should know about all of them."""
    return tuple(filter(None, (paper_remark(cells), access_remark(cells), dense_remark(cells))))


def access_remark(cells: Sequence[Cell]) -> str:
    """Return which policies a budget of entries does not compare with the others."""
    policies = {cell.policy.name: cell.policy for cell in cells}
    other = [name for name, policy in policies.items() if policy.reader or policy.codec]
    if not other or len(policies) < 2:
        return ""
    names = f"{', '.join(other)} read{'s' * (len(other) == 1)} or store{'s' * (len(other) == 1)}"
    part = " (`seen` counts what is held, not what is read)"
    part *= any(policies[name].reader for name in other)
    return (
        f"{names} entries in another way, so budgets of entries do not compare them{part}; "
        "bytes do: replay with --out RUN --metric output_error,bytes_held,bytes_read, "
        "then `kvsim plot pareto RUN`"
    )


def dense_remark(cells: Sequence[Cell]) -> str:
    """Return which readers read everything in more than a quarter of the layers of a trace."""
    dense: dict[str, str] = {}
    for cell in cells:
        reader, numbers = cell.policy.reader, cell.trace.layer_ids
        count = 0 if reader is None else sum(number < reader.dense_layers for number in numbers)
        if count > len(numbers) / 4:
            dense[cell.policy.name] = f"{cell.policy.name} in {count} of {len(numbers)}"
    if not dense:
        return ""
    return (
        "rows read all that is held in many layers, which flatters means over layers: "
        f"{', '.join(dense.values())}; --set dense_layers=0 reads pages in all layers"
    )


def paper_remark(cells: Sequence[Cell]) -> str:
    """Return which policies let rows see far more than the budget on the schedule of their paper.

    Between events a cache grows: after a prompt-only schedule, by every row of the response.
    """
    times: dict[str, float] = {}
    for cell in cells:
        policy, trace = cell.policy, cell.trace
        dropping = policy.propagation is not None and policy.propagation.alone
        if cell.schedule != policy.schedule or not policy.bounded or dropping:
            continue
        rows = np.arange(trace.prompt_len, trace.n_pos)
        events = np.array(
            [-1, *cell.schedule.rows(trace.prompt_len, trace.n_pos, trace.context_len)]
        )
        last = events[np.searchsorted(events, rows) - 1]
        seen = np.minimum(cell.budget, last + 1) + rows - last
        if rows.size:
            times[policy.name] = max(times.get(policy.name, 0), seen.mean() / cell.budget)
    far = [f"{name} (up to {x:.1f} times)" for name, x in times.items() if x > _FAR]
    if not far:
        return ""
    return (
        f"rows see far more than the budget on the schedule of the paper: {', '.join(far)}; "
        f"--interval {INTERVAL} holds the budget"
    )


def measurable(
    metrics: str | Sequence[str],
    traces: Sequence[Trace],
    *,
    regret: bool = False,
    judged: bool = False,
) -> dict[str, Metric]:
    """Return metrics by name, with those of the regret and of the judge if they are measured.

    Raises PolicyError for an unknown one, NeedsError where a trace has not what one reads.
    """
    names = list(dict.fromkeys([*names_of(metrics), *(REGRET if regret else ())]))
    chosen = choose(names, beside=BESIDE if regret else (), judged=judged)
    for trace in traces:
        check_arrays(trace, chosen)
    return chosen


def cells_of(
    traces: Sequence[Trace],
    policies: Sequence[Policy],
    budgets: Sequence[int | str],
    schedules: Sequence[Terms],
) -> list[Cell]:
    """Return every cell, with its budget in entries and its schedule."""
    cells: list[Cell] = []
    for trace, policy, budget, terms in itertools.product(traces, policies, budgets, schedules):
        entries = resolve_budget(budget, trace.n_pos)
        events = policy.schedule.override(*terms)
        cells.append(Cell(len(cells), trace, policy, entries, share_of(budget), events))
    return cells


def check_names(policies: Sequence[Policy]) -> None:
    """Raise PolicyError where two policies differ in neither name nor parameters, and yet do."""
    by_name: dict[str, Policy] = {}
    for policy in policies:
        label = f"{policy.name} {json.dumps(policy.params, sort_keys=True)}"
        if by_name.setdefault(label, policy) != policy:
            raise PolicyError(
                f"two different policies are called {policy.name!r} and have the same parameters, "
                "so that results could not be told apart; replay them one by one or name them "
                "differently"
            )


def params_of(policies: Sequence[Policy]) -> dict[str, Any]:
    """The parameters of policies by name, in a list where several have one."""
    by_name: dict[str, list[Any]] = {}
    for policy in policies:
        by_name.setdefault(policy.name, []).append(policy.params)
    return {name: each[0] if len(each) == 1 else each for name, each in by_name.items()}


#: Metrics of the summary, in the order in which they are shown.
SUMMARY = (
    *("entries_seen", "output_error", "layer_error", "weighted_error", "retained_mass", "wipeout"),
    *("retained_iou", "needle_recall", "needle_wipeout"),  # of traces with a needle
)

#: What the model itself says, live or as a judge of the replay.
PREDICTIONS = ("response_kl", "nll_increase", "top_agreement")

#: The same of a running model.
LIVE_SUMMARY = (
    *(*PREDICTIONS, "layer_error", "output_error"),
    *("retained_iou", "needle_recall", "answer_right", "answer_kept", "peak_share"),
)


def fidelity_shares(table: pl.DataFrame, by: Sequence[str] = ()) -> pl.DataFrame:
    """Return the share of each level of fidelity among the values that a summary shows.

    Of the metrics of `SUMMARY` and `LIVE_SUMMARY`, or of all in a Table that has none of them.
    Each counts once in a layer of a cell, however many heads and events have values, so that the
    share of a run is the same whatever else was measured. Columns are those of `level_shares`.
    """
    measured = {*METRICS} & {*table.drop_nulls(["policy", "value"])["metric"]}
    shown = measured & {*SUMMARY, *LIVE_SUMMARY} or measured
    of_cell = ("trace", "policy", "params", "budget", "share", "interval", "prefill", "metric")
    values = main_variants(table, shown).drop_nulls("value")
    values = values.unique([*of_cell, "layer", "fidelity"], maintain_order=True)
    return level_shares(values, by)


def summarise(
    table: pl.DataFrame, metrics: Sequence[str] = (*PREDICTIONS, *SUMMARY, *REGRET)
) -> pl.DataFrame:
    """One row per policy, parameters and budget as requested, with the mean of each metric.

    And for each model, where traces are of several. Facts about the policy (`FACTS`) stand with it.

    Means over layers and heads within a trace, then over traces, of each metric's main variant;
    layers of some metrics are added up (`layer_error`; `Metric.layers`).
    `wipeout` is that of 32-token regions of which nothing is left, after the last event;
    `iou_chance` stands beside `retained_iou`; `exact` is the share of the values of the row whose
    fidelity is exact (`fidelity_shares`). Null where a policy has no value of the
    main variant, whatever others it has: the segments of a policy that makes none are not counted
    by those of its proxy. Metrics that this version does not know have no column.
    """
    metrics = [name for name in metrics if name in METRICS]
    main = pl.col("metric").replace_strict(
        {name: METRICS[name].main for name in metrics}, default=None, return_dtype=pl.String
    )
    model = of_model(table)
    keys = ["policy", "params", "requested", "interval", "prefill", *model]
    chosen = last_events(
        of_policies(table, *FACTS)
        .with_columns(requested=REQUESTED, main=pl.col("variant") == main)
        .filter(pl.col("metric").is_in(metrics))
    )
    whole = over_layers(chosen, [*keys, "trace", "metric", "variant"])
    within = whole.group_by(*keys, "trace", "metric", maintain_order=True).agg(
        pl.col("value", "chance").filter(pl.col("main")).mean()
    )
    means = within.group_by(*keys, "metric", maintain_order=True).agg(
        pl.col("value").mean(), pl.col("chance").mean()
    )
    wide = means.pivot(on="metric", index=keys, values="value", maintain_order=True)
    chance = means.filter(pl.col("metric") == "retained_iou").select(*keys, iou_chance="chance")
    levels = fidelity_shares(table.with_columns(requested=REQUESTED), keys)
    exact = levels.group_by(keys).agg(
        exact=pl.col("share").filter(pl.col("fidelity") == "exact").sum()
    )
    of_trace = chosen.group_by(*keys, "trace").agg(pl.col("budget", "share", *FACTS).first())
    sizes = of_trace.group_by(keys).agg(
        pl.col("budget").mean().round().cast(pl.Int64), pl.col("share", *FACTS).first()
    )
    for more in (chance, exact, sizes):
        wide = wide.join(more, on=keys, how="left", nulls_equal=True, maintain_order="left")
    measured = [name for name in metrics if name in wide.columns]
    if "retained_iou" in measured:
        measured.insert(measured.index("retained_iou") + 1, "iou_chance")
    return wide.select(*OF_RECORD, *model, *measured, "exact")
