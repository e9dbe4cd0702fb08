# ruff: noqa: INP001 - a module of docs/leaderboard.py
"""Boards and their rows: a policy at a budget, with its mean KL, ranks, bytes and class."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import polars as pl
from study import ROOT

import kvsim
from claims.plan import PLANS
from claims.policies import of_engine
from kvsim.analysis.comparison import Comparison
from kvsim.analysis.table import COLUMNS
from kvsim.policies import describe, names
from kvsim.schema import plural, rounded
from workloads import BYTES, KL, SEEN, WORKLOADS, called

DOCS = ROOT / "docs"
VALUES, PAGE, ACCESS = (
    DOCS / f"{x}" for x in ("leaderboard.parquet", "leaderboard.md", "access.md")
)
ANSWERS = ("answer_kept", "answer_right")
Row = dict[str, Any]


@dataclass(frozen=True)
class Board:
    """A workload on a model, and what its prompts are. few: ranked policies of its table."""

    name: str
    workload: str
    model: str
    about: str
    few: int = 10

    @property
    def title(self) -> str:
        """Heading of the board: its workload and model."""
        return f"{self.workload}, {self.model}"


MODELS = {"smollm2": "SmolLM2-135M"}


def frozen(model: str, workload: str) -> Board:
    """Return the board of a frozen workload on a model, by name or file."""
    stem = called(model)
    about = WORKLOADS[workload].about
    title = workload.capitalize()
    return Board(f"{stem}-{workload.replace(' ', '-')}", title, MODELS.get(stem, stem), about)


#: In the order of the page: frozen workloads, then prompts that are measured by docs/results.py.
BOARDS = (
    frozen("smollm2", "answers"),
    frozen("smollm2", "needles"),
    Board(
        "qwen-1.5b",
        "Answers",
        "Qwen2.5-Coder-1.5B",
        "Questions that need reasoning, and the answers that the model wrote. *Right* counts 48 "
        "live answers, all right with the full cache; KL is of 40 that were recorded.",
    ),
    Board(
        "qwen-1.5b-sheets",
        "Sheets",
        "Qwen2.5-Coder-1.5B",
        "Three such questions in one prompt, with long answers.",
        8,
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
        "The same at 8k tokens, all that the model has. With the full cache 3 of 3 are right.",
        8,
    ),
    Board(
        "smollm2",
        "Documents",
        "SmolLM2-135M",
        "Python's documentation: texts that go on, needles, quotes, chats, examples.",
    ),
    Board(
        "tiny",
        "Ledger",
        "tiny",
        "Questions on a ledger in the language of the model that ships with kvsim. Events every 16 "
        "tokens.",
        8,
    ),
)
#: The share of its prompts that a budget of a board has values for, at least.
MOST = 0.75

# -------------------------------------------------------------------------------------------- rows

#: Classes of policies; those of the first are ranked.
EVICTION, TWICE, CALIBRATED, BOUND = "eviction", "second pass", "calibrated", "bound"
SPARSE, QUANTIZER, UNBOUND = "sparse", "quantizer", "no budget"
ENGINE = "engine"


@cache
def knowing(label: str) -> str:
    """Return whether a policy reads the context twice, was calibrated or is an engine's, or ""."""
    if of_engine(label):
        return ENGINE
    parts = [describe(x) for x in label.partition(",")[0].split("+") if x in names()]
    if any(part.policy.reads.context_again for part in parts):
        return TWICE
    calibrated = any("calibration" in part.entry.required for part in parts)
    return CALIBRATED if calibrated else ""


def table(name: str, rows: pl.DataFrame | None = None) -> pl.DataFrame:
    """Return the values of a board as a Table, on the prompts that have all of its budgets.

    Policies that know more than others count as looking ahead, so that `kvsim.compare` ranks none.
    """
    rows = pl.read_parquet(VALUES).filter(board=name) if rows is None else rows
    absent = (x for x in COLUMNS if x not in rows.columns)
    rows = rows.with_columns(pl.lit(None, COLUMNS[x]).alias(x) for x in absent)
    kl = rows.filter(metric=KL)
    requested = pl.coalesce("share", pl.col("budget").cast(pl.String))
    of_budget = kl.group_by(requested=requested).agg(pl.col("trace").n_unique())
    whole = kl["trace"].n_unique()
    budgets = [*of_budget.filter(pl.col("trace") >= MOST * whole)["requested"]]
    counts = kl.filter(requested.is_in(budgets)).group_by("trace")
    counts = counts.agg(requested.n_unique().alias("n")).filter(n=len(budgets))
    kept = pl.col("trace").is_in([*counts["trace"]]) & requested.is_in(budgets)
    ahead = pl.col("looks_ahead") | pl.col("policy").is_in(
        [*filter(knowing, rows["policy"].unique())]
    )
    rows = rows.filter(kept | pl.col("metric").eq("answer_right"))
    if name not in PLANS or PLANS[name].solved:  # questions are one task
        rows = rows.with_columns(task=pl.lit(None, pl.String))
    return rows.with_columns(looks_ahead=ahead)


