# ruff: noqa: INP001, T201 - a script, not a module, and it says what it did
"""What constraints of engines cost on the texts of the sample traces: tables of optimum.md.

    python docs/price.py                 both models; resumes; minutes on one core
    python docs/price.py --write-only    the page of what is measured already: seconds

The texts are recorded again, all layers with their projections, and judged by their models. What
was measured is kept in `docs/price-results.jsonl`, a line each.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import polars as pl
import torch

import kvsim
from apps.tiny.card import table as markdown
from kvsim.core.trace import Trace
from kvsim.recorder import load_model
from kvsim.studies.price.constraints import CONSTRAINTS
from kvsim.studies.price.prices import prices, summary

ROOT = Path(__file__).resolve().parent.parent
PAGE, RESULTS = ROOT / "docs/optimum.md", ROOT / "docs/price-results.jsonl"
NAMED = {"tiny": "`tiny`", "smollm2": "SmolLM2"}
BUDGET, INTERVAL = 128, 32

Lines = list[dict[str, Any]]


@cache
def recorded(model: str) -> Trace:
    """The text of a model's sample trace, recorded in all layers."""
    sample = kvsim.open_trace(kvsim.sample_trace(model))
    ids = sample.tokens.tolist()
    prompt, response = ids[: sample.prompt_len], ids[sample.prompt_len :]
    return kvsim.capture(*load_model(model), prompt, response=response, name=sample.name)


def constraints(model: str, name: str) -> Lines:
    """Measure the optimum and the policies under one constraint."""
    table, remarks = prices([recorded(model)], BUDGET, INTERVAL, judge=model, constraints=[name])
    print(*remarks, sep="\n")
    return table.with_columns(pl.col("value").round(7), pl.col("open").round(9)).to_dicts()


def steps() -> Iterator[tuple[dict[str, str], Callable[[], Lines]]]:
    """Yield what is measured, and the function that does it."""
    for model in NAMED:
        for name in CONSTRAINTS:
            key = {"part": "constraints", "model": model, "constraint": name}
            yield key, lambda model=model, name=name: constraints(model, name)


def measure(rows: Lines) -> None:
    """Measure what is missing, and write it at once."""
    for key, function in steps():
        if any(key.items() <= row.items() for row in rows):
            continue
        lines = [key | line for line in function()]
        rows += lines
        with RESULTS.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
        print(*key.values(), flush=True)


def priced(rows: Lines, model: str) -> str:
    """The table of what constraints cost on a model."""
    kept = [row for row in rows if row["part"] == "constraints" and row["model"] == model]
    of = pl.DataFrame(kept, infer_schema_length=None)
    mass, kl = ({row["constraint"]: row for row in summary(of, name).to_dicts()}
                for name in ("missing_mass", "response_kl"))  # fmt: skip
    lines = []
    for name, constraint in CONSTRAINTS.items():
        row, judged = mass[name], kl[name]
        lines.append(
            [
                f"{constraint.summary}",
                *(_percent(row[key]) for key in ("optimum", "cost", "gap")),
                f"`{row['policy']}`" if row["policy"] else "-",
                *(_number(judged[key]) for key in ("optimum", "value")),
                f"`{judged['policy']}`" if judged["policy"] else "-",
            ]
        )
    head = ["constraint", "optimum, %", "cost", "gap", "best policy"]
    return markdown([*head, "KL of the optimum", "lowest KL", "of"], lines)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def write(rows: Lines, page: Path) -> None:
    """Put the tables into the page."""
    text = page.read_text("utf-8")
    for model in NAMED:
        begin, end = f"<!-- begin price {model} -->", f"<!-- end price {model} -->"
        before, _, rest = text.partition(begin)
        _, marker, after = rest.partition(end)
        if not marker:
            raise SystemExit(f"{page} has no {begin} with {end} behind it")
        text = f"{before}{begin}\n{priced(rows, model)}\n{end}{after}"
    page.write_text(text, "utf-8")


def measured() -> Lines:
    """What is measured already."""
    text = RESULTS.read_text("utf-8") if RESULTS.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write-only", action="store_true")
    given, rows = parser.parse_args(), measured()
    if not given.write_only:
        torch.set_num_threads(1)
        measure(rows)
    write(rows, PAGE)


if __name__ == "__main__":
    main()
