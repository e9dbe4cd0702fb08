# ruff: noqa: INP001 - a module of docs/leaderboard.py
"""The pages of docs/leaderboard.py: tables and figures of boards."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter
from scoring_page import fill
from study import correlated, picture

from claims.rank_correlation import rank_correlation
from kvsim.plots.style import COLOURS, GRID, NEUTRAL
from leaderboard_rows import (
    ACCESS,
    BOARDS,
    BOUND,
    CALIBRATED,
    DOCS,
    EVICTION,
    PAGE,
    QUANTIZER,
    SPARSE,
    TWICE,
    UNBOUND,
    VALUES,
    Board,
    Row,
    budgets_of,
    on_front,
    other,
    place,
    quarter,
    rows_of,
    shown,
    table,
    value,
)
from workloads import KL, WORKLOADS

NOTE = (
    "Bytes held and read are shares of the full cache, means over the rows of the response. Bold: "
    "nothing else that holds as few bytes has a smaller mean KL."
)
#: A KL that is drawn, at least.
LEAST = 1e-4
#: Columns that say nothing of policies that no budget binds, and these.
SMALL, FREE = ("budget", "ratio"), (QUANTIZER, UNBOUND)
#: Boards whose events are those of the papers.
EVENTS = dict.fromkeys(("qwen-1.5b-8k", "8k"), "after the prompt")
MARKS = {TWICE: "‡", CALIBRATED: "†"}

# ------------------------------------------------------------------------------------------ tables


def lines(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Return a table: a label in the first column, the others to the right."""
    every = [head, ["---", *["---:"] * (len(head) - 1)], *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in every)


def markdown(board: Board, rows: Sequence[Row]) -> str:
    """Return the table of a board's evictions: KL at each budget, whole at a quarter."""
    budgets, middle = budgets_of(rows), quarter(rows)
    every = shown(board, rows)
    ratios = {row["budget"]: row["ratio"] for row in rows if row["ratio"]}
    right = [x for x in budgets if any(row["right"] for row in rows if row["budget"] == x)]
    head = ["policy"]
    head += [x if "%" in x else f"{x} ({ratios[x]:.0%})" for x in budgets]
    head += [f"right, {x}" for x in right]
    body = []
    for name, of in every.items():
        cells = [value(of.get(x), whole=x == middle) for x in budgets]
        answered = [(of.get(x) or {}).get("right") or "" for x in right]
        kind = next(iter(of.values()))["class"]
        mark = MARKS.get(kind, "") + "°" * (
            not next(iter(of.values()))["question"] and not MARKS.get(kind)
        )
        body.append(
            [f"`{name}`{mark}" if kind != BOUND else f"`{name}` (bound)", *cells, *answered]
        )
    return lines(head, body)


def bytes_table(rows: Sequence[Row]) -> str:
    """Return sparse attention and quantizers by bytes held, and each budget's best eviction."""
    front = {id(row) for row in on_front(rows)}
    evictions = sorted((x for x in rows if x["class"] == EVICTION), key=lambda x: x["mean"])
    first = {row["budget"]: row for row in reversed(evictions)}.values()
    chosen = [
        row for row in rows if other(row) and (row["budget"] == quarter(rows) or id(row) in front)
    ]
    chosen += first
    body = []
    for row in sorted(chosen, key=lambda row: (row["held"], row["mean"])):
        cells = [
            f"`{row['policy']}`{_at(row)}",
            row["class"],
            f"{row['held']:.0%}",
            f"{row['read']:.0%}",
        ]
        text = value({**row, "could_be_best": id(row) in front, "rank_low": None})
        body.append(
            [*cells, text, *([row["right"] or ""] if any(x["right"] for x in rows) else [])]
        )
    head = ["policy", "class", "held", "read", "KL", *["right"] * any(x["right"] for x in rows)]
    return lines(head, body)


def best(every: dict[str, list[Row]]) -> str:
    """Return a row for each board: the policies that could be the best at about a quarter."""
    body = []
    for board in BOARDS:
        rows = every[board.name]
        budget = quarter(rows)
        at = [row for row in rows if row["budget"] == budget and row["rank"]]
        names = [
            f"`{row['policy']}`"
            for row in sorted(at, key=lambda x: x["rank"])
            if row["could_be_best"]
        ]
        more = f" and {len(names) - 5} others" if len(names) > 6 else ""
        listed = ", ".join(names[:5] if more else names) + more
        random = next((place(x) for x in at if x["policy"] == "random"), "")
        share = f"{at[0]['ratio']:.0%}"
        body.append([board.title, str(at[0]["n"]), share, listed, random or "-", str(len(at))])
    head = ["board", "prompts", "kept", "could be the best", "ranks of `random`", "policies"]
    return lines(head, body)


def _at(row: Row) -> str:
    """Return the budget of a row, which quantizers alone have not."""
    return "" if row["class"] == QUANTIZER else f", {row['budget']}"


def access(every: dict[str, list[Row]]) -> str:
    """Return what 4 and 8 bits cost on SmolLM2, next to evictions, and which methods lead."""
    body, fronts = [], []
    for board in (x for x in BOARDS if x.name.startswith("smollm2-")):
        rows = every[board.name]
        at = {row["policy"]: row for row in rows if row["budget"] == quarter(rows)}
        eviction = min((x for x in at.values() if x["class"] == EVICTION), key=lambda x: x["mean"])
        front = on_front(rows)
        for row, what in (
            (at["int8"], "8 bits"),
            (at["kivi, 4 bits"], "4 bits"),
            (eviction, "the best eviction at 25%"),
            (front[0], "the fewest bytes"),
        ):
            text = value({**row, "could_be_best": False, "rank_low": None})
            cells = [f"{row['held']:.0%}", text, row["right"] or ""]
            body.append([f"{board.workload}: {what}", f"`{row['policy']}`", *cells])
        lead = "; ".join(f"`{x['policy']}`{_at(x)}" for x in front)
        fronts.append(f"* {board.workload} ({eviction['n']} prompts): {lead}.")
    said = "Nothing else that holds as few bytes has a smaller mean KL, from the fewest bytes on:"
    table_of = lines(["", "policy", "held", "KL", "right"], body)
    return "\n\n".join([table_of, said, "\n".join(fronts)])


# ----------------------------------------------------------------------------------------- figures


def shade(ratio: float) -> str:
    """Return the colour of a budget, the same on every page."""
    return next(
        (COLOURS[i] for i, most in ((3, 0.09), (1, 0.19), (0, 0.36)) if ratio <= most), COLOURS[2]
    )


def figure(board: Board, rows: Sequence[Row]) -> Figure:
    """Return judged KL by policy, a panel for each budget: filled are those that could be the best.

    Squares are policies without a rank; a KL of hardly more than 0 is not drawn.
    """
    every, budgets = shown(board, rows), budgets_of(rows)
    out = Figure(figsize=(8.3, 0.17 * len(every) + 0.75), dpi=120, layout="constrained")
    axes = np.atleast_1d(out.subplots(1, len(budgets), sharey=True, sharex=True))
    for axis, budget in zip(axes, budgets, strict=True):
        ratio = 0.0
        for at, of in enumerate(every.values()):
            if not (row := of.get(budget)) or row["mean"] < LEAST:
                continue
            ratio, ranked = row["ratio"], row["rank"] is not None
            colour = shade(ratio) if ranked else NEUTRAL
            face = colour if row["could_be_best"] or not ranked else "white"
            if row["low"] is not None:
                axis.plot([max(row["low"], LEAST), row["high"]], [at] * 2, color=colour, lw=1.2)
            axis.plot(row["mean"], at, "o" if ranked else "s", ms=4, color=colour, mfc=face)
            if row["policy"] == "random":
                axis.axvline(row["mean"], color=NEUTRAL, lw=0.9, ls=":", zorder=0)
        plain(axis, budget if "%" in budget else f"{budget} entries ({ratio:.0%})")
    axes[0].set_yticks(range(len(every)), every, fontsize=8)
    axes[0].set_ylim(len(every) - 0.5, -0.5)
    label = "KL to the full cache, nats per token. Filled: could be the best; dotted: random"
    out.supxlabel(label, fontsize=8)
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


