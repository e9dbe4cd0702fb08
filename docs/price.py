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
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from study import NAMED, ROOT, append, put, read
from study import Rows as Lines

import kvsim
from apps.tiny.card import table as markdown
from error_optimum import Heads, bound, searched, searched_alone
from kvsim.analysis.overview import summarise
from kvsim.analysis.summaries import per_prompt
from kvsim.core.trace import Trace
from kvsim.recorder import load_model
from kvsim.schema import NEVER
from kvsim.studies.price.constraints import CONSTRAINTS
from kvsim.studies.price.sizes import at_equal_size
from kvsim.text.tasks import sample as draw
from prices import SCORERS, prices, summary

PAGE, RESULTS = ROOT / "docs/optimum.md", ROOT / "docs/price-results.jsonl"
BUDGET, INTERVAL = 128, 32
BUDGETS = (64, 96, 128)
#: Policies that have a threshold, with their other parameters, and those that have a budget.
SIZED = {f"dms+{name}": {"window": 16} for name in ("h2o", "expected_attention@kvpress")}
#: Places after one event, and layers in which errors of query heads alone are bounded.
SMALL, BOUNDED = 64, {"tiny": (0, 1, 2), "smollm2": (7, 17, 28)}
#: Kept sets that the table of errors lists.
LISTED = 8
AGAINST = ("h2o", "expected_attention@kvpress")


@cache
def recorded(model: str) -> Trace:
    """The text of a model's sample trace, recorded in all layers."""
    sample = kvsim.open_trace(kvsim.sample_trace(model))
    ids = sample.tokens.tolist()
    prompt, response = ids[: sample.prompt_len], ids[sample.prompt_len :]
    loaded = load_model(model)
    return kvsim.capture(*loaded, prompt, response=response, name=sample.name, o_proj=True)


def constraints(model: str, name: str) -> Lines:
    """Measure the optimum and the policies under one constraint."""
    table, remarks = prices([recorded(model)], BUDGET, INTERVAL, judge=model, constraints=[name])
    print(*remarks, sep="\n")
    return table.with_columns(pl.col("value").round(7), pl.col("open").round(9)).to_dicts()


@cache
def others() -> list[Trace]:
    """Two more texts of SmolLM2, cut as its sample is."""
    sample, (model, tokenizer) = recorded("smollm2"), load_model("smollm2")

    def count(text: Any) -> int:
        return len(tokenizer(text)["input_ids"])

    texts = []
    for index in range(2):
        drawn = draw(1, index, count, task="text", length=sample.n_pos)
        ids = tokenizer(f"{drawn.prompt}{drawn.response}")["input_ids"][: sample.n_pos]
        parts = ids[: sample.prompt_len], ids[sample.prompt_len :]
        texts.append(kvsim.capture(model, None, parts[0], response=parts[1], name=f"text-{index}"))
    return texts


def sizes(budget: int) -> Lines:
    """Measure policies that have a threshold at the size of others, searched on the other texts."""
    table = at_equal_size(
        *(others(), SIZED, AGAINST, [budget]),
        interval=INTERVAL,
        test=[recorded("smollm2")],
        judge="smollm2",
    )
    averages = summarise(table)
    kept = averages.select("policy", "entries_seen", "output_error", "response_kl")
    thresholds = [json.loads(params).get("threshold") for params in averages["params"]]
    lines = kept.with_columns(pl.selectors.float().round(6)).to_dicts()
    return [line | {"threshold": x} for line, x in zip(lines, thresholds, strict=True)]


def errors(model: str) -> Lines:
    """Measure layer errors of policies, oracles and the searched sets after one event."""
    trace = recorded(model)
    terms = {"interval": trace.n_pos, "prefill": True}
    names = [*SCORERS, "criticalkv+expected_attention@kvpress"]
    policies = {name: kvsim.policy(name).fitted() for name in names}
    policies |= {f"oracle, {by}": kvsim.policy("oracle", by=by) for by in ("mass", "output")}
    records = {name: kvsim.replay(trace, x, SMALL, **terms) for name, x in policies.items()}
    kept = {name: x.evicted_at[..., : trace.prompt_len] == NEVER for name, x in records.items()}
    bounded = BOUNDED[model]
    alone = dict.fromkeys([*names, *kept, "searched", "searched alone", "bound"], 0.0)
    evicted_at = records[names[0]].evicted_at.copy()
    for layer in range(trace.n_layers):
        heads = Heads.of(trace, layer)
        best = searched(heads, [x[layer] for x in kept.values()])
        evicted_at[layer, :, : trace.prompt_len] = np.where(best, NEVER, trace.prompt_len - 1)
        for head in range(trace.n_heads) if layer in bounded else ():
            starts = {name: x[layer, head] for name, x in kept.items()} | {"searched": best[head]}
            alone_best = searched_alone(heads, head, [*starts.values()])
            for name, x in (starts | {"searched alone": alone_best}).items():
                alone[name] += heads.alone(head, x)
            alone["bound"] += bound(heads, head, SMALL)
    records["searched"] = replace(records[names[0]], evicted_at=evicted_at)
    numbered = [replace(x, policy=name) for name, x in records.items()]
    table = kvsim.measure(trace, numbered, ["layer_error"])
    judged = kvsim.judge(load_model(model)[0], trace, numbered).filter(metric="response_kl")
    values = {
        metric: dict(per_prompt(x).select("policy", "value").rows())
        for metric, x in (("layer_error", table), ("response_kl", judged))
    }
    return [
        {"policy": name, "alone": round(error**0.5, 6)}
        | {metric: round(x[name], 6) for metric, x in values.items() if name in x}
        for name, error in alone.items()
    ]


