# ruff: noqa: INP001, T201 - a script, not a module, and it says what it did
"""How near policies come to the optimum, and what learning from it adds: parts of optimum.md.

    python docs/learned.py                 both models; resumes
    python docs/learned.py --write-only    the page of what is measured already: seconds
    python docs/learned.py --traces DIR --models tiny

Traces come from the commands that the page names, and are not made here. What was measured is kept
in `docs/optimum-results.jsonl`, a line each.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import polars as pl
import torch
from matplotlib.figure import Figure

import kvsim
from apps.tiny.card import table as markdown
from drawing import small
from kvsim.analysis.summaries import averages
from kvsim.core.policy import Policy
from kvsim.core.trace import Trace
from kvsim.learning import learn
from kvsim.learning.learn import CAUSAL
from kvsim.plots.style import COLOURS
from kvsim.recorder import load_model
from kvsim.store.opening import as_traces
from kvsim.sweeps.run import replay_all
from kvsim.sweeps.tuning import tune

ROOT = Path(__file__).resolve().parent.parent
PAGE, RESULTS = ROOT / "docs/optimum.md", ROOT / "docs/optimum-results.jsonl"
BUDGETS, INTERVAL = (64, 128), 32
#: Policies of the table; @scaled where lengths are meant for larger budgets.
POLICIES = (
    *("random", "streaming_llm", "knorm", "keydiff", "lagkv", "tova", "h2o", "snapkv@scaled"),
    *("pyramidkv@scaled", "expected_attention", "gkv@scaled", "rkv@scaled", "ams@scaled"),
)
#: What a scorer may see, one kind of information more each time.
KNOWLEDGE = {
    "position": ("position",),
    "+ attention": ("position", "attention"),
    "+ keys": ("position", "attention", "keys"),
    "+ values": CAUSAL,
    "+ the next 8 rows": (*CAUSAL, "future"),
}
FULL = "+ values"
#: Hand-written policies whose parameters are searched.
TUNED = ("h2o", "snapkv")
METRICS = ("possible_share", "output_error")
#: What runs on the model beside the learned scorer, and the prompts with answers: how many tokens
#: of a response they take.
LIVE = ("h2o", "tova", "gkv@scaled", "snapkv@scaled")
ANSWERS = {"tiny": ("unseen", 512), "smollm2": ("smollm2-tasks", 24)}


@dataclass(frozen=True)
class Model:
    """Prompts of a model: folders of traces, the first for learning and testing, others for tests.

    train: how many of the first folder are learned from.
    """

    name: str
    folders: tuple[str, ...]
    train: int
    traces: Path

    @cached_property
    def sets(self) -> dict[str, list[Trace]]:
        """Traces by name of the set: `learned` from, `unseen` of the same kind, and others."""
        # by number, so that tasks alternate
        first, *others = (
            sorted(as_traces(self.traces / folder), key=lambda trace: trace.name[-3:])
            for folder in self.folders
        )
        rest = dict(zip(self.folders[1:], others, strict=True))
        return {"learned": first[: self.train], "unseen": first[self.train :], **rest}


def models(traces: Path) -> dict[str, Model]:
    """Both models."""
    return {
        "tiny": Model("tiny", ("tiny",), 20, traces),
        "smollm2": Model("smollm2", ("smollm2-text", "smollm2-tasks"), 9, traces),
    }


# ------------------------------------------------------------------------------------- measurement


class Results:
    """Lines that are measured once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        text = path.read_text("utf-8") if path.exists() else ""
        self.rows: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]

    def has(self, **key: Any) -> bool:
        """Whether there are lines with these values."""
        return any(all(row.get(name) == x for name, x in key.items()) for row in self.rows)

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Write lines, and keep them."""
        self.rows += rows
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        print(*(f"{row['model']}: {row['part']}, {row['name']}" for row in rows[:1]), flush=True)


def scorer(model: Model, kind: str, **options: Any) -> str:
    """A scorer learned on the model's prompts, made once; its name as a policy."""
    file = (
        model.traces / "scorers" / f"{model.name}-{''.join(filter(str.isalnum, kind))}.safetensors"
    )
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        learn(model.sets["learned"], BUDGETS, file, interval=INTERVAL, held_out=0, **options)
    return f"learned:{file}"


def measured(
    traces: Sequence[Trace], policy: Policy | str, budgets: Sequence[int] = BUDGETS
) -> Iterator[dict[str, Any]]:
    """Means of a policy over prompts at each budget, with intervals."""
    run = replay_all(
        traces, policy, budgets, interval=INTERVAL, regret=True, metrics=["output_error"]
    )
    if run.failures:
        raise SystemExit(f"{policy}: {run.failures[0]}")
    means = averages(run.table, metrics=METRICS)
    for row in means.select("asked", "metric", "mean", "low", "high", "n").to_dicts():
        yield {**row, "budget": int(row.pop("asked"))}


