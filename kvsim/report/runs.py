"""Run folders, read again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from kvsim.analysis.table import COLUMNS
from kvsim.errors import OutputError, PolicyError


@dataclass(frozen=True)
class Saved:
    """A run folder as it was read: its parameters and its Table."""

    path: Path
    parameters: dict[str, Any]
    table: pl.DataFrame


def read_run(path: str | Path) -> Saved:
    """The run that `kvsim replay --out` wrote.

    Raises:
        OutputError: there is no run folder, or it is damaged.
    """
    folder = Path(path)
    try:
        parameters = json.loads((folder / "run.json").read_text("utf-8"))
        table = pl.read_parquet(folder / "results.parquet", glob=False)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise OutputError(
            f"{folder} is no run folder: {error.filename} is missing; expected what `kvsim replay "
            "... --out DIR` wrote"
        ) from None
    except (ValueError, OSError, pl.exceptions.PolarsError) as error:
        raise OutputError(f"{folder} is damaged: {error}; replay it again") from error
    if not isinstance(parameters, dict):
        raise OutputError(
            f"{folder} is damaged: run.json holds no object with parameters; replay it again"
        )
    missing = [name for name in COLUMNS if name not in table.columns]
    if missing:
        raise OutputError(
            f"{folder} has no columns {', '.join(missing)}: it was written by another version of "
            "kvsim; replay it again"
        )
    try:
        typed = table.select(pl.col(name).cast(kind) for name, kind in COLUMNS.items())
    except pl.exceptions.PolarsError as error:
        raise OutputError(
            f"{folder} has values that no result has: {error}; replay it again"
        ) from error
    return Saved(folder, parameters, typed)


def joined(runs: Sequence[Saved]) -> pl.DataFrame:
    """The Table of several runs; what is in several of them is there once.

    Raises:
        PolicyError: runs have different values in one and the same place, or replayed different
            traces of one name.
    """
    _check_traces(runs)
    table = pl.concat([run.table for run in runs]).unique(maintain_order=True)
    place = [name for name in COLUMNS if name not in ("value", "chance", "fidelity")]
    twice = table.filter(table.select(place).is_duplicated())
    if twice.height:
        policy, metric, trace = twice.select("policy", "metric", "trace").row(0)
        raise PolicyError(
            f"two of the runs have different values of {metric} for {policy or 'the trace'} on "
            f"{trace}, with the same parameters and schedule; take them one by one"
        )
    return table


def _check_traces(runs: Sequence[Saved]) -> None:
    """Raise PolicyError where runs replayed different traces of one name, as of two models."""
    known: dict[str, tuple[str, Saved]] = {}
    for run in runs:
        for name, digest in run.parameters.get("traces", {}).items():
            first, other = known.setdefault(name, (digest, run))
            if "" not in (first, digest) and first != digest:  # in memory a trace has none
                raise PolicyError(
                    f"{other.path} and {run.path} replayed different traces, both called {name!r}, "
                    "and results are told apart by the names of traces; take the runs one by one, "
                    "or record one trace again under another id and replay it"
                )
