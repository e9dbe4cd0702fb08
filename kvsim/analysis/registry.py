"""The metrics by name, with their units and better directions."""

from __future__ import annotations

from collections.abc import Mapping

from kvsim.analysis.attention.metrics import METRICS as ATTENTION
from kvsim.analysis.definition import Metric
from kvsim.analysis.kept.metrics import CONTENTS, PLACES
from kvsim.analysis.live.metrics import METRICS as LIVE
from kvsim.analysis.output.metrics import METRICS as OUTPUT
from kvsim.analysis.prompt.metrics import METRICS as PROMPT
from kvsim.errors import PolicyError, suggest

#: The entries of each room; an entry stands next to the functions that compute it.
ROOMS = (PLACES, ATTENTION, CONTENTS, OUTPUT, PROMPT, LIVE)

#: All metrics, in the order of the rows of a Table.
METRICS: Mapping[str, Metric] = {
    name: entry for entries in ROOMS for name, entry in entries.items()
}


def metric(name: str) -> Metric:
    """The metric called `name`; PolicyError with a suggestion otherwise."""
    if name not in METRICS:
        close = suggest(name, METRICS)
        raise PolicyError(f"unknown metric {name!r}{close}; `kvsim metrics` lists all")
    return METRICS[name]
