"""Outcomes of sweeps, and their folders: when one may be overwritten, and finished tasks.

    grid.json              the description: policies, traces by digest, options, versions, code
    parts/N-SHA.parquet    rows of cells of task N; SHA is of the file's content
    parts/N-SHA.records    their records, where they are kept
    run.json, results.parquet, records.zarr     the whole, at the end

Files appear by a rename; a file whose content differs from its name is ignored and recomputed.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from kvsim.analysis.folder import (
    CONFIG,
    decode_table,
    is_run,
    lacking,
    replace_run,
    write_run,
    writing,
)
from kvsim.analysis.live.table import responses
from kvsim.core.record import Record, record_document, record_of
from kvsim.errors import OutputError, local_path
from kvsim.files import check_writable, lock, published, read_input, replace_file, unbroken
from kvsim.store.inputs import decode_arrays, encode_arrays, read_document
from kvsim.sweeps.tasks import Failure, Outcome, Task

#: The finished tasks of a run, and the file that is locked while it is written.
PARTS, LOCK = "parts", "lock"
#: Errors of reading a damaged part.
_DAMAGES = OSError, KeyError, TypeError, ValueError, AttributeError, pl.exceptions.PolarsError
#: Most bytes of a part.
_LARGEST = 8 << 30


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
        """Write the three parts of a run into a folder without them."""
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
    """Versions of the libraries, and the time, ready for JSON."""
    return {
        "versions": {name: version(name) for name in ("kvsim", "torch", "zarr", "polars")}
        | {"python": platform.python_version()},
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }


class Parts:
    """The outcomes of tasks by number, in memory and, with `out`, in a folder.

    description: everything that results depend on, ready for JSON. A run in the folder is resumed;
    raises OutputError for other content, or the run of another description.
    """

    def __init__(self, out: str | Path | None, description: Mapping[str, Any]) -> None:
        self.outcomes: dict[int, list[Outcome]] = {}
        self.folder = None if out is None else local_path(out, OutputError)
        self._grid = json.loads(json.dumps(description))
        self._lock: Any = None
        if self.folder is None:
            return
        check_output(self.folder)
        self._begun = (self.folder / CONFIG).exists()
        if self._begun:
            there = read_document(self.folder / CONFIG)
            names = [x for x in {**self._grid, **there} if self._grid.get(x) != there.get(x)]
            if names:
                raise OutputError(
                    f"{self.folder} holds a run of other {', '.join(names)}; expected the same, "
                    "give another --out or --overwrite, nothing was changed"
                )
            for path in sorted((self.folder / PARTS).glob("*.parquet")):
                self._read(path)

    def done(self, task: Task) -> set[int]:
        """The numbers of the cells of a task that are finished."""
        return {number for part in self.outcomes.get(task.number, ()) for number in part.done}

    def left(self, tasks: Sequence[Task]) -> list[Task]:
        """The unfinished tasks, each with its unfinished cells."""
        rest = (task.without(self.done(task)) for task in tasks)
        return [task for task in rest if task is not None]

    def add(self, task: Task, outcome: Outcome) -> None:
        """Keep the outcome of a task."""
        self.outcomes.setdefault(task.number, []).append(outcome)
        begun = self._lock is not None or any(number >= 0 for number in outcome.done)
        if self.folder is None or not outcome.done or not begun:  # not for values of a trace alone
            return
        with self._writing() as folder:
            document: dict[str, Any] = {"done": outcome.done, "remarks": outcome.remarks}
            records = encode_records(outcome.records) if task.options["records"] else None
            document["records"] = None if records is None else _sha(records)
            content = io.BytesIO()
            outcome.table.write_parquet(content, metadata={"kvsim": json.dumps(document)})
            stem = f"{task.number}-{_sha(content.getvalue())}"
            if records is not None:
                replace_file(folder / PARTS / f"{stem}.records", records)
            replace_file(folder / PARTS / f"{stem}.parquet", content.getvalue())

    def publish(self, run: Run) -> None:
        """Write the whole run next to the parts."""
        if self.folder is not None:
            with self._writing() as folder:
                replace_run(folder, run.write)

    def close(self) -> None:
        """Let other processes work in the folder."""
        if self._lock is not None:
            self._lock.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[Path]:
        """Create the folder; OutputError where the system or another run refuses."""
        folder = self.folder or Path()
        with writing(str(folder), "finished tasks are kept", "give the same command again"):
            if self._lock is None:
                (folder / PARTS).mkdir(parents=True, exist_ok=True)
                file = (folder / LOCK).open("ab")
                if not lock(file) or (folder / CONFIG).exists() != self._begun:
                    file.close()
                    raise _being_written(folder)
                self._lock = file
                replace_file(folder / CONFIG, json.dumps(self._grid, indent=1).encode())
            yield folder

    def _read(self, path: Path) -> None:
        """Read a part whose content matches its name."""
        number, _, sha = path.stem.partition("-")
        try:
            data = read_input(path, _LARGEST)
            if sha != _sha(data):
                return
            document = json.loads(pl.read_parquet_metadata(io.BytesIO(data))["kvsim"])
            done = {int(cell): dict(columns) for cell, columns in document["done"].items()}
            records = b""
            if document["records"] is not None:
                records = read_input(path.with_suffix(".records"), _LARGEST)
            if records and document["records"] != _sha(records):
                return
            held = {x for part in self.outcomes.get(int(number), ()) for x in part.done}
            if held.isdisjoint(done):
                outcome = Outcome(decode_table(data), done=done, remarks=document["remarks"])
                outcome.records = decode_records(records) if records else []
                self.outcomes.setdefault(int(number), []).append(outcome)
        except _DAMAGES:
            return


def check_output(path: Path, *, overwrite: bool = False) -> None:
    """Raise OutputError unless a run can be written to `path`, resumed there, or replaced."""
    free = not (path.exists() or path.is_symlink())
    # a run killed at its start has only these
    free |= path.is_dir() and {each.name for each in path.iterdir()} <= {PARTS, LOCK}
    if not free and not (is_run(path) if overwrite else (path / CONFIG).is_file()):
        raise OutputError(
            f"{path} exists and is no run; give another --out or move it away, nothing was changed"
        )
    check_writable(path.parent)
    with contextlib.suppress(FileNotFoundError), (path / LOCK).open("rb") as file:
        if not lock(file):
            raise _being_written(path)


def _being_written(folder: Path) -> OutputError:
    return OutputError(f"{folder} is being written by another process; wait for it")


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def encode_records(records: Sequence[Record]) -> bytes:
    """Return the content of a file of records, without their internals."""
    documents = json.dumps([record_document(record) for record in records])
    arrays: dict[str, Any] = {"meta": np.frombuffer(documents.encode(), np.uint8)}
    for place, record in enumerate(records):
        arrays[f"{place}/evicted_at"] = record.evicted_at
        if record.reads is not None:
            arrays[f"{place}/reads"] = record.reads.bits
    return encode_arrays(arrays)


def decode_records(data: bytes) -> list[Record]:
    """Return the records of `encode_records`; ValueError and related errors for other content."""
    arrays = decode_arrays(data)
    documents = json.loads(arrays["meta"].tobytes())
    return [
        record_of(document, arrays[f"{place}/evicted_at"], arrays.get(f"{place}/reads"))
        for place, document in enumerate(documents)
    ]