def access_figure(every: dict[str, list[Row]]) -> Figure:
    """Return judged KL over the share of memory, a panel for each workload of SmolLM2."""
    styles = {EVICTION: "o", QUANTIZER: "s", SPARSE: "^", f"{EVICTION}+{QUANTIZER}": "D"}
    called = {EVICTION: "eviction", QUANTIZER: "quantizer", SPARSE: "sparse attention"}
    out = Figure(figsize=(8.3, 3.4), dpi=120, layout="constrained")
    boards = [board for board in BOARDS if board.name.startswith("smollm2-")]
    for axis, board in zip(out.subplots(1, len(boards), sharey=True), boards, strict=True):
        rows = [row for row in every[board.name] if row["mean"] and row["class"] in styles]
        for row in rows:
            evicts = row["class"].startswith(EVICTION)
            colour = (
                shade(row["ratio"]) if evicts else COLOURS[4 if row["class"] == QUANTIZER else 5]
            )
            axis.plot(row["held"], row["mean"], styles[row["class"]], ms=5, color=colour, alpha=0.8)
        front = on_front(rows)
        axis.step(
            [x["held"] for x in front],
            [x["mean"] for x in front],
            where="post",
            color="black",
            lw=0.8,
        )
        axis.set_yscale("log")
        axis.set_title(f"{board.title} ({rows[0]['n']} prompts)", size=9)
        axis.set_xlabel("share of the full cache's bytes", size=8)
        axis.xaxis.set_major_formatter(lambda x, _: f"{x:.0%}")
        axis.grid(color=GRID, linewidth=0.5)
        axis.tick_params(labelsize=8)
        if axis.get_subplotspec().is_first_col():
            axis.set_ylabel("judged KL, nats per token", size=8)
    marks = [
        Line2D(
            [],
            [],
            ls="",
            marker=mark,
            color="#444444",
            label=called.get(kind, "eviction and quantizer"),
            ms=5,
        )
        for kind, mark in styles.items()
    ]
    marks += [
        Line2D([], [], ls="", marker="o", color=shade(ratio), label=f"budget {ratio:.0%}", ms=5)
        for ratio in (0.25, 0.5)
    ]
    out.legend(handles=marks, loc="outside lower center", ncols=6, fontsize=8, frameon=False)
    return out


# -------------------------------------------------------------------------------------------- page


def section(board: Board, rows: Sequence[Row]) -> str:
    """Return a board's part of the page: sentences, figure and tables."""
    values = table(board.name)
    sizes = values.filter(metric=KL).unique("trace").select("tokens", "prompt_tokens")
    low, high = sizes["tokens"].min(), sizes["tokens"].max()
    facts = f"{sizes.height} prompts; {low} to {high} tokens with the response."
    image = f"figures/leaderboard-{board.name}.png"
    picture(figure(board, rows), DOCS / image)
    alt = f"Judged KL of policies at each budget: {board.title}"
    parts = [f"## {board.title}", f"{board.about} {facts}"]
    parts += [f"![{alt}]({image})", markdown(board, rows)]
    if any(map(other, rows)):
        parts += [
            NOTE,
            bytes_table(rows),
        ]
    return "\n\n".join(parts)


