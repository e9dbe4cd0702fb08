"""`kvsim plot`: one figure of policies over traces, of finished runs, or of attention in traces."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsim.cli.figures import FIGURES, Case, Drawing
from kvsim.cli.show import bar, echo_text
from kvsim.cli.values import (
    OptionError,
    Settings,
    Stop,
    build_policies,
    local_path,
    locate,
    split,
)
from kvsim.errors import OutputError, suggest

if TYPE_CHECKING:
    import polars as pl

    from kvsim.core.policy import Policy
    from kvsim.core.record import Record
    from kvsim.core.trace import Trace

_FORMATS = (".pdf", ".png", ".svg")
#: Figures that `kvsim layers --figures` draws, by the names of their functions.
_LAYERS = (
    *("gold_recall", "layer_attention", "layer_overlap", "rank_bumps", "rank_pattern"),
    *("selection_grid", "selection_histogram", "variance_curves"),
)


def plot(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help=f"The figure: {', '.join(FIGURES)}."),
    ],
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="TRACE|RUN",
            help="Recorded traces, or 'sample' for the one shipped; for over_budgets, pareto, "
            "iou_by and sparsity_by_layer also folders that `kvsim replay --out` wrote.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            parser=local_path, metavar="FILE", help="The file to write: .png, .svg or .pdf."
        ),
    ],
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[,NAME...]",
            help="Policies, as `kvsim policies` lists them, for figures that show any; of a run "
            "those to show, by default all.",
        ),
    ] = None,
    budget: Annotated[
        list[str] | None,
        typer.Option(
            metavar="N|P%[,...]",
            help="Entries per KV head that stay after an event, or a share of the trace's length; "
            "of a run those to show, by default all.",
        ),
    ] = None,
    interval: Annotated[
        int | None,
        typer.Option(
            min=1, help="Rows between events, the same for every policy; default: each its own."
        ),
    ] = None,
    prefill: Annotated[
        bool | None,
        typer.Option(
            "--prefill/--no-prefill",
            help="Whether an event follows the prompt; default: each policy its own.",
        ),
    ] = None,
    settings: Settings = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[,NAME...]",
            help="What over_budgets and pareto show, as `kvsim metrics` lists it, a panel each; "
            "of metrics with variants the main one.",
        ),
    ] = None,
    ratio: Annotated[
        list[str] | None,
        typer.Option(
            metavar="P%[,...]",
            help="Shares of the entries that reconstruction_error evicts. [default: 10% to 90%]",
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
    zoom: Annotated[
        str | None,
        typer.Option(
            metavar="A-B",
            help="Positions that bursts shows closely; default: within the longest burst.",
        ),
    ] = None,
    by: Annotated[
        str | None,
        typer.Option(
            metavar="stage|task|domain|level",
            help="What iou_by compares: stages of the model, or labels of prompts. "
            "[default: stage]",
        ),
    ] = None,
) -> None:
    """Draw one figure: replay policies over traces, or take the results of finished runs.

    docs/figures.md shows the figures and says what each needs.
    """
    drawing = _drawing(name)
    _check_out(out)
    own = {"layer": layer, "head": head, "by": by, "metric": metric, "ratio": ratio, "zoom": zoom}
    for option, given in own.items():
        if given is not None and option not in drawing.takes:
            raise OptionError(f"--{option} was given, but {name} has none; leave it out")
    if by not in (None, "stage", "task", "domain", "level"):
        raise OptionError(f"--by is {by!r}; expected stage, task, domain or level")
    chosen = None if metric is None else _metrics(metric)
    near = None if zoom is None else _positions(zoom)

    from kvsim.analysis.summaries import layers_of, uneven

    finished = [source for source in sources if _is_run(source)]
    replaying = {"interval": interval, "prefill": prefill, "set": settings}
    if finished:
        _check_runs(name, drawing, sources, finished, replaying)
        table = _read(finished, policy, budget)
        case = Case([], [], table, by=by, metric=chosen)
        known: Mapping[str, Sequence[int]] = layers_of(table)
    else:
        names, sizes = _asked(name, drawing, policy, budget, replaying)
        ratios = None if ratio is None else [_share(one) for one in split(ratio, "--ratio")]
        _check_single(name, drawing, len(sources), len(names), len(sizes))

        from kvsim.analysis.results import check_distinct
        from kvsim.core.trace import open_trace

        policies = build_policies(names, settings or []) if names else []
        traces = [open_trace(locate(source)) for source in sources]
        check_distinct(traces)
        for trace in traces:
            _check_place(trace, layer, head, replays=bool(policies))
        if layer is None and drawing.single and policies and traces[0].windowed:
            layer = _seeing(traces[0])  # the figure's own default may have a window
        schedule = {"interval": interval, "prefill": prefill}
        if drawing.replay == "once":
            records: Sequence[Record] = []
            table = _errors(traces, policies, ratios)
        elif drawing.replay == "plans":
            records, table = _planned(traces[0], policies[0], sizes[0], schedule)
        else:
            needed = drawing.metrics if chosen is None else (*chosen, "entries_seen")
            records, table = _swept(traces, policies, sizes, schedule, needed)
        case = Case(traces, records, table, layer, head, by, chosen, near)
        known = {one.trace: one.layers for one in records} if layer is None else {}

    from kvsim.plots import save

    figure = drawing.draw(case)
    out.parent.mkdir(parents=True, exist_ok=True)
    typer.echo(f"Written to {save(figure, out)}.")
    differing = uneven(known)
    if differing:
        echo_text(f"Note: {differing}.")


# --------------------------------------------------------------------------------- what was asked


def _drawing(name: str) -> Drawing:
    if name in _LAYERS:
        raise OptionError(
            f"{name} is drawn by `kvsim layers TRACE --budget N --figures DIR`, with all figures "
            "of layers"
        )
    if name not in FIGURES:
        raise OptionError(
            f"no figure is called {name!r}{suggest(name, FIGURES)}; figures: {', '.join(FIGURES)}"
        )
    return FIGURES[name]


def _check_out(out: Path) -> None:
    if out.suffix.lower() not in _FORMATS:
        raise OptionError(f"--out is {str(out)!r}; expected a file that ends in .png, .svg or .pdf")
    if out.exists():
        raise OutputError(f"{out} exists; give another --out, nothing was changed")


def _is_run(source: str) -> bool:
    """Whether this is a folder that `kvsim replay --out` wrote, and no trace."""
    return (Path(source) / "run.json").is_file()


def _metrics(given: Sequence[str]) -> list[str]:
    """Metrics by name that say something of policies."""
    from kvsim.analysis.registry import metric

    names = split(given, "--metric")
    for name in names:
        if metric(name).kind == "trace":
            raise OptionError(
                f"--metric {name} is about traces and the same for every policy; expected one that "
                "tells policies apart, see `kvsim metrics`"
            )
    return names


def _positions(text: str) -> tuple[int, int]:
    """`120-180` as two positions."""
    found = re.fullmatch(r"\s*(\d+)\s*-\s*(\d+)\s*", text)
    if found is None or int(found[1]) >= int(found[2]):
        raise OptionError(f"--zoom is {text!r}; expected two positions such as 120-180")
    return int(found[1]), int(found[2])


def _share(text: str) -> float:
    """`25%` as a share below 1."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)%", text)
    share = 1.0 if found is None else float(found[1]) / 100
    if not 0 < share < 1:
        raise OptionError(f"--ratio is {text!r}; expected a share of the entries such as 25%")
    return share


