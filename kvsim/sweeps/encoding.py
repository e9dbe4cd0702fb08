"""The records of a finished task as bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.core.record import Plans, Record, record_document, record_of
from kvsim.store.archive import decode_arrays, encode_arrays

_PLAN_ARRAYS = [f.name for f in fields(Plans) if f.name not in ("row", "layers", "notes")]

Arrays = dict[str, NDArray[Any]]


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
