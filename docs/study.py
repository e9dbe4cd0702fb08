# ruff: noqa: INP001 - a script, not a module
"""What scripts of studies share: lines of results, pictures, names of models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from drawing import small
from kvsim.analysis.summaries import Interval
from kvsim.sweeps import Run

ROOT = Path(__file__).resolve().parent.parent


def read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of results."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def finished(run: Run) -> Run:
    """Return a run of which no cell failed."""
    if run.failures:
        raise SystemExit(str(run.failures[0]))
    return run


def picture(figure: Figure, path: Path, **options: Any) -> None:
    """Save a figure as a picture of pages."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, **options)
    small(path, path)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of numbers: a label in the first column, the others to the right."""
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "| --- |" + " ---: |" * (len(head) - 1), *lines[1:]])


def correlated(value: float, low: float, high: float) -> str:
    """A rank correlation as text, with its interval if it has one."""
    return Interval(value, low, high, 1).text(".2f")
