"""Parts of a sweep that is not finished: what a process has computed is on disk as it finishes.

A run folder without `run.json` is unfinished. It holds

    sweep.json    what is computed: parameters, digests of traces, versions
    parts/        records of replayed cells, rows of measured cells, each file independent of others
    lock          locked by the process that writes to the folder

A part appears by a rename, and has its sweep and the SHA-256 of its name and content. A part that
is damaged or belongs to another sweep or cell is ignored, and its cells are computed again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, is_dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
import polars as pl
from numpy.typing import NDArray

from kvsim.analysis.folder import RUN, remove, replace_run, writing
from kvsim.analysis.parquet import decode_table, encode_table
from kvsim.analysis.table import in_order
from kvsim.core.digest import document_digest
from kvsim.core.policy import Policy
from kvsim.core.record import Plans, Record, record_document, record_of
from kvsim.core.trace import Trace
from kvsim.errors import OutputError
from kvsim.files import check_writable, hidden, lock, replace_file, unbroken
from kvsim.schema import plural
from kvsim.store.archive import decode_arrays, encode_arrays
from kvsim.store.inputs import read_file

SWEEP, PARTS, LOCK = "sweep.json", "parts", "lock"
_PLAN_ARRAYS = [f.name for f in fields(Plans) if f.name not in ("row", "layers", "notes")]

#: Most bytes of a part.
_LARGEST = 8 << 30

#: Errors of parts that are damaged, although their checksum fits.
_DAMAGED = (
    *(ValueError, TypeError, AttributeError, LookupError, EOFError, OSError, MemoryError),
    pl.exceptions.PolarsError,
)

Arrays = dict[str, NDArray[Any]]
Content = TypeVar("Content")


class Replayed(NamedTuple):
    """A replayed cell, and what it is compared with on the same terms (`Metric.beside`)."""

    record: Record
    oracle: Record | None = None
    optimum: Record | None = None
    unprotected: Record | None = None


class Rows(NamedTuple):
    """Rows of measured cells; trace: the name of the trace whose own rows are among them."""

    cells: tuple[int, ...]
    trace: str | None
    table: pl.DataFrame


def check_output(path: Path, *, resume: bool = False) -> None:
    """Raise OutputError unless a run can be written to `path`, or an unfinished one continued."""
    if resume and ((path / SWEEP).is_file() or is_complete(path)):
        return
    if path.exists() or path.is_symlink():
        raise OutputError(_exists(path))
    check_writable(path.parent)


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[None]:
    """Let a run be written in the place of the one at `path`, which is removed once that is there.

    If nothing is written, the old one stays. Raises OutputError for what is no run folder, and for
    one that another process writes to.
    """
    if not path.exists() and not path.is_symlink():
        yield
        return
    if not path.is_dir() or not ((path / RUN).is_file() or (path / SWEEP).is_file()):
        raise OutputError(f"{path} exists and is no run folder; expected one to replace")
    if (path / LOCK).exists():
        with (path / LOCK).open("ab") as file:
            if not lock(file, wait=False):
                raise OutputError(f"{path} is being written by another process; wait for it")
    old = hidden(path, "old")
    path.rename(old)
    try:
        yield
    finally:
        if path.exists():
            shutil.rmtree(old)
        else:
            old.rename(path)


def plan(
    traces: Sequence[Trace], policies: Sequence[Policy], parameters: Mapping[str, Any]
) -> dict[str, Any]:
    """Return all that the results of a sweep depend on, ready for JSON."""
    schedules = {policy.name: vars(policy.schedule) for policy in policies}
    return {
        **parameters,
        "schedules": schedules,
        "code": {name: code for policy in policies for name, code in code_of(policy)},
        "traces": {trace.name: identity(trace) for trace in traces},
        "versions": {name: version(name) for name in ("kvsim", "torch")},
    }


def identity(trace: Trace) -> str:
    """Return the digest of a trace, and that of its probe, which the former leaves out."""
    probe = trace.header.probe
    return trace.digest if probe is None else f"{trace.digest} {document_digest(probe.document())}"


def plan_digest(plan: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a plan in hex."""
    return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()


def other_sweep(folder: Path, differing: Sequence[str]) -> OutputError:
    """Return the error of a folder in which some parameters differ."""
    return OutputError(
        f"{folder} holds a run with other {', '.join(differing)}; expected the same to continue "
        "it, give another --out"
    )


def is_complete(folder: Path) -> bool:
    """Whether a folder holds a run of which nothing is left to do."""
    return (folder / RUN).is_file() and not (folder / SWEEP).exists()


