"""The policies by name, one file per paper.

A new policy is one file here and its entry in `catalogue.py`. `policy` builds one from its name.
The names below are imported on first use, so that the file of a policy imports only its own needs.
"""

from __future__ import annotations

import reprlib
from importlib import import_module
from typing import TYPE_CHECKING

from kvsim.errors import PolicyError

if TYPE_CHECKING:
    from kvsim.core.policy import Policy, PolicyLike
    from kvsim.policies.catalogue import ACCESS, CATALOGUE
    from kvsim.policies.entry import Entry
    from kvsim.policies.naming import (
        describe,
        has_parameter,
        names,
        parameters,
        policy,
        variants,
    )

_HOME = {"ACCESS": "catalogue", "CATALOGUE": "catalogue", "Entry": "entry"}

__all__ = [
    "ACCESS",
    "CATALOGUE",
    "Entry",
    "as_policy",
    "describe",
    "has_parameter",
    "names",
    "parameters",
    "policy",
    "variants",
]


def as_policy(given: PolicyLike) -> Policy:
    """Return a policy, built if it is given by name; a bare scorer evicts every 128 rows.

    Raises PolicyError for anything else, and as `policy`.
    """
    # the file of a policy does not need it
    from kvsim.core.policy import Policy, Schedule, Scorer  # noqa: PLC0415

    if isinstance(given, Scorer):
        return Policy(given.label, given, schedule=Schedule(interval=128))
    if isinstance(given, str):
        given = import_module("kvsim.policies.naming").policy(given)
    if not isinstance(given, Policy):
        raise PolicyError(
            f"policy is {reprlib.repr(given)}; expected a name, a Scorer, or a Policy as "
            "kvsim.policy(NAME) returns"
        )
    return given


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"kvsim.policies.{_HOME.get(name, 'naming')}")
    globals()[name] = getattr(module, name)
    return globals()[name]
