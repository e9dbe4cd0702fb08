# ruff: noqa: INP001, T201 - a script, not a module, and it says what it did
"""Eviction, reading and storing at equal bytes: tables and figures of access.md.

    python docs/access.py                 both models; resumes
    python docs/access.py --write-only    the page of what is measured already: seconds
    python docs/access.py --traces DIR --models tiny

Traces come from the commands that the page names, and are not made here. What was measured is kept
in `docs/access-results.jsonl`, a line each.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import polars as pl
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter, StrMethodFormatter
from study import ROOT, Rows, append, finished, of_models, picture, put, read, traces_in

import kvsim
from apps.tiny.card import table as markdown
from kvsim.analysis.fronts import COSTS, front
from kvsim.analysis.summaries import averages
from kvsim.core.policy import Policy
from kvsim.plots.style import COLOURS

PAGE, RESULTS = ROOT / "docs/access.md", ROOT / "docs/access-results.jsonl"
FIGURE = "figures/access.png"
#: Prompts of each model: a folder of traces, and how many of it.
MODELS = {"tiny": ("tiny", 20), "smollm2": ("smollm2-text", 10)}
TITLES = {"tiny": "tiny", "smollm2": "SmolLM2-135M"}
BUDGETS, INTERVAL = (64, 128, 256), 32
METRICS = ("output_error", "bytes_held", "bytes_read")
#: Layers in which readers read everything: none, because both models have few tokens and layers.
ALL = {"dense_layers": 0}
#: By kind and name: the policy, and its parameters.
POLICIES: Mapping[str, Mapping[str, tuple[str, dict[str, Any]]]] = {
    "full cache": {"full": ("full", {})},
    "evict": {
        name: (name, {})
        for name in ("streaming_llm", "tova", "h2o", "snapkv@scaled", "expected_attention")
    },
    "read": {
        "quest": ("quest", ALL),
        "quest, pages of 4": ("quest", {**ALL, "page": 4}),
        "quest, one set per KV head": ("quest", {**ALL, "heads": "kv"}),
        "topk (bound)": ("topk", {}),
    },
    "store": {
        "kivi, 2 bits": ("kivi", {"window": 32}),
        "kivi, 4 bits": ("kivi", {"window": 32, "bits_per_number": 4}),
        **{name: (name, {}) for name in ("int8", "int4", "fp8")},
    },
    "combined": {
        "h2o + int8": ("h2o+int8", {}),
        "h2o + int4": ("h2o+int4", {}),
        "h2o + kivi, 4 bits": ("h2o+kivi", {"window": 32, "bits_per_number": 4}),
        "tova + int8": ("tova+int8", {}),
        "quest, pages of 4 + int8": ("quest+int8", {**ALL, "page": 4}),
        "h2o + quest, pages of 4": ("h2o+quest", {**ALL, "page": 4, "share": 0.5}),
    },
}
KIND = {name: kind for kind, of_kind in POLICIES.items() for name in of_kind}
#: What an error is compared among: rounding every entry and leaving some out are errors of two
#: kinds, of which the model bears the first better.
FAMILIES = {
    **dict.fromkeys(POLICIES["store"], "rounding"),
    **dict.fromkeys(POLICIES["combined"], "both"),
    "h2o + quest, pages of 4": "entries",
}
#: Those that the budget does not bind.
FREE = {"full", *POLICIES["store"]}


def built(name: str) -> Policy:
    """The policy of a line."""
    policy, params = POLICIES[KIND[name]][name]
    return kvsim.policy(policy, **params)


def measure(model: str, traces: Path) -> None:
    """Measure what is missing of a model, a policy at a time, and write each down."""
    done = {(row["model"], row["name"], row["budget"]) for row in lines()}
    folder, count = MODELS[model]
    paths = traces_in(traces / folder, 3)[:count]
    for name in KIND:
        of_policy = BUDGETS[:1] if name in FREE else BUDGETS
        budgets = [budget for budget in of_policy if (model, name, budget) not in done]
        if not budgets:
            continue
        run = kvsim.sweep(
            traces=[str(path) for path in paths],
            policies=[built(name)],
            budgets=budgets,
            intervals=INTERVAL,
            metrics=METRICS,
        )
        means = averages(finished(run).table, metrics=list(METRICS))
        budget = pl.col("requested").cast(pl.Int64)
        rows = means.select("metric", "mean", "low", "high", "n", budget=budget).to_dicts()
        append(RESULTS, ({"model": model, "name": name, **row} for row in rows))
        print(f"{model}: {name}", flush=True)


def lines() -> Rows:
    """Return the measured lines of the results file."""
    return read(RESULTS)


def points(rows: pl.DataFrame, model: str) -> pl.DataFrame:
    """A row for each policy and budget of a model: kind, name, budget and the metrics."""
    of_model = rows.filter(model=model)
    wide = of_model.pivot("metric", index=["name", "budget"], values="mean", sort_columns=False)
    ends = of_model.filter(metric="output_error").select("name", "budget", "low", "high", "n")
    kinds = pl.col("name").replace_strict(KIND)
    return wide.join(ends, on=["name", "budget"], maintain_order="left").with_columns(kind=kinds)


def fronts(of_model: pl.DataFrame, *, mixed: bool = False) -> pl.DataFrame:
    """The same, with whether each is on the front of its family against either cost; no bounds.

    mixed: of all families together.
    """
    family = pl.col("name").replace_strict(FAMILIES, default="entries")
    of_model = of_model.with_columns(family=pl.lit("all") if mixed else family)
    real = pl.col("name") != "topk (bound)"
    for cost in ("bytes_held", "bytes_read"):
        parts = of_model.filter(real).partition_by("family", maintain_order=True)
        on = [
            part.select(
                *("name", "budget"),
                front(part.select(seen=cost, mean="output_error")).alias(f"front_{cost}"),
            )
            for part in parts
        ]
        keys = ["name", "budget"]
        of_model = of_model.join(pl.concat(on), on=keys, how="left", maintain_order="left")
    return of_model.with_columns(pl.col("^front_.*$").fill_null(value=False))


def table(rows: pl.DataFrame) -> str:
    """Both models: each policy on a front and the bound, with the error and its interval.

    Bytes are shares of the full cache's.
    """
    parts = []
    for model, title in TITLES.items():
        of_model = fronts(points(rows, model))
        full = of_model.filter(name="full").row(0, named=True)
        body = []
        names = list(KIND)
        rows_of_model = of_model.filter(pl.col("name") != "full").to_dicts()
        for row in sorted(rows_of_model, key=lambda row: (names.index(row["name"]), row["budget"])):
            shares = [row[cost] / full[cost] for cost in ("bytes_held", "bytes_read")]
            marks = [row[f"front_{cost}"] for cost in ("bytes_held", "bytes_read")]
            if not any(marks) and row["name"] != "topk (bound)":
                continue
            body.append(
                [
                    row["name"],
                    "-" if row["name"] in FREE else str(row["budget"]),
                    *(
                        f"**{x:.2f}**" if on else f"{x:.2f}"
                        for x, on in zip(shares, marks, strict=True)
                    ),
                    f"{row['output_error']:.3f} [{row['low']:.3f}, {row['high']:.3f}]",
                ]
            )
        head = ["policy", "budget", "bytes held", "bytes read", "output error"]
        mib = full["bytes_held"] / 2**20
        parts.append(
            f"**{title}**, {full['n']} prompts; the full cache has {mib:.1f} MiB, "
            "mean over the rows of the response.\n\n" + markdown(head, body)
        )
    return "\n\n".join(parts)


def drawn(rows: pl.DataFrame) -> Figure:
    """Output error against bytes held and bytes read; a row of panels for each model."""
    figure, axes = plt.subplots(2, 2, figsize=(9.6, 7.6), layout="constrained")
    styles = dict(zip(list(POLICIES)[1:], zip(COLOURS, "osD^", strict=False), strict=True))
    for panels, (model, title) in zip(axes, TITLES.items(), strict=True):
        of_model = fronts(points(rows, model)).filter(pl.col("name") != "full")
        for axis, cost in zip(panels, ("bytes_held", "bytes_read"), strict=True):
            for kind, (colour, marker) in styles.items():
                for row in of_model.filter(kind=kind).iter_rows(named=True):
                    on, bound = row[f"front_{cost}"], row["name"] == "topk (bound)"
                    axis.plot(
                        row[cost],
                        row["output_error"],
                        marker="x" if bound else marker,
                        ms=7,
                        mfc=colour if on else "white",
                        color=colour,
                        ls="none",
                        label=kind if axis is axes[0, 0] and not bound else None,
                    )
            best = of_model.filter(pl.col(f"front_{cost}")).sort(cost)
            for part in best.partition_by("family", maintain_order=True):
                axis.plot(part[cost], part["output_error"], color="0.6", lw=0.8, zorder=0)
                row = part.row(-1, named=True)  # the one with the smallest error
                label = row["name"] + ("" if row["name"] in FREE else f", {row['budget']}")
                axis.annotate(  # nothing is better and cheaper, so there is room below to the left
                    label,
                    (row[cost], row["output_error"]),
                    xytext=(-5, -4),
                    textcoords="offset points",
                    ha="right",
                    va="top",
                    fontsize=6.5,
                )
            axis.set_xscale("log")
            axis.set_yscale("log")
            axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axis.xaxis.set_major_formatter(EngFormatter(unit="B"))
            axis.xaxis.set_minor_formatter(NullFormatter())
            axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
            axis.yaxis.set_minor_formatter(NullFormatter())
            left, right = axis.get_xlim()
            axis.set_xlim(left / 3.5, right)
            axis.grid(color="0.92")
            axis.set_xlabel(COSTS[cost])
            axis.set_title(title, fontsize=9)
        panels[0].set_ylabel("output error")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    figure.legend(
        unique.values(),
        unique,
        loc="outside lower center",
        ncols=4,
        frameon=False,
        title="filled: on the front of its family; x: a bound, which reads all keys to choose",
    )
    return figure


def write() -> None:
    """Put the tables and the figure into the page."""
    rows = pl.DataFrame(lines(), infer_schema_length=None)
    put(PAGE, {"table": table(rows)})
    picture(drawn(rows), PAGE.parent / FIGURE, dpi=120)


if __name__ == "__main__":
    of_models(__doc__, "optimum", [*MODELS], measure, write)
