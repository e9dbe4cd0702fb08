"""The metrics by name, with their units and better directions."""

from __future__ import annotations

from typing import Any

from kvsim.analysis.attention.metrics import METRICS as ATTENTION
from kvsim.analysis.definition import Metric
from kvsim.analysis.kept.metrics import CONTENTS, PLACES
from kvsim.analysis.live.metrics import METRICS as LIVE
from kvsim.analysis.output.metrics import METRICS as OUTPUT
from kvsim.errors import PolicyError, suggest
from kvsim.registry import Ordered

_ROOMS = (PLACES, ATTENTION, CONTENTS, OUTPUT, LIVE)

#: All metrics, in the order of the rows of a Table.
METRICS = Ordered(
    "metric",
    "kvsim.metrics",
    (Metric,),
    {name: entry for entries in _ROOMS for name, entry in entries.items()},
)


def metric(name: Any) -> Metric:
    """The metric called `name`; PolicyError with a suggestion otherwise."""
    if not isinstance(name, str) or name not in METRICS:
        close = suggest(str(name), METRICS)
        own = "one of your own is an entry point (docs/add-a-policy.md)"
        raise PolicyError(f"unknown metric {name!r}{close}; `kvsim metrics` lists all, {own}")
    return METRICS[name]
