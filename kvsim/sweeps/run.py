"""Many policies and budgets over many traces, into one Table and one run folder."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl

from kvsim.analysis.definition import Metric
from kvsim.analysis.folder import RECORDS, read_run
from kvsim.analysis.registry import METRICS
from kvsim.analysis.results import REQUESTED, check_distinct, of_model
from kvsim.analysis.summaries import last_events, level_shares, main_variants, over_layers
from kvsim.analysis.table import BESIDE, REGRET, check_arrays, choose, names_of
from kvsim.core.arguments import listed, resolve_budget, share_of
from kvsim.core.checks import check_progress, resolve_device
from kvsim.core.policy import Policy, PolicyLike
from kvsim.core.threads import threads_for
from kvsim.core.trace import Trace
from kvsim.engine import check_cell
from kvsim.errors import ConfigError, OutputError, PolicyError, local_path
from kvsim.policies import as_policies
from kvsim.progress import with_bar
from kvsim.schema import plural, schedule
from kvsim.store.opening import Traces, as_traces
from kvsim.store.records import read_records
from kvsim.sweeps.cells import Cell, Cells, Progress, flops_of, named
from kvsim.sweeps.outcome import Run
from kvsim.sweeps.parts import Parts, is_complete, other_sweep, plan, plan_digest
from kvsim.sweeps.workers import processes

#: Rows between events of policies that are compared, unless an interval is given.
INTERVAL = 32

#: Rows that see this many times the budget on a paper's schedule are remarked on.
_FAR = 1.5

#: What replaces the schedules of policies: interval, prefill and compress, each None where a
#: policy's own stays.
Terms = tuple[int | None, bool | None, Literal["prompt", "context", "both"] | None]


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


@with_bar("cells")
def replay_all(
    traces: Traces,
    policies: PolicyLike | Iterable[PolicyLike],
    budgets: int | str | Iterable[int | str],
    *,
    interval: int | None = None,
    prefill: bool | None = None,
    compress: Literal["prompt", "context", "both"] | None = None,
    own_schedule: bool = False,
    fit: bool = False,
    metrics: str | Sequence[str] | None = None,
    regret: bool = False,
    judge: bool | str = False,
    events: bool = False,
    memory: int | None = None,
    device: str = "cpu",
    jobs: int | None = 1,
    out: str | Path | None = None,
    resume: bool = False,
    accounts: bool = True,
    progress: Progress | bool | None = None,
) -> Run:
    """Replay every policy at every budget over every trace and measure the outcome.

    traces, policies, budgets, metrics: one or several, as for `kvsim.replay`; the path of a folder
    stands for the traces in it.

    interval: rows between events, the same events for every policy; the prefill event is one of
    them unless prefill is False. Without an interval, two or more policies act after the prompt and
    every `INTERVAL` rows, and one keeps the schedule of its paper. own_schedule: each policy keeps
    its own, of which prefill replaces the prefill event alone. compress says after what that fires,
    as for `kvsim.replay`, and is listed among the parameters of results. The schedule is recorded
    with every result. fit: scale windows and segments to the budget (`Policy.fitted`).

    regret: compute the optimum on the terms of each cell, and measure by how much it retains more
    (`regret`, `regret_gap` and `possible_share`; `oracle_regret` by name). Policies that no budget
    binds have none. judge: after the replays of a trace, apply its records to the model in one
    forward pass (`kvsim.judge`), and measure its predictions: `response_kl`, `nll_increase`,
    `top_agreement` and `stream_error`, of fidelity `judged`. True takes the model that the trace
    names, a name what `kvsim.recorder.load_model` takes. Records that no such pass can show have a
    remark instead. What metrics read of the decisions at events (`Metric.notes`) is noted and
    measured; the records are returned without it.

    jobs: processes on this machine, each with one thread; None chooses, by the size of the work.
    Results do not depend on it. Traces shorter than 4,096 tokens are replayed with one thread in
    any case. With several, a script needs `if __name__ == "__main__":`.

    out: a new run folder. What is computed is there as soon as it is: each replay, and the values
    of every `TOGETHER` cells. The folder is a run once `run.json` is in it. resume: continue what
    an earlier sweep left in `out`; cells that it finished are not computed again, failed ones are.
    accounts: keep what readers read (`Record.reads`); False frees it when it is measured, where
    there is no `out`, and records have none.

    Budgets that a policy has no rule for (BudgetError), a memory budget that holds no layer
    (MemoryLimitError), two traces of one name (TraceError), and a folder that cannot be written to
    or resumed with these parameters (OutputError) are found before any work starts, and so is a
    metric by name that reads what a trace has not recorded (NeedsError). A cell that
    fails later is listed in `failures`, whatever its policy raises, and the others are kept. Ctrl-C
    ends the replays; what is done by then is measured and kept, and Ctrl-C while measuring leaves
    the last cells unmeasured.
    """
    report: Progress = check_progress(progress) or (lambda *_: None)
    traces, policies, budgets = as_traces(traces), as_policies(policies), listed(budgets)
    if not (traces and policies and budgets):
        raise PolicyError(
            f"{plural(len(traces), 'trace')}, {len(policies)} policies and {len(budgets)} budgets; "
            "expected at least one of each"
        )
    policies = [each.fitted() for each in policies] if fit else policies
    check_names(policies)
    check_distinct(traces)
    terms, shared = shared_terms(policies, (interval, prefill, compress), own_schedule=own_schedule)
    if metrics is None:
        chosen = choose(None, beside=BESIDE if regret else (), judged=bool(judge))
    else:
        chosen = measurable(metrics, traces, regret=regret, judged=bool(judge))
        metrics = list(chosen)
    cells = cells_of(traces, policies, budgets, [terms])
    for cell in cells:
        check_cell(cell.trace, cell.policy, cell.budget, memory, cell.schedule)
    parameters: dict[str, Any] = {
        "policies": params_of(policies),
        "budgets": [str(budget) for budget in budgets],
        **dict(zip(("interval", "prefill", "compress"), terms, strict=True)),
        "metrics": metrics,
        "regret": regret,
        "events": events,
        "memory": memory,
        "device": resolve_device(device),
        **({"judge": named(judge)} if judge else {}),
    }
    check_judge(judge, traces, device)
    flops = sum(flops_of(cell.trace, cell.trace.n_layers) for cell in cells)
    count = processes(jobs, flops, len(cells), traces)
    notes = tuple(filter(None, [shared, *cell_remarks(cells)]))

    def compute(parts: Parts | None) -> Run:
        kept = accounts or parts is not None
        with threads_for(traces):
            done = Cells(cells, chosen, parameters, report, parts, accounts=kept).run(count)
        return replace(done, notes=notes)

    return in_folder(out, traces, policies, parameters, compute, notes, resume=resume)


def check_judge(judge: bool | str, traces: Sequence[Trace], device: str) -> None:
    """Raise NeedsError or CaptureError for a trace that the judging model did not record."""
    if judge:
        from kvsim.runner.judging import judge_of  # noqa: PLC0415  transformers

        for trace in traces:
            judge_of(trace, named(judge), resolve_device(device), None)


def in_folder(
    out: str | Path | None,
    traces: Sequence[Trace],
    policies: Sequence[Policy],
    parameters: dict[str, Any],
    work: Callable[[Parts | None], Run],
    notes: tuple[str, ...],
    *,
    resume: bool,
) -> Run:
    """Do the work of a sweep, and write it to the folder `out`, if there is one.

    notes: those of a run that is complete already. Raises OutputError for another sweep's folder.
    """
    if out is None:
        return work(None)
    folder, content = local_path(out, OutputError), plan(traces, policies, parameters)
    parameters["plan"] = plan_digest(content)
    if resume and is_complete(folder):
        saved = read_run(folder)
        stored, given = saved.parameters, json.loads(json.dumps(parameters))
        if stored.get("plan") != given["plan"]:
            names = [name for name in given if name != "plan" and stored.get(name) != given[name]]
            raise other_sweep(folder, names or ["traces, code or versions"])
        records = tuple(read_records(folder / RECORDS))
        return Run(records, saved.table, (), parameters, notes=notes)
    with Parts(folder, content, resume=resume) as parts:
        run = work(parts)
        if run.records:
            parts.publish(run.write, complete=not (run.interrupted or run.failures))
    return run


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
    """One row per policy, parameters and budget as asked for, with the mean of each metric.

    And for each model, where traces are of several.

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
    keys = ["policy", "params", "asked", "interval", "prefill", *model]
    chosen = last_events(
        table.with_columns(asked=REQUESTED, main=pl.col("variant") == main).filter(
            pl.col("policy").is_not_null() & pl.col("metric").is_in(metrics)
        )
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
    levels = fidelity_shares(table.with_columns(asked=REQUESTED), keys)
    exact = levels.group_by(keys).agg(
        exact=pl.col("share").filter(pl.col("fidelity") == "exact").sum()
    )
    of_trace = chosen.group_by(*keys, "trace").agg(pl.col("budget", "share").first())
    sizes = of_trace.group_by(keys).agg(
        pl.col("budget").mean().round().cast(pl.Int64), pl.col("share").first()
    )
    for more in (chance, exact, sizes):
        wide = wide.join(more, on=keys, how="left", nulls_equal=True, maintain_order="left")
    measured = [name for name in metrics if name in wide.columns]
    if "retained_iou" in measured:
        measured.insert(measured.index("retained_iou") + 1, "iou_chance")
    cell = ("policy", "params", "budget", "share", "interval", "prefill", *model)
    return wide.select(*cell, *measured, "exact")
