"""Output: tables and JSON on standard output, progress on standard error."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.filesize import decimal as size
from rich.table import Table

from kvsim.schema import merged, plural, rounded, visible

if TYPE_CHECKING:
    import polars as pl

    from kvsim.store.forecast import Forecast
    from kvsim.sweeps.tasks import Failure

#: Formats of values by unit.
_FORMATS = {"share": ".1%", "signed share": "+.1%", "entries": ".0f", "bytes": ",.0f"}

#: Most characters of a message: a longer one quotes a long name or value.
_LINE = 2000


def one_line(text: str) -> str:
    """Escape line ends too: a name cannot look like a line of output."""
    return visible(text).replace("\n", "\\n")


def echo_text(text: str = "") -> None:
    """Print prose on standard output; names in it may be untrusted input."""
    typer.echo(visible(text))


def echo_error(text: str) -> None:
    """Print prose on standard error, cut short; names in it may be untrusted input."""
    cut = text if len(text) <= _LINE else f"{text[: _LINE // 2]} ... {text[-_LINE // 4 :]}"
    typer.echo(visible(cut), err=True)


def echo_notes(remarks: Iterable[str]) -> None:
    """Print each remark once, a line each; remarks that differ only in budgets are joined."""
    for remark in merged(remarks):
        echo_text(f"Note: {remark}.")


def echo_json(document: object) -> None:
    """Print one JSON document on standard output."""
    typer.echo(json.dumps(document, indent=2, allow_nan=False))


def echo_table(headers: Sequence[str], rows: Iterable[Sequence[str]], *, right: int = 0) -> None:
    """Print a table, without wrapping in a pipe; columns from `right` on, if not 0, are numbers."""
    width = None if sys.stdout.isatty() else 10_000
    console = Console(markup=False, highlight=False, emoji=False, width=width)
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


def echo_rows(rows: Sequence[Mapping[str, str]], *, right: int = 0) -> None:
    """Print rows with the same keys, the headers of the columns; see `echo_table`."""
    if rows:
        echo_table(list(rows[0]), [list(row.values()) for row in rows], right=right)


def metric_format(name: str) -> str:
    """Return the format of the values of a metric, or of another column of its unit."""
    from kvsim.analysis.registry import METRICS

    return _FORMATS.get(METRICS[name].unit if name in METRICS else "share", ".3g")


def number(value: float | None, form: str) -> str:
    """Return a number as a cell of a table, a dash for None."""
    return "-" if value is None else rounded(value, form)


def interval(form: str, mean: float | None, low: float | None, high: float | None) -> str:
    """Return a mean as a cell of a table, with the ends of its interval where it has one."""
    if mean is None or low is None or high is None:
        return number(mean, form)
    return f"{rounded(mean, form)} [{rounded(low, form)}, {rounded(high, form)}]"


def echo_fields(fields: Mapping[str, str]) -> None:
    """Print names and values, one pair per line."""
    width = max(len(name) for name in fields)
    for name, value in fields.items():
        typer.echo(f"{name:<{width}}  {one_line(value)}")


def cells(summary: pl.DataFrame) -> list[dict[str, Any]]:
    """Return the rows of a summary for JSON."""
    return [{**row, "params": json.loads(row["params"])} for row in summary.to_dicts()]


def fidelity_shares(table: pl.DataFrame) -> dict[str, float]:
    """Return for each fidelity label its share among the values of a run."""
    from kvsim.analysis.overview import fidelity_shares as shares_of

    return dict(sorted(shares_of(table).select("fidelity", "share").iter_rows()))


def brackets(prompts: int) -> str:
    """Return the meaning of brackets after a mean over prompts; empty where it has none."""
    from kvsim.analysis.significance import FEWEST

    return ", in brackets the 95 % interval over prompts" * (prompts >= FEWEST)


def errors_once(failures: Sequence[Failure]) -> Iterator[tuple[Failure, str]]:
    """Yield the first failure of each error, up to numbers, and a count of the other cells."""
    same: dict[str, list[Failure]] = {}
    for each in failures:
        same.setdefault(re.sub(r"\d+", "#", each.error), []).append(each)
    for failed in same.values():
        more = len({(each.trace, each.cell) for each in failed if each.cell >= 0}) - 1
        yield failed[0], failed[0].error + f" (and so in {plural(more, 'more cell')})" * (more > 0)


def echo_failures(failures: Sequence[Failure]) -> None:
    """Print failures on standard error, each error once."""
    for first, error in errors_once(failures):
        cell = f"{one_line(first.trace)}: {first.policy}, budget {first.budget}"
        echo_error(f"failed: {cell}: {error}")


def echo_forecast(
    forecast: Forecast, folder: Path | None, counts: Mapping[str, Any], *, as_json: bool
) -> None:
    """Print a forecast; folder: of the outputs, None without. counts: of cells, traces, tasks."""
    from kvsim.store.forecast import free_bytes

    facts, fields = forecast.describe(), dict[str, str]()
    free = None if folder is None else free_bytes(folder)
    if as_json:
        echo_json({**counts, **facts, "free": free})
        return
    if counts:
        tasks = f"{counts['tasks_left']} of {counts['tasks']} left"
        fields["cells"] = f"{counts['cells']} on {plural(counts['traces'], 'trace')}"
        fields["tasks"] = f"{tasks}, {plural(counts['jobs'], 'job')}"
    if free is not None:
        files = f" in {facts['files']} files" * bool(facts["files"])
        fields["disk"] = f"{size(facts['bytes'])}{files}, {size(free)} free"
    fields["memory"] = size(facts["memory"])
    if facts["device_memory"]:
        fields["memory"] += f" of the CPU, {size(facts['device_memory'])} of the GPU"
    echo_fields(fields)
