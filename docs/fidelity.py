# ruff: noqa: INP001, T201 - a script, not a module, and it says what it did
"""Replay policies and run them on their model, and compare: fidelity.md.

    python docs/fidelity.py                100 prompts of tiny, 40 of SmolLM2: hours; resumes
    python docs/fidelity.py --write-only   the page of what is measured already: a minute
    python docs/fidelity.py --out FILE --traces DIR --jobs N --prompts N

What was measured of a prompt is kept in `--traces` and used again. Every number of the page comes
from `measure_prompt`, and `kvsim.analysis.validity` and `prediction`, as in `kvsim fidelity`; the
calibrations that `kvsim predict` reads are fitted on the same. What does the work lies in
docs/fidelity_page.
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

from fidelity_page.drawing import figure
from fidelity_page.loops import Loops
from fidelity_page.measure import measure_prompt, stored_prompt
from fidelity_page.plan import STUDIES, Study
from fidelity_page.text import page
from kvsim.analysis.prediction import Calibration, config_digest, fit, write_calibrations
from kvsim.recorder import load_model
from kvsim.recorder.provenance import describe_model

ROOT = Path(__file__).resolve().parent.parent
CALIBRATIONS = ROOT / "kvsim" / "analysis" / "calibrations.json"


def loops(study: Study, folder: Path, jobs: int, most: int | None, *, measure: bool) -> Loops:
    """Measure the prompts of a model, `most` at most, or read those that are measured."""
    numbers = range(1, min(most or study.prompts.prompts, study.prompts.prompts) + 1)
    if not measure:
        there = [path for n in numbers if (path := stored_prompt(n, study, folder)).exists()]
        if not there:
            raise SystemExit(f"{folder}: nothing is measured; run without --write-only first")
        tables = [pl.read_parquet(path) for path in there]
    else:
        work = partial(measure_prompt, study=study, folder=folder)
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
            tables = list(pool.map(work, numbers))
    return Loops(study, pl.concat(tables, how="diagonal_relaxed"))


def calibration(of: Loops) -> Calibration:
    """Fit what `kvsim predict` reads of a model."""
    plan, described = of.study.prompts, describe_model(load_model(of.study.prompts.model)[0])
    return Calibration(
        model=described["name"],
        config=config_digest(described),
        prompts=of.prompts,
        policies=tuple(policy.name for policy in of.study.policies),
        budgets=tuple(map(str, of.study.budgets)),
        tokens=(int(of.rows["tokens"].min()), int(of.rows["tokens"].max())),
        interval=plan.interval,
        prefill=plan.prefill,
        curve=fit(of.points()),
        weights=described["weights"],
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, fit, and write the page, its figure and the calibrations."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write-only", action="store_true", help="of what is measured already")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "fidelity.md", metavar="FILE")
    parser.add_argument("--traces", type=Path, default=ROOT / "traces" / "fidelity", metavar="DIR")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes; 2 by default")
    parser.add_argument("--prompts", type=int, metavar="N", help="the first so many of each model")
    given = parser.parse_args(arguments)
    start = time.perf_counter()
    terms = (given.traces, given.jobs, given.prompts)
    measured = [loops(study, *terms, measure=not given.write_only) for study in STUDIES.values()]
    image = given.out.parent / "figures" / f"{given.out.stem}.png"
    figure(measured, image)
    curves = [calibration(each) for each in measured]
    text = page(measured, curves, image.relative_to(given.out.parent).as_posix())
    given.out.write_text(text, "utf-8")
    committed = given.out.resolve().parent == ROOT / "docs"
    write_calibrations(CALIBRATIONS if committed else given.out.with_suffix(".json"), curves)
    print(f"{given.out} written after {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
