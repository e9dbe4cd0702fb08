"""Tests of a policy: generated traces, invariants, and a naive replay to compare with.

    from kvsim.testing import Rule, check_policy
    check_policy("tova")                       # a policy of kvsim by name
    check_policy(my_policy, max_examples=5)    # or one of your own
    check_policy(my_policy, rule=Rule(score))  # compared with plain loops that you write
    conforms("kept.npz", "snapkv")             # what another implementation keeps (docs/conform.md)

`loops` is the naive replay, `strategies` generates traces and settings,
`invariants` holds what `check_policy` tries. Needs the `test` extra (hypothesis).
"""

from kvsim.testing.check import InvariantError, check_policy
from kvsim.testing.conforms import conforms
from kvsim.testing.invariants import INVARIANTS
from kvsim.testing.loops import Event, Rule, Scored

__all__ = ["INVARIANTS", "Event", "InvariantError", "Rule", "Scored", "check_policy", "conforms"]
