"""`report`: run folders to one HTML page that needs nothing else, no network and no scripts.

What a page says: means over prompts with intervals, every policy beside the first one on the same
prompts, figures, the split by domain, level and stage where there is one, the claims of the papers
that these numbers can answer, and where all of it came from. Every text from a run is escaped.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from kvsim.claims import claims
from kvsim.errors import OutputError, PolicyError
from kvsim.metrics import COLUMNS, METRICS
from kvsim.plots.saving import data_url
from kvsim.plots.style import asked_order
from kvsim.plots.summary import over_budgets, pareto
from kvsim.schema import LABELS, schedule
from kvsim.statistics import Interval, averages, compare


@dataclass(frozen=True)
class Saved:
    """A run folder as it was read: its parameters and its Table."""

    path: Path
    parameters: dict[str, Any]
    table: pl.DataFrame


def read_run(path: str | Path) -> Saved:
    """The run that `kvsim replay --out` wrote.

    Raises:
        OutputError: there is no run folder, or it is damaged.
    """
    folder = Path(path)
    try:
        parameters = json.loads((folder / "run.json").read_text("utf-8"))
        table = pl.read_parquet(folder / "results.parquet")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise OutputError(
            f"{folder} is no run folder: {error.filename} is missing; expected what `kvsim replay "
            "... --out DIR` wrote"
        ) from None
    except (ValueError, pl.exceptions.PolarsError) as error:
        raise OutputError(f"{folder} is damaged: {error}; replay it again") from error
    missing = [name for name in COLUMNS if name not in table.columns]
    if missing:
        raise OutputError(
            f"{folder} has no columns {', '.join(missing)}: it was written by another version of "
            "kvsim; replay it again"
        )
    return Saved(folder, parameters, table.select(list(COLUMNS)))


def write_report(
    runs: Sequence[str | Path], out: str | Path, base: str | None = None, *, overwrite: bool = False
) -> Path:
    """Write the page of one run or of several together.

    Args:
        runs: folders that `kvsim replay --out` wrote.
        out: the file to write.
        base: what all other policies are compared with, by default the first one that evicts.
        overwrite: replace what is at `out`.

    Raises:
        OutputError: something is at `out`, or a run cannot be read.
        PolicyError: two runs have one policy with different parameters or schedules, which could
            not be told apart; the runs have no values, or not the policy `base`.
    """
    target = Path(out)
    saved = [read_run(one) for one in runs]
    if target.exists() and not overwrite:
        raise OutputError(
            f"{target} exists; give another --out or --overwrite, nothing was changed"
        )
    text = page(saved, base)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, "utf-8")
    return target


def page(runs: Sequence[Saved], base: str | None = None) -> str:
    """The HTML page of runs; see `write_report`."""
    table = pl.concat([run.table for run in runs]).unique(maintain_order=True)
    _check_distinct(table)
    if not table["value"].is_not_null().any():
        raise PolicyError("the runs have no values, so there is nothing to report")
    parts = [
        _summary(table, runs),
        _figures(table),
        _paired(table, base),
        *_splits(table),
        _of_traces(table),
        _claims(table),
        _provenance(runs),
    ]
    title = ", ".join(run.path.name for run in runs)
    return _PAGE.format(title=escape(title), body="\n".join(filter(None, parts)))


def _check_distinct(table: pl.DataFrame) -> None:
    known = table.filter(pl.col("policy").is_not_null())
    known = known.select("policy", "params", "interval", "prefill").unique(maintain_order=True)
    twice = known.filter(pl.col("policy").is_duplicated())["policy"].to_list()
    if twice:
        raise PolicyError(
            f"{twice[0]} has different parameters or schedules in these runs, and its results "
            "could not be told apart; report them one by one"
        )


# --- sections ---

#: The metrics of the first table; all others are in the Parquet file.
_SHOWN = (
    *("output_error", "retained_mass", "wipeout", "retained_iou", "middle_coverage"),
    *("burst_share", "entries_seen", "regret"),
)


def _main(table: pl.DataFrame, names: Iterable[str]) -> pl.DataFrame:
    """The main variants of some metrics of policies."""
    wanted = [
        (pl.col("metric") == name) & (pl.col("variant") == METRICS[name].main) for name in names
    ]
    return table.filter(pl.col("policy").is_not_null() & pl.any_horizontal(wanted))


def _summary(table: pl.DataFrame, runs: Sequence[Saved]) -> str:
    found = averages(_main(table, _SHOWN))
    prompts = table["trace"].n_unique()
    note = (
        f"Means over {prompts} prompt{'s' * (prompts != 1)}, of layers, heads and events within a "
        "prompt first; in brackets the 95 % bootstrap interval over prompts. "
        "<i>chance</i> is what random sets of the same size would reach. A number of prompts in "
        "parentheses means that the others could not be measured."
    )
    remarks = dict.fromkeys(one for run in runs for one in run.parameters.get("remarks", ()))
    note += "".join(f"<br>Note: {escape(one)}." for one in remarks)
    return _section("Results", note, _wide(found, "policy", with_chance=True))


def _wide(found: pl.DataFrame, first: str, *, with_chance: bool = False) -> str:
    """A row for each value of `first` and budget, a column for each metric."""
    names = [name for name in _SHOWN if name in set(found["metric"])]
    budgets = asked_order(found["asked"].drop_nulls().to_list())
    head = [first, "budget", *(_called(name) for name in names)]
    rows = []
    for policy in found[first].unique(maintain_order=True):
        for asked in budgets:
            part = found.filter(pl.col(first) == policy, pl.col("asked") == asked)
            if part.height:
                cells = [_cell(part.filter(metric=name), chance=with_chance) for name in names]
                rows.append([escape(str(policy)) + _schedule(part), escape(asked), *cells])
    return _table(head, rows, right=2)


def _schedule(part: pl.DataFrame) -> str:
    """After which rows a policy evicts, in small print, where the frame says it."""
    if "interval" not in part.columns:
        return ""
    said = schedule(part["interval"][0], prefill=part["prefill"][0])
    return f"<br><small>after: {said}</small>"


def _cell(part: pl.DataFrame, *, chance: bool) -> str:
    if not part.height or part["mean"][0] is None:
        return "-"
    (row,) = part.to_dicts()
    text = escape(_interval(row))
    if row["n"] < row["of"]:
        text += f" ({row['n']} of {row['of']})"
    if chance and row.get("chance") is not None:
        text += f"<br><small>chance {row['chance']:.3f}</small>"
    return text


def _interval(row: dict[str, Any]) -> str:
    mean, low, high = (np.nan if row[end] is None else row[end] for end in ("mean", "low", "high"))
    digits = 1 if row["unit"] == "entries" else 3
    sign = "+" if "base" in row else ""
    return Interval(mean, low, high, row["n"]).text(f"{sign}.{digits}f")


def _figures(table: pl.DataFrame) -> str:
    images = []
    drawn = {
        "Metrics against the budget": over_budgets,
        "Metrics against the entries that rows really saw": pareto,
    }
    for said, draw in drawn.items():
        try:
            figure = draw(table)
        except PolicyError:
            continue  # not measured in these runs
        images.append(f'<img alt="{said}" src="{data_url(figure)}">')
    return _section("Figures", "", "\n".join(images)) if images else ""


def _paired(table: pl.DataFrame, base: str | None) -> str:
    shown = _main(table, _SHOWN)
    policies = shown["policy"].unique(maintain_order=True).to_list()
    if len(policies) < 2 and base is None:
        return ""
    # what has the metrics of kept sets has evicted something
    evicting = [name for name in policies if "wipeout" in set(shown.filter(policy=name)["metric"])]
    base = base or (evicting or policies)[0]
    found = compare(shown, base)
    note = (
        f"Each policy minus <code>{escape(base)}</code> on the same prompts at the same budget, "
        "as they were replayed: schedules may differ, and with them the entries that rows saw. An "
        "interval without 0 is a difference that other prompts would likely show too."
    )
    return _section(f"Beside {escape(base)}", note, _wide(found, "policy"))


def _splits(table: pl.DataFrame) -> Iterator[str]:
    """A table for each label of the prompts that has several values."""
    for label in LABELS:
        if table[label].drop_nulls().n_unique() < 2:
            continue
        found = averages(_main(table, ["output_error", "wipeout", "retained_iou"]), by=[label])
        rows = [
            [
                *(escape(str(row[name])) for name in (label, "policy", "asked")),
                *(_called(row["metric"]), escape(_interval(row)), str(row["n"])),
            ]
            for row in found.sort(label, maintain_order=True).to_dicts()
            if row["mean"] is not None
        ]
        head = [label, "policy", "budget", "metric", "mean", "prompts"]
        yield _section(f"By {label}", "", _details(_table(head, rows, right=4)))


def _of_traces(table: pl.DataFrame) -> str:
    found = averages(table.filter(pl.col("policy").is_null()))
    rows = [
        [
            *(_called(row["metric"]), escape(row["variant"]), escape(_interval(row))),
            "" if row["chance"] is None else f"{row['chance']:.3f}",
            f"{row['n']} of {row['of']}",
        ]
        for row in found.to_dicts()
        if row["mean"] is not None
    ]
    if not rows:
        return ""
    head = ["metric", "variant", "mean", "chance", "prompts"]
    note = "What the traces are like, whatever evicts from them."
    return _section("The traces", note, _details(_table(head, rows, right=2)))


def _claims(table: pl.DataFrame) -> str:
    found = claims(table)
    if not found:
        return ""
    rows = []
    for one in found:
        cases = [
            escape(f"{case + ': ' if case else ''}{value.text('+.3f')}")
            for case, value in one.cases.items()
        ]
        said = "<br>".join(cases) if len(cases) <= _FEW else _details("<br>".join(cases))
        verdict = f"<b>{one.verdict}</b>"
        rows.append([one.number, one.paper, escape(one.says), verdict, escape(one.tested), said])
    note = (
        "An answer about these traces. A claim <b>holds</b> where the interval lies above 0 in "
        "every case, <b>does not hold</b> where it lies below in any, and otherwise <b>cannot be "
        "said</b>, as always from one prompt. Policies are compared as they were replayed, with "
        "the parameters and schedules above."
    )
    head = ["", "paper", "claim", "here", "number", "cases"]
    return _section("What the papers say", note, _table(head, rows))


_FEW = 4


def _provenance(runs: Sequence[Saved]) -> str:
    levels = pl.concat([run.table for run in runs])["fidelity"].cast(pl.String)
    shares = ", ".join(
        f"{levels.eq(name).mean():.0%} {name}" for name in sorted(levels.unique().drop_nulls())
    )
    note = (
        f"Fidelity of all values in the runs: {shares}. <i>exact</i>: a live run that is fed the "
        "same tokens would show it. <i>open</i>: computed from the recorded queries, keys and "
        "values; in a live run errors also add up from layer to layer."
    )
    parts = []
    for run in runs:
        text = escape(json.dumps(run.parameters, indent=2))
        name = f"<code>{escape(str(run.path))}</code>"
        failed = len(run.parameters.get("failures", ()))
        lost = f" {failed} cells failed." if failed else ""
        parts.append(f"<p>{name}.{lost}</p>" + _details(f"<pre>{text}</pre>", "run.json"))
    return _section("Where this comes from", note, "\n".join(parts))


# --- HTML ---


def _called(name: str) -> str:
    what = METRICS[name]
    better = {"higher": " &uarr;", "lower": " &darr;", None: ""}[what.better]
    said = f"<br><small>{what.main}</small>" if what.main else ""
    return f'<span title="{escape(what.summary)}">{name.replace("_", " ")}{better}</span>{said}'


def _section(title: str, note: str, body: str) -> str:
    said = f"<p>{note}</p>" if note else ""
    return f"<section><h2>{title}</h2>{said}\n{body}</section>"


def _details(body: str, summary: str = "show") -> str:
    return f"<details><summary>{summary}</summary>{body}</details>"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], *, right: int = 0) -> str:
    """A table of cells that are HTML already; those from `right` on are numbers, if it is not 0."""
    top = "".join(f"<th>{cell}</th>" for cell in head)

    def line(row: Sequence[str]) -> str:
        kinds = (' class="n"' if 0 < right <= place else "" for place in range(len(row)))
        return "".join(f"<td{kind}>{cell}</td>" for kind, cell in zip(kinds, row, strict=True))

    body = "\n".join(f"<tr>{line(row)}</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>\n{body}\n</tbody></table>"


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>kvsim report: {title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: #1d2731; margin: 2rem auto; max-width: 78rem;
  padding: 0 1rem; }}
h1 {{ font-size: 1.5rem; }} h2 {{ font-size: 1.15rem; margin-top: 2.2rem; }}
section {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: 13px; }}
th, td {{ padding: .25rem .7rem .25rem 0; text-align: left; vertical-align: top; }}
th {{ border-bottom: 2px solid #33608c; }}
td {{ border-bottom: 1px solid #e6e6e6; }}
td.n {{ font-variant-numeric: tabular-nums; white-space: nowrap; }}
small {{ color: #66717c; }} img {{ max-width: 100%; }} pre {{ font-size: 12px; }}
summary {{ cursor: pointer; color: #33608c; }}
</style>
</head>
<body>
<h1>kvsim report: {title}</h1>
{body}
</body>
</html>
"""
