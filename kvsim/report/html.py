"""Pieces of the page: whatever is no `Markup`, in a cell, a heading or a note, is escaped."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import numpy as np
import polars as pl
from markupsafe import Markup

from kvsim.analysis.registry import METRICS
from kvsim.analysis.summaries import Interval
from kvsim.errors import PolicyError
from kvsim.plots.style import picture

#: Digits behind the point by unit; 3 for all others.
_DIGITS = {"entries": 1, "layer": 1, "squared ranks": 0}


def lines(parts: Iterable[str]) -> Markup:
    """The parts that are not empty, one below the other in the source of the page."""
    return Markup("\n").join(filter(None, parts))


def tag(name: str, content: str) -> Markup:
    """An element with its content."""
    return Markup("<{0}>{1}</{0}>").format(name, content)


def broken(texts: Iterable[str], lead: str = "") -> Markup:
    """Sentences, each on a line of its own."""
    return Markup("").join(Markup("<br>{}{}.").format(lead, text) for text in texts)


def metric_name(name: str) -> Markup:
    """A metric as a heading: summary on hover, better direction, main variant."""
    metric = METRICS[name]
    arrow = {"higher": " ↑", "lower": " ↓", None: ""}[metric.better]
    heading = Markup('<span title="{}">{}</span>').format(
        metric.summary, name.replace("_", " ") + arrow
    )
    return heading + (small(metric.main) if metric.main else "")


def small(text: str) -> Markup:
    """A line in small print."""
    return Markup("<br>") + tag("small", text)


def section(title: str, note: str, body: str) -> Markup:
    """A part of the page under a heading."""
    paragraph = tag("p", note) if note else ""
    return Markup("<section><h2>{}</h2>{}\n{}</section>").format(title, paragraph, body)


def details(body: str, summary: str = "show") -> Markup:
    """A part of the page that opens on a click."""
    return Markup("<details><summary>{}</summary>{}</details>").format(summary, body)


def table_of(head: Sequence[str], rows: Iterable[Sequence[str]], *, right: int = 0) -> Markup:
    """A table; cells from `right` on are numbers, if it is not 0."""
    number = Markup('<td class="n">{}</td>')

    def line(row: Sequence[str]) -> Markup:
        cells = (
            number.format(text) if 0 < right <= place else tag("td", text)
            for place, text in enumerate(row)
        )
        return tag("tr", Markup("").join(cells))

    top = tag("tr", Markup("").join(tag("th", text) for text in head))
    table = Markup("<table><thead>{}</thead><tbody>\n{}\n</tbody></table>")
    return table.format(top, lines(map(line, rows)))


def interval(row: dict[str, Any]) -> str:
    """Mean and interval of a row of `averages`."""
    mean, low, high = (np.nan if row[end] is None else row[end] for end in ("mean", "low", "high"))
    digits = _DIGITS.get(row["unit"], 3)
    small = digits == 3 and 1e-6 <= abs(mean) < 5e-4
    form = ".2g" if small else f".{digits}f"
    return Interval(mean, low, high, row["n"]).text(form)


def cell(part: pl.DataFrame, *, chance: bool = False) -> str:
    """Mean and interval of at most one row, how many were measured if not all, and chance."""
    if not part.height or part["mean"][0] is None:
        return "-"
    (row,) = part.to_dicts()
    text = interval(row)
    if row["n"] < row["of"]:
        text += f" ({row['n']} of {row['of']})"
    if chance and row.get("chance") is not None:
        return text + small(f"chance {row['chance']:.3f}")
    return text


def image(alt: str, draw: Callable[[], Any], form: Literal["svg", "png"] = "svg") -> str:
    """The figure of `draw`, empty where it has no values; alt: its description."""
    try:
        figure = draw()
    except PolicyError:
        return ""
    content = base64.b64encode(picture(figure, form)).decode("ascii")
    # a PNG has more pixels than it takes on the page, where an inch is 96 of them
    width = Markup(' width="{:.0f}"').format(96 * figure.get_figwidth()) if form == "png" else ""
    url = f"data:image/{'svg+xml' if form == 'svg' else 'png'};base64,{content}"
    return Markup('<img alt="{}"{} src="{}">').format(alt, width, url)


#: The page, with its title and body.
PAGE = Markup(
    """<!doctype html>
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
)
