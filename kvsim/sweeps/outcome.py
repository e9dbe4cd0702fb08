"""The outcome of a sweep, and the run folder that holds it."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import polars as pl

from kvsim.analysis.folder import lacking, write_run
from kvsim.analysis.live.table import responses
from kvsim.core.record import Record
from kvsim.errors import OutputError, local_path
from kvsim.files import published, unbroken


@dataclass(frozen=True)
class Failure:
    """A cell of a sweep that went wrong; the others are kept.

    unexpected: no error of kvsim, but one of a policy's own code. cell: its number in the sweep.
    """

    trace: str
    policy: str
    budget: int
    error: str
    unexpected: bool = False
    cell: int = 0


@dataclass(frozen=True)
class Run:
    """The outcome of a sweep: records in the order of traces, policies, budgets; one Table.

    interrupted: Ctrl-C ended the sweep; records and Table hold what was measured until then.
    digests, notes: of each trace, and remarks, where records are not kept.
    """

    records: tuple[Record, ...]
    table: pl.DataFrame
    failures: tuple[Failure, ...]
    parameters: dict[str, Any]
    interrupted: bool = False
    digests: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        counts = f"records={len(self.records)}, failed={len(self.failures)}"
        policies = ", ".join(self.table["policy"].drop_nulls().unique(maintain_order=True))
        return f"Run({policies}; {counts}{lacking(self.parameters, ', ')})"

    def whole(self) -> Run:
        """Return the run itself; raise KeyboardInterrupt if Ctrl-C ended it."""
        if self.interrupted:
            raise KeyboardInterrupt
        return self

    @property
    def remarks(self) -> list[str]:
        """Remarks on the results, each once."""
        remarks = (*(record.remark for record in self.records), *self.notes)
        return list(dict.fromkeys(line for each in remarks for line in each.split("\n") if line))

    @property
    def responses(self) -> pl.DataFrame:
        """The responses of a live run, a row per cell (`kvsim.analysis.live.table`)."""
        return responses(self.records)

    def save(self, out: str | Path) -> Path:
        """Write `run.json`, `records.zarr` and `results.parquet` into a new folder `out`.

        The folder appears whole or not at all. Raises OutputError where something is there
        already, other than an empty folder.
        """
        folder = local_path(out, OutputError)
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
        with published(folder) as draft, unbroken():
            draft.mkdir()
            self.write(draft)
        return folder

    def write(self, folder: Path) -> None:
        """Write the three parts of a run into a folder that has none of them."""
        write_run(folder, self.describe(), self.records, self.table)

    def describe(self) -> dict[str, Any]:
        """Parameters, traces with their digests, versions and failures, ready for JSON."""
        traces = {record.trace: record.digest for record in self.records} | dict(self.digests)
        return {
            **self.parameters,
            "traces": traces,
            "failures": [vars(failure) for failure in self.failures],
            "remarks": self.remarks,
            "interrupted": self.interrupted,
            **provenance(),
        }


def provenance() -> dict[str, Any]:
    """Versions of what computes, and the time, ready for JSON."""
    return {
        "versions": {name: version(name) for name in ("kvsim", "torch", "zarr", "polars")}
        | {"python": platform.python_version()},
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }
