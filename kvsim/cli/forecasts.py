"""Plans of commands (`--plan`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.filesize import decimal as size

from kvsim.cli import show
from kvsim.schema import plural

if TYPE_CHECKING:
    from kvsim.store.forecast import Forecast
    from kvsim.sweeps.driver import Plan


def echo_plan(plan: Plan, *, as_json: bool) -> None:
    """Print what is left of a plan of replays or live runs."""
    from kvsim.sweeps.folder import Parts
    from kvsim.sweeps.forecast import forecast
    from kvsim.sweeps.pool import processes

    out, again = plan.options["out"], plan.options["overwrite"]
    rest = plan.tasks if again else Parts(out, plan.description).left(plan.tasks)
    jobs = processes(plan.options["jobs"], plan.flops, len(rest), plan.traces)
    counts = {"cells": len(plan.cells), "traces": len(plan.traces), "tasks": len(plan.tasks)}
    counts |= {"tasks_left": len(rest), "jobs": jobs}
    echo_forecast(forecast(plan, rest), out, counts, as_json=as_json)


def echo_forecast(
    forecast: Forecast, folder: Path | None, counts: Mapping[str, Any], *, as_json: bool
) -> None:
    """Print a forecast; folder: of the outputs, None without. counts: of cells, traces, tasks."""
    from kvsim.store.forecast import free_bytes

    facts, fields = forecast.describe(), dict[str, str]()
    free = None if folder is None else free_bytes(folder)
    if as_json:
        show.echo_json({**counts, **facts, "free": free})
        return
    if counts:
        tasks = f"{counts['tasks_left']} of {counts['tasks']} left"
        fields["cells"] = f"{counts['cells']} on {plural(counts['traces'], 'trace')}"
        fields["tasks"] = f"{tasks}, {plural(counts['jobs'], 'job')}"
    if free is not None:
        arrays = ", ".join(f"{name} {size(count)}" for name, count in facts["arrays"].items())
        most = f" (at most {size(facts['bytes_at_most'])}: {arrays})" if arrays else ""
        files = f" in {facts['files']} files" * bool(facts["files"])
        fields["disk"] = f"{size(facts['bytes'])}{files}{most}, {size(free)} free"
    fields["memory"] = size(facts["memory"])
    if facts["device_memory"]:
        fields["memory"] += f" of the CPU, {size(facts['device_memory'])} of the GPU"
    show.echo_fields(fields)
