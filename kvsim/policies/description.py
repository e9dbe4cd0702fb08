"""Descriptions of names, as `kvsim policies` shows them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvsim.core.parameters import Parameter, parameters
from kvsim.core.pieces import Piece
from kvsim.core.policy import Policy, chain_of
from kvsim.errors import PolicyError
from kvsim.policies.entry import Entry
from kvsim.policies.full import Full
from kvsim.policies.naming import BEHIND, canonical, policy, written_parts


class Description(NamedTuple):
    """A name by itself: its entry, its parameters, and the policy, around TOVA if it must be."""

    name: str
    entry: Entry
    accepts: Mapping[str, Parameter]
    policy: Policy

    @property
    def params(self) -> dict[str, Any]:
        """Values of the parameters."""
        return {key: x for key, x in self.policy.params.items() if key in self.accepts}


def describe(name: str) -> Description:
    """The entry or preset `name` of the catalogue, or a user's own, by itself and not crossed.

    Raises PolicyError for a name with a +, and what `policy` raises.
    """
    name = canonical(name)
    if "+" in name:
        raise PolicyError(
            f"{name} has several parts; expected one of them, as `kvsim policies` lists them"
        )
    if ":" not in name:
        entry = written_parts(name)[0].entry
        inside = "" if entry.innermost or entry.default or entry.kind in BEHIND else "+tova"
        return Description(name, entry, entry.parameters, policy(name + inside, **entry.required))
    built = policy(name)
    of = defining(built)
    text = documentation(of).partition("\n")[0] or "a policy of your own"
    declared = [parameters(type(x)) for level in reversed(built.levels) for x in level]
    accepts = {key: each for of_piece in declared for key, each in of_piece.items()}
    return Description(name, Entry(text, type(of), built.schedule), accepts, built)


def defining(built: Policy) -> Piece:
    """The piece that a policy of the user's own is about: what stands behind, or its scorer."""
    behind = built.sparse or built.storage
    return behind if behind and isinstance(built.scorer, Full) else chain_of(built.scorer)[-1]


def documentation(piece: Piece) -> str:
    """The docstring of a piece; empty without one, or with that of a dataclass alone."""
    kind = type(piece)
    text = inspect.getdoc(kind) or ""
    return "" if text.startswith(f"{kind.__name__}(") else text
