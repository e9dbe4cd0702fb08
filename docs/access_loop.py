# ruff: noqa: INP001, T201 - a script, not a module, and it says what it did
"""The best of access.md on the running model: the tables of its last section.

    python docs/access_loop.py                 both models; resumes
    python docs/access_loop.py --write-only    the page of what is measured already: seconds
    python docs/access_loop.py --traces DIR --models tiny --prompts N

Traces come from the commands that the page names. `docs/access-loop-results.jsonl` keeps a line for
each prompt and cell.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from study import Rows, append, finished, of_models, put, read, traces_in

import access
import kvsim
from access import FREE, INTERVAL, MODELS, PAGE, ROOT, TITLES
from apps.tiny.card import proportion
from apps.tiny.card import table as markdown
from kvsim.analysis.significance import rank_correlation
from kvsim.analysis.summaries import Interval, averages
from kvsim.core.policy import Policy
from kvsim.recorder import load_model
from kvsim.sweeps import Run
from kvsim.sweeps.driver import replay_all
from results_page.ranking import correlated

RESULTS = ROOT / "docs/access-loop-results.jsonl"
#: Policies of each model that run in the loop, and budgets: chosen once, the five with the smallest
#: output error on the front of error and either cost. And the eviction that has as many bytes.
BEST = {
    "tiny": [
        ("quest, pages of 4", 256),
        ("int8", 256),
        ("quest, pages of 4 + int8", 128),
        ("h2o + int8", 256),
        ("h2o + kivi, 4 bits", 128),
    ],
    "smollm2": [
        ("int8", 256),
        ("fp8", 256),
        ("kivi, 4 bits", 256),
        ("tova + int8", 256),
        ("h2o + kivi, 4 bits", 256),
    ],
}
PLAIN = {"tiny": "h2o", "smollm2": "tova"}
#: Tokens that the model writes, at most. Answers count where the full cache's response fits.
NEW_TOKENS = {"tiny": 320, "smollm2": 32}
COSTS = ("bytes_held", "bytes_read")
REPLAYED, LIVE = ("output_error", *COSTS), ("response_kl", "top_agreement", "answer_right")

#: A policy, and its budget.
Cell = tuple[Policy, int]


def measure(model: str, folder: Path, most: int | None) -> None:
    """Measure the prompts that are missing, and write each down."""
    paths = traces_in(folder / model, 3)[:most]
    done = {(row["model"], row["prompt"]) for row in lines()}
    running, tokenizer = load_model(model)
    for path in paths:
        if (model, path.stem) in done:
            continue
        rows = _measure(running, tokenizer, kvsim.open_trace(path), model)
        append(RESULTS, rows)
        print(f"{model}: {path.stem}", flush=True)


def _measure(running: Any, tokenizer: Any, trace: kvsim.Trace, model: str) -> list[dict[str, Any]]:
    """Both loops of a prompt: the best, and for each the plain eviction of as many bytes."""
    cells = [(name, budget, access.built(name)) for name, budget in BEST[model]]
    full = _replayed(trace, [(kvsim.policy("full"), 1)])[0]
    values = _replayed(trace, [(policy, budget) for _, budget, policy in cells])
    names, plain = [name for name, _, _ in cells], kvsim.policy(PLAIN[model])
    shares = [of[_cost(n)] / full[_cost(n)] for n, of in zip(names, values, strict=True)]
    budgets = [as_many(trace.prompt_len, trace.n_pos, share) for share in shares]
    cells += [(PLAIN[model], budget, plain) for budget in budgets]
    equals = [None] * len(names) + names
    values += _replayed(trace, [(policy, budget) for _, budget, policy in cells[len(names) :]])
    terms = [(policy, budget) for _, budget, policy in cells]
    lived = _lived(running, tokenizer, trace, terms, NEW_TOKENS[model])
    return [
        {
            "model": model,
            "prompt": trace.name,
            "tokens": [trace.prompt_len, trace.n_pos],
            "full_right": trace.meta["answer_check"]["right"],
            "name": name,
            "budget": budget,
            "equals": equal,
            "output_error": of["output_error"],
            **{cost: of[cost] / full[cost] for cost in COSTS},
            **live,
        }
        for (name, budget, _), equal, of, live in zip(cells, equals, values, lived, strict=True)
    ]


def _cost(name: str) -> str:
    """The bytes at which an eviction is the equal of a policy: what a reader reads, or is held."""
    return "bytes_read" if "quest" in name else "bytes_held"


def entries_seen(prompt_len: int, n_pos: int, budget: int) -> float:
    """Entries that a row after the prompt sees under an eviction, mean over these rows."""
    counts = np.arange(prompt_len, n_pos)
    bound = budget + (counts - prompt_len) % INTERVAL
    return float((1 + np.minimum(counts, bound)).mean())


def as_many(prompt_len: int, n_pos: int, share: float) -> int:
    """The budget at which an eviction holds nearest to this share of all entries."""
    expected = share * entries_seen(prompt_len, n_pos, n_pos)
    gaps = [abs(entries_seen(prompt_len, n_pos, b) - expected) for b in range(1, n_pos + 1)]
    return 1 + int(np.argmin(gaps))


def _replayed(trace: kvsim.Trace, cells: Sequence[Cell]) -> list[dict[str, float]]:
    """Measure the replay of each cell."""
    terms: dict[str, Any] = {"interval": INTERVAL, "prefill": True, "metrics": REPLAYED}
    return _values(cells, lambda *of: replay_all([trace], *of, **terms), REPLAYED)


def _lived(
    running: Any, tokenizer: Any, trace: kvsim.Trace, cells: Sequence[Cell], new_tokens: int
) -> list[dict[str, float]]:
    """Measure each cell on the running model."""
    terms: dict[str, Any] = {"interval": INTERVAL, "prefill": True, "metrics": LIVE}
    terms |= {"tokenizer": tokenizer, "max_new_tokens": new_tokens}
    return _values(cells, lambda *of: kvsim.live(running, [trace], *of, **terms), LIVE)


def _values(
    cells: Sequence[Cell],
    run: Callable[[list[Policy], list[int]], Run],
    metrics: Sequence[str],
) -> list[dict[str, float]]:
    """The metrics of each cell; policies of one budget, and budgets of one policy, run together."""
    by_cell: dict[tuple[str, int], dict[str, float]] = {}
    by_name = {policy.name: policy for policy, _ in cells}
    if any(by_name[policy.name] != policy for policy, _ in cells):
        raise SystemExit("two policies have one name; expected names that tell results apart")
    budgets_of = {name: tuple({b: None for p, b in cells if p.name == name}) for name in by_name}
    calls = {
        budgets: [p for n, p in by_name.items() if budgets_of[n] == budgets]
        for budgets in budgets_of.values()
    }
    for budgets, policies in calls.items():
        done = finished(run(policies, list(budgets)))
        for row in averages(done.table, metrics=list(metrics)).iter_rows(named=True):
            values = by_cell.setdefault((row["policy"], int(row["requested"])), {})
            values[row["metric"]] = row["mean"]
    return [by_cell[policy.name, budget] for policy, budget in cells]


def lines() -> Rows:
    """Return the measured lines of the results file."""
    return read(RESULTS)


def cells(rows: pl.DataFrame) -> pl.DataFrame:
    """A row for each cell of a model: name, equals, lists over prompts, and means."""
    numbers = ("budget", *COSTS, "output_error", "top_agreement")
    return (
        rows.sort("prompt")
        .group_by("name", "equals", maintain_order=True)
        .agg(
            *(pl.col(name).mean() for name in numbers),
            kl=pl.col("response_kl"),
            error=pl.col("output_error"),
            right=pl.col("answer_right").filter("fits").sum().cast(pl.Int64),
        )
    )


def table(rows: pl.DataFrame, model: str) -> str:
    """The five, each above the eviction of as many bytes."""
    response = pl.col("tokens").list.last() - pl.col("tokens").list.first()
    rows = rows.with_columns(fits=response <= NEW_TOKENS[model])
    full = rows.unique("prompt")
    count = int(full["fits"].sum())
    of_model = {(row["name"], row["equals"]): row for row in cells(rows).to_dicts()}
    body = []
    for name, _ in BEST[model]:
        for key in ((name, None), (PLAIN[model], name)):
            row = of_model[key]
            free = key[1] is None and name in FREE
            body.append(
                [
                    f"**{name}**" if key[1] is None else f"{key[0]}, as many bytes",
                    "-" if free else f"{row['budget']:.0f}",
                    *(f"{row[cost]:.2f}" for cost in COSTS),
                    f"{row['output_error']:.3f}",
                    Interval.of(np.array(row["kl"])).text(".2g"),
                    f"{100 * row['top_agreement']:.0f} %",
                    proportion(row["right"], count),
                ]
            )
    head = ["policy", "budget", "bytes held", "bytes read", "output error, replay"]
    head += ["`response_kl`, nats", "`top_agreement`", "right answers"]
    right = full.filter("fits")["full_right"].sum()
    counted = "all" if count == full.height else f"the {count}"
    longest = f" whose response has at most {NEW_TOKENS[model]} tokens" * (count < full.height)
    return (
        f"**{TITLES[model]}**, {full.height} prompts; answers are counted on {counted}{longest}, "
        f"{right} of them right with the full cache.\n\n" + markdown(head, body)
    )


def order(rows: pl.DataFrame) -> str:
    """Whether the error of the replay orders cells as the divergence in the loop does, in words."""
    of_model = cells(rows.with_columns(fits=True))
    five = of_model["equals"].is_null().to_numpy()
    error, kl = (np.array(of_model[name].to_list()) for name in ("error", "kl"))  # [cell, prompt]
    prompts = error.shape[1]
    parts = []
    for title, part in (("all ten rows", five | True), ("the five", five)):
        x, y = error[part].T, kl[part].T
        a, b = np.triu_indices(x.shape[1], 1)
        same = [np.sign(v.mean(0)[a] - v.mean(0)[b]) for v in (x, y)]
        parts.append(
            f"{correlated(*rank_correlation(x, y))} over {title}, "
            f"{(same[0] == same[1]).sum()} of {len(a)} pairs in the same order"
        )
    names = of_model.filter(five)["name"].to_list()
    equals = of_model["equals"].to_list()
    smaller = [int((kl[names.index(n)] < kl[equals.index(n)]).sum()) for n in names]
    each = ", ".join(f"{n} on {count}" for n, count in zip(names, smaller, strict=True))
    return (
        f"{TITLES[rows['model'][0]]}: rank correlation of error and divergence, means over "
        f"prompts: {'; '.join(parts)}. Smaller divergence than the eviction of as many bytes, of "
        f"{prompts} prompts: {each}."
    )


def page() -> str:
    """Return the part of the page between its marks."""
    rows = pl.DataFrame(lines(), infer_schema_length=None)
    of = {model: rows.filter(model=model) for model in MODELS}
    tables = [table(part, model) for model, part in of.items()]
    return "\n\n".join([*tables, "\n".join(f"* {order(part)}" for part in of.values())])


def write() -> None:
    """Put the tables into the page."""
    put(PAGE, {"loop": page()})


if __name__ == "__main__":
    of_models(__doc__, "access", [*MODELS], measure, write, prompts=True)
