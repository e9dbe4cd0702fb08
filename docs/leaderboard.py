# ruff: noqa: INP001, T201 - a script, not a module, and it says what it did
"""Rank policies on frozen prompts: docs/leaderboard.md, from docs/leaderboard.parquet alone.

    python docs/leaderboard.py                            the pages and their figures: seconds
    python docs/leaderboard.py --policy NAME [NAME ...]   where policies would stand: minutes
    python docs/leaderboard.py --policy NAME --add        the same, and their values are stored
    python docs/leaderboard.py --model tiny --add         a board of another model: name or file
        [--workloads answers sheets "long documents" needles turns] [--prompts N]
        [--traces DIR] [--values FILE]
    python docs/leaderboard.py --collect                  values of docs/results*.parquet

NAME is a policy of the catalogue, a label of workloads.VARIANTS, or `module:NAME` of your own; the
model is SmolLM2 by default. Another prompt, or other weights, than those of stored values are
refused. Traces and values are kept in `--traces`, a file for each prompt and policy. Values are
those of `kvsim.measure` per prompt, and ranks those of `kvsim.compare`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import polars as pl
from study import ROOT, read

from claims.plan import PLANS, Plan
from claims.policies import table_policies
from claims.statistics import read_values, stored_rows
from kvsim.analysis.table import COLUMNS
from leaderboard_page import write
from leaderboard_rows import ANSWERS, BOARDS, DOCS, VALUES, frozen, rows_of, said_of, table
from workloads import KL, POLICIES, SEEN, WORKLOADS, measure, prompt_digest

#: Plans of further values: the first answers of the 1.5B, under models that did not write them.
ELSEWHERE = ("qwen-0.5b", "qwen-smollm2")


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


def store(new: pl.DataFrame, values: Path) -> None:
    """Put rows into the file of values, in place of those of the same boards and policies."""
    parts = [new.with_columns(pl.col("value").cast(pl.Float32))]
    if values.exists():
        of = new.select("board", "policy").unique()
        parts.insert(0, pl.read_parquet(values).join(of, on=["board", "policy"], how="anti"))
    pl.concat(parts, how="diagonal_relaxed").write_parquet(values, compression_level=19)


def collect(values: Path) -> None:
    """Store the values of results*.parquet anew; those of frozen prompts stay."""
    plans = (*(x.name for x in BOARDS if x.name in PLANS), *ELSEWHERE)
    rest = pl.read_parquet(values).filter(~pl.col("board").is_in(plans))
    every = pl.concat([*map(collected, plans)], how="diagonal_relaxed")
    every.with_columns(pl.col("value").cast(pl.Float32)).write_parquet(values)
    store(rest, values)


def measured(
    model: str, workload: str, labels: Sequence[str], prompts: int, folder: Path, values: Path
) -> pl.DataFrame:
    """Return rows of policies on the first prompts of a workload, which are those stored."""
    board, parts = frozen(model, workload).name, []
    stored = pl.read_parquet(values) if values.exists() else pl.DataFrame({"board": []})
    stored = stored.filter(board=board)
    known = dict(stored.select("number", "prompt").iter_rows()) if len(stored) else {}
    for number in range(prompts):
        of = prompt_digest(WORKLOADS[workload], model, number)
        if known.get(number, of) != of:
            raise SystemExit(
                f"prompt {number} of {workload} has digest {of} on {model}, and {values} has "
                f"{known[number]}; expected the same text and weights"
            )
        parts.append(measure(WORKLOADS[workload], model, number, labels, folder))
        print(f"{workload}, prompt {number + 1} of {prompts}", flush=True)
    return pl.concat(parts, how="diagonal_relaxed").with_columns(board=pl.lit(board))


def stand(new: pl.DataFrame, values: Path) -> None:
    """Print where policies stand among those stored, on the prompts that both have."""
    labels = new["policy"].unique(maintain_order=True).to_list()
    board, rows = new["board"][0], new
    if values.exists():
        others = pl.read_parquet(values).filter(~pl.col("policy").is_in(labels), board=board)
        others = others.filter(pl.col("trace").is_in([*new["trace"]]))
        rows = pl.concat(
            [others, new.with_columns(pl.col("value").cast(pl.Float32))], how="diagonal_relaxed"
        )
    of_board = rows_of(table(board, rows))
    for row in of_board:
        if row["policy"] in labels:
            print(f"{board}: {said_of(row, of_board)}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the page, collect the values, or measure policies."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--collect", action="store_true", help="values of docs/results*.parquet")
    parser.add_argument("--policy", nargs="+", metavar="NAME", help="measure policies")
    parser.add_argument("--model", metavar="NAME", help="a model by name or file; SmolLM2")
    parser.add_argument(
        "--workloads", nargs="+", choices=WORKLOADS, default=["answers", "needles"], metavar="NAME"
    )
    parser.add_argument("--prompts", type=int, default=12, metavar="N", help="the first so many")
    parser.add_argument("--add", action="store_true", help="store the values, write the pages")
    parser.add_argument("--traces", type=Path, metavar="DIR", default=ROOT / "traces/leaderboard")
    parser.add_argument("--values", type=Path, metavar="FILE", default=VALUES)
    args = parser.parse_args(arguments)
    if args.collect:
        collect(args.values)
    if args.policy or args.model:
        for workload in args.workloads:
            of = args.model or "smollm2", workload, args.policy or POLICIES
            new = measured(*of, args.prompts, args.traces, args.values)
            stand(new, args.values)
            if args.add:
                store(new, args.values)
    if args.values == VALUES and (args.add or not (args.policy or args.model)):
        write()


if __name__ == "__main__":
    main()