def steps() -> Iterator[tuple[dict[str, Any], Callable[[], Lines]]]:
    """Yield what is measured, and the function that does it."""
    for model in NAMED:
        for name in CONSTRAINTS:
            key = {"part": "constraints", "model": model, "constraint": name}
            yield key, lambda model=model, name=name: constraints(model, name)
    for budget in BUDGETS:
        yield {"part": "sizes", "budget": budget}, lambda budget=budget: sizes(budget)
    for model in NAMED:
        yield {"part": "error", "model": model}, lambda model=model: errors(model)


def measure(rows: Lines) -> None:
    """Measure what is missing, and write it at once."""
    for key, function in steps():
        if any(key.items() <= row.items() for row in rows):
            continue
        lines = [key | line for line in function()]
        rows += lines
        append(RESULTS, lines)
        print(*key.values(), flush=True)


def priced(rows: Lines) -> str:
    """The table of what constraints cost."""
    costs = {}
    for model in NAMED:
        kept = [row for row in rows if row["part"] == "constraints" and row["model"] == model]
        of = pl.DataFrame(kept, infer_schema_length=None)
        for metric in ("missing_mass", "response_kl"):
            for row in summary(of, metric).to_dicts():
                costs[model, metric, row["constraint"]] = row
    lines = []
    for name, constraint in CONSTRAINTS.items():
        line = [constraint.summary]
        for model in NAMED:
            mass, kl = (costs[model, x, name] for x in ("missing_mass", "response_kl"))
            line += [_percent(mass[key]) for key in ("optimum", "cost", "gap")]
            line.append(f"{_number(kl['optimum'])}/{_number(kl['value'])}")
        lines.append([*line, f"`{mass['policy']}`" if mass["policy"] else "-"])
    head = [f"{model}, {x}" for model in NAMED.values() for x in ("optimum", "cost", "gap", "KL")]
    head = [x.partition(", ")[2] if at % 4 else x for at, x in enumerate(head)]
    return markdown(["constraint", *head, "best"], lines)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def sized(rows: Lines) -> str:
    """The table of policies at equal mean sizes."""
    of = {(row["policy"], row["budget"]): row for row in rows if row["part"] == "sizes"}
    lines = []
    for name in (*SIZED, *AGAINST):
        each = [of[name, budget] for budget in BUDGETS]
        seen = "/".join(f"{row['entries_seen']:.0f}" for row in each)
        lines.append([f"`{name}`", seen, *(f"{row['response_kl']:.3f}" for row in each)])
    return markdown(["policy", "entries seen", *(f"KL, {x}" for x in BUDGETS)], lines)


def lost(rows: Lines) -> str:
    """The table of errors after one event: a bound, searched sets, oracles and policies."""
    of = {model: {} for model in NAMED}
    for row in rows:
        if row["part"] == "error":
            of[row["model"]][row["policy"]] = row
    names = sorted(of["smollm2"], key=lambda name: of["smollm2"][name]["alone"])[:LISTED]
    keys = ("alone", "layer_error", "response_kl")
    lines = [
        [f"`{name}`" if name in SCORERS or "+" in name else name]
        + [_number(of[model][name].get(key)) for model in NAMED for key in keys]
        for name in names
    ]
    titles = ("heads alone", "layer error", "judged KL")
    return markdown(
        ["kept sets", *(f"{NAMED[model]}, {x}" for model in NAMED for x in titles)], lines
    )


def write(rows: Lines, page: Path) -> None:
    """Put the tables into the page."""
    parts = {"costs": priced(rows), "sizes": sized(rows), "error": lost(rows)}
    put(page, {f"price {name}": part for name, part in parts.items()})


def measured() -> Lines:
    """What is measured already."""
    return read(RESULTS)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write-only", action="store_true")
    args, rows = parser.parse_args(), measured()
    if not args.write_only:
        torch.set_num_threads(1)
        measure(rows)
    write(rows, PAGE)


if __name__ == "__main__":
    main()
