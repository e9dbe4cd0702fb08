"""What proves a policy right: generated traces, the invariants, and a naive replay to compare with.

    from kvsim.testing import check_policy
    check_policy("tova")                # a built-in policy by name
    check_policy(my_policy, budget=8)   # or one of your own

Needs the `test` extra (hypothesis).
"""
