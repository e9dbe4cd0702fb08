"""`kvsim replay` and `kvsim live`: policies and budgets over traces, as one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsim.cli import shared, show
from kvsim.cli.options import takes
from kvsim.cli.runs import document_of, echo_document
from kvsim.cli.shared import Stop
from kvsim.progress import progress_bar
from kvsim.schema import plural

if TYPE_CHECKING:
    from kvsim.core.trace import Trace
    from kvsim.sweeps import Run
    from kvsim.sweeps.driver import Plan
    from kvsim.sweeps.folder import Parts

#: Most traces that are named.
_TRACES = 8


@takes(
    *("policies", "budgets", "interval", "compress", "metrics", "judge", "device", "jobs"),
    *("out", "overwrite"),
    metrics="all with --out, else (and of a grid) the table's",
)
def replay(
    source: Annotated[
        list[str],
        typer.Argument(
            metavar="TRACE|GRID.yaml",
            help="Recorded traces (`kvsim info`), or a grid in a file, whose keys options replace.",
        ),
    ],
    options: dict[str, Any],
    settings: shared.Settings = None,
    plan: shared.Plan = False,
    as_json: shared.Json = False,
) -> None:
    """Replay policies at budgets over traces, and measure their errors.

    Interrupted or killed, the same command with --out continues.
    """
    from kvsim.analysis.measuring import available
    from kvsim.analysis.overview import SUMMARY
    from kvsim.sweeps.driver import Plan
    from kvsim.sweeps.grid import EVERYTHING, grid_of

    given = shared.experiment(options, settings)
    usual: dict[str, Any] = {"jobs": None}
    if len(source) == 1 and source[0].endswith((".yaml", ".yml")):
        grid = grid_of(source[0], defaults=usual, **given)
    else:
        usual |= {"records": True} | ({"metrics": EVERYTHING} if "out" in given else {})
        grid = grid_of(where="kvsim replay", defaults=usual, traces=source, **given)
    planned, out = Plan.of(grid), grid.options["out"]
    if plan:
        echo_plan(planned, as_json=as_json)
        return
    with progress_bar("cells") as report:
        run = planned.finish(begun(planned), progress=report)
    metrics = grid.options["metrics"]
    required = () if metrics in (None, EVERYTHING) else metrics
    shown = required or available(SUMMARY, planned.traces)
    show_run(run, planned.traces, shown, out, as_json=as_json, required=required)


@takes(
    *("policies", "budgets", "interval", "compress", "max_new_tokens", "temperature", "seed"),
    *("top_k", "top_p", "batch", "metrics", "paged", "out", "overwrite"),
    metrics="everything of a running model",
)
def live(
    traces: Annotated[
        list[str], typer.Argument(metavar="TRACE", help="Recorded prompts and responses.")
    ],
    model: Annotated[
        str,
        typer.Option(
            help="The model that was recorded: 'tiny', 'tiny-deep', 'smollm2', a local folder, a "
            "GGUF file, or a hub id."
        ),
    ],
    options: dict[str, Any],
    settings: shared.Settings = None,
    device: shared.Device = "cpu",
    trust_remote_code: shared.TrustRemoteCode = False,
    plan: shared.Plan = False,
    as_json: shared.Json = False,
) -> None:
    """Run policies on the model itself, its cache compressed.

    The recorded response is fed to the model under each policy, and its predictions are compared
    with those of the full cache; with --max-new-tokens the model also writes a response of its own,
    which is compared with the right answer, and shown next to that of the full cache.
    """
    from kvsim.analysis.overview import LIVE_SUMMARY
    from kvsim.recorder import load_model
    from kvsim.recorder.loading import load_outline
    from kvsim.schema import object_at
    from kvsim.sweeps.closed_loop import plan_live

    def load(recorded: Sequence[Trace]) -> Any:
        """The model and its tokenizer in the precision of the recording."""
        shared.quiet_transformers()
        given: dict[str, Any] = {"dtype": object_at(recorded[0].meta, "model").get("dtype")}
        given |= {"trust_remote_code": trust_remote_code}
        if plan:
            return load_outline(model, on_cpu=device == "cpu", **given)
        return load_model(model, device=device, **given)

    given = shared.experiment(options, settings, [x for x in shared.KEYS if x != "memory"])
    planned = plan_live(load, traces=traces, **given)
    if plan:
        there = {**planned.parameters, "device": device}
        echo_plan(replace(planned, parameters=there), as_json=as_json)
        return
    with progress_bar("cells") as report:
        run = planned.finish(begun(planned), progress=report)
    shown, out = planned.options["metrics"] or LIVE_SUMMARY, planned.options["out"]
    show_run(run, planned.traces, shown, out, as_json=as_json)


def echo_plan(plan: Plan, *, as_json: bool) -> None:
    """Print the unfinished part of a plan of replays or live runs."""
    from kvsim.sweeps.folder import Parts
    from kvsim.sweeps.pool import processes

    out, again = plan.options["out"], plan.options["overwrite"]
    rest = plan.tasks if again else Parts(out, plan.description).left(plan.tasks)
    forecast = plan.forecast(rest)
    jobs = processes(plan.options["jobs"], plan.flops, len(rest), plan.traces, forecast)
    counts = {"cells": len(plan.cells), "traces": len(plan.traces), "tasks": len(plan.tasks)}
    counts |= {"tasks_left": len(rest), "jobs": jobs}
    show.echo_forecast(forecast, out, counts, as_json=as_json)


def begun(plan: Plan) -> Parts:
    """Return the finished part of a plan in the run folder, and print it."""
    parts = plan.begin()
    if done := {number for each in plan.tasks for number in parts.done(each)} - {-1}:
        show.echo_error(
            f"{plan.options['out']} has results of {plural(len(done), 'cell')}; continuing"
        )
    return parts


def show_run(
    run: Run,
    opened: Sequence[Trace],
    metrics: Sequence[str],
    out: Path | None,
    *,
    as_json: bool,
    required: Sequence[str] = (),
) -> None:
    """Print a sweep's metrics, and end with its status; a note names missing `required` ones."""
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
                f"{plural(trace.n_layers, 'layer')}, {plural(trace.part().n_heads, 'KV head')}"
            )
        more = len(opened) - _TRACES
        show.echo_text(f"... and {plural(more, 'trace')}\n" if more > 0 else "")
        echo_document(document, run.table, shown)
        if shown and (missing := [name for name in required if name not in shown]):
            show.echo_text(
                f"Note: {', '.join(missing)} cannot be computed on these traces; `kvsim metrics "
                f"{missing[0]}` names its inputs."
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
