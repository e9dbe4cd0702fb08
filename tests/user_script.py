"""A small script as a user writes it: mypy checks it, and tests/test_arguments.py runs it."""

from dataclasses import dataclass
from pathlib import Path
from typing import assert_type

import polars as pl
from matplotlib.figure import Figure
from torch import Tensor

import kvsim
from kvsim.analysis.comparison import Comparison
from kvsim.core.policy import Scorer
from kvsim.core.view import View
from kvsim.sweeps import Run


@dataclass(frozen=True)
class Values(Scorer):
    """Keep entries with long values."""

    def score(self, view: View) -> Tensor:
        """Return the squared length of each value, [layer, head, entry]."""
        return view.values.square().sum(-1)


def answers(folder: Path) -> tuple[kvsim.Record, Run, Comparison, pl.DataFrame, Figure]:
    """What public functions give for names, paths, shares, values; folder: with `a.zarr`."""
    path = str(folder / "a.zarr")
    record = assert_type(kvsim.replay(path, "tova", "25%", interval=8), kvsim.Record)
    assert_type(kvsim.measure(path, record, "output_error"), pl.DataFrame)
    run = assert_type(
        kvsim.sweep(
            traces=folder,
            policies=["tova", Values(), kvsim.policy("h2o")],
            budgets="25%",
            interval=8,
            metrics="output_error",
        ),
        Run,
    )
    saved = run.save(folder / "run")
    comparison = assert_type(kvsim.compare(saved, "output_error"), Comparison)
    means = assert_type(kvsim.averages(run, by="stage", metrics="output_error"), pl.DataFrame)
    figure = assert_type(kvsim.plots.over_budgets(saved, "output_error"), Figure)
    return record, run, comparison, means, figure
