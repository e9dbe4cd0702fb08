"""Checked indices of layers and heads, on the axes of a trace and of a record of it."""

from __future__ import annotations

import operator
import reprlib

from kvsim.core.record import Record
from kvsim.core.trace import Trace
from kvsim.errors import PolicyError


def checked_index(axis: str, index: int, count: int, owner: str) -> int:
    """Return an index of `count` things from 0; negative ones count from the end, -1 is the last.

    Raises PolicyError where `owner` has no such thing.
    """
    try:
        return range(count)[operator.index(index)]
    except (TypeError, IndexError):
        last = f"{axis}s 0 to {count - 1}, -1 is the last" if count else f"no {axis}s"
        text = f"{axis} is {reprlib.repr(index)}; {owner} has {last}"
        raise PolicyError(text) from None


def trace_layer(trace: Trace, layer: int) -> int:
    """Return the index of a layer in a trace, from 0 (see `checked_index`)."""
    return checked_index("layer", layer, trace.n_layers, trace.name)


def trace_head(trace: Trace, head: int) -> int:
    """Return the index of a KV head of a trace, from 0 (see `checked_index`)."""
    return checked_index("head", head, trace.n_heads, trace.name)


def record_layer(record: Record, layer: int) -> int:
    """Index of a layer on the layer axis of a record; PolicyError if it was not replayed."""
    if layer not in record.layers:
        raise PolicyError(
            f"layer is {reprlib.repr(layer)}; the record of {record.policy} on {record.trace} has "
            f"layers {', '.join(map(str, record.layers)) or 'none'}; give one of them"
        )
    return record.layers.index(layer)
