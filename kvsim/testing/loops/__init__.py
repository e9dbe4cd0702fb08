"""A replay as plain loops in float64, to compare with what kvsim computes.

Nothing here is shared with the engine or the policies, so agreement means something. `replay` is
given a `Rule`: how a policy scores, what it protects, when it acts, and how it allocates.
"""

from kvsim.schema import NEVER
from kvsim.testing.loops.event import Doubt, Event, Propagated, Rule, Scored, first, last, union
from kvsim.testing.loops.rows import Cut, Outcome, event_rows, replay

__all__ = [
    "NEVER",
    "Cut",
    "Doubt",
    "Event",
    "Outcome",
    "Propagated",
    "Rule",
    "Scored",
    "event_rows",
    "first",
    "last",
    "replay",
    "union",
]