def _given(options: Mapping[str, Any]) -> str:
    """The options that were given, as they were typed; empty for none."""
    return ", ".join(f"--{name}" for name, value in options.items() if value not in (None, []))


def _asked(
    name: str,
    drawing: Drawing,
    policy: Sequence[str] | None,
    budget: Sequence[str] | None,
    replaying: Mapping[str, Any],
) -> tuple[list[str], list[str]]:
    """The policies and budgets to replay, as far as the figure shows any."""
    if drawing.replay is None:
        surplus = _given({"policy": policy, "budget": budget, **replaying})
        if surplus:
            raise OptionError(f"{name} shows no policies; leave {surplus} out")
        return [], []
    once = drawing.replay == "once"
    needed = {"--policy NAME (as `kvsim policies` lists them)": policy}
    if not once:
        needed["--budget N"] = budget
    missing = [option for option, given in needed.items() if not given]
    if missing:
        raise OptionError(f"{name} of traces shows policies; give {' and '.join(missing)} as well")
    names = split(policy or [], "--policy")
    if once:
        surplus = _given({"budget": budget, **replaying, "set": None})
        if surplus:
            raise OptionError(
                f"{name} shows one eviction of each --ratio of the entries; leave {surplus} out"
            )
        return names, []
    return names, split(budget or [], "--budget")


def _check_single(name: str, drawing: Drawing, traces: int, policies: int, budgets: int) -> None:
    if drawing.single and traces > 1:
        raise OptionError(f"{name} shows one trace, but {traces} were given")
    if drawing.single == "record" and (policies, budgets) != (1, 1):
        raise OptionError(
            f"{name} shows one policy at one budget, but {policies} policies and {budgets} "
            "budgets were given"
        )