def transfer() -> str:
    """Return how the ranking of one board goes with that of others, as a table."""
    out = []
    for one, another in TRANSFERS:
        x, y = (_middle(name) for name in (one, another))
        both = sorted({*x.columns} & {*y.columns} - {"trace"})
        ends = rank_correlation(*(a.select(both).to_numpy() for a in (x, y)), same=False)
        out.append([TITLES[one], TITLES[another], str(len(both)), correlated(*ends)])
    head = ["ranking", "and that of", "policies", "rank correlation"]
    every = [head, ["---", "---", "---:", "---:"], *out]
    return "\n".join(f"| {' | '.join(line)} |" for line in every)


def _middle(name: str) -> pl.DataFrame:
    """Return judged KL at the middle budget of a board: a row per prompt, a column per policy."""
    rows = table(name).filter(~pl.col("looks_ahead"), metric=KL, bounds="held")
    budgets = rows["budget"].unique().sort()
    rows = rows.filter(pl.col("policy") != "random", budget=budgets[len(budgets) // 2])
    return rows.pivot("policy", index="trace", values="value").drop_nulls()


TITLES = {x.name: x.title for x in BOARDS} | {
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


def workloads() -> str:
    """Return a row for each frozen workload: what it is, and the digests of stored prompts."""
    rows = pl.read_parquet(VALUES).drop_nulls("number").unique(("board", "number")).sort("number")
    stored: dict[str, list[str]] = {}
    for (name, model), of in rows.group_by("workload", "model"):
        text = hashlib.sha256("".join(of.sort("number")["prompt"]).encode()).hexdigest()[:12]
        stored.setdefault(str(name), []).append(f"{len(of)} on {model} `{text}`")
    body = [
        [f"*{x.name}*", x.about, ", ".join(sorted(stored.get(x.name, [])))]
        for x in WORKLOADS.values()
    ]
    every = [["workload", "prompts", "stored, with digest"], ["---"] * 3, *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in every)


def spreadsheet(every: dict[str, list[Row]]) -> str:
    """Return the rows of all boards as CSV; shares, and KL in nats per token."""
    titles = {x.name: x.title for x in BOARDS}
    columns = ("budget", "ratio", "mean", "low", "high", "rank", "rank_low", "rank_high")
    columns += ("could_be_best", "right", "held", "read", "passes", "question", "n")
    rows = [
        {"board": titles.get(name, name), "policy": row["policy"], "class": row["class"]}
        | {x: None if x in SMALL and row["class"] in FREE else row[x] for x in columns}
        | {"events": EVENTS.get(name, "common")}
        for name, of in every.items()
        for row in of
    ]
    shares = [pl.col(x).round_sig_figs(3) for x in ("ratio", "mean", "low", "high", "held", "read")]
    named = {"mean": "KL", "could_be_best": "best", "n": "prompts"}
    return (
        pl.DataFrame(rows, infer_schema_length=None).with_columns(shares).rename(named).write_csv()
    )


def rows_by_board() -> dict[str, list[Row]]:
    """Return the rows of every board of the file, those of other models last."""
    there = pl.read_parquet(VALUES)["board"].unique().sort().to_list()
    known = [board.name for board in BOARDS]
    return {name: rows_of(table(name)) for name in [*known, *(x for x in there if x not in known)]}


def pages() -> dict[Path, str]:
    """Return the pages with their generated parts written anew; figures are written on the way."""
    every = rows_by_board()
    picture(access_figure(every), DOCS / "figures/access.png")
    boards = "\n\n".join(section(board, every[board.name]) for board in BOARDS)
    parts = {
        "best": best(every),
        "boards": boards,
        "transfer": transfer(),
        "workloads": workloads(),
    }
    page = fill(PAGE.read_text("utf-8"), parts)
    text = fill(ACCESS.read_text("utf-8"), {"access": access(every)})
    return {ACCESS: text, PAGE: page, PAGE.with_suffix(".csv"): spreadsheet(every)}


def write() -> None:
    """Write the pages."""
    for path, text in pages().items():
        path.write_text(text, "utf-8")
