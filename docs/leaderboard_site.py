# ruff: noqa: INP001 - a module of docs/conf.py
"""The table of docs/leaderboard.csv on the site: a click sorts it, and words filter it."""

from __future__ import annotations

import csv
from html import escape
from pathlib import Path

ROWS = Path(__file__).with_name("leaderboard.csv")
STYLE = """<style>
#rows { display: block; max-height: 32em; overflow: auto; font-size: 80%; }
#rows th { cursor: pointer; position: sticky; top: 0; background: var(--color-background-primary); }
#rows td, #rows th { padding: 0 0.5em; white-space: nowrap; }
</style>"""
SCRIPT = """<script>
const body = document.querySelector("#rows tbody"), rows = [...body.rows];
const key = (row, at) => row.cells[at].textContent;
document.querySelectorAll("#rows th").forEach((head, at) => {
  let sign = -1;
  head.onclick = () => {
    sign = -sign;
    rows.sort((a, b) => {
      const [x, y] = [key(a, at), key(b, at)];
      if (!x || !y) return !x - !y;
      return sign * (isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y);
    });
    body.append(...rows);
  };
});
document.querySelector("#words").oninput = (event) => {
  const words = event.target.value.toLowerCase().split(/ +/);
  const has = (row) => words.every((word) => row.textContent.toLowerCase().includes(word));
  rows.forEach((row) => { row.hidden = !has(row); });
};
</script>"""


def with_rows(page: str) -> str:
    """Return the page with the table behind it."""
    with ROWS.open(encoding="utf-8", newline="") as file:
        head, *rows = ([escape(x) for x in row] for row in csv.reader(file))
    titles = "".join(f"<th>{x}</th>" for x in head)
    # a space keeps words of neighbouring cells apart in the text that is searched
    body = "".join("<tr>" + "".join(f"<td>{x}</td> " for x in row) + "</tr>\n" for row in rows)
    table = f"<table id='rows'><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>"
    words = "<input id='words' placeholder='filter, such as: answers 25% quantizer' size='40'>"
    html = f"{STYLE}\n{words}\n{table}\n{SCRIPT}"
    return f"{page}\n## Every policy\n\n```{{raw}} html\n{html}\n```\n"
