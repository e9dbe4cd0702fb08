# ruff: noqa: INP001 - a script, not a module
"""Errors of codecs and their judged divergence: the table of "What an error hides" in access.md.

    python docs/rounding.py --traces DIR        DIR has a folder for each model
    python docs/rounding.py --write-only        the page of what is measured already

`docs/rounding-results.jsonl` keeps a line for each model and codec.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import torch
from study import Rows, finished, of_models, put, read, traces_in

import kvsim
from access import PAGE, ROOT, TITLES
from apps.tiny.card import table as markdown
from kvsim.analysis.summaries import averages
from kvsim.core.storing import Codec, round_marked

RESULTS = ROOT / "docs/rounding-results.jsonl"
KIVI = {"group": 64, "window": 64}
#: By name: the policy, and its parameters.
CODECS: dict[str, tuple[str, dict[str, Any]]] = {
    "kvquant, 4 bits": ("kvquant", {"bits_per_number": 4, "group": 64}),
    "kivi, 4 bits": ("kivi", {**KIVI, "bits_per_number": 4}),
    "turboquant@vllm, 4 bits": ("turboquant@vllm", {}),
    "turboquant, 4 bits": ("turboquant", {}),
    "turboquant@prod, 4 bits": ("turboquant@prod", {}),
    "nvfp4": ("nvfp4", {}),
    "int4": ("int4", {}),
    "kvquant, 2 bits": ("kvquant", {"bits_per_number": 2, "group": 64}),
    "kivi, 2 bits": ("kivi", KIVI),
    "turboquant@vllm, 2 bits": ("turboquant@vllm", {"bits_per_number": 2}),
    "turboquant, 2 bits": ("turboquant", {"bits_per_number": 2}),
    "turboquant@prod, 2 bits": ("turboquant@prod", {"bits_per_number": 2}),
}
METRICS = ("output_error", "response_kl", "bytes_held")


def lost(trace: kvsim.Trace, codec: Codec, which: int) -> float:
    """Squared error of all rounded keys (0) or values (1) over their squares, mean over layers."""
    parts = []
    for layer in range(trace.n_layers):
        exact = trace.read("kv"[which], slice(layer, layer + 1))[0].float()
        rows = exact[:, : exact.shape[1] // codec.groups[which] * codec.groups[which]]
        stored = rows.clone()
        round_marked(codec, which, stored, torch.ones(rows.shape[:-1], dtype=torch.bool))
        parts.append(float((stored - rows).square().sum() / rows.square().sum()))
    return sum(parts) / len(parts)


def measure(model: str, folder: Path) -> None:
    """Measure all codecs on a model, and write them down."""
    paths = traces_in(folder / model, 3)
    policies = {name: kvsim.policy(of, **params) for name, (of, params) in CODECS.items()}
    policies["full"] = kvsim.policy("full")
    run = kvsim.sweep(
        traces=[str(path) for path in paths],
        policies=[*policies.values()],
        budgets=64,
        metrics=METRICS,
        judge=True,
    )
    rows: dict[str, dict[str, Any]] = {x: {"model": model, "name": x} for x in policies}
    names = {(x.name, json.dumps(dict(x.params))): name for name, x in policies.items()}
    for mean in averages(finished(run).table, metrics=list(METRICS)).iter_rows(named=True):
        row = rows[names[mean["policy"], mean["params"]]]
        row |= {mean["metric"]: mean["mean"], "n": mean["n"]}
        row |= {"low": mean["low"], "high": mean["high"]} if "kl" in mean["metric"] else {}
    traces = [kvsim.open_trace(path) for path in paths]
    for name in CODECS:
        codec, dim = cast("Codec", policies[name].codec), traces[0].dim
        rows[name]["bits"] = sum(codec.bits(dim)) / (2 * dim)
        for which, part in enumerate(("keys", "values")):
            rows[name][part] = sum(lost(x, codec, which) for x in traces) / len(traces)
    kept = [row for row in lines() if row["model"] != model]
    text = "".join(json.dumps(row) + "\n" for row in (*kept, *rows.values()))
    RESULTS.write_text(text, "utf-8")


def lines() -> Rows:
    """Return the measured lines of the results file."""
    return read(RESULTS)


def table() -> str:
    """Both models: bits, errors and divergence of each codec."""
    parts, columns = [], ("bits", "held", "error of keys", "of values", "output error", "judged KL")
    for model, title in TITLES.items():
        rows = {row["name"]: row for row in lines() if row["model"] == model}
        if not rows:
            continue
        full = rows["full"]
        body = [
            [
                name,
                f"{row['bits']:.2f}",
                f"{row['bytes_held'] / full['bytes_held']:.2f}",
                f"{row['keys']:.4f}",
                f"{row['values']:.4f}",
                f"{row['output_error']:.3f}",
                f"{row['response_kl']:.2g} [{row['low']:.2g}, {row['high']:.2g}]",
            ]
            for name in CODECS
            if (row := rows.get(name))
        ]
        parts.append(f"**{title}**, {full['n']} prompts:\n\n" + markdown(["codec", *columns], body))
    return "\n\n".join(parts)


def write() -> None:
    """Put the table into the page."""
    put(PAGE, {"codecs": table()})


if __name__ == "__main__":
    of_models(__doc__, "rounding", [*TITLES], measure, write, default=["tiny"])
