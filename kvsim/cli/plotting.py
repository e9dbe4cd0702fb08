"""`kvsim plot`: one figure of policies over traces, or of the attention in traces."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvsim.cli.figures import FIGURES, Case, Drawing
from kvsim.cli.show import bar
from kvsim.cli.values import (
    OptionError,
    Settings,
    Stop,
    build_policies,
    check_distinct,
    locate,
    split,
)
from kvsim.errors import OutputError, suggest

if TYPE_CHECKING:
    import polars as pl

    from kvsim.composition import Policy
    from kvsim.record import Record
    from kvsim.trace import Trace

_FORMATS = (".pdf", ".png", ".svg")


def plot(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help=f"The figure: {', '.join(FIGURES)}."),
    ],
    traces: Annotated[
        list[str],
        typer.Argument(metavar="TRACE", help="Recorded traces, or 'sample' for the one shipped."),
    ],
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="The file to write: .png, .svg or .pdf.")
    ],
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[,NAME...]",
            help="Policies, as `kvsim policies` lists them, for figures that show any.",
        ),
    ] = None,
    budget: Annotated[
        list[str] | None,
        typer.Option(
            metavar="N|P%[,...]",
            help="Entries per KV head that stay after an event, or a share of the trace's length.",
        ),
    ] = None,
    interval: Annotated[
        int | None,
        typer.Option(
            min=1, help="Rows between events, the same for every policy; default: each its own."
        ),
    ] = None,
    settings: Settings = None,
    layer: Annotated[
        int | None,
        typer.Option(min=0, help="The layer shown, from 0; default: the figure's own, or all."),
    ] = None,
    head: Annotated[
        int | None,
        typer.Option(min=0, help="The KV head shown, from 0; default: the figure's own, or all."),
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
    """Replay policies over traces and draw one figure.

    docs/figures.md shows the figures and says what each needs.
    """
    if name not in FIGURES:
        raise OptionError(
            f"no figure is called {name!r}{suggest(name, FIGURES)}; figures: {', '.join(FIGURES)}"
        )
    drawing = FIGURES[name]
    _check_out(out)
    for option, given in {"layer": layer, "head": head, "by": by}.items():
        if given is not None and option not in drawing.takes:
            raise OptionError(f"--{option} was given, but {name} has none; leave it out")
    if by not in (None, "stage", "task", "domain", "level"):
        raise OptionError(f"--by is {by!r}; expected stage, task, domain or level")
    names = split(policy or [], "--policy") if policy or drawing.policies else []
    budgets = split(budget or [], "--budget") if budget or drawing.policies else []
    if not drawing.policies and (names or budgets):
        raise OptionError(f"{name} shows no policies; leave --policy and --budget out")
    if drawing.single and len(traces) > 1:
        raise OptionError(f"{name} shows one trace, but {len(traces)} were given")
    if drawing.single == "record" and (len(names), len(budgets)) != (1, 1):
        raise OptionError(
            f"{name} shows one policy at one budget, but {len(names)} policies and {len(budgets)} "
            "budgets were given"
        )

    from kvsim.plots import save
    from kvsim.trace import open_trace

    policies = build_policies(names, settings or []) if names or settings else []
    opened = [open_trace(locate(trace)) for trace in traces]
    check_distinct(opened)
    for trace in opened:
        _check_place(trace, layer, head)
    records, table = _replayed(opened, policies, budgets, interval, drawing)
    figure = drawing.draw(Case(opened, records, table, layer, head, by or "stage"))
    out.parent.mkdir(parents=True, exist_ok=True)
    typer.echo(f"Written to {save(figure, out)}.")


def _check_out(out: Path) -> None:
    if out.suffix.lower() not in _FORMATS:
        raise OptionError(f"--out is {str(out)!r}; expected a file that ends in .png, .svg or .pdf")
    if out.exists():
        raise OutputError(f"{out} exists; give another --out, nothing was changed")


def _check_place(trace: Trace, layer: int | None, head: int | None) -> None:
    places = {"layer": (layer, trace.n_layers), "head": (head, trace.n_heads)}
    for option, (given, count) in places.items():
        if given is not None and given >= count:
            raise OptionError(f"--{option} is {given}; {trace.name} has 0 to {count - 1}")


def _replayed(
    traces: Sequence[Trace],
    policies: Sequence[Policy],
    budgets: Sequence[str],
    interval: int | None,
    drawing: Drawing,
) -> tuple[Sequence[Record], pl.DataFrame]:
    """Records of every policy at every budget over every trace, and what the figure measures."""
    import polars as pl

    from kvsim.engine import replay
    from kvsim.metrics import COLUMNS
    from kvsim.sweeps import resolve_budget, sweep

    if drawing.internals:
        (trace,), (one,), (asked,) = traces, policies, budgets
        size = resolve_budget(asked, trace.n_pos)
        records = [replay(trace, one, size, interval=interval, internals=True)]
        return records, pl.DataFrame(schema=COLUMNS)
    with bar("cells") as report:
        run = sweep(
            traces,
            policies,
            budgets,
            interval=interval,
            metrics=drawing.metrics,
            progress=report,
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
