"""Inputs of metrics: a trace, or a record of it, with analyses computed on first use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self, TypeVar

from kvsim.analysis.arrays import EvictedAt, event_rows
from kvsim.core.checks import resolve_device
from kvsim.core.outcome import Outcome, OutputDeviation
from kvsim.core.record import Record
from kvsim.core.trace import Trace

T = TypeVar("T")
Read = TypeVar("Read")


class Subjected:
    """The input of metrics, and results that several of them share, computed once.

    given: cache of results by function; prefill it to override.
    """

    given: dict[Callable[[Any], Any], Any]

    def of(self, compute: Callable[[Self], T]) -> T:
        """Return the result of `compute` on this object, computed once."""
        if compute not in self.given:
            self.given[compute] = compute(self)
        result: T = self.given[compute]
        return result


@dataclass(frozen=True)
class Analysis(Subjected):
    """The analyses of one trace.

    only: the layers that metrics of single layers read, all if None. given: see `Subjected`.
    """

    trace: Trace
    device: str = "cpu"
    only: Sequence[int] | None = None
    given: dict[Callable[[Any], Any], Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", resolve_device(self.device))
        object.__setattr__(self, "trace", self.trace.part())

    @property
    def layers(self) -> Sequence[int]:
        """The layers that metrics of single layers read."""
        if self.only is not None:
            return self.only
        return [layer for layer in range(self.trace.n_layers) if layer not in self.trace.windowed]


#: A walk over a trace that computes something for all of its records at once, on a device.
Walk = Callable[[Trace, Sequence[Record], str], Sequence[T]]

#: Entries of the layers that are computed together: more would take memory and save no time.
TOGETHER = 1 << 20

#: The outcome of a model that did not run.
NOTHING = Outcome(None)

Layers = Sequence[int]
#: Layers, and the rows [layer x H, T] after which entries of their heads are gone.
LayerGroup = tuple[Layers, EvictedAt]


@dataclass
class Subject(Subjected):
    """A trace, and a record of it with its output error.

    walk: the result for this record of a walk shared by all records. optimum: on the same terms,
    and its output error. outcome: of a model under the record, live or judged. given: see
    `Subjected`.
    """

    trace: Trace
    record: Record
    output: Callable[[], OutputDeviation]
    walk: Callable[[Walk[Any]], Any]
    optimum: tuple[Record, Callable[[], OutputDeviation]] | None = None
    outcome: Outcome = NOTHING
    given: dict[Callable[[Any], Any], Any] = field(default_factory=dict)

    @cached_property
    def layer_groups(self) -> list[LayerGroup]:
        """The layers of the record, grouped by equal kept sets."""
        gone = self.record.gone_after
        by_rows: dict[bytes, list[int]] = {}
        for index, evicted_at in enumerate(gone):
            by_rows.setdefault(event_rows(evicted_at).tobytes(), []).append(index)
        most = max(1, TOGETHER // max(1, gone[:1].size))
        groups = (
            group[start : start + most]
            for group in by_rows.values()
            for start in range(0, len(group), most)
        )
        return [
            ([self.record.layers[i] for i in group], gone[group].reshape(-1, gone.shape[-1]))
            for group in groups
        ]


def by_layer(
    records: Sequence[Record],
    read: Callable[[int], Read],
    compute: Callable[[Record, int, Read], T],
) -> list[list[T]]:
    """For each record the result of `compute` for each of its layers, in the record's order.

    compute: called with a record, the layer's index in the record, and the result of `read`, which
    is called once per layer.
    """
    results: list[dict[int, T]] = [{} for _ in records]
    for layer in sorted({layer for record in records for layer in record.layers}):
        content = read(layer)
        for record, by_index in zip(records, results, strict=True):
            if layer in record.layers:
                by_index[layer] = compute(record, record.layers.index(layer), content)
    each = zip(records, results, strict=True)
    return [[by_index[layer] for layer in record.layers] for record, by_index in each]