def put(results: Results, model: Model, part: str, name: str, test: str, policy: Any) -> None:
    """Measure a policy on a set of prompts, unless that is done; policy: makes its name."""
    key = {"model": model.name, "part": part, "name": name, "test": test}
    if not results.has(**key):
        rows = [{**key, **row} for row in measured(model.sets[test], policy())]
        results.add(rows)


def measure(results: Results, model: Model, other: Model) -> None:
    """Everything that the page shows of a model; other: whose scorer is tried on it."""
    for name in POLICIES:
        put(results, model, "policies", name, "unseen", lambda name=name: name)
    for kind, groups in KNOWLEDGE.items():
        options: dict[str, Any] = {"features": groups, "ahead": 8 * ("future" in groups)}
        put(
            *(results, model, "knowledge", kind, "unseen"),
            lambda kind=kind, options=options: scorer(model, kind, **options),
        )
    for test in [name for name in model.sets if name != "learned"]:
        put(results, model, "transfer", other.name, test, lambda: scorer(other, FULL))
        put(results, model, "transfer", model.name, test, lambda: scorer(model, FULL))
        put(results, model, "transfer", "h2o", test, lambda: "h2o")
    for metric in ("response_kl", "answer_right"):
        for name in ("learned", *LIVE):
            if not results.has(model=model.name, part="live", metric=metric, name=name):
                results.add(live(model, metric, name))
    beside = {"linear": {"hidden": 0}, "random features": {"fixed": True}}
    for kind, options in beside.items():
        put(
            *(results, model, "beside", kind, "unseen"),
            lambda kind=kind, options=options: scorer(model, kind, **options),
        )
    for name in TUNED:
        key = {"model": model.name, "part": "beside", "name": f"{name}, tuned", "test": "unseen"}
        if not results.has(**key):
            of_budgets = [
                row
                for budget in BUDGETS
                for row in measured(model.sets["unseen"], tuned(model, name, budget), [budget])
            ]
            results.add([{**key, **row} for row in of_budgets])


def tuned(model: Model, name: str, budget: int) -> Policy:
    """A hand-written policy with the parameters that retain most on the prompts learned from."""
    traces = model.sets["learned"]
    search = tune(
        *(traces, name, budget, "retained_mass"),
        trials=15, held_out=0, interval=INTERVAL,
    )  # fmt: skip
    return kvsim.policy(name, **search.parameters)


def live(model: Model, metric: str, name: str) -> list[dict[str, Any]]:
    """Closed loop: the model itself under the learned scorer, or under another policy.

    Fed with its response for the distance of its distributions, and writing for its answers.
    """
    loaded, tokenizer = load_model(model.name)
    test, new_tokens = ("unseen", 0) if metric == "response_kl" else ANSWERS[model.name]
    run = kvsim.live(
        loaded,
        model.sets[test],
        scorer(model, FULL) if name == "learned" else name,
        BUDGETS,
        tokenizer=tokenizer,
        interval=INTERVAL,
        max_new_tokens=new_tokens,
        metrics=[metric],
    )
    if run.failures:
        raise SystemExit(f"{model.name}: {run.failures[0]}")
    key = {"model": model.name, "part": "live", "test": test, "name": name}
    means = averages(run.table, metrics=metric).select(
        "asked", "metric", "mean", "low", "high", "n"
    )
    return [{**key, **row, "budget": int(row["asked"])} for row in means.to_dicts()]


# ---------------------------------------------------------------------------------------- the page

NAMED = {"tiny": "`tiny`", "smollm2": "SmolLM2"}
SETS = {
    "unseen": "of the kind it was learned on",
    "smollm2-tasks": "few-shot, chat and needle prompts",
}
#: Names of scorers in tables; policies are shown as they are called.
SHOWN = {
    FULL: "**learned**",
    "linear": "learned, linear",
    "random features": "learned, random features",
    "tiny": "learned on `tiny`",
    "smollm2": "learned on SmolLM2's texts",
    "learned": "**learned**",
}


def cells(rows: pl.DataFrame, form: str, **key: Any) -> str:
    """A mean with its interval, or a dash."""
    of = rows.filter(**key)
    if not of.height:
        return "-"
    row = of.row(0, named=True)
    if row["low"] is None or row["low"] == row["high"]:
        return f"{row['mean']:{form}}"
    return f"{row['mean']:{form}} [{row['low']:{form}}, {row['high']:{form}}]"


def wide(
    rows: pl.DataFrame, columns: Sequence[dict[str, Any]], names: Sequence[str]
) -> list[list[str]]:
    """A line for each name, a cell for each column's key."""
    return [
        [SHOWN.get(name, f"`{name}`"), *(cells(rows, ".3f", name=name, **key) for key in columns)]
        for name in names
    ]


