"""The metrics by name, with their units and better directions."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from kvsim.analysis.attention.metrics import METRICS as ATTENTION
from kvsim.analysis.definition import Metric
from kvsim.analysis.kept.metrics import CONTENTS, PLACES
from kvsim.analysis.live.metrics import METRICS as LIVE
from kvsim.analysis.output.metrics import METRICS as OUTPUT
from kvsim.analysis.prompt.metrics import METRICS as PROMPT
from kvsim.errors import PolicyError, suggest
from kvsim.registry import Registry

#: The entries of each room; an entry stands next to the functions that compute it.
ROOMS = (PLACES, ATTENTION, CONTENTS, OUTPUT, PROMPT, LIVE)


class Metrics(Registry[Metric]):
    """Metrics by name; one with `Metric.after` follows the metric of that name."""

    @cached_property
    def _order(self) -> list[str]:
        order = list(self._own)
        waiting = {name: self[name].after for name in super().__iter__() if name not in self._own}
        while waiting:
            ready = [name for name, after in waiting.items() if after in order] or [*waiting]
            for name in ready:
                after = waiting.pop(name)
                order.insert(order.index(after) + 1 if after in order else len(order), name)
        return order

    def __iter__(self) -> Iterator[str]:
        return iter(self._order)


#: All metrics, in the order of the rows of a Table.
METRICS = Metrics(
    "metric",
    "kvsim.metrics",
    (Metric,),
    {name: entry for entries in ROOMS for name, entry in entries.items()},
)


def metric(name: str) -> Metric:
    """The metric called `name`; PolicyError with a suggestion otherwise."""
    if name not in METRICS:
        close = suggest(name, METRICS)
        raise PolicyError(f"unknown metric {name!r}{close}; `kvsim metrics` lists all")
    return METRICS[name]
