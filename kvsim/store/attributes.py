"""The header of a trace as attributes of its zarr group (docs/trace-format.md, 3 and 4)."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from kvsim.core.attention import Formula, Rope
from kvsim.core.header import Header, printable
from kvsim.errors import TraceError
from kvsim.schema import FORMAT_VERSION
from kvsim.store.documents import error_line, short_repr


def attributes_of(header: Header) -> dict[str, Any]:
    """Return the attributes, in the oldest format version that can hold the header."""
    attributes: dict[str, Any] = {
        "kvsim_format": 1 if header.uniform else FORMAT_VERSION,
        "name": header.name,
        "prompt_len": header.prompt_len,
    }
    if header.uniform:
        attributes["scale"], attributes["mask"] = header.formulas[0].scale, {"kind": "causal"}
        attributes["rope"] = _rope_attributes(header.ropes[0])
    else:
        ropes = list(dict.fromkeys(header.ropes))
        attributes["attention"] = [
            {**_formula_attributes(formula), "rope": ropes.index(rope)}
            for formula, rope in zip(header.formulas, header.ropes, strict=True)
        ]
        attributes["ropes"] = [_rope_attributes(rope) for rope in ropes]
    return {**attributes, "meta": dict(header.meta)}


def read_header(
    attributes: Mapping[str, Any],
    *,
    layer_ids: tuple[int, ...],
    source_dtypes: Mapping[str, str],
    where: str,
) -> Header:
    """Return the header that `attributes` describe; `where` names the trace in error messages."""
    attributes = _upgraded(attributes, len(layer_ids), where)
    layers = _get(attributes, "attention", list, where)
    stored_ropes = [_rope(rope, where) for rope in _get(attributes, "ropes", list, where)]
    ropes, formulas = [], []
    for layer in layers:
        formulas.append(_formula(layer, where))
        index = layer.get("rope")
        if type(index) is not int or not 0 <= index < len(stored_ropes):
            raise TraceError(
                f"{where}: rope {short_repr(index)} of a layer is not among the "
                f"{len(stored_ropes)} of attribute ropes; record the trace again"
            )
        ropes.append(stored_ropes[index])
    meta = attributes.get("meta", {})
    return Header(
        prompt_len=_get(attributes, "prompt_len", int, where),
        formulas=tuple(formulas),
        ropes=tuple(ropes),
        layer_ids=layer_ids,
        name=printable(str(attributes.get("name", where))),
        source_dtypes=source_dtypes,
        meta=meta if isinstance(meta, dict) else {},
    )


def _get(attributes: Mapping[str, Any], key: str, kind: Any, where: str) -> Any:
    # JSON values are Any; the caller names the type it needs.
    value = attributes.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TraceError(
            f"{where}: attribute {key} is {short_repr(value)}, which docs/trace-format.md does not "
            "allow; record the trace again"
        )
    return value


def _upgraded(attributes: Mapping[str, Any], n_layers: int, where: str) -> Mapping[str, Any]:
    """Attributes of format version 1 as version 2 has them; those of version 2 unchanged.

    Version 1 has one scale and one rotary embedding for all layers, and causal attention only.
    """
    if attributes.get("kvsim_format") != 1:
        return attributes
    mask = _get(attributes, "mask", dict, where).get("kind")
    if mask != "causal":
        raise TraceError(
            f"{where}: attribute mask.kind is {short_repr(mask)}, expected 'causal', the only one "
            "of format version 1; record the trace again"
        )
    layer = {"scale": attributes.get("scale"), "rope": 0}
    return {
        **attributes,
        "attention": [layer] * n_layers,
        "ropes": [_get(attributes, "rope", dict, where)],
    }


def _formula_attributes(formula: Formula) -> dict[str, Any]:
    optional = {
        "softcap": formula.softcap,
        "window": formula.window,
        "sinks": list(formula.sinks) or None,
    }
    return {"scale": formula.scale, **{key: x for key, x in optional.items() if x is not None}}


def _formula(attributes: Any, where: str) -> Formula:
    try:
        softcap, window = attributes.get("softcap"), attributes.get("window")
        return Formula(
            _number(attributes["scale"]),
            softcap=None if softcap is None else _number(softcap),
            window=None if window is None else operator.index(window),
            sinks=tuple(_number(sink) for sink in attributes.get("sinks") or ()),
        )
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise TraceError(
            f"{where}: the attention of a layer is not readable ({error_line(error)}), expected "
            "scale, and optionally softcap, window and sinks; record the trace again"
        ) from error


def _rope_attributes(rope: Rope) -> dict[str, Any]:
    return {**asdict(rope), "inv_freq": list(rope.inv_freq)}


def _rope(attributes: Any, where: str) -> Rope:
    try:
        return Rope(
            tuple(_number(frequency) for frequency in attributes["inv_freq"]),
            _number(attributes["attention_scaling"]),
            operator.index(attributes["rotary_dim"]),
            attributes["layout"],
        )
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        raise TraceError(
            f"{where}: attribute rope is not readable ({error_line(error)}), expected inv_freq, "
            "attention_scaling, rotary_dim and layout; record the trace again"
        ) from error


def _number(value: Any) -> float:
    """Return a finite JSON number, or raise ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{short_repr(value)} is not a finite number")
    return float(value)
