# ruff: noqa: INP001, T201 - a script, not a module, and it says what it did
"""Measure every policy on the prompts of a board, and test what the papers claim: claims.md.

    python docs/results.py                   tiny, 24 prompts: six minutes on two cores
    python docs/results.py --smallest        2 short prompts: a minute; what a test runs
    python docs/results.py --model smollm2   46 prompts of up to 1,024 tokens: hours; resumes
    python docs/results.py --model 8k        6 prompts of 8,192 tokens of SmolLM2: an hour; resumes
    python docs/results.py --model qwen-1.5b --file FILE.gguf    answers of Qwen2.5-Coder; resumes
    python docs/results.py --stored          the page of claims, of the values that are there
    python docs/results.py --out FILE --traces DIR --jobs N --prompts N

The values of every prompt are in `docs/results*.parquet`; the page of claims follows from it by
`kvsim.studies.claims`, as in `kvsim report`, and docs/leaderboard.py ranks policies by it. What was
measured of a prompt is kept in `--traces` too, a piece for each policy, and used again, so that a
policy added later is all that is measured. The work is done in docs/claims.
"""

from __future__ import annotations

import argparse
import multiprocessing
import platform
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

import polars as pl
import torch

from claims.page import cases, claims_page
from claims.plan import PLANS, SMALLEST, Plan
from claims.statistics import Results, read_values, write_values
from claims.tables import measure_prompt
from claims.timing import cost
from claims.traces import record, weights

DOCS = Path(__file__).resolve().parent
CLAIMS_PAGE, TRACES = DOCS / "claims.md", DOCS.parent / "traces" / "results"
#: Plans of all policies, and those whose values claims are tested on.
WHOLE = ("tiny", "smollm2")
CLAIMED = (*WHOLE, "qwen-1.5b", "qwen-1.5b-8k")


def measure_all(plan: Plan, folder: Path, values: Path, jobs: int) -> None:
    """Record, replay, judge and measure every prompt, and write the file of values.

    In processes of their own where there are several. What an earlier run measured is read.
    """
    calibration = Path() if plan.only else record(plan, folder, [0])[0]
    work = partial(measure_prompt, plan=plan, folder=folder, calibration=calibration, values=values)
    numbers = range(1, plan.prompts + 1)
    if jobs == 1:
        measured = [work(number) for number in numbers]
    else:
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
            measured = list(pool.map(work, numbers))
    tools = ", ".join(f"{name} {version(name)}" for name in ("kvsim", "torch", "transformers"))
    facts = {"weights": weights(plan), "tools": f"{tools}, Python {platform.python_version()}"}
    facts |= {} if plan.device == "cpu" else {"device": torch.cuda.get_device_name()}
    write_values(values, plan, pl.concat(measured), cost(plan.cost), facts)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, unless the values are there, and write the page of claims beside the values."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=PLANS, default="tiny")
    parser.add_argument("--smallest", action="store_true", help="two short prompts, one budget")
    parser.add_argument("--stored", action="store_true", help="write the page of claims alone")
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--traces", type=Path, default=TRACES, metavar="DIR")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes; 2 by default")
    parser.add_argument("--prompts", type=int, metavar="N", help="the first so many of them")
    parser.add_argument("--file", type=Path, metavar="FILE.gguf", help="the model, if it is Qwen")
    parser.add_argument("--device", default="cpu", help="what computes: cpu or cuda")
    args = parser.parse_args(arguments)
    start = time.perf_counter()
    plan = SMALLEST[args.model] if args.smallest else PLANS[args.model]
    plan = replace(plan, prompts=args.prompts or plan.prompts)
    plan = replace(plan, file=args.file, device=args.device)
    out = args.out or DOCS / plan.values
    if not args.stored:
        measure_all(plan, args.traces, out, args.jobs)
    if plan.name in CLAIMED:
        results = {plan.name: read_values(out, plan)} if args.out else committed()
        out.with_name(CLAIMS_PAGE.name).write_text(claims_page(results), "utf-8")
        cases(results).write_csv(out.with_name("claims.csv"))
    print(f"{out}: done after {time.perf_counter() - start:.0f} s")


def committed() -> dict[str, Results]:
    """The values in the repository that claims are tested on."""
    return {name: read_values(DOCS / PLANS[name].values, PLANS[name]) for name in CLAIMED}


if __name__ == "__main__":
    main()
