"""JSON of strangers: how large, how deep and how many values, before anything is made of it."""

from __future__ import annotations

import json
import math
import reprlib
from typing import Any

from kvsim.errors import TraceError
from kvsim.store.place import Place

#: Largest metadata document in bytes: of the group (it holds text), and of one array.
ROOT_LIMIT = 64 << 20
ARRAY_LIMIT = 1 << 20

#: Most values and deepest nesting of a document.
VALUES = 1 << 22
DEPTH = 64


def read_document(place: Place, key: str, where: str) -> dict[str, Any]:
    """The metadata document of a trace at `key`; `where` names the trace in error messages.

    Raises:
        TraceError: there is none, or it is unusable.
    """
    document = find_document(place, key, where)
    if document is None:
        raise TraceError(
            f"{where}: {key} is missing, expected a zarr group written by kvsim; "
            "give the folder of a trace"
        )
    return document


def find_document(place: Place, key: str, where: str) -> dict[str, Any] | None:
    """The metadata document of a trace at `key`, None where there is none.

    Raises:
        TraceError: it is unusable.
    """
    try:
        data = place.read(key, ARRAY_LIMIT if "/" in key else ROOT_LIMIT)
    except FileNotFoundError:
        return None
    return parse_json(data, key, where)


def parse_json(data: bytes, name: str, where: str) -> dict[str, Any]:
    """The object that the metadata document `data` holds.

    Raises:
        TraceError: it is no JSON object, or has more values, deeper nesting or larger whole numbers
            than any trace needs.
    """
    # each value but the first of a list or object comes after one of these; text has some too
    if sum(map(data.count, (b",", b"[", b"{"))) > VALUES:
        raise TraceError(f"{where}: {name} has more than {VALUES} values; record the trace again")
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise TraceError(
            f"{where}: {name} is not readable ({error}), expected JSON; "
            "copy the trace again or record it again"
        ) from error
    if not isinstance(document, dict):
        raise TraceError(f"{where}: {name} is no JSON object; record the trace again")
    _check_size(document, name, where)
    return document


def _check_size(document: dict[str, Any], name: str, where: str) -> None:
    """Refuse nesting that recursion would not survive, and numbers that no float holds."""
    level: list[Any] = [document]
    for _ in range(DEPTH):
        inner: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                inner.extend(one.values())
            elif isinstance(one, list):
                inner.extend(one)
            elif isinstance(one, int) and abs(one) >= 1 << 63:
                raise TraceError(
                    f"{where}: {name} has the number {brief(one)}, expected whole numbers of at "
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
    for key, one in items or (enumerate(value) if isinstance(value, list) else ()):
        check_numbers(one, f"{what}.{brief(key).strip(chr(39))}", where)


def said(error: BaseException) -> str:
    """What an error says, on one line of no great length; its kind where it says nothing."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def brief(value: object) -> str:
    """The value as a few printable characters on one line, however large it is."""
    return reprlib.repr(value)
