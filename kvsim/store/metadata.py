"""Metadata of a trace: untrusted JSON and the header as attributes (docs/trace-format.md, 3, 4)."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from reprlib import repr as short_repr
from typing import Any

from kvsim.core.attention import Formula, Rope
from kvsim.core.header import Header, printable
from kvsim.core.left_out import LeftOut
from kvsim.errors import TraceError, error_line
from kvsim.schema import FORMAT_VERSION, NEWEST_VERSION, object_at
from kvsim.store.chunks import read_part
from kvsim.store.layout import StoredArray
from kvsim.store.place import Place, damaged

#: Largest metadata document in bytes: of the group (it holds text), and of one array.
ROOT_LIMIT = 64 << 20
ARRAY_LIMIT = 1 << 20

Shapes = Mapping[str, tuple[int, ...]]

#: Most values and deepest nesting of a document.
VALUES = 1 << 22
DEPTH = 64


def find_document(place: Place, key: str) -> dict[str, Any] | None:
    """Return the metadata document of a trace at `key`, None if it is missing.

    Raises TraceError for anything but a JSON object, and for more values, deeper nesting or larger
    integers than any trace needs.
    """
    try:
        data = place.read(key, ARRAY_LIMIT if "/" in key else ROOT_LIMIT)
    except FileNotFoundError:
        return None
    try:
        return decode_document(data)
    except ValueError as error:
        raise damaged(f"{place.path}: {key} {error}") from error


def encode_document(document: Mapping[str, Any]) -> bytes:
    """Return a document as it is stored, which `decode_document` may refuse."""
    return json.dumps(document, indent=2).encode("ascii")


def decode_document(data: bytes, limit: int = ROOT_LIMIT) -> dict[str, Any]:
    """Return a document; ValueError, which says what no trace has, for one that is refused."""
    if len(data) > limit:
        raise ValueError(f"has {len(data)} bytes, expected at most {limit}")
    # each value is preceded by one of these characters; text has some too
    if sum(map(data.count, (b",", b"[", b"{"))) > VALUES:
        raise ValueError(f"has more than {VALUES} values")
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not readable ({error_line(error)}), expected JSON") from error
    if not isinstance(document, dict):
        raise ValueError("is not a JSON object")  # noqa: TRY004  of the data
    _check_size(document)
    return document


def check_format(attributes: Mapping[str, Any], where: str) -> None:
    """Raise TraceError for a trace, or a draft of one, of another version of the format."""
    version = attributes.get("kvsim_format")
    if version not in range(FORMAT_VERSION, NEWEST_VERSION + 1):
        raise TraceError(
            f"{where} was recorded by another version of kvsim (trace format "
            f"{short_repr(version)}, expected {FORMAT_VERSION} to {NEWEST_VERSION}); record it "
            "again"
        )


def left_out_of(attributes: Mapping[str, Any], where: str) -> LeftOut:
    """Return which rows a trace leaves out; TraceError for what names none."""
    value = attributes.get("left_out")
    if value is None and "left_out" not in attributes:
        return None
    if not (isinstance(value, list) and [*map(type, value)] == [int, int] and value[0] < value[1]):
        raise damaged(f"{where}: left_out is {short_repr(value)}, expected [start, stop] of rows")
    return value[0], value[1]


def group_attributes(place: Place) -> dict[str, Any]:
    """Return the attributes of a zarr group; empty if it has no metadata or no attributes."""
    return object_at(find_document(place, "zarr.json") or {}, "attributes")


def _check_size(document: dict[str, Any]) -> None:
    """Refuse nesting beyond what recursion allows, and integers beyond 64 bits."""
    level: list[Any] = [document]
    for _ in range(DEPTH):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                inner.extend(value.values())
            elif isinstance(value, list):
                inner.extend(value)
            elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
                raise ValueError(f"has {short_repr(value)}, expected integers of at most 64 bits")
        if not inner:
            return
        level = inner
    raise ValueError(f"is nested more than {DEPTH} deep, expected what docs/trace-format.md has")


def check_numbers(value: Any, what: str, where: str) -> None:
    """Raise TraceError for NaN or infinity anywhere in the JSON value `value`."""
    if isinstance(value, float) and not math.isfinite(value):
        raise damaged(f"{where}: {what} is {value}, expected a finite number")
    items = value.items() if isinstance(value, dict) else ()
    for key, item in items or (enumerate(value) if isinstance(value, list) else ()):
        # nearly all are finite: without the words for an error, which take ten times as long
        if isinstance(item, dict | list) or (isinstance(item, float) and not math.isfinite(item)):
            check_numbers(item, f"{what}.{short_repr(key).strip(chr(39))}", where)


def attributes_of(header: Header, version: int) -> dict[str, Any]:
    """Return the attributes that describe the header of a trace in a version of the format."""
    ropes = list(dict.fromkeys(header.ropes))
    return {
        "kvsim_format": version,
        "name": header.name,
        "prompt_len": header.prompt_len,
        **({} if header.context_len is None else {"context_len": header.context_len}),
        **({"questions": [*map(list, header.questions)]} if header.questions else {}),
        **({"owners": list(header.owners)} if header.owners else {}),
        **({"sizes": [*map(list, header.sizes)]} if header.sizes else {}),
        **({"left_out": list(header.left_out)} if header.left_out else {}),
        "attention": [
            {
                "scale": formula.scale,
                **({} if formula.softcap is None else {"softcap": formula.softcap}),
                **({} if formula.window is None else {"window": formula.window}),
                **({} if formula.chunk is None else {"chunk": formula.chunk}),
                **({"sinks": list(formula.sinks)} if formula.sinks else {}),
                "rope": ropes.index(rope),
            }
            for formula, rope in zip(header.formulas, header.ropes, strict=True)
        ],
        "ropes": [{**asdict(rope), "inv_freq": list(rope.inv_freq)} for rope in ropes],
        "meta": dict(header.meta),
    }


def whole_attributes(
    header: Header, shapes: Shapes, version: int, checksums: Mapping[str, Any], digest: str
) -> dict[str, Any]:
    """Return the attributes of a complete trace, without those that bind it."""
    counts = dict.fromkeys(("n_tokens", "committed_tokens"), shapes["k"][2])
    final = {"checksums": checksums, "digest": digest, "complete": True}
    return {**attributes_of(header, version), **counts, **final}


def read_header(
    attributes: Mapping[str, Any], arrays: Mapping[str, StoredArray], place: Place
) -> Header:
    """Return the header that the attributes and the arrays of a trace describe."""
    where = str(place.path)
    layer_ids = tuple(read_part(arrays["layer"], (), place).tolist())
    stored_ropes = [_rope(rope, where) for rope in _get(attributes, "ropes", list, where)]
    ropes, formulas = [], []
    for layer in _get(attributes, "attention", list, where):
        formulas.append(_formula(layer, where))
        index = layer.get("rope")
        if type(index) is not int or not 0 <= index < len(stored_ropes):
            raise damaged(
                f"{where}: rope {short_repr(index)} of a layer is not among the "
                f"{len(stored_ropes)} of attribute ropes"
            )
        ropes.append(stored_ropes[index])
    floats = {name: array for name, array in arrays.items() if array.dtype.kind in "fu"}
    return Header(
        prompt_len=_get(attributes, "prompt_len", int, where),
        formulas=tuple(formulas),
        ropes=tuple(ropes),
        layer_ids=layer_ids,
        name=printable(str(attributes.get("name", where))),
        source_dtypes={name: x.source_dtype or x.number for name, x in floats.items()},
        meta=object_at(attributes, "meta"),
        context_len=(
            _get(attributes, "context_len", int, where) if "context_len" in attributes else None
        ),
        owners=tuple(_get(attributes, "owners", list, where) if "owners" in attributes else ()),
        sizes=_lists(attributes, "sizes", where),
        questions=_lists(attributes, "questions", where),
        left_out=left_out_of(attributes, where),
    )


def _lists(attributes: Mapping[str, Any], key: str, where: str) -> tuple[Any, ...]:
    lists = _get(attributes, key, list, where) if key in attributes else ()
    return tuple(tuple(each) if isinstance(each, list) else () for each in lists)


def _get(attributes: Mapping[str, Any], key: str, kind: Any, where: str) -> Any:
    # JSON values are Any; the caller names the type it needs.
    value = attributes.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise damaged(
            f"{where}: attribute {key} is {short_repr(value)}, which docs/trace-format.md does not "
            "allow"
        )
    return value


@contextmanager
def _converting(attributes: Any, label: str, *keys: str) -> Iterator[None]:
    """Raise TraceError, with one line, for attributes that lack `keys` or have other types."""
    try:
        if unknown := attributes.keys() - set(keys):  # it could change what the layer computes
            raise ValueError(f"{short_repr(min(unknown))} is not a key of it")  # noqa: TRY301  one message
        yield
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        reason = error_line(error)
        raise damaged(f"{label} is not readable ({reason}), expected {', '.join(keys)}") from error


def _formula(attributes: Any, where: str) -> Formula:
    label = f"{where}: the attention of a layer"
    with _converting(attributes, label, "scale", "softcap", "window", "chunk", "sinks", "rope"):
        softcap, sizes = attributes.get("softcap"), {"window", "chunk"} & attributes.keys()
        return Formula(
            _number(attributes["scale"]),
            softcap=None if softcap is None else _number(softcap),
            **{name: operator.index(attributes[name]) for name in sizes},
            sinks=tuple(_number(sink) for sink in attributes.get("sinks") or ()),
        )


def _rope(attributes: Any, where: str) -> Rope:
    keys = ("inv_freq", "attention_scaling", "rotary_dim", "layout")
    with _converting(attributes, f"{where}: attribute rope", *keys):
        return Rope(
            tuple(_number(frequency) for frequency in attributes["inv_freq"]),
            _number(attributes["attention_scaling"]),
            operator.index(attributes["rotary_dim"]),
            attributes["layout"],
        )


def _number(value: Any) -> float:
    """Return a finite JSON number, or raise ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{short_repr(value)} is not a finite number")
    return float(value)
