"""Untrusted JSON: its size, depth and number of values are limited before it is used."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvsim.errors import TraceError
from kvsim.store.place import Folder, Place

#: Largest metadata document in bytes: of the group (it holds text), and of one array.
ROOT_LIMIT = 64 << 20
ARRAY_LIMIT = 1 << 20

#: Most values and deepest nesting of a document.
VALUES = 1 << 22
DEPTH = 64


def read_document(place: Place, key: str, where: str) -> dict[str, Any]:
    """Return the metadata document of a trace at `key`; `where` names the trace in messages.

    Raises:
        TraceError: it is missing or unusable.
    """
    document = find_document(place, key, where)
    if document is None:
        raise TraceError(
            f"{where}: {key} is missing, expected a zarr group written by kvsim; "
            "give the folder of a trace"
        )
    return document


def read_json(path: Path, where: str) -> dict[str, Any]:
    """Return the metadata document at `path`, as `read_document`."""
    return read_document(Folder(path.parent), path.name, where)


def find_document(place: Place, key: str, where: str) -> dict[str, Any] | None:
    """Return the metadata document of a trace at `key`, None if it is missing.

    Raises:
        TraceError: it is not a JSON object, or has more values, deeper nesting or larger integers
            than any trace needs.
    """
    try:
        data = place.read(key, ARRAY_LIMIT if "/" in key else ROOT_LIMIT)
    except FileNotFoundError:
        return None
    # each value is preceded by one of these characters; text has some too
    if sum(map(data.count, (b",", b"[", b"{"))) > VALUES:
        raise TraceError(f"{where}: {key} has more than {VALUES} values; record the trace again")
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise TraceError(
            f"{where}: {key} is not readable ({error}), expected JSON; "
            "copy the trace again or record it again"
        ) from error
    if not isinstance(document, dict):
        raise TraceError(f"{where}: {key} is not a JSON object; record the trace again")
    _check_size(document, key, where)
    return document


def _check_size(document: dict[str, Any], name: str, where: str) -> None:
    """Refuse nesting beyond what recursion allows, and integers beyond 64 bits."""
    level: list[Any] = [document]
    for _ in range(DEPTH):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                inner.extend(value.values())
            elif isinstance(value, list):
                inner.extend(value)
            elif isinstance(value, int) and abs(value) >= 1 << 63:
                raise TraceError(
                    f"{where}: {name} has the number {short_repr(value)}, expected integers of at "
                    "most 64 bits; record the trace again"
                )
        if not inner:
            return
        level = inner
    raise TraceError(
        f"{where}: {name} is nested more than {DEPTH} deep, expected what docs/trace-format.md "
        "describes; record the trace again"
    )


def check_numbers(value: Any, what: str, where: str) -> None:
    """Raise TraceError for NaN or infinity anywhere in the JSON value `value`."""
    if isinstance(value, float) and not math.isfinite(value):
        raise TraceError(f"{where}: {what} is {value}, expected a finite number; record it again")
    items = value.items() if isinstance(value, dict) else ()
    for key, item in items or (enumerate(value) if isinstance(value, list) else ()):
        check_numbers(item, f"{what}.{short_repr(key).strip(chr(39))}", where)


def object_at(document: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the object at a key; empty if another writer put something else there."""
    value = document.get(key)
    return value if isinstance(value, dict) else {}


def error_line(error: BaseException) -> str:
    """Return the message of an error on one line, shortened; its class if it has none."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def short_repr(value: object) -> str:
    """Return the repr of a value, shortened to a few printable characters on one line."""
    return reprlib.repr(value)
