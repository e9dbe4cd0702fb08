# ruff: noqa: INP001, T201 - a script, not a module, and it says what it did
"""Eviction, reading and storing at equal bytes: tables and figures of access.md.

    python docs/access.py                 both models; resumes
    python docs/access.py --write-only    the page of what is measured already: seconds
    python docs/access.py --traces DIR --models tiny

Traces come from the commands that the page names, and are not made here. What was measured is kept
in `docs/access-results.jsonl`, a line each.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter
from study import ROOT, Rows, append, finished, of_models, picture, put, read, traces_in

import kvsim
from apps.tiny.card import table as markdown
from kvsim.analysis.fronts import COSTS, front
from kvsim.analysis.summaries import Interval, per_prompt
from kvsim.core.policy import Policy
from kvsim.plots.style import COLOURS

PAGE, RESULTS = ROOT / "docs/access.md", ROOT / "docs/access-results.jsonl"
FIGURE = "figures/access.png"
#: Prompts of each model: a folder of traces, and how many of it.
MODELS = {"tiny": ("tiny", 12), "smollm2": ("smollm2-text", 6)}
TITLES = {"tiny": "tiny", "smollm2": "SmolLM2-135M"}
BUDGETS, INTERVAL = (64, 128, 256), 32
METRICS = ("response_kl", "output_error", "bytes_held", "bytes_read")
#: Layers in which readers read everything: none, because both models have few tokens and layers.
ALL = {"dense_layers": 0}
KIVI, QUEST = {"window": 32, "bits_per_number": 4}, {**ALL, "page": 4}
SKIP = {**ALL, "threshold": 0.01}
#: A KL below this counts as this, in nats: twice the same predictions, but for rounding.
FLOOR, BOUND = 1e-5, "topk (bound)"
SHOWN = {"bytes_held": "bytes held", "bytes_read": "bytes read"}
EVICTIONS, MERGERS = ("streaming_llm", "h2o", "snapkv"), ("lookm", "d2o")
#: By kind and name: the policy, and its parameters.
POLICIES: Mapping[str, Mapping[str, tuple[str, dict[str, Any]]]] = {
    "full cache": {"full": ("full", {})},
    "evict": {name: (name, {}) for name in (*EVICTIONS, "tova", "dropkv", "expected_attention")},
    "store": {
        "kivi, 2 bits": ("kivi", {"window": 32}),
        "kivi, 4 bits": ("kivi", KIVI),
        "kvquant, 2 bits": ("kvquant", {"bits_per_number": 2, "group": 64}),
        "kvquant, 4 bits": ("kvquant", {"bits_per_number": 4, "group": 64}),
        **{
            name: (name, {})
            for name in ("turboquant", "turboquant@vllm", "think", "nvfp4", "int8", "int4", "fp8")
        },
    },
    "combine": {
        "h2o + int8": ("h2o+int8", {}),
        "h2o + kivi, 4 bits": ("h2o+kivi", KIVI),
        "h2o + turboquant@vllm": ("h2o+turboquant@vllm", {}),
        "h2o + think": ("h2o+think", {}),
        "tova + int8": ("tova+int8", {}),
        "dropkv + int8": ("dropkv+int8", {}),
        "dropkv + kivi, 4 bits": ("dropkv+kivi", {"scorer__window": 32, "bits_per_number": 4}),
        "h2o + quest": ("h2o+quest", {**QUEST, "share": 0.5}),
        "quest, pages of 4 + int8": ("quest+int8", QUEST),
        "skip_softmax, 0.01 + kivi, 4 bits": ("skip_softmax+kivi", {**SKIP, **KIVI}),
    },
    "read": {
        "quest": ("quest", ALL),
        "quest, pages of 4": ("quest", QUEST),
        "skip_softmax, 0.01": ("skip_softmax", SKIP),
        "skip_softmax, 0.1": ("skip_softmax", {**ALL, "threshold": 0.1}),
        "magicpig": ("magicpig", {**ALL, "tables": 75, "bits": 8}),
        "pqcache": ("pqcache", ALL),
        BOUND: ("topk", {}),
    },
    "merge": {f"{of} + {merger}": (f"{of}+{merger}", {}) for of in EVICTIONS for merger in MERGERS},
}
KIND = {name: kind for kind, of_kind in POLICIES.items() for name in of_kind}
#: Those that the budget does not bind.
FREE = {"full", *POLICIES["store"], "magicpig"} | {x for x in KIND if x.startswith("skip")}


def built(name: str) -> Policy:
    """The policy of a line."""
    policy, params = POLICIES[KIND[name]][name]
    return kvsim.policy(policy, **params)


def measure(model: str, traces: Path) -> None:
    """Measure what is missing of a model, a kind at a time, and write each down."""
    done = {(row["model"], row["name"]) for row in lines()}
    folder, count = MODELS[model]
    paths = [str(path) for path in traces_in(traces / folder, 3)[:count]]
    for kind, of_kind in POLICIES.items():
        missing = [name for name in of_kind if (model, name) not in done]
        for budgets, part in (
            (BUDGETS, [name for name in missing if name not in FREE]),
            (BUDGETS[:1], [name for name in missing if name in FREE]),
        ):
            if part:
                append(RESULTS, _measured(model, paths, budgets, part))
                print(f"{model}: {kind}, budgets {budgets}", flush=True)


def _measured(
    model: str, paths: Sequence[str], budgets: Sequence[int], names: Sequence[str]
) -> Rows:
    """A line for each policy and budget, with the values of each metric by prompt."""
    policies = {name: built(name) for name in names}
    name_of = {(x.name, json.dumps(dict(x.params))): name for name, x in policies.items()}
    run = kvsim.sweep(
        traces=paths,
        policies=[*policies.values()],
        budgets=budgets,
        intervals=INTERVAL,
        metrics=METRICS,
        judge=True,
    )
    values: dict[tuple[str, int], dict[str, Any]] = {}
    for row in per_prompt(finished(run).table).sort("trace").iter_rows(named=True):
        if row["metric"] in METRICS and not row["variant"]:
            name, budget = name_of[row["policy"], row["params"]], int(row["requested"])
            line = values.setdefault(
                (name, budget), {"model": model, "name": name, "budget": budget}
            )
            line.setdefault(row["metric"], []).append(float(f"{row['value']:.5g}"))
    return [*values.values()]


def lines() -> Rows:
    """Return the measured lines of the results file."""
    return read(RESULTS)


def points(model: str) -> pl.DataFrame:
    """A row for each policy and budget of a model, with its costs and whether it is on each front.

    `mean` and `text` are of the judged KL. The bound and the full cache are on no front.
    """
    rows = []
    for line in lines():
        if line["model"] == model:
            kl = Interval.of(np.array(line["response_kl"]))
            rest = {name: float(np.mean(line[name])) for name in METRICS[1:]}
            name, budget = line["name"], line["budget"]
            label = name if name in FREE else f"{name}, {budget}"
            here = {"name": name, "kind": KIND[name], "budget": budget, "label": label}
            rows.append({**here, **rest, "n": kl.n, "mean": kl.mean, "text": kl.text(".2g")})
    table = pl.DataFrame(rows).with_columns(seen_kl=pl.col("mean").clip(FLOOR))
    table = table.with_columns(real=~pl.col("name").is_in(["full", BOUND]))
    for cost in SHOWN:
        real = table.filter("real")
        on = front(real.select(seen=cost, mean="seen_kl"))
        best = real.select("name", "budget", on.alias(f"front_{cost}"))
        table = table.join(best, on=["name", "budget"], how="left", maintain_order="left")
    return table.with_columns(pl.col("^front_.*$").fill_null(value=False))


def table(model: str) -> str:
    """Each policy on a front, and the bound, by judged KL; bytes are shares of the full cache's."""
    of_model = points(model)
    full = of_model.filter(name="full").row(0, named=True)
    body = []
    shown = pl.any_horizontal("^front_.*$") | (pl.col("name") == BOUND)
    for row in of_model.filter(shown).sort("mean").to_dicts():
        shares = [(f"{row[cost] / full[cost]:.2f}", row[f"front_{cost}"]) for cost in SHOWN]
        body.append(
            [
                row["name"],
                "-" if row["name"] in FREE else str(row["budget"]),
                *(f"**{share}**" if on else share for share, on in shares),
                row["text"] if row["mean"] >= FLOOR else f"< {FLOOR:g}",
                f"{row['output_error']:.3f}",
            ]
        )
    head = ["policy", "budget", "bytes held", "bytes read", "judged KL", "output error"]
    mib = full["bytes_held"] / 2**20
    return (
        f"**{TITLES[model]}**, {full['n']} prompts; the full cache has {mib:.1f} MiB, "
        "mean over the rows of the response.\n\n" + markdown(head, body)
    )


