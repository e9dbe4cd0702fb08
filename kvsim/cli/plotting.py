"""`kvsim plot`: one figure of policies over traces, of finished runs, or of attention in traces."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kvsim.cli import shared
from kvsim.cli.options import takes
from kvsim.cli.shared import OptionError, Stop
from kvsim.cli.show import echo_error
from kvsim.errors import suggest
from kvsim.files import check_output
from kvsim.plots.registry import FIGURES, Figure
from kvsim.policies.fit import remark_of
from kvsim.progress import progress_bar
from kvsim.schema import merged

if TYPE_CHECKING:
    import polars as pl

    from kvsim.analysis.folder import Saved
    from kvsim.core.record import Record
    from kvsim.core.trace import Trace

_FORMATS = (".pdf", ".png", ".svg")


def listing() -> str:
    """Return the figures of `kvsim plot` with their summaries, as lines of its help."""
    names = list(FIGURES)
    wide = 2 + max(map(len, names))
    lines = [
        textwrap.fill(f"{name:{wide}}{FIGURES[name].summary}", 78, subsequent_indent=" " * wide)
        for name in names
    ]
    return "\b\nFigures:\n" + "\n".join(lines)


@takes("interval")
def plot(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The figure, of the list below.")],
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="TRACE|RUN",
            help="Recorded traces, or the shipped 'sample' and 'sample-smollm2'; for figures of "
            "results, such as pareto, also folders that `kvsim replay` or `live` wrote.",
        ),
    ],
    out: Annotated[Path, shared.path_option("FILE", "The file to write: .png, .svg or .pdf.")],
    options: dict[str, Any],
    policy: shared.PoliciesOfRuns = None,
    budget: shared.BudgetsOfRuns = None,
    settings: shared.Settings = None,
    metric: Annotated[
        list[str] | None,
        shared.several(
            "NAME[,NAME...]",
            "What over_budgets and pareto show, as `kvsim metrics` lists it, a panel each; "
            "of metrics with variants the main one.",
        ),
    ] = None,
    layer: Annotated[
        int | None,
        typer.Option(min=0, help="The layer shown, from 0; default: the figure's own, or all."),
    ] = None,
    head: Annotated[
        int | None,
        typer.Option(min=0, help="The KV head shown, from 0; default: the figure's own, or all."),
    ] = None,
    by: Annotated[
        Literal["stage", "task", "domain", "level"] | None,
        typer.Option(
            help="What iou_by compares: stages of the model, or labels of prompts. "
            "[default: stage]",
        ),
    ] = None,
) -> None:
    """Draw one figure: replay policies over traces, or take the results of finished runs.

    docs/figures.md shows the figures and says what each needs.
    """
    from kvsim.analysis.folder import is_run

    figure = _figure(name)
    if out.suffix.lower() not in _FORMATS:
        raise OptionError(f"--out is {str(out)!r}; expected a file that ends in .png, .svg or .pdf")
    check_output(out, advice="give another --out")
    flags: dict[str, Any] = {"layer": layer, "head": head, "by": by, "metric": metric}
    given = {"policy": policy, "budget": budget, **options, "set": settings}
    given = {key: value for key, value in given.items() if value}
    runs = [source for source in sources if is_run(source)]
    for problem in _problems(name, figure, sources, runs, given, flags):
        raise OptionError(problem)
    texts = [source for source in sources if source not in runs]
    traces = shared.open_traces(texts) if texts else []
    if figure.single and len(traces) != 1:
        raise OptionError(f"{name} shows one trace, but {len(traces)} were given")
    if runs:
        data = replace(read(runs, policy, budget), traces=traces)
    else:
        options |= {"policies": policy, "budgets": budget} if policy else {}
        data = _replayed(name, figure, traces, shared.experiment(options, settings), flags)

    from kvsim import plots

    shown = flags["layer"]
    keywords = {**flags, "metrics": metric, "layers": None if shown is None else [shown]}
    chosen = {key: keywords[key] for key in figure.options if keywords[key] is not None}
    inputs = [data.input(key, figure) for key in figure.inputs]
    with FIGURES.running(name):
        written = plots.save(getattr(plots, name)(*inputs, **chosen), out)
    typer.echo(f"Written to {written}.")
    for remark in merged(data.remarks):
        echo_error(f"Note: {remark}.")


def _figure(name: str) -> Figure:
    if name not in FIGURES:
        closest = suggest(name, FIGURES)
        raise OptionError(f"no figure is called {name!r}{closest}; figures: {', '.join(FIGURES)}")
    return FIGURES[name]


def _problems(
    name: str,
    figure: Figure,
    sources: Sequence[str],
    runs: Sequence[str],
    given: Mapping[str, Any],
    flags: Mapping[str, Any],
) -> Iterator[str]:
    """Yield why a figure cannot be drawn with these options."""
    from kvsim.analysis.registry import metric

    for flag, value in flags.items():
        if value is not None and flag not in figure.flags:
            yield f"--{flag} was given, but {name} has none; leave it out"
    for each in flags["metric"] or ():
        if metric(each).kind == "trace":
            yield f"--metric {each} is about traces and the same for every policy; give another"
    if runs and not figure.runs:
        yield f"{name} is drawn from traces, but {runs[0]} is a run; give the traces"
    others = [source for source in sources if source not in runs]
    if runs and others and not figure.single:
        yield f"{runs[0]} is a run and {others[0]} is none; give either runs or traces"
    of_traces = {None: set[str](), "once": {"policy", "set"}}
    used = (
        {"policy", "budget"} if runs else of_traces.get(figure.replay, {*given, "policy", "budget"})
    )
    if surplus := [f"--{key}" for key in given if key not in used]:
        what = f"{runs[0]} is replayed already" if runs else f"{name} does not replay with it"
        yield f"{what}; leave {', '.join(surplus)} out"
    required = [key for key in ("policy", "budget") if key in used and key not in given]
    if required and not runs:
        folder = f", or the folder of a run ({sources[0]} has no run.json)" * figure.runs
        expected = " and ".join(f"--{key} {key.upper()}" for key in required)
        yield f"{name} of traces shows policies; give {expected}{folder}"


def _replayed(
    name: str,
    figure: Figure,
    traces: Sequence[Trace],
    given: dict[str, Any],
    flags: dict[str, Any],
) -> Data:
    """Replay what a figure shows; `flags` get a layer where that of a default has a window."""
    from kvsim.analysis.results import check_models

    check_models(traces)
    for trace in traces:
        whole = [layer for layer in range(trace.n_layers) if layer not in trace.windowed]
        if flags["layer"] is None and figure.single and figure.replay and trace.windowed and whole:
            flags["layer"] = whole[0]  # the figure's own default may have a window
    if figure.replay is None:
        return Data(traces)
    if figure.replay == "once":
        return _evicted_once(traces, given)
    return _swept(name, figure, traces, given, flags["metric"])


@dataclass(frozen=True)
class Data:
    """The data that figures are drawn from, or policies compared by.

    table: of the sweep or the runs, or the errors of single evictions. remarks: what users should
    know of the replays. runs: as they were read.
    """

    traces: Sequence[Trace] = ()
    records: Sequence[Record] = ()
    table: pl.DataFrame | None = None
    remarks: Sequence[str] = ()
    runs: Sequence[Saved] = ()

    def input(self, name: str, figure: Figure) -> Any:
        """Return an argument of a figure, computed if need be."""
        if figure.prepare:
            prepare = getattr(import_module(figure.module), figure.prepare)
            return prepare(self.traces, figure.metrics)
        if name == "trace":
            return self.traces[0]
        if name in ("record", "plans"):
            return self.records[0]
        return getattr(self, "table" if name == "evictions" else name)


def read(
    runs: Sequence[str], policies: Sequence[str] | None, budgets: Sequence[str] | None
) -> Data:
    """Return the Table of runs, of the requested policies and budgets or of all."""
    import polars as pl

    from kvsim.analysis.folder import joined, read_run
    from kvsim.analysis.results import REQUESTED, labelled

    saved = [read_run(run) for run in runs]
    whole, remarks = joined(saved)
    table = labelled(whole)
    if policies is not None:
        policies = [label for name in policies for label in _labels_of(name, table)]
    requested = {"--policy": (policies, pl.col("policy")), "--budget": (budgets, REQUESTED)}
    for option, (names, column) in requested.items():
        if names is None:
            continue
        present = table.select(name=column)["name"].drop_nulls().unique(maintain_order=True)
        missing = [name for name in names if name not in set(present)]
        if missing:
            raise OptionError(
                f"{option} {missing[0]}: the run has none{suggest(missing[0], present)}; it has "
                f"{', '.join(present) or 'no policies'}"
            )
        # what belongs to no policy stays, such as the sparsity of the full cache
        table = table.filter(column.is_in(names) | pl.col("policy").is_null())
    shown = {label.partition(" (")[0] for label in table["policy"].drop_nulls().unique()}
    hidden = tuple(f"{name}: " for name in {*whole["policy"].drop_nulls()} - shown)
    remarks = [remark for remark in remarks if not remark.startswith(hidden)]
    return Data(table=table, remarks=remarks, runs=saved)


def _labels_of(name: str, table: pl.DataFrame) -> list[str]:
    """The labels that a name of `--policy` stands for: itself, or else those of its variants.

    Where runs have several schedules every label of a policy names one.
    """
    labels = table["policy"].drop_nulls().unique(maintain_order=True).to_list()
    same = [label for label in labels if label.lower() == name.lower()]
    variants = [label for label in labels if label.lower().startswith(f"{name.lower()} (")]
    return same or variants or [name]


def _evicted_once(traces: Sequence[Trace], given: Mapping[str, Any]) -> Data:
    import polars as pl

    from kvsim.analysis.output.reconstruction import RATIOS, reconstruction_table
    from kvsim.sweeps.grid import adapted

    adaptation = {name: given[name] for name in ("fit", "protect") if name in given}
    policies = adapted(given["policies"], **adaptation)
    with progress_bar("cells") as report:
        table = pl.concat(
            reconstruction_table(trace, policies, RATIOS, progress=report) for trace in traces
        )
    budgets = table["budget"].unique().sort(descending=True)
    remarks = [remark_of(policy, budget) for policy in policies for budget in budgets]
    return Data(traces, table=table, remarks=remarks)


def _swept(
    name: str,
    figure: Figure,
    traces: Sequence[Trace],
    given: Mapping[str, Any],
    metrics: Sequence[str] | None,
) -> Data:
    from kvsim.analysis.measuring import available
    from kvsim.analysis.registry import metric
    from kvsim.analysis.summaries import COSTS
    from kvsim.engine.checks import Setup
    from kvsim.engine.replay import run
    from kvsim.sweeps.driver import Plan
    from kvsim.sweeps.grid import grid_of

    names = available(figure.metrics, traces) if metrics is None else [*metrics, *COSTS]
    of_figure: dict[str, Any] = {"traces": traces, "metrics": [*dict.fromkeys(names)]}
    of_figure["judge"] = any(metric(each).kind == "live" for each in names)
    plan = Plan.of(grid_of({**given, **of_figure, "records": True}))
    if figure.single == "record" and (count := len(plan.cells)) > 1:
        raise OptionError(f"{name} shows one policy at one budget, but {count} were given")
    if figure.replay == "plans":
        cell = plan.cells[0]
        setup = Setup(cell.trace, cell.policy, cell.budget, cell.schedule).checked()
        record = run(setup, layers=cell.layers, internals=True)
        return Data(traces, [record], None, [record.remark])
    with progress_bar("cells") as report:
        swept = plan.finish(plan.begin(), progress=report).whole()
    if swept.failures:
        first = swept.failures[0]
        cell_name = f"{first.trace}: {first.policy}, budget {first.budget}"
        raise Stop(f"error: {cell_name}: {first.error}; nothing was written", 2)
    return Data(traces, swept.records, swept.table, swept.remarks)
