"""Pieces of the page: sections, tables, numbers. What is not HTML yet is escaped by the caller."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any, Literal

import numpy as np
import polars as pl

from kvsim.analysis.registry import METRICS
from kvsim.analysis.summaries import Interval
from kvsim.errors import PolicyError
from kvsim.plots.saving import data_url

#: Digits behind the point by unit; 3 for all others.
_DIGITS = {"entries": 1, "layer": 1, "squared ranks": 0}


def called(name: str) -> str:
    """A metric as a heading: what it says on hover, which direction is better, its main variant."""
    what = METRICS[name]
    better = {"higher": " &uarr;", "lower": " &darr;", None: ""}[what.better]
    said = f"<br><small>{what.main}</small>" if what.main else ""
    return f'<span title="{escape(what.summary)}">{name.replace("_", " ")}{better}</span>{said}'


def section(title: str, note: str, body: str) -> str:
    """A part of the page under a heading; note and body are HTML already."""
    said = f"<p>{note}</p>" if note else ""
    return f"<section><h2>{title}</h2>{said}\n{body}</section>"


def details(body: str, summary: str = "show") -> str:
    """What opens on a click; HTML already."""
    return f"<details><summary>{summary}</summary>{body}</details>"


def table_of(head: Sequence[str], rows: Iterable[Sequence[str]], *, right: int = 0) -> str:
    """A table of cells that are HTML already; those from `right` on are numbers, if it is not 0."""
    top = "".join(f"<th>{cell}</th>" for cell in head)

    def line(row: Sequence[str]) -> str:
        kinds = (' class="n"' if 0 < right <= place else "" for place in range(len(row)))
        return "".join(f"<td{kind}>{cell}</td>" for kind, cell in zip(kinds, row, strict=True))

    body = "\n".join(f"<tr>{line(row)}</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>\n{body}\n</tbody></table>"


def interval(row: dict[str, Any]) -> str:
    """Mean and interval of a row of `averages`, or of a difference of `compare`."""
    mean, low, high = (np.nan if row[end] is None else row[end] for end in ("mean", "low", "high"))
    digits = _DIGITS.get(row["unit"], 3)
    sign = "+" if "base" in row else ""
    return Interval(mean, low, high, row["n"]).text(f"{sign}.{digits}f")


def cell(part: pl.DataFrame, *, chance: bool = False) -> str:
    """Mean and interval of at most one row, how many were measured if not all, and chance."""
    if not part.height or part["mean"][0] is None:
        return "-"
    (row,) = part.to_dicts()
    text = escape(interval(row))
    if row["n"] < row["of"]:
        text += f" ({row['n']} of {row['of']})"
    if chance and row.get("chance") is not None:
        text += f"<br><small>chance {row['chance']:.3f}</small>"
    return text


def image(said: str, draw: Callable[[], Any], form: Literal["svg", "png"] = "svg") -> str:
    """The figure that `draw` makes, nothing where it has nothing to show; said: what it shows."""
    try:
        figure = draw()
    except PolicyError:
        return ""
    # a PNG has more pixels than it takes on the page, where an inch is 96 of them
    width = f' width="{96 * figure.get_figwidth():.0f}"' if form == "png" else ""
    return f'<img alt="{escape(said)}"{width} src="{data_url(figure, form)}">'


#: The page, with its title and body.
PAGE = """<!doctype html>
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
small {{ color: #66717c; }} img {{ max-width: 100%; margin-top: .8rem; }} pre {{ font-size: 12px; }}
summary {{ cursor: pointer; color: #33608c; }}
</style>
</head>
<body>
<h1>kvsim report: {title}</h1>
{body}
</body>
</html>
"""
