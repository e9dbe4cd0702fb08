# ruff: noqa: INP001 - a script, not a module
"""Draw the figures of needle.md from needle.csv, and write its table; `kvsim live` measured them.

python docs/needle.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
from study import markdown, picture

from apps.tiny.card import proportion
from kvsim import plots
from kvsim.analysis.table import TYPES

DOCS = Path(__file__).resolve().parent
NAMED = {"tiny": "`tiny`", "smollm2": "SmolLM2"}


def values() -> pl.DataFrame:
    """Right answers and prompts by model, policy, budget, depth and length."""
    return pl.read_csv(DOCS / "needle.csv")


def part() -> str:
    """Right answers of each policy, over all depths and lengths."""
    keys = ["model", "budget"]
    cells = values().group_by("policy", *keys, maintain_order=True).agg(pl.sum("right", "prompts"))
    columns = cells.select(keys).unique(maintain_order=True).rows()
    head = ["policy", *(f"{NAMED[model]}, {budget}" for model, budget in columns)]
    rows = []
    for (policy,), of in cells.group_by("policy", maintain_order=True):
        found = (of.filter(model=model, budget=budget) for model, budget in columns)
        shown = [proportion(x["right"].item(), x["prompts"].item()) for x in found]
        rows.append([f"`{policy}`", *shown])
    return markdown(head, rows)


def table(model: str) -> pl.DataFrame:
    """A Table of live runs with a row for each prompt."""
    rows: list[dict[str, Any]] = [
        {
            "trace": f"{cell['length']}-{cell['depth']}-{number}",
            **{name: cell[name] for name in ("length", "depth", "policy")},
            "share": cell["budget"],
            "params": "{}",
            "variant": "",
            "unit": "share",
            "metric": "answer_right",
            "fidelity": "closed",
            "value": float(number < cell["right"]),
        }
        for cell in values().filter(model=model).iter_rows(named=True)
        for number in range(cell["prompts"])
    ]
    types = {name: kind for name, kind in TYPES.items() if name in rows[0]}
    empty = (pl.lit(None, kind).alias(name) for name, kind in TYPES.items() if name not in types)
    return pl.DataFrame(rows, schema_overrides=types).with_columns(*empty).select(*TYPES)


if __name__ == "__main__":
    for name in ("tiny", "smollm2"):
        figure = plots.needle(table(name), "answer_right")
        figure.set_size_inches(8.3, 5.2)  # of about the width of pages, which leaves letters large
        for axis in figure.axes:
            axis.tick_params(labelsize=8)
        picture(figure, DOCS / "figures" / f"needle-{name}.png")
