"""The Tables of runs: in memory, in folders, and of several runs together."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import polars as pl

from kvsim.analysis.folder import Saved, read_run
from kvsim.analysis.table import COLUMNS, in_order
from kvsim.core.arguments import listed
from kvsim.errors import PolicyError


class Measured(Protocol):
    """An object that has a Table: a run in memory, or one that was read from a folder."""

    @property
    def table(self) -> pl.DataFrame:
        """The Table."""


#: A Table, a run, or run folders by path or URL.
Tabular = pl.DataFrame | Measured | str | Path | Iterable[str | Path]


def as_table(given: Tabular) -> pl.DataFrame:
    """Return a Table, that of a run, or that of run folders together.

    Raises PolicyError for anything else, OutputError for what is no run folder.
    """
    table = getattr(given, "table", given)
    if isinstance(table, pl.DataFrame):
        return table
    places = listed(given)
    paths = [place for place in places if isinstance(place, str | Path)]
    if not paths or len(paths) < len(places):
        raise PolicyError(
            f"table is {reprlib.repr(given)}; expected a Table, a run, or the folder of one"
        )
    return joined([read_run(path) for path in paths])


def joined(runs: Sequence[Saved]) -> pl.DataFrame:
    """The Table of several runs; what is in several of them is there once.

    Raises:
        PolicyError: runs have different values in one and the same place, or replayed different
            traces of one name.
    """
    first: dict[str, tuple[str, Saved]] = {}
    for run in runs:
        for name, digest in run.parameters.get("traces", {}).items():
            expected, other = first.setdefault(name, (digest, run))
            if "" not in (expected, digest) and expected != digest:  # in memory a trace has none
                raise PolicyError(
                    f"{other.path} and {run.path} replayed different traces, both called {name!r}, "
                    "and results are told apart by the names of traces; take the runs one by one, "
                    "or record one trace again under another id and replay it"
                )
    table = in_order(run.table for run in runs).unique(maintain_order=True)
    place = [name for name in COLUMNS if name not in ("value", "chance", "fidelity")]
    twice = table.filter(table.select(place).is_duplicated())
    if twice.height:
        policy, metric, trace = twice.select("policy", "metric", "trace").row(0)
        raise PolicyError(
            f"two of the runs have different values of {metric} for {policy or 'the trace'} on "
            f"{trace}, with the same parameters and schedule; take them one by one"
        )
    return table
