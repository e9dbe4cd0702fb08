"""A replay by a `Rule` as plain loops in float64, which shares nothing with engine or policies."""

from kvsim.schema import NEVER
from kvsim.testing.loops.event import Doubt, Event, Rule, Scored, first, last, union
from kvsim.testing.loops.rows import Cut, Outcome, event_rows, first_difference, replay

__all__ = [
    "NEVER",
    "Cut",
    "Doubt",
    "Event",
    "Outcome",
    "Rule",
    "Scored",
    "event_rows",
    "first",
    "first_difference",
    "last",
    "replay",
    "union",
]
