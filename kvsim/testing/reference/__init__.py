"""The replay and its metrics once more, as naively as the definitions read.

Nothing here is shared with the engine or the policies, so that agreement means something. `replay`
takes any policy by name: `NAMES` lists what stands alone, `OUTER` what is put around it,
`PROPAGATIONS` what stands before all of that, and `defaults` gives the parameters of each.
"""

from kvsim.testing.reference.basics import NEVER
from kvsim.testing.reference.classic import hash_score, splitmix64
from kvsim.testing.reference.event import Event, Scored
from kvsim.testing.reference.loop import Cut, Outcome, event_rows, replay
from kvsim.testing.reference.metrics import (
    Outputs,
    Overlap,
    WindowOverlap,
    Wipeout,
    acting_rows,
    outputs,
    retained_iou,
    seen_by,
    window_overlap,
    wipeout,
)
from kvsim.testing.reference.propagation import PROPAGATIONS, Propagated, propagate
from kvsim.testing.reference.rules import (
    NAMES,
    OUTER,
    RULES,
    Chain,
    Outer,
    Rule,
    defaults,
    parse,
    smallest_budget,
)

__all__ = [
    "NAMES",
    "NEVER",
    "OUTER",
    "PROPAGATIONS",
    "RULES",
    "Chain",
    "Cut",
    "Event",
    "Outcome",
    "Outer",
    "Outputs",
    "Overlap",
    "Propagated",
    "Rule",
    "Scored",
    "WindowOverlap",
    "Wipeout",
    "acting_rows",
    "defaults",
    "event_rows",
    "hash_score",
    "outputs",
    "parse",
    "propagate",
    "replay",
    "retained_iou",
    "seen_by",
    "smallest_budget",
    "splitmix64",
    "window_overlap",
    "wipeout",
]
