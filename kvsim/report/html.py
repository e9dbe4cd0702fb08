"""Pieces of the page; all text that is no `Markup` is escaped."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
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
    """A metric as a heading: summary on hover, better direction."""
    metric = METRICS[name]
    arrow = {"higher": " ↑", "lower": " ↓", None: ""}[metric.better]
    return Markup('<span title="{}">{}{}</span>').format(
        metric.summary, name.replace("_", " "), arrow
    )


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
    """Mean and interval of a row of `averages`, and how many were measured if not all."""
    if row["mean"] is None:
        return "-"
    mean, low, high = (np.nan if row[end] is None else row[end] for end in ("mean", "low", "high"))
    digits = _DIGITS.get(row["unit"], 3)
    form = ".2g" if digits == 3 and 1e-6 <= abs(mean) < 5e-4 else f".{digits}f"
    text = Interval(mean, low, high, row["n"]).text(form)
    return f"{text} ({row['n']} of {row['of']})" if row["n"] < row["of"] else text


def chance(row: dict[str, Any]) -> str:
    """The value of random sets; empty where it is unknown."""
    return "" if row["chance"] is None else f"{row['chance']:.3f}"


def image(alt: str, draw: Callable[[], Any]) -> str:
    """The figure of `draw`, empty where it has no values; alt: its description."""
    try:
        content = base64.b64encode(picture(draw(), "svg")).decode("ascii")
    except PolicyError:
        return ""
    return Markup('<img alt="{}" src="data:image/svg+xml;base64,{}">').format(alt, content)


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
