# ruff: noqa: INP001 - a script, not a module
"""Readers of all keys or of a sample, and mergers: two tables of access.md.

    python docs/parts.py --traces DIR       DIR has a folder for each model
    python docs/parts.py --write-only       the page of what is measured already

`docs/parts-results.jsonl` keeps a line for each model, policy, budget, metric and prompt.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from study import Rows, finished, of_models, put, read, traces_in

import kvsim
from access import ALL, INTERVAL, PAGE, ROOT, TITLES
from apps.tiny.card import table as markdown
from kvsim.analysis.summaries import per_prompt

RESULTS = ROOT / "docs/parts-results.jsonl"
METRICS = ("response_kl", "output_error", "bytes_read")
#: By name: the policy, and its parameters.
READERS: dict[str, tuple[str, dict[str, Any]]] = {
    "topk (bound)": ("topk", ALL),
    "quest, pages of 4": ("quest", ALL | {"page": 4}),
    "skip_softmax, threshold 0.01": ("skip_softmax", ALL | {"threshold": 0.01}),
    "skip_softmax, threshold 0.1": ("skip_softmax", ALL | {"threshold": 0.1}),
    "magicpig, 75 tables of 8 bits": ("magicpig", ALL | {"tables": 75, "bits": 8}),
    "magicpig, 150 tables of 10 bits": ("magicpig", ALL | {"tables": 150, "bits": 10}),
    "full": ("full", {}),
}
EVICTIONS, MERGERS = ("streaming_llm", "h2o", "snapkv"), ("", "+lookm", "+d2o")
MERGED: dict[str, tuple[str, dict[str, Any]]] = {
    of + merger: (of + merger, {}) for of in EVICTIONS for merger in MERGERS
}
#: Budgets of both tables; most of these readers have none, and are the same at each.
OF_READERS, OF_MERGERS = (128,), (64, 128)


def measure(model: str, folder: Path) -> None:
    """Measure all readers and mergers on a model, and write them down."""
    rows = [row for row in read(RESULTS) if row["model"] != model]
    paths = [str(path) for path in traces_in(folder / model, 3)]
    for group, budgets in ((READERS, OF_READERS), (MERGED, OF_MERGERS)):
        policies = {name: kvsim.policy(of, **params) for name, (of, params) in group.items()}
        names = {(x.name, json.dumps(dict(x.params))): name for name, x in policies.items()}
        run = kvsim.sweep(
            traces=paths,
            policies=[*policies.values()],
            budgets=budgets,
            intervals=INTERVAL,
            prefill=True,
            metrics=METRICS,
            judge=True,
        )
        for each in per_prompt(finished(run).table).iter_rows(named=True):
            if each["metric"] in METRICS and not each["variant"]:
                name = names[each["policy"], each["params"]]
                kept = {x: each[x] for x in ("trace", "metric", "value")}
                row = {"model": model, "name": name, "budget": int(each["requested"])}
                rows.append(row | kept)
    RESULTS.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def values(rows: Rows, name: str, budget: int, metric: str) -> np.ndarray[Any, Any]:
    """The values of a policy, by prompt."""
    wanted = {"name": name, "budget": budget, "metric": metric}
    by_trace = {row["trace"]: row["value"] for row in rows if wanted.items() <= row.items()}
    return np.array([by_trace[trace] for trace in sorted(by_trace)])


def readers(rows: Rows) -> list[list[str]]:
    """Bytes read as a share, output error and KL of each reader."""
    (budget,) = OF_READERS
    whole = values(rows, "full", budget, "bytes_read").mean()
    return [
        [
            name,
            f"{values(rows, name, budget, 'bytes_read').mean() / whole:.2f}",
            f"{values(rows, name, budget, 'output_error').mean():.3f}",
            f"{values(rows, name, budget, 'response_kl').mean():.2g}",
        ]
        for name in READERS
        if name != "full"
    ]


def mergers(rows: Rows) -> list[list[str]]:
    """KL of each eviction alone and with a merger, and how often this is the smaller one."""
    body = []
    for of in EVICTIONS:
        cells = []
        for merger in MERGERS:
            parts = []
            for budget in OF_MERGERS:
                alone, kl = (values(rows, x, budget, "response_kl") for x in (of, of + merger))
                smaller = f" ({(kl < alone).sum()})" if merger else ""
                parts.append(f"{kl.mean():.2f}{smaller}")
            cells.append(", ".join(parts))
        body.append([f"`{of}`", *cells])
    return body


def tables() -> dict[str, str]:
    """Both tables, of all models that are measured."""
    parts: dict[str, list[str]] = {"readers": [], "mergers": []}
    heads = {
        "readers": ["reader", "bytes read", "output error", "judged KL"],
        "mergers": ["eviction", "alone", "+ `lookm`", "+ `d2o`"],
    }
    for model, title in TITLES.items():
        if rows := [row for row in read(RESULTS) if row["model"] == model]:
            count = len({row["trace"] for row in rows})
            for name, body in (("readers", readers(rows)), ("mergers", mergers(rows))):
                table = markdown(heads[name], body)
                parts[name].append(f"**{title}**, {count} prompts:\n\n{table}")
    return {name: "\n\n".join(part) for name, part in parts.items()}


def write() -> None:
    """Put the tables into the page."""
    put(PAGE, tables())


if __name__ == "__main__":
    of_models(__doc__, "parts", [*TITLES], measure, write)
