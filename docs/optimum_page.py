# ruff: noqa: INP001 - beside the script that it belongs to
"""Tables and the figure of optimum.md, from the lines that docs/learned.py measures."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import polars as pl
from matplotlib.figure import Figure
from study import NAMED, picture, put

from apps.tiny.card import proportion
from apps.tiny.card import table as markdown
from kvsim.analysis.significance import best_set
from kvsim.analysis.summaries import Interval
from kvsim.plots.style import COLOURS
from kvsim.policies import describe
from kvsim.policies import names as catalogue

BUDGETS = (64, 128)
#: The scorer that is called learned; those of the same features, with which it is compared.
FULL = "+ values"
KINDS = (FULL, "linear", "random features")
PROJECTIONS = "+ projections"
#: Those that are learned with several seeds.
SEEDED = (FULL, PROJECTIONS)
#: What a scorer may see, in the order of the figure.
KNOWLEDGE = ("position", "+ attention", "+ keys", FULL, PROJECTIONS, "+ the next 8 rows")
#: Names of scorers in tables; policies are shown as they are called.
SHOWN = {
    FULL: "**learned**",
    "linear": "learned, linear",
    "random features": "learned, random features",
    PROJECTIONS: "learned, with projections",
    "oracle": "`oracle`, which looks ahead",
    "tiny": "learned on `tiny`",
    "smollm2": "learned on SmolLM2's texts",
    "needle": "**learned on needle prompts**",
    "other chats": "learned on other chats",
    "text": "learned on texts",
    "learned": "**learned**",
}
SETS = {"unseen": "", "smollm2-tasks": " tasks"}
#: What the table of shares lists: policies above HIGH in a column, presets that differ from their
#: policy by more than NEAR, and these.
HIGH, NEAR = 0.9, 0.05
LISTED = ("h2o", "snapkv@scaled", "expected_attention", "streaming_llm", "random")
#: Columns of most tables.
_COLUMNS = [{"model": model, "budget": budget} for model in NAMED for budget in BUDGETS]
_HEAD = [f"{NAMED[c['model']]}, {c['budget']}" for c in _COLUMNS]
#: The mark of what could be the best of a column.
_BEST = "°"
#: The mark of what was fitted on other prompts of the model.
_FITTED = "†"


def shown(name: str) -> str:
    """A policy or scorer as tables name it, marked where it was learned, tuned or calibrated."""
    label = SHOWN.get(name, f"`{name}`")
    policy = name.partition(",")[0].removesuffix("@scaled")
    fitted = "learned" in label or "tuned" in name
    return label + _FITTED * (fitted or any(map(is_calibrated, policy.split("+"))))


def is_calibrated(name: str) -> bool:
    """Whether a policy of the catalogue has learned from queries of other prompts."""
    return name in catalogue() and "calibration" in describe(name).required


def with_intervals(lines: Sequence[dict[str, Any]]) -> pl.DataFrame:
    """The lines with mean, low and high over prompts; some have these and no values."""
    of = [np.array(line.get("values", []), np.float64) for line in lines]
    numbers = (vars(interval) for interval in Interval.of_each(of))
    rows = [{**number, **line} for number, line in zip(numbers, lines, strict=True)]
    return pl.DataFrame(rows, infer_schema_length=None)


def cells(rows: pl.DataFrame, **key: Any) -> str:
    """A mean with its interval, or a dash."""
    of = rows.filter(**key)
    if not of.height:
        return "-"
    if of["metric"][0] == "answer_right":
        return proportion(int(sum(of["values"][0])), len(of["values"][0]))
    mean, low, high = (f"{x:.3f}" for x in of.select("mean", "low", "high").row(0))
    return mean if low == high else f"{mean} [{low}, {high}]"


def wide(
    rows: pl.DataFrame, columns: Sequence[dict[str, Any]], names: Sequence[str]
) -> list[list[str]]:
    """A line for each name, a cell for each column's key."""
    return [[shown(name), *(cells(rows, name=name, **key) for key in columns)] for name in names]


def compared(rows: pl.DataFrame) -> pl.DataFrame:
    """Lines of the share of all policies on unseen prompts."""
    part = pl.col("part").is_in(["policies", "beside"])
    return rows.filter(part, test="unseen", metric="possible_share")


def best_first(rows: pl.DataFrame) -> list[str]:
    """Names of lines by their mean over columns."""
    means = rows.group_by("name", maintain_order=True).agg(pl.col("mean").mean())
    return means.sort("mean", descending=True, maintain_order=True)["name"].to_list()


