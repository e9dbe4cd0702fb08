"""A walk over the layers of a trace that reads each layer once for all records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from kvsim.core.record import Record

Layer = TypeVar("Layer")
T = TypeVar("T")


def by_layer(
    records: Sequence[Record],
    read: Callable[[int], Layer],
    compute: Callable[[Record, int, Layer], T],
) -> list[list[T]]:
    """For each record what `compute` returns for each of its layers, in the record's order.

    compute: called with a record, the place of a layer among the record's, and what `read` returned
    for the layer, which is called once.
    """
    results: list[dict[int, T]] = [{} for _ in records]
    for layer in sorted({layer for record in records for layer in record.layers}):
        content = read(layer)
        for record, by_index in zip(records, results, strict=True):
            if layer in record.layers:
                by_index[layer] = compute(record, record.layers.index(layer), content)
    each = zip(records, results, strict=True)
    return [[by_index[layer] for layer in record.layers] for record, by_index in each]
