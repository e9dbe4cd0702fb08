"""`kvsim plot`, one figure of runs, kept sets or attention, and `kvsim report`, a page of all."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kvsim.cli import shared
from kvsim.cli.options import takes
from kvsim.cli.shared import OptionError
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
            "results, such as pareto, folders that `kvsim replay` or `live` wrote.",
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
    """Draw one figure of finished runs, or of traces, over which policies are replayed if need be.

    docs/figures.md shows the figures and says what each needs.
    """
    from kvsim.analysis.folder import is_run
    from kvsim.analysis.results import check_models

    figure = _figure(name)
    if out.suffix.lower() not in _FORMATS:
        raise OptionError(f"--out is {str(out)!r}; expected a file that ends in .png, .svg or .pdf")
    check_output(out, advice="give another --out")
    flags: dict[str, Any] = {"layer": layer, "head": head, "by": by, "metric": metric}
    given = {"policy": policy, "budget": budget, **options, "set": settings}
    given = {key: value for key, value in given.items() if value}
    runs = [source for source in sources if is_run(source)]
    shared.refuse(_conflicts(name, figure, sources, runs, given, flags))
    traces = shared.open_traces([source for source in sources if source not in runs])
    if figure.single and len(traces) != 1:
        raise OptionError(f"{name} shows one trace, but {len(traces)} were given")
    data: dict[str, Any] = {"traces": traces, "trace": traces[0] if traces else None}
    remarks: Sequence[str] = ()
    if figure.runs:
        _, data["table"], remarks = read(runs, policy, budget)
    else:
        check_models(traces)
        _check_place(traces, flags)
    if figure.replay is not None:
        options |= {"policies": policy, "budgets": budget, "traces": traces}
        replayed = _evicted_once if figure.replay == "once" else _replayed
        more, remarks = replayed(name, figure, shared.experiment(options, settings))
        data |= more

    from kvsim import plots

    shown = flags["layer"]
    for trace in traces:
        whole = [each for each in range(trace.n_layers) if each not in trace.windowed]
        if shown is None and figure.single and figure.replay and trace.windowed and whole:
            shown = whole[0]  # the figure's own default may have a window
    keywords = {**flags, "layer": shown, "metrics": metric}
    keywords["layers"] = None if shown is None else [shown]
    chosen = {key: keywords[key] for key in figure.options if keywords[key] is not None}
    inputs = [data[key] for key in figure.inputs]
    written = plots.save(getattr(plots, name)(*inputs, **chosen), out)
    typer.echo(f"Written to {written}.")
    for remark in merged(remarks):
        echo_error(f"Note: {remark}.")


def _figure(name: str) -> Figure:
    if name not in FIGURES:
        closest = suggest(name, FIGURES)
        raise OptionError(f"no figure is called {name!r}{closest}; figures: {', '.join(FIGURES)}")
    return FIGURES[name]


def _conflicts(
    name: str,
    figure: Figure,
    sources: Sequence[str],
    runs: Sequence[str],
    given: Collection[str],
    flags: Mapping[str, Any],
) -> dict[str, object]:
    """Return why a figure cannot be drawn with these options, and whether each reason holds."""
    others = [source for source in sources if source not in runs]
    of_replays = {None: set[str](), "once": {"policy", "set"}}
    used = {"policy", "budget"} if figure.runs else of_replays.get(figure.replay, {*given})
    surplus = ", ".join(f"--{key}" for key in given if key not in used)
    required = {None: (), "once": ("policy",)}.get(figure.replay, ("policy", "budget"))
    missing = " and ".join(f"--{key} {key.upper()}" for key in required if key not in given)
    source, run = (each[0] if each else "" for each in (others, runs))
    conflicts: dict[str, object] = {
        f"--{flag} was given, but {name} has none; leave it out": flag not in figure.flags
        for flag, value in flags.items()
        if value is not None
    }
    return conflicts | {
        f"{name} is drawn from traces, but {run} is a run; give the traces": runs
        and not figure.runs,
        f"{name} is drawn from runs, but {source} is no run; give one of `kvsim replay --out`": (
            figure.runs and (not runs or (others and not figure.single))
        ),
        f"{name} does not replay with it; leave {surplus} out": surplus,
        f"{name} shows policies; give {missing}": missing,
    }


def _check_place(traces: Sequence[Trace], flags: Mapping[str, Any]) -> None:
    """Raise for a layer or a head that a trace lacks, before any replay."""
    from kvsim.analysis.axes import checked_index

    for trace in traces:
        for flag, count in (("layer", trace.n_layers), ("head", trace.part().n_heads)):
            if flags[flag] is not None:
                checked_index(flag, flags[flag], count, trace.name)


def read(
    runs: Sequence[str], policies: Sequence[str] | None, budgets: Sequence[str] | None
) -> tuple[list[Saved], pl.DataFrame, list[str]]:
    """Return runs, their Table of the requested policies and budgets or of all, and remarks."""
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
        # values without a policy stay, such as the sparsity of the full cache
        table = table.filter(column.is_in(names) | pl.col("policy").is_null())
    shown = {label.partition(" (")[0] for label in table["policy"].drop_nulls().unique()}
    hidden = tuple(f"{name}: " for name in {*whole["policy"].drop_nulls()} - shown)
    remarks = [remark for remark in remarks if not remark.startswith(hidden)]
    return saved, table, remarks


def _labels_of(name: str, table: pl.DataFrame) -> list[str]:
    """The labels of a name of `--policy`: itself, or all variants and schedules of the policy."""
    labels = table["policy"].drop_nulls().unique(maintain_order=True).to_list()
    same = [label for label in labels if label.lower() == name.lower()]
    variants = [label for label in labels if label.lower().startswith(f"{name.lower()} (")]
    return same or variants or [name]


def _evicted_once(
    _name: str, _figure: Figure, given: dict[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    import polars as pl

    from kvsim.analysis.output.reconstruction import RATIOS, reconstruction_table
    from kvsim.sweeps.grid import adapted

    adaptation = {name: given[name] for name in ("fit", "protect") if name in given}
    policies = adapted(given["policies"], **adaptation)
    with progress_bar("cells") as report:
        table = pl.concat(
            reconstruction_table(trace, policies, RATIOS, progress=report)
            for trace in given["traces"]
        )
    budgets = table["budget"].unique().sort(descending=True)
    remarks = [remark_of(policy, budget) for policy in policies for budget in budgets]
    return {"evictions": table}, remarks


def _replayed(name: str, figure: Figure, given: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    from kvsim.engine.checks import Setup
    from kvsim.engine.replay import run
    from kvsim.sweeps.grid import grid_of

    grid = grid_of(where="kvsim plot", **given)
    schedules, memory = grid.schedules(), grid.options["memory"]
    cells = grid.cells(given["traces"], [terms for terms, _ in schedules])
    if figure.single == "record" and len(cells) > 1:
        raise OptionError(f"{name} shows one policy at one budget, but {len(cells)} were given")
    setups = [Setup(x.trace, x.policy, x.budget, x.schedule).checked(memory) for x in cells]
    records: list[Record] = []
    with progress_bar("cells") as report:
        for cell, setup in zip(cells, setups, strict=True):
            report(len(records), len(cells), f"{cell.trace.name}: {cell.policy.name}")
            plans = figure.replay == "plans"
            record = run(setup, layers=cell.layers, memory=memory, internals=plans)
            records.append(replace(record, facts=replace(record.facts, share=cell.share)))
    remarks = [*(remark for _, remark in schedules), *(record.remark for record in records)]
    return {"records": records, "record": records[0], "plans": records[0]}, remarks


def report(
    given: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN|TRACE",
            help="Folders that `kvsim replay` or `live` wrote, and recorded traces to "
            "analyse, or the shipped 'sample' and 'sample-smollm2'; paths or URLs.",
        ),
    ],
    out: Annotated[Path, shared.path_option("FILE", "The page to write.")] = Path("report.html"),
    metric: Annotated[
        list[str] | None,
        shared.several(
            "NAME[,NAME...]",
            "Metrics next to the one that ranks; default: entries_seen,wipeout.",
        ),
    ] = None,
    overwrite: shared.Overwrite = False,
) -> None:
    """Write results, figures and the papers' claims on them as one HTML page.

    Of runs: every policy with intervals over prompts. Of traces: what they say before any policy
    evicts. Traces next to runs have to be those that the runs replayed.
    """
    from kvsim.analysis.folder import is_run
    from kvsim.report import METRICS, write_report
    from kvsim.store.reader import open_trace

    paths = shared.paths_of(given)
    runs = [x for x in paths if is_run(x) or Path(x).suffix == ".parquet"]
    traces = [open_trace(path) for path in paths if path not in runs]
    with progress_bar("steps") as progress:
        options: dict[str, Any] = {"metrics": metric or METRICS, "traces": traces}
        page = write_report(runs, out, **options, overwrite=overwrite, progress=progress)
    typer.echo(f"Written to {page}.")
