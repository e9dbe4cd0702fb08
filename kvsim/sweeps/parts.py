"""What a run folder may be written over, and the records of its parts as bytes."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.analysis.folder import CONFIG, RUN, is_run
from kvsim.core.record import Plans, Record, record_document, record_of
from kvsim.errors import OutputError
from kvsim.files import check_writable, hidden, lock
from kvsim.store.archive import decode_arrays, encode_arrays

PARTS = "parts"
_PLAN_ARRAYS = [f.name for f in fields(Plans) if f.name not in ("row", "layers", "notes")]

Arrays = dict[str, NDArray[Any]]


def check_output(path: Path, *, resume: bool = False) -> None:
    """Raise OutputError unless a run can be written to `path`, or one that is there continued."""
    begun = (path / CONFIG).is_file()
    if not (resume and begun) and (path.exists() or path.is_symlink()):
        raise taken(str(path), begun=begun)
    check_writable(path.parent)


def taken(where: str, *, begun: bool) -> OutputError:
    """Return the error of a folder in which something is; begun: a run of kvsim."""
    what = "; give another --out or move it away"
    if begun:
        what = " and holds a run; continue it with the same command and --resume, or give another "
        what += "--out"
    return OutputError(f"{where} exists{what}, nothing was changed")


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[None]:
    """Let a run be written in the place of the one at `path`, which is removed once that is there.

    If nothing is written, the old one stays. Raises OutputError for what is no run folder, and for
    one that another process writes to.
    """
    if not path.exists() and not path.is_symlink():
        yield
        return
    if not path.is_dir() or not is_run(path):
        raise OutputError(f"{path} exists and is no run folder; expected one to replace")
    if any(map(locked, (path / PARTS).glob("*.claim"))):
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


def locked(claim: Path) -> bool:
    """Whether a process holds a claim."""
    try:
        with claim.open("rb") as file:
            return not lock(file, wait=False)
    except FileNotFoundError:
        return False


def is_complete(folder: Path) -> bool:
    """Whether a folder holds a run of which nothing is left to do."""
    try:
        return bool(json.loads((folder / RUN).read_bytes()).get("missing", 0) == 0)
    except (OSError, ValueError, AttributeError):
        return False


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