def shares(rows: pl.DataFrame) -> str:
    """Share of the possible of all policies on unseen prompts, best first."""
    part = (pl.col("part") != "knowledge") | (pl.col("name") == FULL)
    kept = rows.filter(part, pl.col("part") != "transfer", test="unseen", metric="possible_share")
    best = kept.group_by("name").agg(pl.col("mean").mean(), pl.len())
    names = best.sort("mean", descending=True)["name"].to_list()
    columns = [{"model": m, "budget": b} for m in NAMED for b in BUDGETS]
    head = ["policy", *(f"{NAMED[c['model']]}, {c['budget']}" for c in columns)]
    lines = [f"* {_beside(kept.filter(**column))}" for column in columns]
    return "\n\n".join([markdown(head, wide(kept, columns, names)), "\n".join(lines)])


def _beside(rows: pl.DataFrame) -> str:
    """The learned scorer and the best policy that is written by hand, on a model at a budget."""
    scorers = (FULL, "linear", "random features")
    learned = rows.filter(name=FULL).row(0, named=True)
    best = rows.filter(~pl.col("name").is_in(scorers)).sort("mean").row(-1, named=True)
    apart = learned["low"] > best["high"] or best["low"] > learned["high"]
    sure = "their intervals are apart" if apart else "their intervals overlap"
    return (
        f"{NAMED[learned['model']]}, {learned['budget']} entries: learned {learned['mean']:.3f}, "
        f"the best of the others `{best['name']}` {best['mean']:.3f}; {sure}."
    )


def transfer(rows: pl.DataFrame) -> str:
    """Scorers on prompts of another kind and another model than they were learned on."""
    kept = rows.filter(part="transfer", metric="possible_share")
    tests = kept.select("model", "test").unique(maintain_order=True).rows()
    columns = [{"model": m, "test": t, "budget": b} for m, t in tests for b in BUDGETS]
    head = ["scorer", *(f"{NAMED[c['model']]}, {SETS[c['test']]}, {c['budget']}" for c in columns)]
    return markdown(head, wide(kept, columns, ["tiny", "smollm2", "h2o"]))


def closed(rows: pl.DataFrame) -> str:
    """What the models do under the policies."""
    kept = rows.filter(part="live")
    metrics = [m for m in ("response_kl", "answer_right") if kept.filter(metric=m).height]
    columns = [
        {"model": m, "metric": metric, "budget": b}
        for m in NAMED
        for metric in metrics
        if kept.filter(model=m, metric=metric).height
        for b in BUDGETS
    ]
    head = ["policy", *(f"{NAMED[c['model']]}, `{c['metric']}`, {c['budget']}" for c in columns)]
    names = kept["name"].unique(maintain_order=True).to_list()
    return markdown(head, wide(kept, columns, names))


def knowledge(rows: pl.DataFrame) -> Figure:
    """Share of the possible by what the scorer may see; a panel per model."""
    kept = rows.filter(part="knowledge", metric="possible_share")
    figure, axes = plt.subplots(
        1, len(NAMED), figsize=(8.4, 3.1), sharey=True, layout="constrained"
    )
    for axis, (model, title) in zip(axes, NAMED.items(), strict=True):
        for budget, colour in zip(BUDGETS, COLOURS, strict=False):
            of = kept.filter(model=model, budget=budget)
            by_kind = [of.filter(name=kind).row(0, named=True) for kind in KNOWLEDGE]
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
        axis.set_xticks(range(len(KNOWLEDGE)), KNOWLEDGE, rotation=20, ha="right", fontsize=8)
        axis.axvspan(len(KNOWLEDGE) - 1.5, len(KNOWLEDGE) - 0.5, color="0.93", zorder=0)
        axis.set_title(title.strip("`"), fontsize=9)
        axis.grid(axis="y", color="0.9")
    axes[0].set_ylabel("share of the possible")
    axes[0].legend(fontsize=8, frameon=False, loc="lower right")
    axes[-1].text(
        len(KNOWLEDGE) - 1,
        axes[-1].get_ylim()[0],
        "looks\nahead",
        ha="center",
        va="bottom",
        fontsize=7,
    )
    return figure


def write(results: Results, page: Path) -> None:
    """Put tables and the figure into the page."""
    rows = pl.DataFrame(results.rows, infer_schema_length=None)
    text = page.read_text("utf-8")
    parts = {"shares": shares(rows), "transfer": transfer(rows), "closed": closed(rows)}
    for name, content in parts.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        before, _, rest = text.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            raise SystemExit(f"{page} has no {begin} with {end} behind it")
        text = f"{before}{begin}\n{content}\n{end}{after}"
    page.write_text(text, "utf-8")
    picture = page.parent / "figures/knowledge.png"
    knowledge(rows).savefig(picture, dpi=120)
    small(picture, picture)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--traces", type=Path, default=ROOT / "traces/optimum")
    parser.add_argument("--models", nargs="*", choices=NAMED, default=[*NAMED])
    parser.add_argument("--write-only", action="store_true")
    given = parser.parse_args()
    results = Results(RESULTS)
    if not given.write_only:
        torch.set_num_threads(1)
        every = models(given.traces)
        for name in given.models:
            (other,) = (model for model in every.values() if model.name != name)
            measure(results, every[name], other)
    write(results, PAGE)


if __name__ == "__main__":
    main()
