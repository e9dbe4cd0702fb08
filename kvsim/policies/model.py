"""The model of a trace, and whether another trace is of the same one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from kvsim.core.trace import Trace


def model_of(trace: Trace) -> dict[str, Any]:
    """The model of a trace: name, shape (layers, KV heads, dimensions), digest.

    digest: of what the trace says of it, name, type and checksum of its file; empty for nothing. Of
    a hub id the name is the last part, as of a folder.
    """
    recorded = trace.meta.get("model")
    model = recorded if isinstance(recorded, dict) else {}
    file = model.get("source")
    name = model.get("name")
    facts = [
        name.rpartition("/")[2] if isinstance(name, str) else name,
        model.get("type"),
        file.get("sha256") if isinstance(file, dict) else None,
    ]
    if trace.layer_ids != tuple(range(trace.n_layers)):  # what was learned belongs to these layers
        facts.append(list(trace.layer_ids))
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest() if model else ""
    return {
        "name": str(model.get("name", "")),
        "shape": [trace.n_layers, trace.n_heads, trace.dim],
        "digest": digest,
    }


def is_model(facts: object) -> bool:
    """Whether facts of a file are those of `model_of`, or nothing."""
    if not isinstance(facts, dict):
        return False
    shape = facts.get("shape")
    sizes = isinstance(shape, list) and len(shape) == 3 and all(type(x) is int for x in shape)
    named = isinstance(facts.get("name"), str) and isinstance(facts.get("digest"), str)
    return not facts or (sizes and named)


def differ(model: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two models of `model_of` are different ones; traces that name none may be of any."""
    return model["shape"] != other["shape"] or len({model["digest"], other["digest"]} - {""}) > 1


def described(model: Mapping[str, Any]) -> str:
    """Name and shape of a model of `model_of`."""
    layers, heads, dim = model["shape"]
    name = model["name"] or "a model"
    return f"{name} ({layers} layers, {heads} KV heads, {dim} dimensions)"
