# ruff: noqa: INP001, T201 - a script, not a module, and it says what it did
"""Replay every policy on traces of the shipped model, and test what the papers claim: results.md.

    python docs/results.py              24 prompts, four budgets: six minutes on two cores
    python docs/results.py --smallest   2 short prompts, two budgets: a minute; what a test runs
    python docs/results.py --out FILE --traces DIR --jobs N

Traces are kept in `--traces` and used again. Every number of the page comes from `measure_trace`,
every verdict from `kvsim.claims`, as in `kvsim report`: nothing in the page is typed in. What does
the work lies in docs/results_page.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import polars as pl

from kvsim import open_trace
from kvsim.claims import Evidence
from results_page.drawing import figure
from results_page.plan import FULL, SMALLEST, Plan
from results_page.policies import table_policies
from results_page.statistics import Results
from results_page.tables import measure_trace
from results_page.text import page
from results_page.timing import cost
from results_page.traces import record

ROOT = Path(__file__).resolve().parent.parent


def measure_all(plan: Plan, paths: Sequence[Path], calibration: Path, jobs: int) -> Results:
    """Replay and measure every trace, in processes of their own where there are several."""
    seconds = cost(plan.cost)
    work = partial(measure_trace, calibration=calibration, budgets=plan.budgets)
    if jobs == 1:
        found = [work(path) for path in paths]
    else:
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
            found = list(pool.map(work, paths))
    traces = [open_trace(path) for path in paths]
    sizes = [(one.n_pos, one.prompt_len) for one in traces]
    evidence = Evidence(pl.concat(found), seconds)
    return Results(plan, evidence, [one.digest for one in traces], sizes)


def main(arguments: Sequence[str] | None = None) -> None:
    """Record, replay, measure, and write the page and its figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--smallest", action="store_true", help="two short prompts, two budgets")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results.md", metavar="FILE")
    parser.add_argument("--traces", type=Path, default=ROOT / "traces" / "results", metavar="DIR")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes; 2 by default")
    given = parser.parse_args(arguments)
    start = time.perf_counter()
    plan = SMALLEST if given.smallest else FULL
    calibration, *paths = record(plan, given.traces)
    results = measure_all(plan, paths, calibration, given.jobs)
    policies = table_policies(str(calibration))
    image = given.out.parent / "figures" / f"{given.out.stem}.png"
    figure(results, policies, image)
    text = page(results, policies, image.relative_to(given.out.parent).as_posix())
    given.out.write_text(text, "utf-8")
    print(f"{given.out} written after {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
