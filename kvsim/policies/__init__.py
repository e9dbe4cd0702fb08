"""The policies by name, one file per paper.

A new policy is one file here and its lines in `catalogue.py`. `policy` builds one from its name.
"""

from __future__ import annotations

from typing import Any

from kvsim.core.policy import Policy
from kvsim.policies import naming
from kvsim.policies.catalogue import CATALOGUE
from kvsim.policies.naming import Description, Entry, Preset

__all__ = [
    "CATALOGUE",
    "Description",
    "Entry",
    "Preset",
    "describe",
    "has_parameter",
    "names",
    "parameters",
    "policy",
]


def policy(name: str, **params: Any) -> Policy:
    """The policy called `name`, with parameters replaced by `params`.

    A name is a scorer, `NAME[@PRESET]`, with wrappers and at most one allocator in front:
    `ams+expected_attention`, `adakv@kvpress+snapkv`, `ams+global+knorm`. Bare `ams` is `ams+tova`.
    A parameter goes to the outermost part that has it; `scorer__NAME` looks one part further in.
    `protect=Protection(sink, recent, prompt)` protects these entries, too.

    `package.module:NAME` is a policy of the user's own: a Policy, a Scorer, or something that
    returns one when called with `params`; it may stand behind a `+` too.

    Raises PolicyError for an unknown name, preset or parameter, a parameter out of its range, and
    parts that do not go together.
    """
    return naming.build(CATALOGUE, name, params)


def names() -> list[str]:
    """Every name of the catalogue, presets included, as `policy` takes it."""
    return [
        full
        for name, entry in CATALOGUE.items()
        for full in (name, *(f"{name}@{preset}" for preset in entry.presets))
    ]


def describe(name: str) -> Description:
    """What there is to know of a name of the catalogue, by itself and not crossed."""
    return naming.describe(CATALOGUE, name)


def parameters(name: str) -> tuple[str, ...]:
    """Names of the parameters that `policy` takes for `name`; none for a user's own."""
    return naming.parameter_names(CATALOGUE, name)


def has_parameter(name: str, key: str) -> bool:
    """Whether `policy` takes the parameter `key` for `name`, spelt in any way that it takes."""
    return naming.has_parameter(CATALOGUE, name, key)
