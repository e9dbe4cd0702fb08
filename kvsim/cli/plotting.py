"""`kvsim plot`: one figure of policies over traces, of finished runs, or of attention in traces."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsim.cli.figures import Data
from kvsim.cli.show import bar, echo_text
from kvsim.cli.values import (
    Interval,
    OptionError,
    Prefill,
    Settings,
    Stop,
    build_policies,
    locate,
    path_option,
    split,
)
from kvsim.errors import OutputError, suggest
from kvsim.plots.registry import FIGURES, PLOTTED, Figure

if TYPE_CHECKING:
    from kvsim.core.policy import Policy
    from kvsim.core.trace import Trace

_FORMATS = (".pdf", ".png", ".svg")
_RUNS = tuple(name for name in PLOTTED if FIGURES[name].runs)
_BY = ("stage", "task", "domain", "level")


def listing() -> str:
    """The figures of `kvsim plot` with their summaries, as lines of its help."""
    wide = 2 + max(map(len, PLOTTED))
    lines = [
        textwrap.fill(f"{name:{wide}}{FIGURES[name].summary}", 78, subsequent_indent=" " * wide)
        for name in PLOTTED
    ]
    return "\b\nFigures:\n" + "\n".join(lines)


def plot(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The figure, of the list below.")],
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="TRACE|RUN",
            help="Recorded traces, or 'sample' for the one shipped; for "
            f"{', '.join(_RUNS[:-1])} and {_RUNS[-1]} also folders that "
            "`kvsim replay --out` wrote.",
        ),
    ],
    out: Annotated[Path, path_option("FILE", "The file to write: .png, .svg or .pdf.")],
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
    interval: Interval = None,
    prefill: Prefill = None,
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
            metavar="|".join(_BY),
            help="What iou_by compares: stages of the model, or labels of prompts. "
            "[default: stage]",
        ),
    ] = None,
) -> None:
    """Draw one figure: replay policies over traces, or take the results of finished runs.

    docs/figures.md shows the figures and says what each needs.
    """
    figure = _figure(name)
    _check_out(out)
    typed: dict[str, Any] = {
        "layer": layer,
        "head": head,
        "by": by,
        "metric": metric,
        "ratio": ratio,
        "zoom": zoom,
    }
    for option, given in typed.items():
        if given is not None and option not in figure.flags:
            raise OptionError(f"--{option} was given, but {name} has none; leave it out")
    if by not in (None, *_BY):
        raise OptionError(f"--by is {by!r}; expected {', '.join(_BY[:-1])} or {_BY[-1]}")
    metrics = None if metric is None else _metrics(metric)
    span = None if zoom is None else _positions(zoom)

    from kvsim.analysis.summaries import layers_of, uneven

    runs = [source for source in sources if _is_run(source)]
    schedule = {"interval": interval, "prefill": prefill}
    if runs:
        _check_runs(name, sources, runs, {**schedule, "set": settings})
        data = _read(runs, policy, budget)
        layers: Mapping[str, Sequence[int]] = layers_of(data.table)
    else:
        names, budgets = _requested(name, figure, policy, budget, {**schedule, "set": settings})
        ratios = None if ratio is None else [_share(text) for text in split(ratio, "--ratio")]
        _check_single(name, figure, len(sources), len(names), len(budgets))

        from kvsim.analysis.results import check_distinct
        from kvsim.store import open_trace

        policies = build_policies(names, settings or []) if names else []
        traces = [open_trace(locate(source)) for source in sources]
        check_distinct(traces)
        for trace in traces:
            _check_place(trace, layer, head, replays=bool(policies))
        if layer is None and figure.single and policies and traces[0].windowed:
            layer = _unwindowed(traces[0])  # the figure's own default may have a window
        if figure.replay is None:
            data = Data(traces)
        elif figure.replay == "once":
            data = _evicted_once(traces, policies, ratios)
        elif figure.replay == "plans":
            data = _planned(traces[0], policies[0], budgets[0], schedule)
        else:
            measured = figure.metrics if metrics is None else (*metrics, "entries_seen")
            data = _swept(traces, policies, budgets, schedule, measured)
        layers = {one.trace: one.layers for one in data.records} if layer is None else {}

    from kvsim import plots

    values = typed | {"layer": layer, "metrics": metrics, "zoom": span}
    values["layers"] = None if layer is None else [layer]
    keywords = {key: values[key] for key in figure.options if values[key] is not None}
    drawing = getattr(plots, name)(*data.arguments(figure), **keywords)
    out.parent.mkdir(parents=True, exist_ok=True)
    typer.echo(f"Written to {plots.save(drawing, out)}.")
    for remark in dict.fromkeys(filter(None, (*data.remarks, uneven(layers)))):
        echo_text(f"Note: {remark}.", err=True)


# ------------------------------------------------------------------------------- the request


def _figure(name: str) -> Figure:
    if name in PLOTTED:
        return FIGURES[name]
    if name in FIGURES:
        raise OptionError(
            f"{name} is drawn by `kvsim layers TRACE --budget N --figures DIR`, with all figures "
            "of layers"
        )
    raise OptionError(
        f"no figure is called {name!r}{suggest(name, PLOTTED)}; figures: {', '.join(PLOTTED)}"
    )


def _check_out(out: Path) -> None:
    if out.suffix.lower() not in _FORMATS:
        raise OptionError(f"--out is {str(out)!r}; expected a file that ends in .png, .svg or .pdf")
    if out.exists():
        raise OutputError(f"{out} exists; give another --out, nothing was changed")


def _is_run(source: str) -> bool:
    """Whether this is a folder that `kvsim replay --out` wrote, and no trace."""
    return (Path(source) / "run.json").is_file()


def _metrics(given: Sequence[str]) -> list[str]:
    """Metrics by name that differ between policies."""
    from kvsim.analysis.registry import metric

    names = split(given, "--metric")
    for name in names:
        if metric(name).kind == "trace":
            raise OptionError(
                f"--metric {name} is about traces and the same for every policy; expected one that "
                "differs between policies, see `kvsim metrics`"
            )
    return names


def _positions(text: str) -> tuple[int, int]:
    """`120-180` as two positions."""
    match = re.fullmatch(r"\s*(\d+)\s*-\s*(\d+)\s*", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise OptionError(f"--zoom is {text!r}; expected two positions such as 120-180")
    return int(match[1]), int(match[2])


def _share(text: str) -> float:
    """`25%` as a share below 1."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)%", text)
    share = 1.0 if match is None else float(match[1]) / 100
    if not 0 < share < 1:
        raise OptionError(f"--ratio is {text!r}; expected a share of the entries such as 25%")
    return share


