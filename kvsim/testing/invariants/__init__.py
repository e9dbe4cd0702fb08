"""What every policy must satisfy: a small function for each invariant, and their registry.

An invariant replays a `Trial`, and variations of it, and raises `Broken` with what it objects to.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from kvsim.testing.invariants.causality import absent_rows, causality, no_peeking_at_the_dead
from kvsim.testing.invariants.independence import (
    head_permutation,
    isolation,
    layer_blocks,
    naive_replay,
    ragged,
    rows_equal_events,
    thread_count,
)
from kvsim.testing.invariants.results import finite, retained_mass, round_trip
from kvsim.testing.invariants.sizes import (
    exact_size,
    full_budget,
    no_effect_while_there_is_room,
    nothing_returns,
    protected_survive,
    tie_rule,
)
from kvsim.testing.invariants.trial import Trial

Invariant = Callable[[Trial], None]

#: Every invariant by name, in the order in which they are tried.
INVARIANTS: Mapping[str, Invariant] = {
    invariant.__name__: invariant
    for invariant in (
        exact_size,
        nothing_returns,
        protected_survive,
        no_effect_while_there_is_room,
        full_budget,
        finite,
        tie_rule,
        causality,
        no_peeking_at_the_dead,
        absent_rows,
        isolation,
        rows_equal_events,
        layer_blocks,
        thread_count,
        ragged,
        head_permutation,
        retained_mass,
        round_trip,
        naive_replay,
    )
}

#: What policies of kvsim are exempt from by definition; a name stands for any part of a name.
EXEMPT: Mapping[str, Collection[str]] = {
    "random": {"head_permutation"},  # the head's number is part of the draw
    "tova": {"ragged"},  # one ranking for all heads is defined while they hold the same entries
    "rpc": {"ragged"},  # the same
    "criticalkv": {"ragged"},  # its first stage is a share of the even budget
    # each layer has its own budget, in some layers below the policy's even while there is room
    "pyramidkv": {"full_budget", "no_effect_while_there_is_room"},
    # it propagates a fixed number of rows even if the prompt just fills the budget
    "fastkv": {"full_budget", "no_effect_while_there_is_room"},
}