def shares(rows: pl.DataFrame) -> str:
    """Share of the possible on unseen prompts, best first, above HIGH in a column, and LISTED.

    Presets are listed where a column is more than NEAR from their policy's.
    """
    kept = compared(rows)
    high = {*kept.filter(pl.col("mean") > HIGH)["name"], *LISTED}
    names = [name for name in best_first(kept) if name in high and _is_news(kept, name)]
    return markdown(["policy", *_HEAD], wide(kept, _COLUMNS, names))


def _is_news(rows: pl.DataFrame, name: str) -> bool:
    """Whether a name is no preset, or one whose shares differ from its policy's."""
    if not re.search(r"@(?!scaled)", name):
        return True
    base = re.sub(r"@\w+", "", name)
    plain = rows.filter(pl.col("name").is_in([base, f"{base}@scaled"]))
    pairs = rows.filter(name=name).join(plain, on=["model", "budget"])
    return bool((pairs["mean"] - pairs["mean_right"]).abs().max() > NEAR)


def seeds(rows: pl.DataFrame) -> str:
    """Means of learned scorers, one for each seed, and what projections add on average."""
    parts = pl.col("part").is_in(["knowledge", "seeds"])
    kept = rows.filter(parts, metric="possible_share")
    kept = kept.sort(pl.col("seed").fill_null(0), maintain_order=True)
    table = [[shown(name)] for name in SEEDED] + [["what projections add"]]
    for key in _COLUMNS:
        of = [kept.filter(name=name, **key) for name in SEEDED]
        for line, each in zip(table, of, strict=False):
            line.append(", ".join(f"{x:.3f}" for x in each["mean"]))
        pairs = zip(*(each["values"].to_list() for each in of), strict=False)
        gap = np.mean([np.subtract(with_them, without) for without, with_them in pairs], 0)
        table[-1].append(Interval.of(gap).text("+.3f"))
    return markdown(["scorer", *_HEAD], table)


def parameters(rows: pl.DataFrame) -> str:
    """Return the parameters of the tuned policies."""
    chosen = rows.filter(part="beside", metric="possible_share").filter(
        pl.col("parameters").is_not_null()
    )
    table = []
    for name in chosen["name"].unique(maintain_order=True):
        cell = []
        for key in _COLUMNS:
            of = chosen.filter(name=name, **key)["parameters"]
            values = json.loads(of[0]) if len(of) else {}
            cell.append(", ".join(f"`{k}={_short(x)}`" for k, x in values.items()) or "the default")
        table.append([shown(name), *cell])
    return markdown(["policy", *_HEAD], table)


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def could_be_best(
    rows: pl.DataFrame, names: Sequence[str], key: dict[str, Any], *, lower: bool = False
) -> set[str]:
    """Names of a set that holds the best of a column with 95 %; lower: is better."""
    values = {name: _values(rows, name, key) for name in names}
    most = max(map(len, values.values()))
    whole = {name: of for name, of in values.items() if len(of) == most}
    x = np.stack([*whole.values()], 1) * (1 if lower else -1)
    return {name for name, best in zip(whole, best_set(x)[1], strict=True) if best}


def leads(
    rows: pl.DataFrame, first: str, name: str, columns: Sequence[dict[str, Any]]
) -> list[str]:
    """Mean differences of a policy to another one, prompt by prompt, with their intervals."""
    out = []
    for key in columns:
        a, b = _values(rows, first, key), _values(rows, name, key)
        paired = name != first and len(a) == len(b) > 0
        out.append(Interval.of(a - b).text("+.3f") if paired else "-")
    return out


def _values(rows: pl.DataFrame, name: str, key: dict[str, Any]) -> np.ndarray:
    """The values of a line [prompt]; [0] if there is none."""
    of = rows.filter(name=name, **key)["values"].drop_nulls()
    return np.array(of[0] if len(of) else [], np.float64)


def paired(rows: pl.DataFrame) -> str:
    """The learned scorer against every other policy, prompt by prompt."""
    kept = compared(rows).filter(pl.col("name") != "oracle")
    names = best_first(kept)
    best = [could_be_best(kept, names, key) for key in _COLUMNS]
    near = [n for n in names if n in KINDS or "tuned" in n or any(n in each for each in best)]
    text = (
        f"The best of {len(names)} policies in a column is, with 95 %, among those marked "
        f"{_BEST}. The learned scorer was "
        "trained on this very metric, on prompts of the same kind; most of the others were fitted "
        "on nothing. Listed are the simpler and the tuned ones, and all that could be the best:"
    )
    table = []
    for name in near:
        cells = leads(kept, FULL, name, _COLUMNS)
        marks = (_BEST * (name in each) for each in best)
        table.append([shown(name), *(map("".join, zip(cells, marks, strict=True)))])
    return f"{text}\n\n{markdown(['learned less', *_HEAD], table)}"