def _given(options: Mapping[str, Any]) -> str:
    """The options that were given, as they were typed; empty for none."""
    return ", ".join(f"--{name}" for name, value in options.items() if value not in (None, []))


def _requested(
    name: str,
    figure: Figure,
    policy: Sequence[str] | None,
    budget: Sequence[str] | None,
    replaying: Mapping[str, Any],
) -> tuple[list[str], list[str]]:
    """Return the policies and budgets to replay, none where the figure shows none."""
    if figure.replay is None:
        surplus = _given({"policy": policy, "budget": budget, **replaying})
        if surplus:
            raise OptionError(f"{name} shows no policies; leave {surplus} out")
        return [], []
    once = figure.replay == "once"
    needed = {"--policy NAME (as `kvsim policies` lists them)": policy}
    needed |= {} if once else {"--budget N": budget}
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


def _check_single(name: str, figure: Figure, traces: int, policies: int, budgets: int) -> None:
    if figure.single and traces > 1:
        raise OptionError(f"{name} shows one trace, but {traces} were given")
    if figure.single == "record" and (policies, budgets) != (1, 1):
        raise OptionError(
            f"{name} shows one policy at one budget, but {policies} policies and {budgets} "
            "budgets were given"
        )


def _unwindowed(trace: Trace) -> int | None:
    """Return the first layer without a sliding window; replaying fails where there is none."""
    return next((layer for layer in range(trace.n_layers) if layer not in trace.windowed), None)


