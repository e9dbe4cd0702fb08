"""The rules of kvsim's own policies as plain loops in float64, to compare the policies with.

Written from the papers and the released code, and not from the policies: nothing is shared with
them. `rule` takes any policy by name: `NAMES` lists what stands alone, and `defaults` gives the
parameters of each. The replay that they run in is `kvsim.testing.loops`.
"""

from collections.abc import Mapping
from typing import Any

from kvsim.core.policy import Policy
from kvsim.errors import PolicyError
from kvsim.policies import policy as named
from kvsim.testing import check_policy, loops
from kvsim.testing.loops import NEVER, Cut, Outcome, Scored
from reference.classic import hash_score, splitmix64
from reference.composition import rule, ties_are_exact
from reference.event import Event
from reference.propagation import Descended
from reference.rules import NAMES, defaults, smallest_budget

__all__ = [
    "NAMES",
    "NEVER",
    "Cut",
    "Descended",
    "Event",
    "Outcome",
    "Scored",
    "check",
    "defaults",
    "hash_score",
    "rule",
    "rule_of",
    "smallest_budget",
    "splitmix64",
    "ties_are_exact",
]


def rule_of(policy: Policy) -> loops.Rule | None:
    """The rule of a policy with its parameters; None for a policy that is not kvsim's own."""
    try:
        parameters = defaults(policy.name)
        twin = named(policy.name, **policy.params)
    except PolicyError:
        return None
    if twin != policy:
        return None
    return rule(policy.name, {key: x for key, x in policy.params.items() if key in parameters})


def check(name: str, params: Mapping[str, Any], **options: Any) -> None:
    """`check_policy` of a policy by name, with its rule; test_reference.py compares the two."""
    policy = named(name, **params)
    of_policy = rule_of(policy)
    assert of_policy is not None, f"{name} has no rule; write one into tests/reference"
    exempt = () if "only" in options else ("naive_replay",)
    check_policy(policy, rule=of_policy, exempt=exempt, **options)
