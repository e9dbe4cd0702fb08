"""`kvsim replay`: policies and budgets over traces, as one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsim.cli import shared, show
from kvsim.cli.forecasts import echo_plan
from kvsim.cli.groups import SCHEDULE, Chosen, Folder, Judging, Printed, grouped, offered
from kvsim.cli.runs import echo_responses
from kvsim.cli.shared import OptionError, Stop
from kvsim.schema import plural

if TYPE_CHECKING:
    import polars as pl

    from kvsim.core.record import Record
    from kvsim.core.trace import Trace
    from kvsim.sweeps import Run
    from kvsim.sweeps.driver import Plan
    from kvsim.sweeps.folder import Parts

#: Most traces and lines of a table that are printed; the others are in the results.
_TRACES, _LINES = 8, 200

_OPEN_LOOP = (
    "open: computed from the recorded queries, keys and values; in a live run errors also add up "
    "from layer to layer and the model may generate other tokens."
)

#: Columns of the table whose names do not say what they are.
_EXPLAINED = ("wipeout", "layer_error", "weighted_error", "regret", "possible_share", "peak_share")


@dataclass(frozen=True)
class Cells(Chosen):
    """Policies and budgets, which a configuration has instead."""

    policy: Annotated[list[str] | None, shared.option("policies")] = None  # type: ignore[assignment]
    budget: Annotated[list[str] | None, shared.option("budgets")] = None


@grouped
def replay(
    source: Annotated[
        list[str],
        typer.Argument(
            metavar="GRID.yaml | TRACE...",
            help="Recorded traces, as `kvsim info` lists them, or a grid in a file, which has "
            "all but --jobs and where results go.",
        ),
    ],
    *,
    cells: Cells,
    options: Annotated[
        dict[str, Any],
        offered(
            *(*SCHEDULE, "layers", "metrics", "memory", "device", "jobs"),
            metrics="everything with --out, without it what the table shows",
        ),
    ],
    judging: Judging,
    folder: Folder,
    printed: Printed,
) -> None:
    """Replay policies at budgets over traces and compare them.

    Prints what each policy would have kept and lost, and how far the attention output would have
    moved. With --out, whatever ends the command keeps the cells that are done, and the same command
    continues.
    """
    folder.check()
    out, jobs, metrics = folder.out, options.pop("jobs"), options["metrics"]
    options |= {"judge": judging.by, "events": folder.events}

    from kvsim.analysis.overview import SUMMARY
    from kvsim.analysis.table import available
    from kvsim.sweeps.driver import Plan, plan_replays
    from kvsim.sweeps.grid import read_grid

    if len(source) == 1 and source[0].endswith((".yaml", ".yml")):
        every = {**vars(cells), **options}
        given = [name for name, x in every.items() if x not in (None, False, "cpu", [], ())]
        if given or options["prefill"] is False:
            raise OptionError(
                f"a configuration has its own {', '.join(given) or 'prefill'}; change the file, or "
                "give traces"
            )
        grid = read_grid(source[0])
        planned, metrics = Plan.of(grid), grid.options["metrics"]
    else:
        for name in ("policy", "budget"):
            if not getattr(cells, name):
                raise OptionError(f"--{name} is missing; give one, or several between commas")
        policies = cells.built()
        traces = shared.open_traces(source)
        options["metrics"] = metrics if metrics or out else available(SUMMARY, traces)
        planned = plan_replays(traces, policies, cells.budget or (), **options)
    if printed.plan:
        echo_plan(planned, out, jobs, overwrite=folder.overwrite, as_json=printed.as_json)
        return
    try:
        with show.bar("cells") as report:
            parts = begun(planned, folder)
            run = planned.finish(parts, jobs=jobs, progress=report)
    except KeyboardInterrupt:  # at any other moment than those that a sweep handles
        raise interrupted(out) from None
    shown = metrics or available(SUMMARY, planned.traces)
    as_json = printed.as_json
    show_run(run, planned.traces, shown, out, as_json=as_json, required=metrics or ())


def begun(plan: Plan, folder: Folder) -> Parts:
    """Return what of a plan is done in the run folder, and say so."""
    parts = plan.begin(folder.out, overwrite=folder.overwrite)
    if done := {number for each in plan.tasks for number in parts.done(each)}:
        show.echo_error(f"{folder.out} has results of {plural(len(done), 'cell')}; continuing")
    return parts


def interrupted(out: Path | None) -> Stop:
    """Return the end of a command at any other moment than those that a run handles."""
    again = "" if out is None else f", what is done is kept in {out}; the same command continues"
    return Stop(f"interrupted{again}", 130)


def show_run(
    run: Run,
    opened: Sequence[Trace],
    metrics: Sequence[str],
    out: Path | None,
    *,
    as_json: bool,
    whole: bool = False,
    required: Sequence[str] = (),
) -> None:
    """Print those metrics of the outcome of a sweep that it has, and end with the right status.

    whole: print all of what the model of a live run wrote. required: metrics that a note names if
    they are not among them.
    """
    from kvsim.analysis.overview import PREDICTIONS

    done, total = run.parameters["done"], run.parameters["cells"]
    if not done and run.interrupted:
        raise Stop("interrupted, no cell was done and nothing was written", 130)
    if not done:
        status = 1 if any(failure.unexpected for failure in run.failures) else 2
        raise Stop("\n".join(f"error: {x}" for _, x in show.errors_once(run.failures)), status)
    measured = set(run.table["metric"])
    shown = [name for name in dict.fromkeys([*PREDICTIONS, *metrics]) if name in measured]
    if as_json:
        show.echo_json(_document(run, shown, out))
    else:
        _print(opened, run, shown, out)
        echo_responses(run.responses.to_dicts(), whole=whole)
        if shown and (missing := [name for name in required if name not in measured]):
            show.echo_text(
                f"Note: {', '.join(missing)} cannot be computed on these traces; `kvsim metrics "
                f"{missing[0]}` says what it reads."
            )
    show.echo_failures(run.failures)
    kept = "shown above" if out is None else f"kept in {out}"
    if run.interrupted:
        again = "" if out is None else "; the same command continues"
        raise Stop(f"interrupted, {done} of {total} cells are done and {kept}{again}", 130)
    if run.failures:
        failed = len({failure.cell for failure in run.failures})
        raise Stop(f"error: {failed} of {total} cells failed, the others are {kept}", 1)


def _document(run: Run, shown: Sequence[str], out: Path | None) -> dict[str, Any]:
    from kvsim.analysis.overview import summarise

    return {
        **run.describe(),
        **show.verdict(run.table, shown),
        "cells": show.cells(summarise(run.table, shown)),
        "trace_metrics": _trace_metrics(run.table, shown).to_dicts(),
        "fidelity": show.fidelity_shares(run.table),
        "selections": [
            {"trace": record.trace, "policy": record.policy, "budget": record.budget, **selection}
            for record in run.records
            if (selection := show.selection_dict(record)) is not None
        ],
        **({"responses": run.responses.to_dicts()} if run.parameters.get("loop") else {}),
        "out": None if out is None else str(out),
    }


def _trace_metrics(table: pl.DataFrame, shown: Sequence[str]) -> pl.DataFrame:
    """Metrics that belong to a trace and to no policy: mean over layers of each variant."""
    import polars as pl

    of_trace = table.filter(pl.col("policy").is_null() & pl.col("metric").is_in(shown))
    return of_trace.group_by("trace", "metric", "variant", maintain_order=True).agg(
        pl.col("value").mean(), pl.col("chance").mean()
    )


def _print(traces: Sequence[Trace], run: Run, shown: Sequence[str], out: Path | None) -> None:
    from kvsim.analysis.overview import summarise

    for trace in traces[:_TRACES]:
        show.echo_text(
            f"{show.one_line(trace.name)}: {trace.n_pos} tokens (prompt {trace.prompt_len}), "
            f"{plural(trace.n_layers, 'layer')}, {plural(trace.evicting.n_heads, 'KV head')}"
        )
    if len(traces) > _TRACES:
        show.echo_text(f"... and {plural(len(traces) - _TRACES, 'trace')}")
    show.echo_text()
    show.echo_verdict(show.verdict(run.table, shown))
    summary = summarise(run.table, shown)
    if summary.height:
        show.echo_results(summary.head(_LINES))
        hidden = summary.height - _LINES
        show.echo_text(f"... and {plural(hidden, 'line')}\n" if hidden > 0 else "")
    of_trace = _trace_metrics(run.table, shown)
    if of_trace.height:
        rows = ([*row[:3], *(show.number(x, ".3f") for x in row[3:])] for row in of_trace.rows())
        show.echo_table(of_trace.columns, rows, right=3)
        show.echo_text()
    if shown:
        show.echo_text(means(run.table, shown))
        show.echo_text(fidelity_line(run.table))
    else:
        show.echo_text("No values: none of the metrics can be computed on these traces.")
    lines = (_selection_line(record, many=len(traces) > 1) for record in run.records)
    for line in filter(None, dict.fromkeys(lines)):
        show.echo_text(line)
    show.echo_notes(run.remarks)
    if out is not None:
        records = ", records.zarr" * bool(run.records)
        show.echo_text(f"Written to {out}: run.json{records}, results.parquet.")


def _selection_line(record: Record, *, many: bool) -> str:
    """After which layers a record's policy dropped rows, in words; many: there are other traces."""
    selection = record.selection
    if selection is None:
        return ""
    budget = f", budget {record.budget}" if record.bounds else ""
    outcome = "no rows are dropped"
    if selection.layer is not None:
        after = ", ".join(map(str, selection.dropped or (selection.layer,)))
        outcome = f"rows are dropped after layer {after}, {selection.counts[-1]} of "
        outcome += f"{record.prompt_len} tokens go on" + " from the start" * selection.restarted
    return f"{show.one_line(record.trace)}: " * many + f"{record.policy}{budget}: {outcome}."