def _check_place(trace: Trace, layer: int | None, head: int | None, *, replays: bool) -> None:
    places = {"layer": (layer, trace.n_layers), "head": (head, trace.n_heads)}
    for option, (given, count) in places.items():
        if given is not None and given >= count:
            raise OptionError(f"--{option} is {given}; {trace.name} has 0 to {count - 1}")
    unwindowed = _unwindowed(trace)
    if replays and layer in trace.windowed and unwindowed is not None:
        raise OptionError(
            f"--layer {layer} of {trace.name} has a sliding window, so no policy is replayed "
            f"there; expected one that sees the whole text, as {unwindowed}"
        )


def _check_runs(
    name: str, sources: Sequence[str], runs: Sequence[str], replaying: Mapping[str, Any]
) -> None:
    if name not in _RUNS:
        raise OptionError(
            f"{name} is drawn from traces, but {runs[0]} is a run; give the traces that it "
            f"replayed. Drawn from runs: {', '.join(_RUNS)}"
        )
    if len(runs) < len(sources):
        other = next(source for source in sources if source not in runs)
        raise OptionError(f"{runs[0]} is a run and {other} is none; give either runs or traces")
    surplus = _given(replaying)
    if surplus:
        raise OptionError(f"{runs[0]} is replayed already; leave {surplus} out")


# ------------------------------------------------------------------------------------ the data


def _read(runs: Sequence[str], policy: Sequence[str] | None, budget: Sequence[str] | None) -> Data:
    """Return the Table of runs, of the requested policies and budgets or of all."""
    import polars as pl

    from kvsim.analysis.results import labelled
    from kvsim.report import joined, read_run

    saved = [read_run(run) for run in runs]
    table = labelled(joined(saved))
    size = pl.coalesce("share", pl.col("budget").cast(pl.String))
    requested = {"--policy": (policy, pl.col("policy")), "--budget": (budget, size)}
    for option, (given, column) in requested.items():
        if given is None:
            continue
        wanted = split(given, option)
        present = table.select(name=column)["name"].drop_nulls().unique(maintain_order=True)
        missing = [name for name in wanted if name not in set(present)]
        if missing:
            raise OptionError(
                f"{option} {missing[0]}: the run has none{suggest(missing[0], present)}; it has "
                f"{', '.join(present) or 'no policies'}"
            )
        # what belongs to no policy stays, such as the sparsity of the full cache
        table = table.filter(column.is_in(wanted) | pl.col("policy").is_null())
    remarks = [remark for run in saved for remark in run.parameters.get("remarks", ())]
    return Data(table=table, remarks=remarks)


def _planned(trace: Trace, policy: Policy, size: str, schedule: Mapping[str, Any]) -> Data:
    """Return one record with its Plans."""
    from kvsim.engine import replay
    from kvsim.sweeps.run import resolve_budget, shared_prefill

    budget = resolve_budget(size, trace.n_pos)
    interval, prefill = schedule["interval"], shared_prefill(**schedule)
    record = replay(trace, policy, budget, interval=interval, prefill=prefill, internals=True)
    return Data([trace], [record], remarks=[record.remark])


def _evicted_once(
    traces: Sequence[Trace], policies: Sequence[Policy], ratios: Sequence[float] | None
) -> Data:
    """Return the errors of one eviction by each policy at each ratio."""
    import polars as pl

    from kvsim.analysis.output.reconstruction import RATIOS, reconstruction_table

    shares = sorted(set(ratios or RATIOS))
    with bar("cells") as report:
        table = pl.concat(
            reconstruction_table(trace, policies, shares, progress=report) for trace in traces
        )
    budgets = table["budget"].unique().sort(descending=True)
    remarks = [policy.remark(budget) for policy in policies for budget in budgets]
    return Data(traces, table=table, remarks=remarks)


def _swept(
    traces: Sequence[Trace],
    policies: Sequence[Policy],
    budgets: Sequence[str],
    schedule: Mapping[str, Any],
    metrics: Sequence[str],
) -> Data:
    """Return records of every policy at every budget over every trace, and their metrics."""
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
        cell = f"{first.trace}: {first.policy}, budget {first.budget}"
        raise Stop(f"error: {cell}: {first.error}; nothing was written", 2)
    return Data(traces, run.records, run.table, [record.remark for record in run.records])
