"""The records of a finished task as bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvsim.core.record import Record, record_document, record_of
from kvsim.store.archive import decode_arrays, encode_arrays


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
