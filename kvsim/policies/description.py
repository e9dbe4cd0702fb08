"""Descriptions of names, as `kvsim policies` shows them."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from kvsim.core.parameters import parameters
from kvsim.core.pieces import Piece
from kvsim.core.policy import Policy, chain_of
from kvsim.errors import PolicyError
from kvsim.policies.entry import Entry
from kvsim.policies.full import Full
from kvsim.policies.naming import BEHIND, canonical, entry_of, policy


@dataclass(frozen=True)
class Description:
    """Description of a name, as `kvsim policies` shows it.

    innermost: nothing stands inside; default: the scorer inside where none is named. params: the
    parameters and their values; accepts: in words, type and bounds of each.
    Interval and prefill are those of the scorer inside where `own_schedule` is False; needs are
    arrays that a trace must hold beyond q, k and v. bounded: whether the budget binds at all;
    exact: whether exactly the budget stays.
    """

    name: str
    kind: str
    innermost: bool
    default: str
    rule: str
    params: dict[str, Any]
    accepts: dict[str, str]
    required: dict[str, str]
    own_schedule: bool
    interval: int | None
    prefill: bool
    needs: tuple[str, ...]
    clairvoyant: bool
    bounded: bool
    exact: bool
    paper: str


def describe(name: str) -> Description:
    """The entry or preset `name` of the catalogue, or a user's own, by itself and not crossed.

    Raises PolicyError for a name with a +, and what `policy` raises.
    """
    name = canonical(name)
    if "+" in name:
        raise PolicyError(
            f"{name} has several parts; expected one of them, as `kvsim policies` lists them"
        )
    if ":" in name:
        built = policy(name)
        of = defining(built)
        text = documentation(of).partition("\n")[0] or "a policy of your own"
        entry = Entry(text, type(of), built.schedule)
        declares = [parameters(type(x)) for level in reversed(built.levels) for x in level]
        accepted = {key: each for of_piece in declares for key, each in of_piece.items()}
    else:
        entry = entry_of(name)
        inside = "" if entry.innermost or entry.default or entry.kind in BEHIND else "+tova"
        built, accepted = policy(name + inside, **entry.required), entry.parameters
    params = {key: value for key, value in built.params.items() if key in accepted}
    return Description(
        name=name,
        kind=entry.kind,
        innermost=entry.innermost,
        default=entry.default,
        rule=entry.rule,
        params=params,
        accepts={key: accepted[key].expected for key in params},
        required={key: str(value) for key, value in entry.required.items()},
        own_schedule=entry.schedule is not None,
        interval=built.schedule.interval,
        prefill=built.schedule.prefill,
        needs=tuple(sorted(built.reads.arrays)),
        clairvoyant=built.reads.future,
        bounded=built.bounded,
        exact=built.effect == "exact",
        paper=entry.paper,
    )


def defining(built: Policy) -> Piece:
    """The piece that a policy of the user's own is about: what stands behind, or its scorer."""
    behind = built.reader or built.storage
    return behind if behind and isinstance(built.scorer, Full) else chain_of(built.scorer)[-1]


def documentation(piece: Piece) -> str:
    """The docstring of a piece; empty without one, or with that of a dataclass alone."""
    kind = type(piece)
    text = inspect.getdoc(kind) or ""
    return "" if text.startswith(f"{kind.__name__}(") else text
