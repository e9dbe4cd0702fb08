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

from kvsim.schema import PREFILL, merged, plural, rounded, schedule, visible

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
    """Print each remark once, a line each; those that differ only in budgets as one."""
    for remark in merged(remarks):
        echo_text(f"Note: {remark}.")


def echo_json(document: object) -> None:
    """Print one JSON document on standard output."""
    typer.echo(json.dumps(document, indent=2, allow_nan=False))


def echo_table(headers: Sequence[str], rows: Iterable[Sequence[str]], *, right: int = 0) -> None:
    """Print a table without lines; columns from `right` on are numbers, unless `right` is 0.

    Cells never wrap in a pipe.
    """
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


def verdict(table: pl.DataFrame, metrics: Sequence[str]) -> dict[str, Any]:
    """Return for JSON which policies could be the best at each budget, and how sure that is."""
    from kvsim.analysis.sentences import answer

    comparison, lines = answer(table, metrics)
    each = [] if comparison is None else comparison.verdicts
    return {"verdict": [verdict.describe() for verdict in each], "verdict_text": lines}


def echo_verdict(document: Mapping[str, Any]) -> None:
    """Print the lines of a verdict, with which tables open, if there is one."""
    if document["verdict_text"]:
        echo_text("\n".join(document["verdict_text"]) + "\n")


def fidelity_shares(table: pl.DataFrame) -> dict[str, float]:
    """Return for each fidelity label its share among the values of a run."""
    from kvsim.analysis.overview import fidelity_shares as shares_of

    return dict(sorted(shares_of(table).select("fidelity", "share").iter_rows()))


def brackets(prompts: int) -> str:
    """Return the meaning of brackets behind a mean over prompts; empty where it has none."""
    from kvsim.analysis.significance import FEWEST

    return ", in brackets the 95 % interval over prompts" * (prompts >= FEWEST)


def echo_results(summary: pl.DataFrame) -> None:
    """Print the table of a sweep, a line per policy and budget.

    Policies on which the budget has no effect are printed once.
    """
    import polars as pl

    from kvsim.analysis.results import labelled
    from kvsim.analysis.table import OF_RECORD

    keys = (*OF_RECORD, "model")
    shown = [name for name in summary.columns if name not in keys and summary[name].count()]
    model = ["model"] if "model" in summary else []
    once = pl.struct("policy", "params", *model).is_first_distinct()
    summary = summary.filter(once | (pl.col("bounds") != ""))
    labels = labelled(summary.with_columns(interval=None, prefill=None))["policy"]
    rows = []
    for row, label in zip(summary.to_dicts(), labels, strict=True):
        bounded = bool(row["bounds"])
        budget = budget_text(row["budget"], row["share"], row["per_query_head"])
        params = json.loads(row["params"])
        given = {name: params[name] for name in PREFILL if name in params}
        after = schedule(row["interval"], prefill=row["prefill"], **given)
        line = {
            "policy": label,
            "budget": budget if bounded else "-",
            "evicts after": after if bounded else "never",
        }
        line |= {name: row[name] or "unknown" for name in model}
        line |= {x.replace("_", "\n"): number(row[x], metric_format(x)) for x in shown}
        rows.append(line)
    common = {row["evicts after"] for row in rows} - {"never"}
    if len(common) == 1:
        echo_text(f"Every policy evicts after: {common.pop()}. Budgets are entries per KV head.\n")
        for row in rows:
            del row["evicts after"]
    echo_rows(rows, right=2 + ("evicts after" in rows[0]) + len(model))


def budget_text(budget: int, share: str | None, per_query_head: bool = False) -> str:
    """Return the entries, and the share of the trace if the budget was given as a share.

    Those of a policy that keeps a set for each query head are marked: it holds several times as
    many.
    """
    text = str(budget) if share is None else f"{budget} ({share})"
    return text + " per query head" * per_query_head


def errors_once(failures: Sequence[Failure]) -> Iterator[tuple[Failure, str]]:
    """Yield the first failure of each error, and the error with a count of the other cells.

    Errors that differ in numbers alone, such as rows, are the same.
    """
    same: dict[str, list[Failure]] = {}
    for each in failures:
        same.setdefault(re.sub(r"\d+", "#", each.error), []).append(each)
    for failed in same.values():
        more = len({(each.trace, each.cell) for each in failed if each.cell >= 0}) - 1
        yield failed[0], failed[0].error + f" (and so in {plural(more, 'more cell')})" * (more > 0)


def echo_failures(failures: Sequence[Failure]) -> None:
    """Print on standard error what failed, each error once."""
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
