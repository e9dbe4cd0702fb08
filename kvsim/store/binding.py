"""The binding of a trace: one seal over header, arrays and all chunks (docs/trace-format.md, 5).

With it, an open trace is one snapshot: what is read later is what its header describes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from reprlib import repr as short_repr
from typing import Any

from kvsim.core.checks import DTYPES, stored_dtype
from kvsim.core.digest import CHECKSUMMED, content_digest, document_digest
from kvsim.core.header import Header
from kvsim.schema import object_at
from kvsim.store.layout import UNSEALED, StoredArray
from kvsim.store.place import damaged

#: Attributes of a trace; anything else could change a meaning that no seal describes.
ATTRIBUTES = frozenset(
    (
        *("kvsim_format", "complete", "n_tokens", "committed_tokens", "prompt_len", "context_len"),
        *("questions", "owners", "sizes", "left_out"),
        *("attention", "ropes", "digest", "checksums", "name", "meta", "chunks", "seal"),
    )
)

Arrays = Mapping[str, StoredArray]


def seal(attributes: Mapping[str, Any], arrays: Arrays) -> str:
    """Return the seal, ``sha256:`` and 64 hex digits; attributes as JSON gives them."""
    facts = {
        "attributes": {key: value for key, value in attributes.items() if key != "seal"},
        "arrays": {
            name: {
                "shape": array.shape,
                "dtype": "string" if array.dtype.hasobject else array.dtype.name,
                "source_dtype": array.source_dtype,
            }
            for name, array in arrays.items()
            if name not in UNSEALED
        },
    }
    return document_digest(facts)


def sealed(
    attributes: Mapping[str, Any], arrays: Arrays, chunks: Mapping[str, bytes]
) -> dict[str, Any]:
    """Return the attributes with the seal; chunks: the checksums of each array's chunks."""
    listed = {name: data.hex() for name, data in chunks.items()}
    # as a reader gets them: keys that are numbers would be sorted differently
    plain: dict[str, Any] = json.loads(json.dumps({**attributes, "chunks": listed}))
    return {**plain, "seal": seal(plain, arrays)}


def check_attributes(attributes: Mapping[str, Any], where: str) -> None:
    """Raise TraceError for attributes that the format does not have."""
    if unexpected := attributes.keys() - ATTRIBUTES:
        raise damaged(f"{where}: attribute {short_repr(min(unexpected))} is not part of a trace")


def bound(arrays: Arrays, attributes: Mapping[str, Any], where: str) -> dict[str, StoredArray]:
    """Return the arrays with checksums of their chunks; TraceError where attributes name others."""
    listed, chunks = object_at(attributes, "chunks"), {}
    for name, array in arrays.items():
        text = listed.get(name)
        if not (isinstance(text, str) and re.fullmatch(f"[0-9a-f]{{{8 * array.nchunks}}}", text)):
            raise damaged(
                f"{where}: attribute chunks.{name} is {short_repr(text)}, expected 8 hex digits "
                f"for each of {array.nchunks} chunks"
            )
        chunks[name] = bytes.fromhex(text)
    return {name: replace(array, crcs=chunks[name]) for name, array in arrays.items()}


def check_binding(
    attributes: Mapping[str, Any], header: Header, arrays: Arrays, where: str
) -> None:
    """Raise TraceError unless digest and seal fit header and checksums; reads no chunk."""
    checksums = object_at(attributes, "checksums")
    for name in (*CHECKSUMMED, "token_text"):
        if name in checksums and name not in arrays:
            raise damaged(f"{where}: {name} has checksums and is not there, expected it")
        if name not in arrays:
            continue
        count = 1 if name.startswith("token") else len(header.layer_ids)
        recorded = checksums.get(name)
        if not (isinstance(recorded, list) and len(recorded) == count and are_checksums(recorded)):
            what = f"attribute checksums.{name} is {short_repr(recorded)}"
            raise damaged(f"{where}: {what}, expected {count} of 64 hex digits")
    shapes = {name: array.shape for name, array in arrays.items()}
    dtypes = {
        name: DTYPES[stored_dtype(array.number)] if array.dtype.kind in "fu" else array.dtype.name
        for name, array in arrays.items()
    }
    digest = content_digest(header, shapes, dtypes, checksums)
    if digest != attributes["digest"]:
        raise damaged(
            f"{where}: the digest of its header and checksums is {digest[:19]}..., recorded is "
            f"{attributes['digest'][:19]}..."
        )
    if attributes.get("seal") != seal(attributes, arrays):
        raise damaged(f"{where}: its seal does not fit its attributes and arrays")


def are_checksums(values: Iterable[object]) -> bool:
    """Return whether all values are SHA-256 in hex."""
    return all(isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) for value in values)
