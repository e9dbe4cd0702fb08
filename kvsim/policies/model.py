"""The model of a trace, and whether another trace has the same model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvsim.core.trace import Trace
from kvsim.errors import PolicyError
from kvsim.schema import object_at


def model_of(trace: Trace) -> dict[str, Any]:
    """The model of a trace: name, shape (layers, KV heads, dimensions), digest, weights.

    digest: of the model's name, type and file checksum in the trace; empty without any. The name of
    a hub id or folder is its last part. weights: their digest, where it is known.
    """
    model = object_at(trace.meta, "model")
    name = model.get("name")
    facts = [
        name.rpartition("/")[2] if isinstance(name, str) else name,
        model.get("type"),
        object_at(model, "source").get("sha256"),
    ]
    known = any(facts)  # a live run states only its layers
    if trace.layer_ids != tuple(range(trace.n_layers)):  # plans belong to these layers
        facts.append(list(trace.layer_ids))
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest() if known else ""
    return {
        "name": str(model.get("name", "")),
        "shape": [trace.n_layers, trace.n_heads, trace.dim],
        "digest": digest,
        **({"weights": str(model["weights"])} if model.get("weights") else {}),
    }


def is_model(facts: object) -> bool:
    """Whether facts of a file are empty, or as `model_of` returns."""
    if not isinstance(facts, dict):
        return False
    shape = facts.get("shape")
    sizes = isinstance(shape, list) and len(shape) == 3 and all(type(x) is int for x in shape)
    texts = {"weights": "", **facts}
    named = all(isinstance(texts.get(key), str) for key in ("name", "digest", "weights"))
    return not facts or (sizes and named)


def differ(model: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two models of `model_of` differ; an unnamed model may be any."""
    both = (model, other)
    known = ({each.get(key, "") for each in both} - {""} for key in ("digest", "weights"))
    return model["shape"] != other["shape"] or any(len(digests) > 1 for digests in known)


def common_model(traces: Sequence[Trace]) -> dict[str, Any]:
    """The model of all traces, most completely described. Raises PolicyError for several models."""
    models = [model_of(trace) for trace in traces]
    at, common = max(enumerate(models), key=lambda each: len(each[1]))
    for trace, model in zip(traces, models, strict=True):
        if differ(model, common):
            raise PolicyError(
                f"{trace.name} is of {described(model)} and {traces[at].name} of "
                f"{described(common)}; expected traces of one model"
            )
    return common


def described(model: Mapping[str, Any]) -> str:
    """Name, shape and, where known, weights of a model of `model_of`."""
    layers, heads, dim = model["shape"]
    name = model["name"] or "a model"
    weights = f", weights {model['weights'][:19]}" if model.get("weights") else ""
    return f"{name} ({layers} layers, {heads} KV heads, {dim} dimensions{weights})"