def both() -> str:
    """The names that are on a front of both models, whatever the budget, in words."""
    of = [points(model) for model in TITLES]
    parts = []
    for cost, words in SHOWN.items():
        names = [set(each.filter(f"front_{cost}")["name"]) for each in of]
        common = [name for name in KIND if all(name in each for each in names)]
        parts.append(f"* Of {words}: {'; '.join(common) or 'none'}.")
    return "On a front of both models:\n\n" + "\n".join(parts)


def mergers(model: str) -> str:
    """KL of each eviction alone and with a merger, and on how many prompts this is the smaller."""
    kl = {
        (line["name"], line["budget"]): np.array(line["response_kl"])
        for line in lines()
        if line["model"] == model
    }
    body = []
    for of in EVICTIONS:
        cells = [", ".join(f"{kl[of, budget].mean():.2f}" for budget in BUDGETS)]
        for merger in MERGERS:
            pairs = [(kl[of, budget], kl[f"{of} + {merger}", budget]) for budget in BUDGETS]
            cells.append(", ".join(f"{b.mean():.2f} ({(b < a).sum()})" for a, b in pairs))
        body.append([f"`{of}`", *cells])
    head = ["eviction", "alone", *(f"+ `{merger}`" for merger in MERGERS)]
    count = len(kl["full", BUDGETS[0]])
    return f"**{TITLES[model]}**, {count} prompts:\n\n" + markdown(head, body)


