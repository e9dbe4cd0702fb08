"""What proves a policy right: generated traces, the invariants, and a naive replay to compare with.

    from kvsim.testing import check_policy
    check_policy("tova")                     # a built-in policy by name
    check_policy(my_policy, max_examples=5)  # or one of your own

`reference` is the naive replay and the naive metrics, `strategies` generates traces and settings,
`invariants` holds what `check_policy` tries. Needs the `test` extra (hypothesis).
"""

from kvsim.testing.invariants import INVARIANTS, InvariantError, check_policy

__all__ = ["INVARIANTS", "InvariantError", "check_policy"]