def compared(rows: pl.DataFrame) -> Comparison:
    """Compare the policies of a board by judged KL."""
    kl = rows.filter(pl.col("metric").is_in([KL, SEEN]))
    return kvsim.compare(kl.select(name for name in COLUMNS if name in kl.columns), KL)


def kind_of(facts: Row) -> str:
    """Return the class of a policy from its label, access and bounds."""
    access = [SPARSE] * ("read" in facts["access"]) + [QUANTIZER] * ("stored" in facts["access"])
    held = "held" in (facts["bounds"] or "")
    if access:
        looks = " (bound)" * bool(facts["looks_ahead"])
        return "+".join([EVICTION] * held + access) + looks
    if known := knowing(facts["policy"]):
        return known
    return BOUND if facts["looks_ahead"] else EVICTION if held else UNBOUND


def rows_of(rows: pl.DataFrame) -> list[Row]:
    """Return a row for each policy and budget of a board's Table, in the order of the page.

    Rows that read or store entries in other ways are compared apart from evictions.
    """
    facts = rows.filter(metric=KL).unique("policy")
    kinds = {str(x["policy"]): kind_of(x) for x in facts.iter_rows(named=True)}
    apart = pl.col("policy").is_in(
        [x for x, kind in kinds.items() if SPARSE in kind or QUANTIZER in kind]
    )
    parts = [rows.filter(~apart), rows.filter(apart).with_columns(looks_ahead=True)]
    comparisons = [compared(part).overall for part in parts if part["metric"].eq(KL).any()]
    means = _means(rows)
    out = []
    for row in pl.concat(comparisons).to_dicts():
        policy, budget = row["policy"], row["requested"]
        kind = kinds[policy]
        out.append(
            {x: row[x] for x in ("policy", "mean", "low", "high", "n")}
            | {x: row[x] for x in ("rank", "rank_low", "rank_high", "could_be_best")}
            | {x: of.get((policy, budget)) for x, of in means.items()}
            | {"budget": budget, "class": kind, "passes": int(kind == TWICE)}
            | {"question": needs_question(policy)}
        )
    return sorted(out, key=lambda row: _order(out, row))


@cache
def needing() -> frozenset[str]:
    """Return the policies whose kept sets change with the question, by the page of policies."""
    text = (DOCS / "policies.md").read_text("utf-8")
    rows = re.findall(r"(?m)^\| \[`(\w+)[^|]*\|[^|]*\|[^|]*\| ([^|]*) \|", text)
    return frozenset(name for name, needs in rows if needs == "question")


def needs_question(policy: str) -> bool:
    """Whether what a policy keeps depends on the last rows of the prompt."""
    parts = policy.partition(",")[0].replace(" ", "").split("+")
    return any(part.partition("@")[0] in needing() for part in parts)


def _order(out: Sequence[Row], row: Row) -> tuple[bool, float, str, float]:
    of = [x for x in out if x["policy"] == row["policy"]]
    ranked = all(x["rank"] is not None for x in of)
    by = np.mean([x["rank"] if ranked else x["mean"] for x in of])
    return not ranked, float(by), row["policy"], row["ratio"] or 0


def _means(rows: pl.DataFrame) -> dict[str, dict[tuple[str, str], Any]]:
    """Return means over prompts by policy and budget: the ratio, shares of bytes, right answers."""
    requested = pl.coalesce("share", pl.col("budget").cast(pl.String)).alias("requested")
    rows = rows.with_columns(requested)
    full = rows.filter(policy="full").group_by("trace", "metric").agg(whole=pl.col("value").first())
    out: dict[str, dict[tuple[str, str], Any]] = {x: {} for x in ("held", "read", "ratio", "right")}
    by = ("policy", "requested")
    kl = rows.filter(metric=KL)
    for policy, budget, ratio in (
        kl.group_by(by).agg((pl.col("budget") / pl.col("tokens")).mean()).iter_rows()
    ):
        out["ratio"][policy, budget] = ratio
    of = rows.join(full, on=["trace", "metric"]).with_columns(pl.col("value") / pl.col("whole"))
    for name, metrics in (("held", (SEEN, BYTES[0])), ("read", (SEEN, BYTES[1]))):
        for metric in metrics:  # bytes, where they were measured
            means = of.filter(metric=metric).group_by(by).agg(pl.col("value").mean())
            out[name] |= {(x, y): value for x, y, value in means.iter_rows()}
    right = rows.filter(pl.col("metric").is_in(ANSWERS)).group_by(by)
    for policy, budget, a, n in right.agg(a=pl.col("value").sum(), n=pl.len()).iter_rows():
        out["right"][policy, budget] = f"{int(a)}/{n}"
    return out


