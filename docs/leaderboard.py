# ruff: noqa: INP001, T201 - a script, not a module, and it says what it did
"""Rank policies on frozen prompts: docs/leaderboard.md, from docs/leaderboard.parquet alone.

    python docs/leaderboard.py                            the page and its figures: seconds
    python docs/leaderboard.py --collect                  the values, from docs/results*.parquet
    python docs/leaderboard.py --policy module:NAME       where a policy of yours would stand
        [--board tiny|smollm2|8k|qwen-1.5b|...] [--prompts N] [--file FILE.gguf] [--traces DIR]

A board is a workload on a model. Its prompts are frozen: another text, response or weights than
those of the values are refused. Values are those of `kvsim.measure` per prompt, and ranks those of
`kvsim.compare`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from scoring_page import fill
from study import ROOT, correlated, picture, read

import kvsim
from claims.plan import PLANS, Plan
from claims.policies import scaled, table_policies
from claims.rank_correlation import rank_correlation
from claims.statistics import read_values, stored_rows
from claims.tables import key
from claims.traces import record
from kvsim.analysis.comparison import Comparison
from kvsim.analysis.sentences import said
from kvsim.analysis.table import COLUMNS, in_order
from kvsim.core.policy import Schedule
from kvsim.plots.style import COLOURS, GRID, NEUTRAL
from kvsim.policies import describe, names
from kvsim.schema import rounded
from kvsim.sweeps import replay_all

DOCS = ROOT / "docs"
VALUES, PAGE = DOCS / "leaderboard.parquet", DOCS / "leaderboard.md"
KL, ANSWERS, SEEN = "response_kl", ("answer_kept", "answer_right"), "entries_seen"


@dataclass(frozen=True)
class Board:
    """A workload on a model: the plan of its values, and what its prompts are."""

    plan: str
    workload: str
    model: str
    about: str

    @property
    def title(self) -> str:
        """Heading of the board: its workload and model."""
        return f"{self.workload}, {self.model}"


#: In the order of the page.
BOARDS = (
    Board(
        "qwen-1.5b",
        "Answers",
        "Qwen2.5-Coder-1.5B",
        "Questions that need reasoning, and the answers that the model wrote. Events follow the "
        "prompt and every 32 tokens. *Right* counts answers written under the policy: 48 "
        "questions, all right with the full cache.",
    ),
    Board(
        "qwen-1.5b-sheets",
        "Sheets",
        "Qwen2.5-Coder-1.5B",
        "Three such questions in one prompt, with long answers.",
    ),
    Board(
        "qwen-1.5b-8k",
        "Long documents",
        "Qwen2.5-Coder-1.5B",
        "Prompts of 4k and 8k tokens of Python's documentation, half of them with a needle. The "
        "only event follows the prompt. *Right* counts the needles' answers.",
    ),
    Board(
        "8k",
        "Long documents",
        "SmolLM2-135M",
        "The same at 8k tokens, all positions that the model has.",
    ),
    Board(
        "smollm2",
        "Documents",
        "SmolLM2-135M",
        "Python's documentation: texts that go on, needles, quotes, chats, examples. Events follow "
        "the prompt and every 32 tokens.",
    ),
    Board(
        "tiny",
        "Ledger",
        "tiny",
        "Answers of the model that ships with kvsim, in its own language. Events every 16 tokens.",
    ),
)
#: Plans of further values: the first answers of the 1.5B, under models that did not write them.
ELSEWHERE = ("qwen-0.5b", "qwen-smollm2")


#: Marks of policies that are listed without a rank, because they know more.
TWICE, CALIBRATED = "‡", "†"
#: Policies whose scores use neither queries nor attention of the prompt's last rows.
WITHOUT_QUESTION = frozenset(
    ("random", "streaming_llm", "keydiff", "knorm", "norm_ratio", "lagkv", "lacache")
)
#: The share of its prompts that a budget of a board has values for, at least.
MOST = 0.75


def collected(name: str) -> pl.DataFrame:
    """Return the rows of a plan from the file of its values: KL, answers and entries seen."""
    plan = PLANS[name]
    path = DOCS / plan.values
    results = read_values(path, plan)
    defaults = [x for x in table_policies(plan, "prefix:64") if not {"@", ","} & {*x}]
    measured = [results.result(x) for x in defaults if results.has(x)]
    rows = stored_rows(path).filter(pl.col("metric").is_in([KL, *ANSWERS, SEEN]))
    rows = rows.drop_nulls("policy").with_columns(
        params=pl.col("params").map_elements(_sorted, pl.String)
    )
    kept = [
        rows.filter(pl.col("interval").eq_missing(x.interval), policy=x.policy, params=x.params)
        for x in measured
    ]
    return pl.concat([*kept, *answers(plan)], how="diagonal_relaxed").select(
        pl.lit(name).alias("board"),
        *(x for x in COLUMNS if x in rows.columns),
        *("prompt", "digest", "tokens", "prompt_tokens"),
    )


def _sorted(params: str) -> str:
    return json.dumps(json.loads(params), sort_keys=True)


def answers(plan: Plan) -> Iterator[pl.DataFrame]:
    """Yield right answers that were written under policies, as rows of a Table."""
    if plan.name != "qwen-1.5b":
        return
    rows = [
        {"trace": f"{row['task']}-{row['index']}", "policy": row["policy"], "value": row["right"]}
        | {"budget": row["budget"]}
        for row in read(DOCS / "qwen-live.jsonl")
        if row["model"] == plan.model.lower() and row["policy"] != "full"
    ]
    fixed = {"metric": "answer_right", "unit": "share", "fidelity": "closed", "variant": ""}
    yield pl.DataFrame(rows).with_columns(
        pl.col("value").cast(pl.Float64), **{x: pl.lit(y) for x, y in fixed.items()}
    )


def table(name: str) -> pl.DataFrame:
    """Return the values of a board as a Table, on the prompts that have all of its budgets.

    Policies that know more than others count as looking ahead, so that `kvsim.compare` ranks none.
    """
    rows = pl.read_parquet(VALUES).filter(board=name)
    kl = rows.filter(metric=KL)
    of_budget = kl.group_by("budget").agg(pl.col("trace").n_unique())
    whole = kl["trace"].n_unique()
    budgets = of_budget.filter(pl.col("trace") >= MOST * whole)["budget"].sort()
    counts = kl.filter(pl.col("budget").is_in([*budgets])).group_by("trace")
    counts = counts.agg(pl.col("budget").n_unique()).filter(budget=len(budgets))
    kept = pl.col("trace").is_in([*counts["trace"]]) & pl.col("budget").is_in([*budgets])
    knowing = [x for x in rows["policy"].unique() if mark(x)]
    ahead = pl.col("looks_ahead") | pl.col("policy").is_in(knowing)
    rows = rows.filter(kept | pl.col("metric").eq("answer_right"))
    if PLANS[name].solved:  # its questions are one task
        rows = rows.with_columns(task=pl.lit(None, pl.String))
    return rows.with_columns(looks_ahead=ahead)


def mark(label: str) -> str:
    """Return the mark of a policy that reads the context twice or was calibrated."""
    parts = [describe(x) for x in label.partition(",")[0].split("+") if x in names()]
    twice = any(part.policy.reads.context_again for part in parts)
    calibrated = any("calibration" in part.entry.required for part in parts)
    return TWICE * twice + CALIBRATED * calibrated


def compared(rows: pl.DataFrame) -> Comparison:
    """Compare the policies of a board by judged KL."""
    kl = rows.filter(pl.col("metric").is_in([KL, SEEN]))
    return kvsim.compare(kl.select(name for name in COLUMNS if name in kl.columns), KL)


def section(board: Board) -> str:
    """Return a board's part of the page: sentences, figure and table."""
    rows = table(board.plan)
    comparison = compared(rows)
    sizes = rows.filter(metric=KL).unique("trace").select("tokens", "prompt_tokens")
    low, high = sizes["tokens"].min(), sizes["tokens"].max()
    facts = f"{len(comparison.traces)} prompts; {low} to {high} tokens with the response."
    verdicts = [f"* {said(each, KL, comparison.scale)}" for each in comparison.verdicts]
    image = f"figures/leaderboard-{board.plan}.png"
    picture(figure(comparison), DOCS / image)
    alt = f"Judged KL of policies at each budget: {board.title}"
    parts = [f"## {board.title}", f"{board.about} {facts}", "\n".join(verdicts)]
    return "\n\n".join([*parts, f"![{alt}]({image})", markdown(rows, comparison, sizes["tokens"])])


