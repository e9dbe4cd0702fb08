# ruff: noqa: INP001 - lies in docs/, which is no package
"""The tables of conformance.md; `python docs/conformance_page.py` writes the rows of all cases."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import polars as pl

from kvsim.studies.conformance import deviations as changes
from kvsim.studies.conformance import report
from leaderboard_rows import ENGINE, knowing
from workloads import KL

FOLDER = Path(__file__).resolve().parent / "conformance"


def read(name: str) -> dict[str, Any]:
    """The content of a file of results."""
    content: dict[str, Any] = json.loads((FOLDER / name).read_text("utf-8"))
    return content


def releases() -> str:
    """A row for each implementation at a commit: the verdict in short."""
    lines = ["| implementation | cases | equal | others |", "| --- | ---: | ---: | --- |"]
    for name, facts in read("cases.json").items():
        if "commit" in facts:
            cases = facts["cases"]
            equal = sum(not case["apart"] for case in cases)
            link = f"https://github.com/{facts['repository']}/tree/{facts['commit']}"
            reasons = ", ".join(dict.fromkeys(filter(None, map(_reason, cases))))
            cells = (f"[{name}]({link})", len(cases), equal, reasons)
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def _reason(case: Mapping[str, Any]) -> str:
    if not case["apart"]:
        return ""
    of_counts = "other sizes of sets" if case["counts"] else "other scores"
    return ", ".join(f"`{each}`" for each in case["explained"]) or of_counts


def deviations() -> str:
    """A row for each deviation that `conform` knows, with the words that it prints."""
    tried = (changes.CHANGES | changes.ACCESSES).items()
    known = [*(changes.Deviation(name, x) for name, (x, _) in tried), *report.FOUND]
    rows = (f"| `{each.name}` | {each.description} |" for each in known)
    return "\n".join(["| name | the engine differs so |", "| --- | --- |", *rows])


def costs() -> str:
    """A row for each deviation whose cost was judged."""
    lines = ["| deviation | prompts | definition | deviating |", "| --- | ---: | ---: | ---: |"]
    for name, x in read("costs.json").items():
        a, b = (sum(x[key]) / x["prompts"] for key in ("definition", "deviating"))
        lines.append(f"| `{name}` | {x['prompts']} | {a:.3f} | {b:.3f} |")
    return "\n".join(lines)


def engines() -> str:
    """A row for each rule of an engine: its judged KL next to that of the policy of its name."""
    rows = pl.read_parquet(FOLDER.parent / "leaderboard.parquet").filter(metric=KL, share="25%")
    keys = ("policy", "board")
    means = {x[:2]: x[2] for x in rows.group_by(keys).agg(pl.col("value").mean()).iter_rows()}
    lines = ["| engine's rule | answers: policy | rule | needles: policy | rule |"]
    lines += ["| --- | ---: | ---: | ---: | ---: |"]
    for name in sorted({name for name, _ in means if knowing(name) == ENGINE}):
        policy, preset, _ = name.partition("@")
        pairs = product(("smollm2-answers", "smollm2-needles"), (policy if preset else "", name))
        cells = (f"{means[x, board]:.2g}" if (x, board) in means else "" for board, x in pairs)
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def rows() -> str:
    """CSV with a row for each case: what was run, the definition, and what `conform` says."""
    text = io.StringIO()
    table = csv.DictWriter(text, [*next(_rows())], lineterminator="\n")
    table.writeheader()
    table.writerows(_rows())
    return text.getvalue()


def _rows() -> Iterator[dict[str, Any]]:
    for name, facts in read("cases.json").items():
        for case in facts["cases"]:
            first = case["first"] or {}
            given = {"budget": case["budget"], **case["settings"]}
            budget = given.pop("budget")
            settings = "".join(f" --set {key}={x}" for key, x in given.items())
            source = {key: facts.get(key, "").replace("`", "") for key in ("commit", "runs", "how")}
            counts = {key: case[key] for key in ("events", "compared", "apart", "ties")}
            places = ("row", "layer", "head", "keeps", "evicts", "gap")
            yield {
                "dump": case["dump"],
                "implementation": name,
                **source,
                "trace": case["trace"],
                "options": f"--policy {case['policy']}{settings} --budget {budget}",
                **counts,
                **{f"first_{key}": first.get(key) for key in places},
                "explained": ", ".join(case["explained"]),
            }


if __name__ == "__main__":
    (FOLDER / "cases.csv").write_text(rows(), "utf-8")
