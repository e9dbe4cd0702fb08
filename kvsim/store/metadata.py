"""The header of a trace as attributes of its group (docs/trace-format.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvsim.core.attention import Formula, Rope
from kvsim.core.header import OPTIONAL, Header, listed, printable
from kvsim.errors import TraceError, error_line
from kvsim.schema import FORMAT_VERSION, object_at


def attributes_of(header: Header) -> dict[str, Any]:
    """Return the attributes that describe the header of a trace."""
    ropes = list(dict.fromkeys(header.ropes))
    return {
        "kvsim_format": FORMAT_VERSION,
        "name": header.name,
        "prompt_len": header.prompt_len,
        "layer_ids": list(header.layer_ids),
        **header.optional,
        "attention": [
            {key: listed(x) for key, x in vars(formula).items() if x not in (None, ())}
            | {"rope": ropes.index(rope)}
            for formula, rope in zip(header.formulas, header.ropes, strict=True)
        ],
        "ropes": [{key: listed(x) for key, x in vars(rope).items()} for rope in ropes],
        "meta": dict(header.meta),
    }


def read_header(attributes: Mapping[str, Any], dtypes: Mapping[str, str], where: str) -> Header:
    """Return the header that the attributes of a trace describe; TraceError for any other.

    dtypes: of each array of floating-point numbers, the dtype in the model.
    """
    try:
        ropes = [Rope(**rope) for rope in attributes["ropes"]]
        layers = [dict(layer) for layer in attributes["attention"]]
        places = [layer.pop("rope") for layer in layers]
        return Header(
            prompt_len=attributes["prompt_len"],
            formulas=tuple(Formula(**layer) for layer in layers),
            ropes=tuple(ropes[place] for place in places),
            layer_ids=attributes["layer_ids"],
            name=printable(str(attributes["name"])),
            source_dtypes=dtypes,
            meta=object_at(attributes, "meta"),
            **{key: attributes[key] for key in OPTIONAL if key in attributes},
        )
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise TraceError(
            f"{where}: its attributes are not readable ({error_line(error)}), expected those of "
            "docs/trace-format.md; copy the trace again or record it again"
        ) from error