def order(comparison: Comparison) -> list[str]:
    """Return the policies by the mean of their ranks, then those without one by their mean."""
    by = comparison.overall.group_by("policy").agg(pl.col("rank", "mean").mean())
    return by.sort("rank", "mean", nulls_last=True)["policy"].to_list()


def markdown(rows: pl.DataFrame, comparison: Comparison, tokens: pl.Series) -> str:
    """Return the table of a board: a row for each policy, a column for each budget."""
    budgets = comparison.overall["requested"].unique(maintain_order=True).to_list()
    cells = {(row["policy"], row["requested"]): row for row in comparison.overall.to_dicts()}
    right = rows.filter(pl.col("metric").is_in(ANSWERS)).group_by("policy", "budget")
    right = {
        (x, str(y)): (int(a), n)
        for x, y, a, n in right.agg(a=pl.col("value").sum(), n=pl.len()).iter_rows()
    }
    ratios = [float((int(budget) / tokens).mean()) for budget in budgets]
    head = [
        "policy",
        *(f"{x} entries ({y:.0%} kept)" for x, y in zip(budgets, ratios, strict=True)),
    ]
    head += [f"right at {x}" for x in budgets] * bool(right)
    out = [head, ["---", *["---:"] * (len(head) - 1)]]
    for name in order(comparison):
        shown = f"`{name}`{mark(name)}" + "°" * (name in WITHOUT_QUESTION)
        values = [value(cells.get((name, budget))) for budget in budgets]
        answered = [right.get((name, budget)) for budget in budgets] * bool(right)
        out.append([shown, *values, *(f"{x[0]} of {x[1]}" if x else "" for x in answered)])
    return "\n".join(f"| {' | '.join(line)} |" for line in out)