def parts() -> dict[str, str]:
    """The tables of the page."""
    return {
        "table": "\n\n".join([*map(table, TITLES), both()]),
        "mergers": "\n\n".join(map(mergers, TITLES)),
    }


def drawn() -> Figure:
    """Judged KL against bytes held and bytes read; a row of panels for each model."""
    figure, axes = plt.subplots(2, 2, figsize=(10, 9), layout="constrained", sharex="row")
    kinds = [kind for kind in POLICIES if kind != "full cache"]
    styles = dict(zip(kinds, zip(COLOURS, "osDv^", strict=False), strict=True))
    for panels, model in zip(axes, TITLES, strict=True):
        of_model = points(model).filter(pl.col("name") != "full")
        for axis, cost in zip(panels, SHOWN, strict=True):
            for row in of_model.iter_rows(named=True):
                colour, marker = styles[row["kind"]]
                on = row[f"front_{cost}"]
                axis.plot(
                    *(row[cost], row["seen_kl"]),
                    marker=marker if row["real"] else "x",
                    ms=7 if on else 4.5,
                    mfc=colour if on else "white",
                    color=colour,
                    ls="none",
                )
            _labelled(axis, of_model.filter(f"front_{cost}").sort(cost), cost)
            axis.set_title(TITLES[model], fontsize=9)
        panels[0].set_ylabel(f"judged KL, nats; at least {FLOOR:g}")
    handles = [
        Line2D([], [], marker=marker, color=colour, ls="none", label=kind)
        for kind, (colour, marker) in styles.items()
    ]
    title = "filled: on the front; x: a bound, which reads all keys to choose"
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, title=title)
    return figure


def _labelled(axis: Axes, best: pl.DataFrame, cost: str) -> None:
    """The front as a line, and names below it to the left, where nothing is, one above the next."""
    axis.plot(best[cost], best["seen_kl"], color="0.6", lw=0.8, zorder=0)
    axis.set(xscale="log", yscale="log", xlabel=COSTS[cost])
    axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
    axis.xaxis.set_major_formatter(EngFormatter(unit="B"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.grid(color="0.92")
    axis.set_xlim(best[cost].min() / 14, axis.get_xlim()[1])
    axis.set_ylim(best["seen_kl"].min() / 3)
    low, high = np.log(axis.get_ylim())
    at = np.inf  # of the label above, as a share of the height
    for (x, y), part in best.group_by(cost, "seen_kl", maintain_order=True):
        at = min((np.log(y) - low) / (high - low), at - 0.045)
        axis.annotate(
            " / ".join(part["label"]),
            (x, y),
            xytext=(x / 1.25, at),
            textcoords=axis.get_xaxis_transform(),
            arrowprops={"arrowstyle": "-", "color": "0.7", "lw": 0.5},
            ha="right",
            va="center",
            fontsize=7,
        )


def write() -> None:
    """Put the tables and the figure into the page."""
    put(PAGE, parts())
    picture(drawn(), PAGE.parent / FIGURE, dpi=110)


if __name__ == "__main__":
    of_models(__doc__, "optimum", [*MODELS], measure, write)