def place(row: Row) -> str:
    """Return the possible ranks of a row; empty without."""
    first, last = row["rank_low"], row["rank_high"]
    return "" if first is None else f"{first}" if first == last else f"{first}-{last}"


def value(row: Row | None, *, whole: bool = True) -> str:
    """Return a mean with its interval and its possible ranks, bold if it could be the best."""
    if row is None or row["mean"] is None:
        return ""
    ends = [rounded(row[x], ".2g") for x in ("mean", "low", "high") if row[x] is not None]
    text = f"{ends[0]} [{ends[1]}, {ends[2]}]" if len(ends) == 3 and whole else ends[0]
    text = f"**{text}**" if row["could_be_best"] else text
    return f"{text} {place(row)}".rstrip() if whole else text


def said_of(row: Row, rows: Sequence[Row]) -> str:
    """Return where a policy stands among the rows of its board, as a line."""
    ranked = [x for x in rows if x["budget"] == row["budget"] and x["rank"] is not None]
    ranked.sort(key=lambda x: float(x["mean"]))
    of = f", possible ranks {place(row)}" if place(row) else ""
    held = f"; holds {row['held']:.0%} of the bytes, reads {row['read']:.0%}" if row["held"] else ""
    right = f"; right {row['right']}" if row["right"] else ""
    best = "; could be the best" * bool(row["could_be_best"])
    rank = f"rank {row['rank']} of {len(ranked)}{of}{best}" if row in ranked else "no rank"
    if len(ranked) > 1 and row in ranked:
        at = ranked.index(row)
        near = ranked[max(0, at - 1) : at] + ranked[at + 1 : at + 2]
        each = [f"{x['policy']} ({value(x, whole=False).strip('*')})" for x in near]
        rank += f"; next to {' and '.join(each)}"
    elif row in ranked:
        rank += " (nothing else is stored for this board)"
    text = value(row, whole=True).replace("*", "").removesuffix(place(row)).strip()
    where = f"{row['policy']} ({row['class']}) at {row['budget']}, {plural(row['n'], 'prompt')}"
    return f"{where}: KL {text}, {rank}{held}{right}"


def quarter(rows: Sequence[Row]) -> str:
    """Return the budget of evictions that is next to a quarter of all tokens."""
    ratios = {row["budget"]: row["ratio"] for row in rows if row["ratio"]}
    return min(ratios, key=lambda budget: abs(ratios[budget] - 0.25))


def budgets_of(rows: Sequence[Row]) -> list[str]:
    """Return the budgets of a board, ascending."""
    ratios = {row["budget"]: row["ratio"] for row in rows if row["ratio"]}
    return sorted(ratios, key=ratios.__getitem__)


def by_policy(rows: Sequence[Row]) -> dict[str, dict[str, Row]]:
    """Return the rows of each policy by budget, in the order of the page."""
    out: dict[str, dict[str, Row]] = {}
    for row in rows:
        out.setdefault(row["policy"], {})[row["budget"]] = row
    return out


def other(row: Row) -> bool:
    """Whether a row is of sparse attention or a quantizer."""
    return SPARSE in row["class"] or QUANTIZER in row["class"]


def shown(board: Board, rows: Sequence[Row]) -> dict[str, dict[str, Row]]:
    """Return the evictions on the page: the first ranked ones, `random`, and those without rank."""
    every = by_policy([row for row in rows if not other(row) and row["class"] != UNBOUND])
    ranked = [name for name, of in every.items() if any(x["rank"] for x in of.values())]
    dropped = {*ranked[board.few :]} - {"random"}
    dropped |= {
        name
        for name, of in every.items()
        if next(iter(of.values()))["class"] in (CALIBRATED, ENGINE)
    }
    return {name: of for name, of in every.items() if name not in dropped}


def on_front(rows: Sequence[Row], cost: str = "held") -> list[Row]:
    """Return the rows that no other beats with as few bytes, without bounds and `full`."""
    out: list[Row] = []
    usable = [x for x in rows if x["class"] not in (BOUND, UNBOUND) and "bound" not in x["class"]]
    for row in sorted(usable, key=lambda row: (row[cost], row["mean"])):
        if not out or row["mean"] < out[-1]["mean"]:
            out.append(row)
    return out
