# ruff: noqa: INP001, T201 - a script, not a module, and it says what it did
"""Replay every policy on traces of a model, and test what the papers claim: results.md.

    python docs/results.py                   tiny, 24 prompts: six minutes on two cores
    python docs/results.py --smallest        2 short prompts: a minute; what a test runs
    python docs/results.py --model smollm2   60 prompts of up to 2,048 tokens: hours; resumes
    python docs/results.py --out FILE --traces DIR --jobs N --prompts N

What was measured of a prompt is kept in `--traces`, a piece for each policy, and used again, so
that a policy added later is all that is measured. Regret on SmolLM2 is kept in
`docs/results_page/regret.parquet` too. Every number of the page comes
from `measure_prompt`, every verdict from `kvsim.claims`, as in `kvsim report`: nothing in the page
is typed in but the reasons for which verdicts on two models differ. What does the work lies in
docs/results_page.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import polars as pl

from kvsim.claims import CLAIMS, Evidence
from results_page.claims import store
from results_page.drawing import figure
from results_page.opening import beside, ranking_figure
from results_page.plan import PLANS, SMALLEST, Plan
from results_page.policies import table_policies
from results_page.statistics import Results
from results_page.tables import KEPT, measure_prompt
from results_page.text import page
from results_page.timing import cost
from results_page.traces import record

ROOT = Path(__file__).resolve().parent.parent


def measure_all(plan: Plan, folder: Path, calibration: Path, jobs: int) -> Results:
    """Record, replay and measure every prompt, in processes of their own where there are several.

    What an earlier run measured is read.
    """
    work = partial(measure_prompt, plan=plan, folder=folder, calibration=calibration)
    numbers = range(1, plan.prompts + 1)
    if jobs == 1:
        measured = [work(number) for number in numbers]
    else:
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
            measured = list(pool.map(work, numbers))
    if plan == PLANS["smollm2"]:
        pl.concat(one.regret for one in measured).write_parquet(KEPT)
    evidence = Evidence(pl.concat(one.table for one in measured), cost(plan.cost))
    digests, sizes = zip(*((one.digest, one.size) for one in measured), strict=True)
    return Results(plan, evidence, digests, sizes)


def main(arguments: Sequence[str] | None = None) -> None:
    """Record, replay, measure, and write the page and its figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=PLANS, default="tiny")
    parser.add_argument("--smallest", action="store_true", help="two short prompts, two budgets")
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--traces", type=Path, default=ROOT / "traces" / "results", metavar="DIR")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes; 2 by default")
    parser.add_argument("--prompts", type=int, metavar="N", help="the first so many of them")
    given = parser.parse_args(arguments)
    start = time.perf_counter()
    plan = SMALLEST[given.model] if given.smallest else PLANS[given.model]
    plan = replace(plan, prompts=given.prompts or plan.prompts)
    name = "results.md" if given.model == "tiny" else f"results-{given.model}.md"
    out = given.out or ROOT / "docs" / name
    (calibration,) = record(plan, given.traces, [0])
    results = measure_all(plan, given.traces, calibration, given.jobs)
    policies = table_policies(plan, str(calibration))
    image = out.parent / "figures" / f"{out.stem}.png"
    figure(results, policies, image)
    claims = {paper: list(make(results.evidence)) for paper, make in CLAIMS.items()}
    text = page(results, policies, claims, image.relative_to(out.parent).as_posix())
    out.write_text(text, "utf-8")
    ranking_figure(text, Path(beside(str(image))))
    if not given.smallest:
        store(given.model, claims)
    print(f"{out} written after {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