def transfer(rows: pl.DataFrame) -> str:
    """Scorers on prompts of another kind and another model than they were learned on."""
    kept = rows.filter(part="transfer", metric="possible_share")
    tests = kept.select("model", "test").unique(maintain_order=True).rows()
    columns = [{"model": m, "test": t, "budget": b} for m, t in tests for b in BUDGETS]
    head = ["scorer", *(f"{NAMED[c['model']]}{SETS[c['test']]}, {c['budget']}" for c in columns)]
    return markdown(head, wide(kept, columns, ["tiny", "smollm2", "h2o"]))


def tasks(rows: pl.DataFrame) -> str:
    """Scorers and policies on chats, with what the one learned on needle prompts is ahead."""
    kept = rows.filter(part="tasks", metric="possible_share")
    names = best_first(kept)
    columns = [{"budget": budget} for budget in BUDGETS]
    head = ["policy", *map(str, BUDGETS), *(f"needle less it, {budget}" for budget in BUDGETS)]
    lines = zip(names, wide(kept, columns, names), strict=True)
    table = [[*line, *leads(kept, "needle", name, columns)] for name, line in lines]
    return markdown(head, table)


def closed(rows: pl.DataFrame) -> str:
    """Return the table of live runs of `tiny`; marked are those that could be the best.

    Those of SmolLM2 have no values of each prompt, so that nothing can be tested.
    """
    kept = rows.filter(part="live", model="tiny")
    columns = [
        {"metric": metric, "budget": budget}
        for metric in ("response_kl", "answer_right")
        for budget in BUDGETS
    ]
    head = ["policy", *(f"`{c['metric']}`, {c['budget']}" for c in columns)]
    names = kept["name"].unique(maintain_order=True).to_list()
    best = [could_be_best(kept, names, c, lower=c["metric"] == "response_kl") for c in columns]
    table = [
        [label, *(cell + _BEST * (name in each) for cell, each in zip(of, best, strict=True))]
        for name, (label, *of) in zip(names, wide(kept, columns, names), strict=True)
    ]
    return markdown(head, table)


def knowledge(rows: pl.DataFrame) -> Figure:
    """Share of the possible by what the scorer may see; a panel per model."""
    kept = rows.filter(part="knowledge", metric="possible_share")
    kinds = [kind for kind in KNOWLEDGE if kind in kept["name"]]
    figure, axes = plt.subplots(
        1, len(NAMED), figsize=(8.4, 3.1), sharey=True, layout="constrained"
    )
    for axis, (model, title) in zip(axes, NAMED.items(), strict=True):
        for budget, colour in zip(BUDGETS, COLOURS, strict=False):
            of = kept.filter(model=model, budget=budget)
            by_kind = [of.filter(name=kind).row(0, named=True) for kind in kinds]
            means = [row["mean"] for row in by_kind]
            ends = [
                [row["mean"] - row["low"] for row in by_kind],
                [row["high"] - row["mean"] for row in by_kind],
            ]
            axis.errorbar(
                range(len(means)),
                means,
                ends,
                fmt="o-",
                ms=4,
                color=colour,
                capsize=2,
                label=f"budget {budget}",
            )
        axis.set_xticks(range(len(kinds)), kinds, rotation=20, ha="right", fontsize=8)
        axis.axvspan(len(kinds) - 1.5, len(kinds) - 0.5, color="0.93", zorder=0)
        axis.set_title(title.strip("`"), fontsize=9)
        axis.grid(axis="y", color="0.9")
    axes[0].set_ylabel("share of the possible")
    axes[0].legend(fontsize=8, frameon=False, loc="lower right")
    axes[-1].text(
        len(kinds) - 1,
        axes[-1].get_ylim()[0],
        "looks\nahead",
        ha="center",
        va="bottom",
        fontsize=7,
    )
    return figure


def write(lines: Sequence[dict[str, Any]], page: Path) -> None:
    """Put tables and the figure into the page."""
    rows = with_intervals(lines)
    parts = {
        "shares": shares(rows),
        "paired": paired(rows),
        "parameters": parameters(rows),
        "seeds": seeds(rows),
        "transfer": transfer(rows),
        "tasks": tasks(rows),
        "closed": closed(rows),
    }
    put(page, parts)
    picture(knowledge(rows), page.parent / "figures/knowledge.png", dpi=120)
