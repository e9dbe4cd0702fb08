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
from kvsim.cli.runs import document_of, echo_document
from kvsim.cli.shared import OptionError, Stop
from kvsim.schema import plural

if TYPE_CHECKING:
    from kvsim.core.trace import Trace
    from kvsim.sweeps import Run
    from kvsim.sweeps.driver import Plan
    from kvsim.sweeps.folder import Parts

#: Most traces that are named.
_TRACES = 8


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

    from kvsim.analysis.measuring import available
    from kvsim.analysis.overview import SUMMARY
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
    with show.bar("cells") as report:
        run = planned.finish(begun(planned, folder), jobs=jobs, progress=report)
    shown = metrics or available(SUMMARY, planned.traces)
    as_json = printed.as_json
    show_run(run, planned.traces, shown, out, as_json=as_json, required=metrics or ())


def begun(plan: Plan, folder: Folder) -> Parts:
    """Return what of a plan is done in the run folder, and say so."""
    parts = plan.begin(folder.out, overwrite=folder.overwrite)
    if done := {number for each in plan.tasks for number in parts.done(each)} - {-1}:
        show.echo_error(f"{folder.out} has results of {plural(len(done), 'cell')}; continuing")
    return parts


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
    done, total = run.parameters["done"], run.parameters["cells"]
    if not done and run.interrupted:
        raise Stop("interrupted, no cell was done and nothing was written", 130)
    if not done:
        status = 1 if any(failure.unexpected for failure in run.failures) else 2
        raise Stop("\n".join(f"error: {x}" for _, x in show.errors_once(run.failures)), status)
    document, shown = document_of(run.describe(), run.table, run.records, metrics)
    if as_json:
        show.echo_json({**document, "out": None if out is None else str(out)})
    else:
        for trace in opened[:_TRACES]:
            show.echo_text(
                f"{show.one_line(trace.name)}: {trace.n_pos} tokens (prompt {trace.prompt_len}), "
                f"{plural(trace.n_layers, 'layer')}, {plural(trace.evicting.n_heads, 'KV head')}"
            )
        more = len(opened) - _TRACES
        show.echo_text(f"... and {plural(more, 'trace')}\n" if more > 0 else "")
        echo_document(document, run.table, shown, whole=whole)
        if shown and (missing := [name for name in required if name not in shown]):
            show.echo_text(
                f"Note: {', '.join(missing)} cannot be computed on these traces; `kvsim metrics "
                f"{missing[0]}` says what it reads."
            )
        if out is not None:
            records = ", records.zarr" * bool(run.records)
            show.echo_text(f"Written to {out}: run.json{records}, results.parquet.")
    show.echo_failures(run.failures)
    kept = "shown above" if out is None else f"kept in {out}"
    if run.interrupted:
        again = "" if out is None else "; the same command continues"
        raise Stop(f"interrupted, {done} of {total} cells are done and {kept}{again}", 130)
    if run.failures:
        failed = len({failure.cell for failure in run.failures} - {-1})  # of a trace alone
        raise Stop(f"error: {failed} of {total} cells failed, the others are {kept}", 1)
