"""Policies that a running model cannot follow."""

from __future__ import annotations

from collections.abc import Sequence

from kvsim.core.policy import Policy
from kvsim.engine.checks import (
    DROPS,
    FUTURE,
    MERGES,
    PART,
    QUERY_HEADS,
    ROUNDS,
    SLOTS,
    TRACE,
    refuse,
)


def check_live(policy: Policy, *, paged: bool = False) -> None:
    """Raise PolicyError for a policy that a running model cannot follow.

    paged: with a cache in blocks (`kvsim.runner.paged`).
    """
    advice = "which a running model cannot follow; replay it, or take another"
    refuse(policy, FUTURE, QUERY_HEADS, TRACE, advice=advice)
    if paged:
        advice = "and block tables are read whole, as they are; run it without --paged"
        refuse(policy, PART, ROUNDS, MERGES, advice=advice)


def check_layers(policy: Policy, layers: Sequence[int], n_layers: int) -> None:
    """Raise PolicyError for a policy of the whole model, where only some layers evict."""
    if tuple(layers) != tuple(range(n_layers)):
        advice = f"and layers {list(layers)} of {n_layers} evict; expected all: replay these alone"
        refuse(policy, SLOTS, DROPS, advice=advice)