def means(table: pl.DataFrame, shown: Sequence[str]) -> str:
    """Return what the numbers of a table of these metrics are means over."""
    import polars as pl

    from kvsim.analysis.overview import PREDICTIONS
    from kvsim.analysis.registry import METRICS
    from kvsim.analysis.results import of_model

    values = table.drop_nulls("value").filter(pl.col("metric").is_in(list(shown)))
    traces = values.group_by("metric", maintain_order=True).agg(pl.col("trace").n_unique())
    counts = show.counts(dict(traces.iter_rows()), "trace")
    over = "layers and heads" if counts == "1 trace" else f"layers, heads and {counts}"
    over = "layers, heads and the traces of each model" if of_model(table) else over
    parts = [f"Means over {over}, of rows over those after the prompt"]
    if not set(PREDICTIONS).isdisjoint(shown):
        parts.append("of tokens over those of the recorded response")
    measured = {*traces["metric"]}
    parts += [f"{name}: {METRICS[name].summary}" for name in _EXPLAINED if name in measured]
    return f"{'; '.join(parts)}."


def fidelity_line(table: pl.DataFrame) -> str:
    """Return how far the values of a run can be trusted."""
    shares = show.fidelity_shares(table)
    parts = ", ".join(f"{share:.0%} {name}" for name, share in shares.items())
    return f"Fidelity of the values: {parts}. {_OPEN_LOOP if 'open' in shares else ''}".rstrip()
