"""The folder of a sweep that several processes compute: the file system is the queue.

    config.resolved.yaml   the grid, with what it was resolved to: parameters, digests, versions
    parts/KEY.parquet      the Table of a finished task
    parts/KEY.json         what the task has finished and what failed, whose keys give KEY, with the
                           SHA-256 of the other files
    parts/KEY.records      records of its cells, where the grid asks for them
    parts/KEY.claim        locked by the process that computes the task
    run.json, results.parquet, records.zarr, failures.json     the whole, once it is collected

A part appears with its KEY.json, by a rename. One that is damaged is ignored and computed again.
Cells are named by all that their values depend on, so what a grid shares with an earlier one in the
folder is not computed again.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import yaml

from kvsim.analysis.folder import CONFIG, writing
from kvsim.analysis.parquet import decode_table, encode_table
from kvsim.analysis.table import COLUMNS, OF_RECORD, in_order
from kvsim.core.record import Record, record_document, record_of
from kvsim.errors import ConfigError, OutputError, local_path
from kvsim.files import check_writable, lock, replace_file
from kvsim.store.archive import decode_arrays, encode_arrays
from kvsim.store.inputs import digests, read_document, read_file, sealed, unsealed
from kvsim.sweeps.grid import Dumper, Grid, read_grid, read_yaml
from kvsim.sweeps.outcome import Failure
from kvsim.sweeps.output import PARTS, locked, taken
from kvsim.sweeps.tasks import Outcome, Task

#: Most bytes of a Table or the records of a part.
_LARGEST = 8 << 30


class Kept:
    """The outcomes of tasks in memory, not in a folder (`Shards`); parts: finished ones by key."""

    def __init__(self) -> None:
        self.parts: dict[str, Outcome] = {}

    def scan(self) -> None:
        """Look for what other processes have finished."""

    def look(self, key: str) -> bool:
        """Whether a task has been finished, by this process or another one."""
        return key in self.parts

    @property
    def done(self) -> set[str]:
        """Keys of the cells that are finished, as far as `scan` has seen."""
        return {key for part in self.parts.values() for key in part.done}

    def claim(self, task: Task) -> bool:
        """Claim a task; False if another process computes it. A dead process has no claims."""
        return True

    def release(self, key: str) -> None:
        """Give up the claim to a task."""

    def claimed(self, task: Task) -> bool:
        """Whether a process computes a task now."""
        return False

    def close(self) -> None:
        """Give up all claims."""

    def add(self, task: Task, outcome: Outcome) -> None:
        """Keep what a task computed, and give up the claim to it."""
        self.parts[task.key] = outcome

    def tables(self, keys: Sequence[str]) -> list[pl.DataFrame]:
        """The rows of some finished cells, each once, those of a key before those of later ones."""
        owners = {key: name for name, part in self.parts.items() for key in part.done}
        by_part: dict[str, list[Mapping[str, Any]]] = {}
        for key in keys:
            if key in owners:
                name = owners[key]
                by_part.setdefault(name, []).append(self.parts[name].done[key])
        return [_rows(self._table(name), cells) for name, cells in by_part.items()]

    def records(self, keys: Sequence[str]) -> dict[str, Record]:
        """The records of some finished cells by their keys, as far as they are kept."""
        wanted = set(keys)
        out: dict[str, Record] = {}
        for name, part in self.parts.items():
            if not wanted.isdisjoint(part.done):
                out |= dict(zip(part.done, self._records(name), strict=True))
        return out

    def _table(self, key: str) -> pl.DataFrame:
        return self.parts[key].table

    def _records(self, key: str) -> Sequence[Record]:
        return self.parts[key].records


class Shards(Kept):
    """The folder of a sweep. Raises OutputError where something else is there or nothing can be."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.where = folder, str(folder)
        self._again = "run the same command again"
        self._withdrawn = False
        self._claims: dict[str, Any] = {}

    def begin(self, configuration: Mapping[str, Any], *, resume: bool | None = None) -> None:
        """Make the folder, or go on with one, and write what is computed.

        resume: False takes an empty folder alone; None goes on with what is there.
        """
        if resume is not None:
            self._withdrawn = self.is_empty()
            self._again = "continue with the same command and --resume"
        if resume is False and not self.is_empty():
            raise taken(self.where, begun=self.has_begun())
        # in this order: another process may begin the folder at this moment
        if not self.is_empty() and not self.has_begun():
            raise OutputError(
                f"{self.where} exists and is not the folder of a sweep; give another --out or "
                "move it away, nothing was changed"
            )
        check_writable(self.folder)
        text = yaml.dump(dict(configuration), Dumper=Dumper, sort_keys=False, allow_unicode=True)
        with self.writing():
            (self.folder / PARTS).mkdir(parents=True, exist_ok=True)
            replace_file(self.folder / CONFIG, text.encode())

    def check_kind(self, command: str, keys: AbstractSet[str], *, records: bool) -> None:
        """Raise OutputError where another command has results here that would be replaced.

        keys: of the cells of the new results. records: whether these have records. Replays and
        sweeps continue each other as long as nothing is lost.
        """
        begun = _commands(self.folder / CONFIG) if self.has_begun() else [command]
        if command in begun:
            return
        self.scan()
        lost = not records and any((self.folder / PARTS).glob("*.records"))
        if lost or "live" in (command, *begun) or not self.done <= keys:
            raise OutputError(
                f"{self.where} holds results of `kvsim {begun[0]}`, which `kvsim {command}` would "
                "replace; give another --out, nothing was changed"
            )

    def is_empty(self) -> bool:
        """Whether nothing is there, apart from what `begin` makes before the configuration."""
        if not self.folder.is_dir():
            return not (self.folder.exists() or self.folder.is_symlink())
        return all(
            path.name.startswith(f".{CONFIG}.")
            or (path.name == PARTS and path.is_dir() and not any(path.iterdir()))
            for path in self.folder.iterdir()
        )

    def has_begun(self) -> bool:
        """Whether the folder has the configuration of a sweep."""
        return (self.folder / CONFIG).exists()

    def grid(self) -> Grid:
        """The grid that the folder was begun with."""
        if not self.has_begun():
            raise OutputError(
                f"{self.where} is no folder of a sweep; expected what `kvsim sweep ... --out` made"
            )
        return read_grid(self.folder / CONFIG)

    def scan(self) -> None:
        """Read what has been finished since the last time."""
        for path in sorted((self.folder / PARTS).glob("*.json")):
            self.look(path.stem)

    def look(self, key: str) -> bool:
        """Whether a task has been finished, by this process or another one."""
        if key in self.parts:
            return True
        path = self.folder / PARTS / f"{key}.json"
        try:
            document = unsealed(read_document(path), path)
            for name, expected in document["files"].items():
                read_file(path.with_name(name), _LARGEST, expected)
            outcome = Outcome(
                pl.DataFrame(),  # read when it is needed, and so are records
                done={str(key): dict(cell) for key, cell in document["done"].items()},
                failed={str(key): Failure(**each) for key, each in document["failed"].items()},
                remarks=tuple(map(str, document["remarks"])),
            )
            names = set(document["files"]) - {f"{key}.records"}
            if outcome.key != key or names != {f"{key}.parquet"}:
                return False  # the part of other cells, under this name
        except (OutputError, OSError, KeyError, TypeError, ValueError, AttributeError):
            return False
        self.parts[key] = outcome
        return True

    def add(self, task: Task, outcome: Outcome) -> None:
        """Store what a task computed, under the key of these cells, and give up the claim to it."""
        folder, stem = self.folder / PARTS, outcome.key
        if not (outcome.done or outcome.failed):  # interrupted at its first cell
            self.release(task.key)
            return
        names = [f"{stem}.parquet"]
        with self.writing():
            replace_file(folder / names[0], encode_table(in_order([outcome.table])))
            if outcome.records:
                names.append(f"{stem}.records")
                replace_file(folder / names[1], encode_records(outcome.records))
            document = {
                "done": outcome.done,
                "failed": {key: vars(failure) for key, failure in outcome.failed.items()},
                "remarks": outcome.remarks,
                "files": digests(folder, *names),
            }
            text = json.dumps(sealed(document))
            replace_file(folder / f"{stem}.json", text.encode())
        self.parts.pop(stem, None)
        self.look(stem)
        self.release(task.key)

    def claim(self, task: Task) -> bool:
        """Claim a task; False if another process computes it. A dead process has no claims."""
        path = self.folder / PARTS / f"{task.key}.claim"
        with self.writing():
            file = path.open("ab")
        if lock(file, wait=False):
            self._claims[task.key] = file
            return True
        file.close()
        return False

    def claimed(self, task: Task) -> bool:
        """Whether a process computes a task now."""
        return locked(self.folder / PARTS / f"{task.key}.claim")

    def release(self, key: str) -> None:
        """Give up the claim to a task."""
        file = self._claims.pop(key, None)
        if file is not None:
            with contextlib.suppress(OSError):
                (self.folder / PARTS / f"{key}.claim").unlink(missing_ok=True)
            file.close()

    def withdraw(self) -> None:
        """Remove the folder if it was made for this run and no other process works in it."""
        if self._withdrawn and not self._used():
            shutil.rmtree(self.folder)

    def _used(self) -> bool:
        """Whether a cell is done or being computed, by any process."""
        self.scan()
        done = any(cell for part in self.parts.values() for cell in part.done.values())
        return done or any((self.folder / PARTS).glob("*.claim"))

    def _table(self, key: str) -> pl.DataFrame:
        path = self.folder / PARTS / f"{key}.parquet"
        return decode_table(read_file(path, _LARGEST))

    def _records(self, key: str) -> Sequence[Record]:
        return decode_records(read_file(self.folder / PARTS / f"{key}.records", _LARGEST))

    def close(self) -> None:
        """Give up all claims."""
        for key in list(self._claims):
            self.release(key)

    def writing(self) -> AbstractContextManager[None]:
        """Raise OutputError where the system refuses; an interrupt waits for the end."""
        return writing(self.where, "what is finished is kept", self._again)