def value(row: dict[str, object] | None) -> str:
    """Return a mean with its interval and its possible ranks, bold if it could be the best."""
    if row is None or row["mean"] is None:
        return ""
    ends = [rounded(row[x], ".2g") for x in ("mean", "low", "high") if row[x] is not None]
    text = f"{ends[0]} [{ends[1]}, {ends[2]}]" if len(ends) == 3 else ends[0]
    if row["rank"] is None:
        return f"{text} -"
    first, last = row["rank_low"], row["rank_high"]
    place = "" if first is None else f" {first}" if first == last else f" {first}-{last}"
    return f"**{text}**{place}" if row["could_be_best"] else f"{text}{place}"


def figure(comparison: Comparison) -> Figure:
    """Return judged KL by policy, a panel for each budget: filled are those that could be the best.

    Squares are policies without a rank; `full`, whose KL is 0, is not drawn.
    """
    every = [name for name in order(comparison) if name != "full"]
    rows = comparison.overall.filter(pl.col("policy").is_in(every), pl.col("mean") > 0)
    budgets = rows["requested"].unique(maintain_order=True).to_list()
    out = Figure(figsize=(8.3, 0.17 * len(every) + 0.75), dpi=120)
    axes = np.atleast_1d(out.subplots(1, len(budgets), sharey=True, sharex=True))
    for axis, budget in zip(axes, budgets, strict=True):
        for row in rows.filter(requested=budget).to_dicts():
            place, ranked = every.index(row["policy"]), row["rank"] is not None
            colour = COLOURS[0] if ranked else NEUTRAL
            face = colour if row["could_be_best"] or not ranked else "white"
            if row["low"] is not None:
                axis.plot([row["low"], row["high"]], [place] * 2, color=colour, lw=1.2)
            axis.plot(row["mean"], place, "o" if ranked else "s", ms=4, color=colour, mfc=face)
        for row in rows.filter(requested=budget, policy="random").to_dicts():
            axis.axvline(row["mean"], color=NEUTRAL, lw=0.9, ls=":", zorder=0)
        plain(axis, f"{budget} entries")
    axes[0].set_yticks(range(len(every)), every, fontsize=8)
    axes[0].set_ylim(len(every) - 0.5, -0.5)
    label = "KL to the full cache, nats per token. Filled: could be the best; dotted: random"
    out.supxlabel(label, fontsize=8, y=0.06 / out.get_figheight())
    out.tight_layout(pad=0.4, w_pad=0.8, rect=(0, 0.2 / out.get_figheight(), 1, 1))
    return out


def plain(axis: Axes, title: str) -> None:
    """Give a panel a log axis with few ticks, a grid and a title."""
    axis.set_xscale("log")
    low, high = axis.get_xlim()
    axis.xaxis.set_major_locator(
        LogLocator(subs=(1, 2, 5) if high < 60 * low else (1,), numticks=9)
    )
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.tick_params(labelsize=8)
    axis.grid(color=GRID, linewidth=0.5)
    axis.set_axisbelow(True)
    axis.set_title(title, size=9)


def transfer() -> str:
    """Return how the ranking of one board goes with that of others, as a table."""
    head = ["ranking", "and that of", "policies", "rank correlation"]
    out = [head, ["---", "---", "---:", "---:"]]
    for one, other in TRANSFERS:
        x, y = (_middle(name) for name in (one, other))
        both = sorted({*x.columns} & {*y.columns} - {"trace"})
        ends = rank_correlation(*(a.select(both).to_numpy() for a in (x, y)), same=False)
        text = correlated(*ends)
        out.append([TITLES[one], TITLES[other], str(len(both)), text])
    return "\n".join(f"| {' | '.join(line)} |" for line in out)


def _middle(name: str) -> pl.DataFrame:
    """Return judged KL at the middle budget of a board: a row per prompt, a column per policy."""
    rows = table(name).filter(~pl.col("looks_ahead"), metric=KL, bounds="held")
    budgets = rows["budget"].unique().sort()
    rows = rows.filter(pl.col("policy") != "random", budget=budgets[len(budgets) // 2])
    return rows.pivot("policy", index="trace", values="value").drop_nulls()


TITLES = {x.plan: x.title for x in BOARDS} | {
    "qwen-0.5b": "12 of the answers, Qwen2.5-Coder-0.5B",
    "qwen-smollm2": "12 of the answers, SmolLM2-135M",
}
#: Boards whose rankings are compared.
TRANSFERS = (
    ("qwen-1.5b", "qwen-0.5b"),
    ("qwen-1.5b", "qwen-smollm2"),
    ("qwen-1.5b", "tiny"),
    ("qwen-1.5b", "qwen-1.5b-8k"),
    ("qwen-1.5b-8k", "smollm2"),
    ("smollm2", "tiny"),
)


def page() -> str:
    """Return the page with its generated parts written anew; figures are written on the way."""
    parts = {"boards": "\n\n".join(map(section, BOARDS)), "transfer": transfer()}
    return fill(PAGE.read_text("utf-8"), parts)


def stand(board: Board, name: str, prompts: int, folder: Path, file: Path | None) -> None:
    """Measure a policy on the first prompts of a board, and print where it would stand."""
    plan = replace(PLANS[board.plan], file=file)
    rows = table(board.plan)
    made = replace(scaled(plan.sizes, name), name=name)
    terms = {"interval": plan.interval, "prefill": plan.prefill}
    if plan.once:
        made, terms = replace(made, schedule=Schedule(None, prefill=True)), {"interval": "paper"}
    measured = []
    for number in range(1, min(prompts, plan.prompts) + 1):
        stored = rows.filter(prompt=key(plan, number))
        if stored.is_empty():
            raise SystemExit(
                f"prompt {number} of {board.title} or its model is not that of {VALUES}"
            )
        (path,) = record(plan, folder, [number])
        trace = kvsim.open_trace(path)
        budgets = [x for x in plan.budgets if 2 * x <= trace.n_pos]
        judge = str(file or plan.model)
        run = replay_all([trace], [made], budgets, metrics=[SEEN], judge=judge, **terms)
        measured.append(run.table.with_columns(trace=pl.lit(stored["trace"][0])))
    mine = pl.concat(measured)
    others = rows.filter(pl.col("trace").is_in([*mine["trace"]]), pl.col("policy") != name)
    budgets = others.filter(metric=KL)["budget"].unique()
    columns = [x for x in COLUMNS if x in others.columns]
    task = dict(others.select("trace", "task").unique("trace").iter_rows())
    mine = mine.filter(pl.col("budget").is_in([*budgets])).with_columns(
        task=pl.col("trace").replace_strict(task, default=None, return_dtype=pl.String)
    )
    comparison = compared(in_order([others.select(columns), mine.select(columns)]))
    for verdict in comparison.verdicts:
        print(said(verdict, KL, comparison.scale))
    for row in comparison.overall.filter(policy=name).to_dicts():
        of = comparison.overall.filter(requested=row["requested"])["rank"].max()
        mean = value(row).replace("*", "")
        print(f"{name} at {row['requested']}: {mean}, rank {row['rank']} of {of}")


def main() -> None:
    """Write the page, collect the values, or measure a policy."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--collect", action="store_true", help="the values, from result files")
    parser.add_argument("--policy", metavar="NAME", help="measure it on a board")
    parser.add_argument("--board", choices=[x.plan for x in BOARDS], default="tiny")
    parser.add_argument("--prompts", type=int, default=12, metavar="N", help="the first so many")
    parser.add_argument("--file", type=Path, metavar="FILE.gguf", help="the model, if it is Qwen")
    parser.add_argument("--traces", type=Path, default=ROOT / "traces" / "results", metavar="DIR")
    args = parser.parse_args()
    if args.policy:
        board = next(x for x in BOARDS if x.plan == args.board)
        stand(board, args.policy, args.prompts, args.traces, args.file)
        return
    if args.collect:
        plans = (*(x.plan for x in BOARDS), *ELSEWHERE)
        pl.concat(map(collected, plans), how="diagonal_relaxed").with_columns(
            pl.col("value").cast(pl.Float32)
        ).write_parquet(VALUES, compression_level=19)
    PAGE.write_text(page(), "utf-8")


if __name__ == "__main__":
    main()
