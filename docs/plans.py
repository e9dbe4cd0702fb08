# ruff: noqa: INP001, T201 - a script, not a module, and it prints the table
r"""Policies of plans of heads, judged on prompts that no plan has seen: a part of policies.md.

    python docs/plans.py --traces DIR       DIR has a folder for each model
    python docs/plans.py --write-only       the table of what is measured already

    kvsim prompts --n 14 --level 3 --seed 31 --out tiny.jsonl
    kvsim capture --model tiny --prompts tiny.jsonl --max-new-tokens 256 --o-proj --out DIR/tiny
    kvsim prompts --model smollm2 --task needle,quote,chat,fewshot --length 512 --n 16 --seed 31 \
        --out smollm2.jsonl
    kvsim capture --model smollm2 --prompts smollm2.jsonl --max-new-tokens 64 --o-proj \
        --out DIR/smollm2

The first half of a model's prompts makes the plans, the other half compares. Every policy evicts
once, after the prompt, and protects the first four entries and the last one, as LU-KV does.
`docs/plans-results.jsonl` keeps a line for each model, policy, budget and prompt.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
from study import NAMED, ROOT, Rows, finished, of_models, read, traces_in

import kvsim
from apps.tiny.card import table as markdown
from kvsim.analysis.summaries import per_prompt
from kvsim.core.policy import Policy, Protection
from kvsim.studies.learning.heads import head_plan
from kvsim.studies.learning.utility import utility_plan

RESULTS = ROOT / "docs/plans-results.jsonl"
BUDGETS = (64, 128)
#: By scorer: it alone, where every head keeps the budget, then its allocations.
GROUPS = {
    "expected_attention": ("", "adakv+", "lukv"),
    "snapkv": ("", "adakv+", "headkv", "lukv"),
}


def label(scorer: str, allocation: str) -> str:
    """Name of a policy in the table."""
    return allocation + scorer if allocation in ("", "adakv+") else f"{allocation}, {scorer}"


def policies(paths: list[Path], folder: Path) -> dict[str, Policy]:
    """The policies by name, with plans made from traces and written to a folder."""
    made: dict[str, Policy] = {}
    protect = Protection(sink=4, recent=1)  # what LU-KV protects by definition
    for scorer, allocations in GROUPS.items():
        params = {"epsilon": 0.02} if scorer == "expected_attention" else {}
        for allocation in allocations:
            name, given = allocation + scorer, params
            if allocation in ("headkv", "lukv"):
                plan = head_plan(paths, BUDGETS[0]) if allocation == "headkv" else None
                path = folder / f"{allocation}-{scorer}.json"
                path.write_text((plan or utility_plan(paths, scorer=scorer)).text(), "utf-8")
                name, given = f"{allocation}:{path}", {}
            made[label(scorer, allocation)] = kvsim.policy(name, **given, protect=protect)
    return made


def measure(model: str, folder: Path) -> None:
    """Make the plans of a model, judge all policies on its other prompts, and write that down."""
    paths = traces_in(folder / model, 3)
    half = len(paths) // 2
    with tempfile.TemporaryDirectory() as plans:
        named = policies(paths[:half], Path(plans))
        run = kvsim.sweep(
            traces=[str(path) for path in paths[half:]],
            policies=[*named.values()],
            budgets=BUDGETS,
            intervals=[None],
            metrics="response_kl",
            judge=True,
        )
    names = {(x.name, json.dumps(dict(x.params))): name for name, x in named.items()}
    rows = [row for row in read(RESULTS) if row["model"] != model]
    for each in per_prompt(finished(run).table).iter_rows(named=True):
        if each["metric"] == "response_kl" and not each["variant"]:
            name = names[each["policy"], each["params"]]
            row = {"model": model, "name": name, "budget": int(each["requested"])}
            rows.append(row | {x: each[x] for x in ("trace", "value")} | {"plans_of": half})
    RESULTS.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def values(rows: Rows, name: str, budget: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """KL of a policy, by prompt."""
    by_trace = {x["trace"]: x["value"] for x in rows if (x["name"], x["budget"]) == (name, budget)}
    return np.array([by_trace[trace] for trace in sorted(by_trace)])


def table() -> str:
    """KL of each policy, and on how many prompts it is smaller than with the same size of heads."""
    measured = {model: [x for x in read(RESULTS) if x["model"] == model] for model in NAMED}
    head, body = ["policy"], []
    for model, rows in measured.items():
        count = len({row["trace"] for row in rows})
        head += [f"{NAMED[model]} ({count} prompts), {budget}" for budget in BUDGETS]
    for scorer, allocations in GROUPS.items():
        for allocation in allocations:
            cells = []
            for rows in measured.values():
                for budget in BUDGETS:
                    kl = values(rows, label(scorer, allocation), budget)
                    smaller = (kl < values(rows, scorer, budget)).sum()
                    cells.append(f"{kl.mean():.2g}" + f" ({smaller})" * bool(allocation))
            body.append([f"`{label(scorer, allocation)}`", *cells])
    return markdown(head, body)


if __name__ == "__main__":
    of_models(__doc__, "plans", [*NAMED], measure, lambda: print(table()))