def kept_in(out: str | Path | None) -> Kept:
    """Return what keeps a sweep: memory or a folder; OutputError for a URL."""
    return Kept() if out is None else Shards(local_path(out, OutputError))


def _commands(path: Path) -> list[str]:
    """Return the commands that may have written a configuration, one unless kvsim was older."""
    try:
        document = read_yaml(path)
    except ConfigError:
        document = None
    known = document if isinstance(document, dict) else {}
    guess = ["live"] if known.get("loop") else ["replay", "sweep"]
    return [str(known["command"])] if "command" in known else guess


def _rows(table: pl.DataFrame, cells: Sequence[Mapping[str, Any]]) -> pl.DataFrame:
    """The rows of some cells; one without columns has the rows of the trace alone."""
    schema = {name: COLUMNS[name] for name in OF_RECORD}
    requested = pl.DataFrame([dict(cell) for cell in cells], schema)
    return table.join(requested, on=list(OF_RECORD), how="semi", nulls_equal=True)


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
    """Return the records of `encode_records`; ValueError and its like for other content."""
    arrays = decode_arrays(data)
    documents = json.loads(arrays["meta"].tobytes())
    return [
        record_of(document, arrays[f"{place}/evicted_at"], arrays.get(f"{place}/reads"))
        for place, document in enumerate(documents)
    ]
