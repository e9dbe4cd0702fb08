"""What the user sees: tables and JSON on standard output, progress on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table

from kvsim.schema import schedule

if TYPE_CHECKING:
    import polars as pl

#: Metrics whose column has a shorter name, and how their values are written.
_COLUMNS = {
    "entries_seen": ("seen", "{:.0f}"),
    "output_error": ("output\nerror", "{:.3f}"),
    "retained_mass": ("mass\nkept", "{:.1%}"),
    "wipeout": ("wiped\nout", "{:.0%}"),
    "wipeout_hazard": ("wiped out\nper event", "{:.1%}"),
    "retained_iou": ("IoU", "{:.2f}"),
    "iou_chance": ("IoU by\nchance", "{:.2f}"),
    "missing_mass": ("missing\nmass", "{:.1%}"),
    "error_distance": ("error\ndistance", "{:.2f}"),
    "regret": ("regret", "{:+.1%}"),
    "exact": ("exact", "{:.0%}"),
}
#: Columns of a summary that say which cell a row is.
_KEYS = ("policy", "params", "budget", "share", "interval", "prefill")

OPEN_LOOP = (
    "open: computed from the recorded queries, keys and values; in a live run errors also add up "
    "from layer to layer and the model may write other tokens."
)


def visible(text: str) -> str:
    """Text that no terminal acts upon: what cannot be printed is escaped, line ends stay."""
    return "".join(c if c == "\n" or c.isprintable() else json.dumps(c)[1:-1] for c in text)


def one_line(text: str) -> str:
    """As `visible`, line ends escaped too: a name cannot pass for a line of its own."""
    return visible(text).replace("\n", "\\n")


def echo_text(text: str = "", *, err: bool = False) -> None:
    """Prose on standard output, or on standard error; names in it may come from files."""
    typer.echo(visible(text), err=err)


def echo_json(document: object) -> None:
    """One JSON document on standard output."""
    typer.echo(json.dumps(document, indent=2, allow_nan=False))


def echo_table(headers: Sequence[str], rows: Iterable[Sequence[str]], *, right: int = 0) -> None:
    """A table without lines; the columns from `right` on are numbers, unless `right` is 0.

    In a pipe no cell is wrapped, however long.
    """
    console = Console(
        markup=False,
        highlight=False,
        emoji=False,
        width=None if sys.stdout.isatty() else 10_000,
    )
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for i, header in enumerate(headers):
        numbers = 0 < right <= i
        table.add_column(header, justify="right" if numbers else "left", no_wrap=numbers or i == 0)
    for row in rows:
        table.add_row(*(one_line(cell) for cell in row))
    if console.measure(table, options=console.options.update(width=10_000)).minimum > console.width:
        table.padding = (0, 1, 0, 0)
    with console.capture() as captured:
        console.print(table)
    typer.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


def echo_fields(fields: Mapping[str, str]) -> None:
    """Names and values, one pair per line."""
    width = max(len(name) for name in fields)
    for name, value in fields.items():
        typer.echo(f"{name:<{width}}  {one_line(value)}")


def cells(summary: pl.DataFrame) -> list[dict[str, Any]]:
    """The rows of a summary for JSON."""
    return [{**row, "params": json.loads(row["params"])} for row in summary.to_dicts()]


def fidelity_shares(table: pl.DataFrame, metrics: Sequence[str]) -> dict[str, float]:
    """For each fidelity label the share of the values of `metrics` that carry it."""
    labels = table.filter(table["metric"].is_in(list(metrics)))["fidelity"].cast(str).to_list()
    return {name: labels.count(name) / len(labels) for name in sorted(set(labels))}


def echo_results(
    summary: pl.DataFrame,
    unbounded: Iterable[str],
    more: Mapping[str, Callable[[dict[str, Any]], str]] | None = None,
) -> None:
    """The table of a sweep, a line per policy and budget; `more` are columns made from a row.

    `unbounded`: policies that no budget binds, shown once.
    """
    free = set(unbounded)
    rows = [
        row
        for i, row in enumerate(summary.to_dicts())
        if row["policy"] not in free or row["policy"] not in set(summary["policy"][:i])
    ]
    columns: dict[str, list[str]] = {
        "policy": [row["policy"] for row in rows],
        "budget": ["-" if row["policy"] in free else _budget(row) for row in rows],
    }
    schedules = [
        "never" if row["policy"] in free else schedule(row["interval"], prefill=row["prefill"])
        for row in rows
    ]
    common = set(schedules) - {"never"}
    if len(common) == 1:
        echo_text(f"Every policy evicts after: {common.pop()}. Budgets are entries per KV head.\n")
    else:
        columns["evicts after"] = schedules
    right = len(columns)
    for name in summary.columns:
        if name in _KEYS:
            continue
        header, form = _COLUMNS.get(name, (name.replace("_", "\n"), "{:.3f}"))
        columns[header] = ["-" if row[name] is None else form.format(row[name]) for row in rows]
    for header, make in (more or {}).items():
        columns[header] = [make(row) for row in rows]
    echo_table(list(columns), list(zip(*columns.values(), strict=True)), right=right)


def _budget(row: Mapping[str, Any]) -> str:
    """Entries, and the share of the trace that they are where they were asked for as one."""
    return str(row["budget"]) if row["share"] is None else f"{row['budget']} ({row['share']})"


@contextmanager
def bar(unit: str) -> Iterator[Callable[[int, int, str], None]]:
    """A function that shows (done, total, what) as a bar on a terminal, and nothing in a pipe."""
    if not sys.stderr.isatty():
        yield lambda *_: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task("", total=None)

        def report(done: int, total: int, what: str = "") -> None:
            shown.update(task, completed=done, total=total, description=visible(what))

        yield report
