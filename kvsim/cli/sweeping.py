"""`kvsim sweep`: a grid of policies, parameters, budgets and intervals over many traces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsim.cli import shared, show
from kvsim.cli.forecasts import echo_plan
from kvsim.cli.groups import Judging, grouped, offered
from kvsim.cli.shared import OptionError, Stop
from kvsim.schema import PREFILL, plural

if TYPE_CHECKING:
    from kvsim.sweeps.driver import Shown, Standing
    from kvsim.sweeps.grid import Grid
    from kvsim.sweeps.outcome import Run
    from kvsim.sweeps.planning import Plan
    from kvsim.sweeps.shards import Kept

#: Most lines of the table that is printed; the others are in the results.
_LINES = 60


@dataclass(frozen=True)
class Spread:
    """Who computes the tasks."""

    shard: Annotated[
        str | None, typer.Option(metavar="I/N", help="Compute every N-th task, from the I-th on.")
    ] = None
    scheduler: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS|FILE.json", help="Compute on the workers of a dask cluster."),
    ] = None
    slurm: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Submit N shards as jobs of Slurm.")
    ] = None
    slurm_set: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE", help="An option of submitit, such as slurm_partition=long."
        ),
    ] = None

    def check(self, out: Path | None, *, folder_only: bool) -> None:
        """Raise OptionError for options that exclude each other, or need a folder."""
        if out is None and (self.shard or self.slurm or folder_only):
            option = (
                "--shard" if self.shard else "--slurm" if self.slurm else "--status or --collect"
            )
            raise OptionError(f"{option} is about a folder that processes share; give --out DIR")
        if self.slurm_set and not self.slurm:
            raise OptionError("--slurm-set is about jobs of Slurm; give --slurm N too")
        ways = {"--shard": self.shard, "--slurm": self.slurm, "--scheduler": self.scheduler}
        chosen = [name for name, value in ways.items() if value is not None]
        if len(chosen) > 1:
            raise OptionError(f"{' and '.join(chosen)} exclude each other; give one of them")


@dataclass(frozen=True)
class Look:
    """What is done instead of computing."""

    plan: shared.Plan = False
    status: Annotated[bool, typer.Option("--status", help="Say how far the sweep in --out is.")] = (
        False
    )
    collect: Annotated[
        bool, typer.Option("--collect", help="Write the results of what is done by now.")
    ] = False


@grouped
def sweep(
    source: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG.yaml | TRACE...]",
            help="A configuration, or recorded traces and the options below. Without either, what "
            "the sweep in --out was begun with.",
            callback=shared.sources,
        ),
    ] = None,
    *,
    swept: Annotated[
        dict[str, Any],
        offered(
            *("policies", "budgets", "fit", "layers", "metrics", "records", "intervals"),
            *("prefill", *PREFILL, "memory", "device"),
            metrics="the main metrics",
        ),
    ],
    settings: shared.Settings = None,
    own_schedule: Annotated[bool, shared.option("own_schedule")] = False,
    judging: Judging,
    jobs: Annotated[int | None, shared.option("jobs")] = None,
    out: Annotated[Path | None, shared.option("out", parser=shared.local_path)] = None,
    spread: Spread,
    look: Look,
    as_json: shared.Json = False,
) -> None:
    """Replay a grid of policies, parameters, budgets and intervals over traces, and compare.

    Results go to --out as they are finished, one file per task. Whatever ends the command, the same
    command goes on; nothing finished is computed again, and more policies or budgets add to it.
    """
    from kvsim.sweeps.driver import begin, finish, publish
    from kvsim.sweeps.planning import Plan
    from kvsim.sweeps.shards import Shards, kept_in

    if own_schedule and swept["intervals"]:
        raise OptionError("--interval and --own-schedule were both given; expected one of them")
    given = {
        **{name: value for name, value in swept.items() if name == "prefill" or value},
        "intervals": ["own"] if own_schedule else swept["intervals"],
        "set": settings,
        "judge": judging.by or None,
        "device": None if swept["device"] == "cpu" else swept["device"],
    }
    spread.check(out, folder_only=look.status or look.collect)
    part = None if spread.shard is None else _shard(spread.shard)
    kept = kept_in(out)
    grid = _grid(source or [], given, kept)
    plan = Plan.of(grid)
    if look.plan:
        echo_plan(plan, out, jobs, as_json=as_json)
        return
    if look.status:
        kept.scan()
        _status(plan, kept, as_json=as_json)
        return
    if look.collect and isinstance(kept, Shards):
        plan.check_kind(kept)
        kept.scan()
        run = plan.run(kept)
        publish(run, kept)
        _show(run, plan, kept, out, as_json=as_json)
        return
    begin(plan, kept)
    if spread.slurm is not None and out is not None:
        _submit(out, spread.slurm, spread.slurm_set or [], as_json=as_json)
        return
    with _bar() as report:
        run = finish(
            plan,
            kept,
            shard=part,
            jobs=jobs,
            scheduler=spread.scheduler,
            progress=report,
        )
    _show(run, plan, kept, out, shard=part, as_json=as_json)


def _shard(text: str) -> tuple[int, int]:
    number, slash, count = text.partition("/")
    if not slash or not number.isdecimal() or not count.isdecimal():
        raise OptionError(f"--shard is {text!r}; expected I/N, such as 0/4")
    return int(number), int(count)


def _grid(source: Sequence[str], given: dict[str, Any], kept: Kept) -> Grid:
    from kvsim.sweeps.grid import grid_of, read_grid
    from kvsim.sweeps.shards import Shards

    options = [name for name, value in given.items() if value is not None]
    configured = len(source) == 1 and source[0].endswith((".yaml", ".yml"))
    if configured or not source:
        if options:
            raise OptionError(
                f"a configuration has its own {', '.join(options)}; change the file, or give traces"
            )
        if configured:
            return read_grid(source[0])
        if isinstance(kept, Shards):
            return kept.grid()
        raise OptionError("nothing to sweep; give CONFIG.yaml, or traces, --policy and --budget")
    for name, option in {"policies": "--policy", "budgets": "--budget"}.items():
        if not given.get(name):
            raise OptionError(f"{option} is missing; give one, or several between commas")
    document = {name: value for name, value in given.items() if value is not None}
    document["traces"] = [str(path) for path in shared.paths_of(source)]
    settings = shared.settings_of(given["policies"], document.pop("set", None) or [])
    document["policies"] = [{name: lists} for name, lists in settings.items()]
    document["intervals"] = [int(x) if x.isdecimal() else x for x in given["intervals"] or ()]
    return grid_of(document, Path(), where="the options")


@contextmanager
def _bar() -> Iterator[Shown]:
    """A bar of cells with traces and bytes; off a terminal lines of progress."""
    from rich.filesize import decimal

    with show.bar("cells") as report:

        def standing(now: Standing) -> None:
            whole = "{}/{} cells, {}/{} traces".format(*now.cells, *now.traces)
            report(*now.steps, f"{now.label} ({whole}, {decimal(now.read)} read)")

        yield standing


def _status(plan: Plan, kept: Kept, *, as_json: bool) -> None:
    run = plan.run(kept)
    rest = plan.left(kept)
    running = sum(kept.claimed(task) for task in rest)
    counts = {
        "cells": len(plan.cells),
        "done": run.parameters["done"],
        "failed": len({failure.cell for failure in run.failures}),
        "tasks": len(plan.tasks),
        "tasks_left": len(rest),
        "tasks_running": running,
    }
    if as_json:
        show.echo_json(counts)
        return
    show.echo_text(
        f"{_standing(plan, kept, counts['done'])}, {counts['failed']} failed; "
        f"{plural(running, 'task')} being computed."
    )


def _standing(plan: Plan, kept: Kept, cells: int) -> str:
    """How far the sweep is; a cell is complete when the tasks of all its layers are done."""
    tasks, total = len(plan.tasks), len(plan.cells)
    ended = kept.done.union(*(part.failed for part in kept.parts.values()))
    done = sum(task.without(ended) is None for task in plan.tasks)
    complete = f"{cells} of {plural(total, 'cell')} {'is' if total == 1 else 'are'}"
    if cells == total:
        return f"{complete} done"
    verb = "is" if tasks == 1 else "are"
    return f"{done} of {plural(tasks, 'task')} {verb} done, {complete} complete"


def _submit(out: Path, jobs: int, options: Sequence[str], *, as_json: bool) -> None:
    from kvsim.sweeps.slurm import submit

    numbers = submit(out, jobs, dict(map(shared.parse_set, options)))
    if as_json:
        show.echo_json({"jobs": numbers, "out": str(out)})
        return
    show.echo_text(
        f"Submitted {plural(len(numbers), 'job')}: {', '.join(numbers)}. `kvsim sweep --out {out} "
        "--status` says how far they are, --collect writes the results."
    )


def _show(
    run: Run,
    plan: Plan,
    kept: Kept,
    out: Path | None,
    *,
    as_json: bool,
    shard: tuple[int, int] | None = None,
) -> None:
    """Print the results, or what of them is there, and end with the right status."""
    from kvsim.analysis.overview import PREDICTIONS, summarise
    from kvsim.cli.replaying import fidelity_line, means

    standing, total = _standing(plan, kept, run.parameters["done"]), len(plan.cells)
    metrics = [name for name in plan.metrics if name in set(run.table["metric"])]
    summary = summarise(run.table, list(dict.fromkeys([*PREDICTIONS, *metrics])))
    if as_json:
        cells = show.cells(summary) if summary.height else []
        verdict = show.verdict(run.table, metrics)
        show.echo_json({**run.describe(), **verdict, "results": cells, "out": out and str(out)})
    elif shard is None:
        if summary.height:
            show.echo_verdict(show.verdict(run.table, metrics))
            show.echo_results(summary.head(_LINES))
            hidden = summary.height - _LINES
            show.echo_text(f"... and {plural(hidden, 'line')}\n" if hidden > 0 else "")
            show.echo_text(means(run.table, metrics))
            show.echo_text(fidelity_line(run.table))
        show.echo_notes(run.remarks)
    if out is not None and not as_json:
        more = "" if shard is None else "; --collect writes the results"
        show.echo_text(f"{out}: {standing}{more}.")
    show.echo_failures(run.failures)
    again = "" if out is None else "; the same command goes on"
    if run.interrupted:
        raise Stop(f"interrupted, {standing}{again}", 130)
    failed = len({failure.cell for failure in run.failures})
    missing, alone = (run.parameters[x] for x in ("missing", "missing_traces"))
    left = shard is None and missing + alone > 0
    words = [f"{failed} of {total} cells failed"] * (failed > 0)
    words += [f"{missing} of {total} cells are missing"] * (left and missing > 0)
    words += [f"metrics of {plural(alone, 'trace')} alone are missing"] * (left and alone > 0)
    if words:
        again = "; run the sweep again" if left else ""
        raise Stop(f"error: {' and '.join(words)}, the others are done{again}", 1)