def _seeing(trace: Trace) -> int | None:
    """The first layer that sees the whole text; replaying says so where there is none."""
    return next((layer for layer in range(trace.n_layers) if layer not in trace.windowed), None)


def _check_place(trace: Trace, layer: int | None, head: int | None, *, replays: bool) -> None:
    places = {"layer": (layer, trace.n_layers), "head": (head, trace.n_heads)}
    for option, (given, count) in places.items():
        if given is not None and given >= count:
            raise OptionError(f"--{option} is {given}; {trace.name} has 0 to {count - 1}")
    seeing = _seeing(trace)
    if replays and layer in trace.windowed and seeing is not None:
        raise OptionError(
            f"--layer {layer} of {trace.name} has a sliding window, so no policy is replayed "
            f"there; expected one that sees the whole text, as {seeing}"
        )


def _check_runs(
    name: str,
    drawing: Drawing,
    sources: Sequence[str],
    finished: Sequence[str],
    replaying: Mapping[str, Any],
) -> None:
    if not drawing.runs:
        able = ", ".join(one for one, drawn in FIGURES.items() if drawn.runs)
        raise OptionError(
            f"{name} is drawn from traces, but {finished[0]} is a run; give the traces that it "
            f"replayed. Drawn from runs: {able}"
        )
    if len(finished) < len(sources):
        other = next(source for source in sources if source not in finished)
        raise OptionError(f"{finished[0]} is a run and {other} is none; give either runs or traces")
    surplus = _given(replaying)
    if surplus:
        raise OptionError(f"{finished[0]} is replayed already; leave {surplus} out")


# ------------------------------------------------------------------------------ what is drawn from


def _read(
    runs: Sequence[str], policy: Sequence[str] | None, budget: Sequence[str] | None
) -> pl.DataFrame:
    """The Table of runs; of the policies and budgets that were asked for, else of all."""
    import polars as pl

    from kvsim.analysis.results import labelled
    from kvsim.report import joined, read_run

    table = labelled(joined([read_run(run) for run in runs]))
    asked = pl.coalesce("share", pl.col("budget").cast(pl.String))
    for option, given, column in (
        ("--policy", policy, pl.col("policy")),
        ("--budget", budget, asked),
    ):
        if given is None:
            continue
        wanted = split(given, option)
        known = table.select(column.alias("one")).drop_nulls()["one"].unique(maintain_order=True)
        missing = [one for one in wanted if one not in set(known)]
        if missing:
            raise OptionError(
                f"{option} {missing[0]}: the run has none{suggest(missing[0], known)}; it has "
                f"{', '.join(known) or 'no policies'}"
            )
        # what belongs to no policy stays, such as the sparsity of the full cache
        table = table.filter(column.is_in(wanted) | pl.col("policy").is_null())
    return table


def _planned(
    trace: Trace, policy: Policy, asked: str, schedule: Mapping[str, Any]
) -> tuple[Sequence[Record], pl.DataFrame]:
    """One record with its Plans, and an empty Table."""
    import polars as pl

    from kvsim.analysis.table import COLUMNS
    from kvsim.engine import replay
    from kvsim.sweeps.run import resolve_budget

    size = resolve_budget(asked, trace.n_pos)
    record = replay(trace, policy, size, internals=True, **schedule)
    return [record], pl.DataFrame(schema=COLUMNS)


def _errors(
    traces: Sequence[Trace], policies: Sequence[Policy], ratios: Sequence[float] | None
) -> pl.DataFrame:
    """The error of one eviction by each policy at each ratio."""
    import polars as pl

    from kvsim.analysis.output.reconstruction import RATIOS, reconstruction_table

    shares = sorted(set(ratios or RATIOS))
    with bar("cells") as report:
        return pl.concat(
            reconstruction_table(trace, policies, shares, progress=report) for trace in traces
        )


def _swept(
    traces: Sequence[Trace],
    policies: Sequence[Policy],
    budgets: Sequence[str],
    schedule: Mapping[str, Any],
    metrics: Sequence[str],
) -> tuple[Sequence[Record], pl.DataFrame]:
    """Records of every policy at every budget over every trace, and what the figure measures."""
    from kvsim.sweeps.run import sweep

    with bar("cells") as report:
        run = sweep(
            traces,
            policies,
            budgets,
            metrics=list(dict.fromkeys(metrics)),
            regret="regret" in metrics,
            progress=report,
            **schedule,
        )
    if run.interrupted:
        raise Stop("interrupted, nothing was written", 130)
    if run.failures:
        first = run.failures[0]
        raise Stop(
            f"error: {first.trace}: {first.policy}, budget {first.budget}: {first.error}; nothing "
            "was written",
            2,
        )
    return run.records, run.table
