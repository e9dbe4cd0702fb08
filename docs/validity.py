# ruff: noqa: INP001, T201 - a script, not a module, and it says what it did
"""Which number orders policies as the running model does, at one budget: a part of fidelity.md.

    python docs/validity.py              print the tables of the stored values
    python docs/validity.py --measure    record, replay, judge and run live again: two hours
    python docs/validity.py --answers    the same of answers: half an hour

`validity-results.parquet` has a row for each model, prompt, policy, budget, metric and way: `open`
the replay, `judged` its records judged by the model, `closed` the live run that is fed the recorded
response. Prompts, policies and budgets were fixed before the first of them ran.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray
from study import correlated, markdown

import kvsim
from claims.answers import POLICIES as ANSWERED
from claims.answers import auc, live_answers
from claims.plan import PLANS, SMALL, Plan, Sizes
from claims.policies import scaled
from claims.rank_correlation import rank_correlation
from claims.statistics import read_values
from claims.traces import samples
from kvsim.analysis.output.metrics import REGRET
from kvsim.analysis.registry import METRICS
from kvsim.analysis.summaries import per_prompt
from kvsim.cli import show
from kvsim.recorder import capture_many, load_model
from kvsim.sweeps import replay_all

RESULTS = Path(__file__).with_name("validity-results.parquet")
#: Judged KL, and whether the answer of the live run is wrong, by prompt, policy and budget.
ANSWERS = Path(__file__).with_name("answers-results.parquet")
#: Policies that somebody might deploy, and `random`, which no correlation counts.
POLICIES = (
    *("streaming_llm", "h2o", "tova", "snapkv", "keydiff", "expected_attention", "gkv", "ams"),
    *("pyramidkv", "adakv+snapkv", "adakv+expected_attention", "morphkv", "rkv", "cake", "lagkv"),
    *("snapkv@gkv", "random"),
)
PREDICTIONS = ("response_kl", "nll_increase", "top_agreement")
#: Metrics of a replay that may order policies as the running model does.
OFFLINE = (
    *("weighted_error", "layer_error", "output_error", "concat_error"),
    *("retained_mass", "wipeout"),
)
#: Those of them in the tables.
TABLED = ("weighted_error", "layer_error", "output_error", "retained_mass", "wipeout")
_SMALLER = Sizes(SMALL.largest | {"window": 16}, SMALL.ams, SMALL.recent, 16)
#: Prompts, budgets, and the tokens that a model writes where the response is not given.
STUDIES: dict[str, tuple[Plan, tuple[int, ...], int]] = {
    "smollm2": (
        Plan(
            model="smollm2",
            prompts=30,
            seed=11,
            lengths=(512,),
            interval=32,
            prefill=True,
            presets=False,
            sizes=_SMALLER,
        ),
        (64, 128, 256),
        24,
    ),
    "tiny": (Plan(prompts=30, seed=11), (96, 192, 288), 320),
}
Matrix = NDArray[np.float64]


@cache
def values() -> pl.DataFrame:
    """The stored values."""
    return pl.read_parquet(RESULTS).with_columns(pl.col(pl.Categorical).cast(pl.String))


def matrix(
    model: str, budget: int, metric: str, way: str, *, answers: bool | None = None
) -> Matrix:
    """Values [prompt, policy], the smaller the better; `random` is not among them.

    answers: only prompts whose response is a short answer, or only those that go on with a text.
    """
    rows = values().filter(
        pl.col("policy") != "random", model=model, budget=budget, metric=metric, fidelity=way
    )
    if answers is not None:
        rows = rows.filter((pl.col("task") != "text") == answers)
    wide = rows.sort("prompt", "policy").pivot(on="policy", index="prompt", values="value")
    sign = -1.0 if METRICS[metric].better == "higher" else 1.0
    return sign * wide.drop("prompt").to_numpy().astype(np.float64)


def cell(model: str, budget: int, metric: str, way: str, **of: Any) -> str:
    """Rank correlation with live KL of means over prompts, with its interval if it has one."""
    x = matrix(model, budget, metric, way, **of)
    y = matrix(model, budget, "response_kl", "closed", **of)
    between, low, high = (None if np.isnan(value) else value for value in rank_correlation(x, y))
    return show.interval(".2f", between, low, high)


def _table(model: str) -> Iterator[str]:
    """Lines of a table: judged KL, then metrics of a replay."""
    budgets = STUDIES[model][1]
    yield f"| {model}: ranked by | {' | '.join(f'{each} entries' for each in budgets)} |"
    yield f"| --- | {' | '.join('---:' for _ in budgets)} |"
    rows = {"judged KL": ("response_kl", "judged")}
    rows |= {f"`{name}`": (name, "open") for name in TABLED}
    for label, of in rows.items():
        cells = (cell(model, budget, *of) for budget in budgets)
        yield f"| {label} | {' | '.join(cells)} |"


def _ratios() -> Iterator[str]:
    for model, (_, budgets, _) in STUDIES.items():
        parts, same = [], 0
        for budget in budgets:
            judged, live = (
                matrix(model, budget, "response_kl", way) for way in ("judged", "closed")
            )
            low, high = np.quantile((judged / live)[live > 0], (0.05, 0.95))
            parts.append(f"{low:.2f} to {high:.2f} at {budget}")
            same += int(judged.mean(0).argmin() == live.mean(0).argmin())
        yield (
            f"* {model}: judged over live KL of a prompt under a policy is {', '.join(parts)} in "
            f"90 % of the cases. The policy with the lowest mean is the same at {same} of "
            f"{len(budgets)} budgets."
        )
    kinds = {True: "Answers of up to 24 tokens", False: "Texts of about 128 tokens"}
    for answers, kind in kinds.items():
        ranges = []
        for label, *of in (
            ("judged KL", "response_kl", "judged"),
            ("`weighted_error`", "weighted_error", "open"),
        ):
            cells = [cell("smollm2", x, *of, answers=answers) for x in STUDIES["smollm2"][1]]
            numbers = sorted(each.split()[0] for each in cells)
            ranges.append(f"{label} at {' to '.join(dict.fromkeys((numbers[0], numbers[-1])))}")
        yield f"* {kind} only (smollm2): {', '.join(ranges)}."


def part() -> str:
    """The tables, from the stored values."""
    blocks = [*([*_table(model)] for model in STUDIES), [*_ratios()]]
    return "\n\n".join("\n".join(lines) for lines in blocks)


def answers() -> str:
    """How judged KL goes with wrong answers: of `ANSWERS`, then of the page of the 1.5B."""
    rows = []
    stored = (
        pl.read_parquet(ANSWERS)
        .with_columns(pl.col("kl").cast(pl.Float64))
        .sort("digest", "policy")
    )
    for budget in (64, 128):
        kl, wrong = (
            stored.filter(budget=budget).pivot(on="policy", index="digest", values=name)
            for name in ("kl", "wrong")
        )
        of = kl.drop("digest").to_numpy(), wrong.drop("digest").to_numpy()
        rows.append(_answered("needles and quotes of SmolLM2", budget, *of, *of, same=True))
    plan = PLANS["qwen-1.5b"]
    results = read_values(RESULTS.with_name(plan.values), plan)
    for budget in plan.budgets:
        part = live_answers(results, ANSWERED, budget)
        rows.append(_answered("reasoning of the 1.5B", budget, *part, same=False))
    head = ["answers", "entries", "wrong", "within a policy", "between policies"]
    return markdown(head, rows)


def _answered(
    label: str, budget: int, kl: Matrix, wrong: Matrix, own: Matrix, lost: Matrix, *, same: bool
) -> list[str]:
    between = correlated(*rank_correlation(kl, wrong.astype(np.float64), same=same))
    return [label, str(budget), f"{wrong.mean():.0%}", auc(own, lost), between]


# ---------------------------------------------------------------------------------- measuring


def measure() -> pl.DataFrame:
    """Record every prompt, replay, judge and run live every policy at every budget."""
    parts = []
    options: dict[str, Any] = {"metrics": [*OFFLINE, *REGRET]}
    for name, loaded, trace, cells, terms in recorded(residual=True, o_proj=True):
        replayed = replay_all([trace], *cells, judge=name, **options, **terms)
        live = kvsim.live(loaded[0], [trace], *cells, tokenizer=loaded[1], **terms)
        parts += [_stored(replayed.table, trace, name), _stored(live.table, trace, name)]
        print(f"{trace.name} is done")
    return pl.concat(parts)


def measure_answers() -> pl.DataFrame:
    """Record needles and quotes, judge every policy, and let the model answer under it."""
    study, _, tokens = STUDIES["smollm2"]
    plan = replace(study, tasks=("needle", "quote"), prompts=18, seed=65)
    model, tokenizer = load_model(plan.model)
    cells = [scaled(plan.sizes, each) for each in ANSWERED], (64, 128)
    terms: dict[str, Any] = {"interval": plan.interval, "prefill": plan.prefill}
    parts = []
    for prompt in samples(plan)[1:]:
        with tempfile.TemporaryDirectory() as folder:
            (trace,) = capture_many(model, tokenizer, [prompt], folder, max_new_tokens=tokens)
            judged = replay_all(
                [trace], *cells, judge=plan.model, metrics=["entries_seen"], **terms
            )
            terms_of = terms | {"tokenizer": tokenizer, "max_new_tokens": tokens}
            live = kvsim.live(model, [trace], *cells, metrics=["answer_right"], **terms_of)
            kl, right = (
                per_prompt(run.table.filter(metric=name)).select(
                    "policy", pl.col("requested").cast(pl.Int32).alias("budget"), value
                )
                for run, name, value in (
                    (judged, "response_kl", pl.col("value").alias("kl")),
                    (live, "answer_right", (pl.col("value") < 1).alias("wrong")),
                )
            )
            of = kl.join(right, on=["policy", "budget"])
            parts.append(of.select(pl.lit(trace.digest).alias("digest"), pl.all()))
    return pl.concat(parts)


def recorded(**options: Any) -> Iterator[tuple[str, Any, kvsim.Trace, Any, dict[str, Any]]]:
    """Yield the name of a model, the model, a trace, policies with budgets, and the schedule.

    A trace is there until the next one is recorded. options: of the capture.
    """
    for name, (plan, budgets, tokens) in STUDIES.items():
        model, tokenizer = load_model(name)
        cells = [scaled(plan.sizes, each) for each in POLICIES], budgets
        terms = {"interval": plan.interval, "prefill": plan.prefill}
        for prompt in samples(plan)[1:]:
            writes = {} if prompt.response is not None else {"max_new_tokens": tokens}
            with tempfile.TemporaryDirectory() as folder:
                (trace,) = capture_many(model, tokenizer, [prompt], folder, **options, **writes)
                yield name, (model, tokenizer), trace, cells, terms


def _stored(table: pl.DataFrame, trace: kvsim.Trace, model: str) -> pl.DataFrame:
    """One value for each policy, budget and metric."""
    closed = pl.col("fidelity") == "closed"
    chosen = ~closed & pl.col("metric").is_in(OFFLINE) | pl.col("metric").is_in(PREDICTIONS)
    main = {name: METRICS[name].main for name in (*OFFLINE, *PREDICTIONS)}
    rows = table.filter(pl.col("policy").is_not_null(), chosen).filter(
        pl.col("variant") == pl.col("metric").replace_strict(main)
    )
    way = pl.when(pl.col("fidelity").is_in(("judged", "closed"))).then(
        pl.col("fidelity").cast(pl.String)
    )
    return per_prompt(rows).select(
        model=pl.lit(model),
        prompt=pl.lit(trace.name),
        task=pl.lit(trace.header.labels.get("task")),
        tokens=pl.lit(trace.n_pos, pl.Int32),
        response=pl.lit(trace.n_pos - trace.prompt_len, pl.Int32),
        policy="policy",
        budget=pl.col("requested").cast(pl.Int32),
        metric="metric",
        fidelity=way.otherwise(pl.lit("open")),
        value=pl.col("value").cast(pl.Float32),
    )


if __name__ == "__main__":
    if "--measure" in sys.argv[1:]:
        measure().write_parquet(RESULTS)
    if "--answers" in sys.argv[1:]:
        measure_answers().write_parquet(ANSWERS)
    print(part(), answers(), sep="\n\n")