def code_of(piece: object) -> Iterator[tuple[str, str]]:
    """Yield the modules of a policy's pieces that kvsim has not, with the SHA-256 of each."""
    name = type(piece).__module__
    path = getattr(sys.modules.get(name), "__file__", None)
    if not is_dataclass(piece):
        return
    if name.partition(".")[0] != "kvsim" and path is not None:
        yield name, hashlib.sha256(Path(path).read_bytes()).hexdigest()
    for each in fields(piece):
        yield from code_of(getattr(piece, each.name))


def _exists(path: Path) -> str:
    if (path / RUN).exists() or not (path / SWEEP).is_file():
        return f"{path} exists; give another --out or move it away, nothing was changed"
    return (
        f"{path} exists and holds an unfinished run; continue it with the same command and "
        "--resume, or give another --out, nothing was changed"
    )


class Parts:
    """The parts of one sweep in a folder, locked until the end of the context.

    Args:
        folder: the run folder; created unless a sweep is resumed.
        plan: what is computed, ready for JSON. A sweep with another plan is not resumed.
        resume: continue the sweep in `folder` if there is one.

    Raises OutputError if something else is in the folder, another process writes to it, or the
    system refuses; any method that writes raises it as well.
    """

    def __init__(self, folder: Path, plan: Mapping[str, Any], *, resume: bool) -> None:
        self.folder = folder
        self._plan = json.loads(json.dumps(plan))
        self._digest = bytes.fromhex(plan_digest(plan))
        check_output(folder, resume=resume)
        self._created = False
        with self._writing():
            with contextlib.suppress(FileExistsError):  # resumed, or another process was faster
                folder.mkdir(parents=True)
                self._created = True
            self._lock = (folder / LOCK).open("ab")
        if not lock(self._lock, wait=False):
            self._lock.close()
            raise OutputError(
                f"{folder} is being written by another process; wait for it, or give another --out"
            )
        try:
            with self._writing():
                self._begin(resume=resume)
        except BaseException:
            self.__exit__()
            raise

    def _begin(self, *, resume: bool) -> None:
        """Write the plan of a new sweep, or compare it with that of the old one."""
        path = self.folder / SWEEP
        if resume and path.is_file():
            self._check_plan(path)
        elif any(other.name != LOCK for other in self.folder.iterdir()):
            raise OutputError(_exists(self.folder))
        (self.folder / PARTS).mkdir(exist_ok=True)
        for partial in (self.folder / PARTS).glob(".*"):  # of a process that was killed
            partial.unlink()
        if not path.exists():
            replace_file(path, json.dumps(self._plan, indent=2).encode())

    def _check_plan(self, path: Path) -> None:
        """Raise OutputError unless the sweep in the folder computes the same."""
        try:
            stored = json.loads(path.read_bytes())
            differing = [key for key in self._plan if stored.get(key) != self._plan[key]]
        except (OSError, ValueError, AttributeError) as error:
            raise OutputError(
                f"{self.folder} cannot be continued: {SWEEP} is damaged; give another --out"
            ) from error
        if differing:
            raise other_sweep(self.folder, differing)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Unlock the folder; remove one that was created and has no parts."""
        with unbroken():
            if self._created and not self._names() and not (self.folder / RUN).exists():
                shutil.rmtree(self.folder, ignore_errors=True)
            self._lock.close()

    def _names(self) -> list[str]:
        return sorted(path.name for path in (self.folder / PARTS).glob("*.part"))

    # --- cells ---

    def add_cell(self, cell: int, replayed: Replayed) -> None:
        """Store a replayed cell."""
        self._put(f"cell-{cell:06}.part", encode_records(replayed))

    def add_rows(self, rows: Rows) -> None:
        """Store the rows of cells that were measured together."""
        arrays = {"table": np.frombuffer(encode_table(rows.table), np.uint8)}
        content = _encoded({"cells": rows.cells, "trace": rows.trace}, arrays)
        self._put(f"rows-{min(rows.cells):06}.part", content)

    def cells(self) -> dict[int, Replayed]:
        """Return the replayed cells by number."""

        def replayed(data: bytes) -> Replayed:
            record, *references = decode_records(data)
            if record is None:
                raise ValueError("a cell without its record")
            return Replayed(record, *references)

        return {int(name[5:11]): cell for name, cell in self._parts("cell-", replayed)}

    def rows(self) -> list[Rows]:
        """Return the measured cells."""

        def rows_of(data: bytes) -> Rows:
            meta, arrays = _decoded(data)
            table = in_order([decode_table(arrays["table"].tobytes())])
            return Rows(tuple(meta["cells"]), meta["trace"], table)

        return [rows for _, rows in self._parts("rows-", rows_of)]

    def _put(self, name: str, content: bytes) -> None:
        body = self._digest + content
        with self._writing():
            replace_file(self.folder / PARTS / name, _checksum(name, body) + body)

    def _parts(
        self, prefix: str, build: Callable[[bytes], Content]
    ) -> Iterator[tuple[str, Content]]:
        """Yield names of the parts of this sweep that are whole, and what is built of each."""
        for name in self._names():
            if not name.startswith(prefix):
                continue
            try:
                data = read_file(self.folder / PARTS / name, _LARGEST)
                checksum, body = data[:32], data[32:]
                if _checksum(name, body) != checksum or body[:32] != self._digest:
                    continue
                content = build(body[32:])
            except (OutputError, *_DAMAGED):
                continue
            yield name, content

    # --- the whole ---

    def publish(self, write: Callable[[Path], None], *, complete: bool) -> None:
        """Make the folder a run.

        write: writes the files of the run into an empty folder. complete: nothing is left to do, so
        the parts are removed.
        """
        with self._writing():
            replace_run(self.folder, write)
            for name in (SWEEP, PARTS, LOCK) if complete else ():
                remove(self.folder / name)

    def _writing(self) -> AbstractContextManager[None]:
        """Raise OutputError where the system refuses; an interrupt waits for the end."""
        again = "continue with the same command and --resume"
        return writing(str(self.folder), self._kept, again)

    def _kept(self) -> str:
        count = sum(name.startswith("cell-") for name in self._names())
        return f"with {plural(count, 'replayed cell')} kept" if count else "with nothing done"


def _checksum(name: str, body: bytes) -> bytes:
    """Return the SHA-256 of the name of a part, which says which cells it has, and its content."""
    return hashlib.sha256(name.encode() + body).digest()


def _encoded(meta: object, arrays: Arrays) -> bytes:
    """Return an archive of arrays and a JSON document."""
    return encode_arrays({"meta": np.frombuffer(json.dumps(meta).encode(), np.uint8), **arrays})


def _decoded(data: bytes) -> tuple[Any, Arrays]:
    """Return what `_encoded` stored. Raises one of `_DAMAGED` for another content."""
    arrays = decode_arrays(data)
    return json.loads(arrays.pop("meta").tobytes()), arrays


def encode_records(records: Sequence[Record | None]) -> bytes:
    """Return the content of a file of records with their decisions."""
    arrays: Arrays = {}
    documents = [
        None if record is None else _packed(record, f"{place}/", arrays)
        for place, record in enumerate(records)
    ]
    return _encoded(documents, arrays)


def decode_records(data: bytes) -> list[Record | None]:
    """Return the records of `encode_records`."""
    documents, arrays = _decoded(data)
    return [
        None if document is None else _unpacked(document, f"{place}/", arrays)
        for place, document in enumerate(documents)
    ]


def _packed(record: Record, prefix: str, arrays: Arrays) -> dict[str, Any]:
    """Return the JSON form of a record and its decisions; put their arrays into `arrays`."""
    arrays[f"{prefix}evicted_at"] = record.evicted_at
    if record.reads is not None:
        arrays[f"{prefix}reads"] = record.reads.bits
    plans = []
    for number, plan in enumerate(record.internals):
        place = f"{prefix}{number}/"
        plans.append({"row": plan.row, "layers": plan.layers, "notes": list(plan.notes)})
        arrays |= {f"{place}notes/{name}": note for name, note in plan.notes.items()}
        values = {name: getattr(plan, name) for name in _PLAN_ARRAYS}
        arrays |= {place + name: value for name, value in values.items() if value is not None}
    return record_document(record) | {"internals": plans}


def _unpacked(document: dict[str, Any], prefix: str, arrays: Arrays) -> Record:
    plans = []
    for number, plan in enumerate(document.pop("internals")):
        place = f"{prefix}{number}/"
        values: dict[str, Any] = {name: arrays.get(place + name) for name in _PLAN_ARRAYS}
        notes = {name: arrays[f"{place}notes/{name}"] for name in plan["notes"]}
        plans.append(Plans(plan["row"], tuple(plan["layers"]), notes=notes, **values))
    record = record_of(document, arrays[f"{prefix}evicted_at"], arrays.get(f"{prefix}reads"))
    return replace(record, internals=tuple(plans))
