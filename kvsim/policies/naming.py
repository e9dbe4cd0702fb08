"""From a name and parameters to a Policy: `outer[@preset][+inner[@preset]]...`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from kvsim.core.policy import (
    Allocator,
    Everything,
    LayerBudgets,
    Policy,
    Protection,
    Schedule,
    Scorer,
    Uniform,
)
from kvsim.core.propagation import Propagation
from kvsim.errors import PolicyError, suggest
from kvsim.policies.full import Full


@dataclass(frozen=True)
class Preset:
    """What an implementation does differently: other pieces, parameters or schedule."""

    summary: str
    piece: type[Any] | None = None
    layer_budgets: type[Any] | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    policy: Mapping[str, Any] = field(default_factory=dict)
    inner: Mapping[str, Mapping[str, Any]] | None = None


@dataclass(frozen=True)
class Entry:
    """A name of the catalogue: what it keeps, from which paper, its pieces and presets.

    piece: a scorer, a wrapper (a scorer that has a field `scorer`), an allocator or a propagation.
    schedule: its own; None where the scorer inside decides. layer_budgets: takes the piece's
    parameters of the same names. policy: other fields of the Policy. inner: parameters that a
    scorer inside, by name, takes for its defaults there. default: the scorer inside where none is
    named. shares: of a propagation, parameters whose values that scorer takes over. required:
    parameters without a default, and an example of each.
    """

    summary: str
    paper: str
    piece: type[Any]
    schedule: Schedule | None
    presets: Mapping[str, Preset] = field(default_factory=dict)
    layer_budgets: type[Any] | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    policy: Mapping[str, Any] = field(default_factory=dict)
    inner: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    default: str = ""
    shares: tuple[str, ...] = ()
    required: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """`propagation`, `allocator`, `wrapper` or `scorer`: where in a name it may stand."""
        if issubclass(self.piece, Propagation):
            return "propagation"
        if issubclass(self.piece, Allocator):
            return "allocator"
        return "wrapper" if "scorer" in {f.name for f in fields(self.piece)} else "scorer"

    @property
    def innermost(self) -> bool:
        """Whether nothing stands inside: a scorer, or a propagation that leaves caches whole."""
        alone = issubclass(self.piece, Propagation) and self.piece.alone
        return self.kind == "scorer" or alone

    def preset(self, name: str) -> Entry:
        """The entry as the preset has it."""
        if not name:
            return self
        one = self.presets[name]
        schedule = one.policy.get("schedule", self.schedule)
        return replace(
            self,
            summary=one.summary,
            piece=one.piece or self.piece,
            layer_budgets=one.layer_budgets or self.layer_budgets,
            schedule=schedule,
            params={**self.params, **one.params},
            policy={**self.policy, **{k: v for k, v in one.policy.items() if k != "schedule"}},
            inner=self.inner if one.inner is None else one.inner,
        )

    @property
    def known(self) -> dict[str, Any]:
        """Its parameters by name, with the type that each field names."""
        pieces = (self.piece, *([self.layer_budgets] if self.layer_budgets else []))
        return {f.name: f.type for p in pieces for f in fields(p) if f.name != "scorer"}


@dataclass(frozen=True)
class Description:
    """What `kvsim policies` says of a name.

    innermost: nothing stands inside; default: the scorer inside where none is named. Interval and
    prefill are those of the scorer inside where `own_schedule` is False; needs are arrays that a
    trace must hold beyond q, k and v. bounded: whether the budget binds at all; exact: whether
    exactly the budget stays.
    """

    name: str
    kind: str
    innermost: bool
    default: str
    keeps: str
    params: dict[str, Any]
    required: dict[str, str]
    own_schedule: bool
    interval: int | None
    prefill: bool
    needs: tuple[str, ...]
    clairvoyant: bool
    bounded: bool
    exact: bool
    paper: str


def describe(catalogue: Mapping[str, Entry], name: str) -> Description:
    """The entry or preset `name` of the catalogue, with its own parameters and their defaults."""
    base, _, preset = name.partition("@")
    entry = catalogue[base].preset(preset)
    plain = "" if entry.innermost or entry.default else "+tova"
    policy = build(catalogue, name + plain, entry.required)
    return Description(
        name=name,
        kind=entry.kind,
        innermost=entry.innermost,
        default=entry.default,
        keeps=entry.summary,
        params={k: v for k, v in policy.params.items() if k in entry.known},
        required={key: str(value) for key, value in entry.required.items()},
        own_schedule=entry.schedule is not None,
        interval=policy.schedule.interval,
        prefill=policy.schedule.prefill,
        needs=tuple(sorted(policy.scorer.needs)),
        clairvoyant=policy.scorer.clairvoyant,
        bounded=policy.bounded,
        exact=policy.exact,
        paper=entry.paper,
    )


def parameters(catalogue: Mapping[str, Entry], name: str) -> tuple[str, ...]:
    """Names of parameters that `build` takes for `name`, `scorer__` names included."""
    known: list[Mapping[str, Any]] = [e.known for _, e in _parse(catalogue, name) if e is not None]
    first = {key: level for level, one in reversed(list(enumerate(known))) for key in one}
    out = list(first)
    for level, one in enumerate(known):
        for key in one:
            if first[key] != level:
                before = max(i for i, other in enumerate(known[:level]) if key in other)
                out.append("scorer__" * (before + 1) + key)
    return tuple(out)


def has_parameter(catalogue: Mapping[str, Entry], name: str, key: str) -> bool:
    """Whether `build` takes `key` for `name`."""
    try:
        _route(name, [e for _, e in _parse(catalogue, name) if e is not None], {key: 0}, own=None)
    except PolicyError:
        return False
    return True


def build(catalogue: Mapping[str, Entry], name: str, params: Mapping[str, Any]) -> Policy:
    """The policy called `name` with parameters replaced by `params` (see `kvsim.policy`)."""
    given = dict(params)
    protect = _protect(name, given.pop("protect", None))
    chain = _parse(catalogue, name)
    own = None if isinstance(chain[-1][1], Entry) else chain[-1][0]
    entries = [entry for _, entry in chain if isinstance(entry, Entry)]
    routed = _route(name, entries, given, own=own)
    outer = entries if own else entries[:-1]
    inside = {key: value for e in outer for key, value in e.inner.items()}
    if own:
        policy = _own(own, routed[-1])
    else:
        base, entry = chain[-1][0].partition("@")[0], entries[-1]
        inner = {k: v for k, v in inside.get(base, {}).items() if k in entry.known}
        shared = _shared(outer[0], routed[0]) if outer and chain[-1][0] == outer[0].default else {}
        policy = _base(name, entry, {**entry.params, **inner, **shared, **routed[-1]})
    rearranged = [entry for entry in outer if entry.kind != "propagation"]
    if rearranged and not isinstance(policy.allocator, Uniform):
        raise PolicyError(
            f"{name}: {chain[-1][0]} decides itself how many entries each head keeps, so nothing "
            f"can be put around it; expected a scorer after {chain[-2][0]!r}, such as tova"
        )
    for entry, own_params in reversed(list(zip(outer, routed, strict=False))):
        _check(name, entry, own_params)
        arguments = {**entry.params, **own_params}
        if entry.kind == "propagation":
            policy = replace(policy, propagation=entry.piece(**arguments))
        elif entry.kind == "wrapper":
            policy = replace(policy, scorer=entry.piece(scorer=policy.scorer, **arguments))
        else:
            policy = replace(policy, allocator=entry.piece(**arguments))
        if entry.schedule is not None:
            policy = replace(policy, schedule=entry.schedule)
    called = policy.name if own and not outer else name
    return replace(policy, name=called, protect=policy.protect | protect)


def _parse(catalogue: Mapping[str, Entry], name: str) -> list[tuple[str, Entry | None]]:
    """The parts of a name from the outside in; None for a policy of the user's own."""
    parts = [part.strip() for part in name.split("+")]
    chain: list[tuple[str, Entry | None]] = []
    for part in parts:
        if ":" in part:
            chain.append((part, None))
            continue
        base, at, preset = part.partition("@")
        if base not in catalogue:
            known = ", ".join(catalogue)
            raise PolicyError(f"unknown policy {base!r}{suggest(base, catalogue)}; known: {known}")
        entry = catalogue[base]
        if at and preset not in entry.presets:
            known = ", ".join(f"{base}@{p}" for p in entry.presets) or "none"
            raise PolicyError(
                f"{base} has no preset {preset!r}{suggest(preset, entry.presets)}; "
                f"presets of {base}: {known}"
            )
        chain.append((part, entry.preset(preset)))
    innermost = chain[-1][1]
    if innermost is not None and not innermost.innermost:
        if not innermost.default:
            raise PolicyError(
                f"{name!r} says how entries are chosen but not how they are scored; "
                f"name a scorer too, such as {name}+tova or {name}+expected_attention"
            )
        chain.append((innermost.default, catalogue[innermost.default]))
    for place, (part, outer) in enumerate(chain[:-1]):
        if outer is None or outer.innermost:
            does = "scores" if outer is None or outer.kind == "scorer" else "fills its caches"
            raise PolicyError(
                f"{name}: {part} {does} by itself and takes no scorer inside; "
                f"expected one of these before the +: {_outer(catalogue)}"
            )
        before = chain[place - 1] if place else None
        if outer.kind == "propagation" and before is not None:
            raise PolicyError(
                f"{name}: {part} says what deeper layers go on with and stands in front of "
                f"everything; expected {part}+{before[0]}, with the scorer last"
            )
        around = None if before is None else before[1]
        if outer.kind == "allocator" and around is not None and around.kind != "propagation":
            raise PolicyError(
                f"{name}: {part} is an allocator and {chain[place - 1][0]} around it needs a "
                f"scorer; expected at most one allocator, in front, such as {part}+tova"
            )
    last = chain[-1][1]
    if len(chain) > 1 and last is not None and last.kind == "propagation":
        raise PolicyError(
            f"{name}: {chain[-1][0]} fills its caches by itself, so nothing stands around it; "
            f"expected {chain[-1][0]} alone"
        )
    return chain


def _outer(catalogue: Mapping[str, Entry]) -> str:
    return ", ".join(key for key, entry in catalogue.items() if not entry.innermost)


def _route(
    name: str, entries: Sequence[Entry], params: Mapping[str, Any], *, own: str | None
) -> list[dict[str, Any]]:
    """The parameters of each level: the outermost that has the name, `scorer__` one level in."""
    known: list[Mapping[str, Any] | None] = [entry.known for entry in entries]
    if own:
        known.append(None)  # takes what no other has; its own function says what it knows
    out: list[dict[str, Any]] = [{} for _ in known]
    for given, value in params.items():
        depth, key = 0, given
        while key.startswith("scorer__"):
            depth, key = depth + 1, key.removeprefix("scorer__")
        for level in range(depth, len(known)):
            has = known[level]
            if has is None or key in has:
                out[level][key] = value
                break
        else:
            names = {k: None for one in known[depth:] if one for k in one}
            listed = ", ".join(names) or "none"
            raise PolicyError(
                f"{name} has no parameter {given!r}{suggest(key, names)}; parameters: {listed}"
            )
    return out


def _base(name: str, entry: Entry, params: Mapping[str, Any]) -> Policy:
    """The innermost policy: a scorer and what belongs to it."""
    _check(name, entry, params)
    extra: dict[str, Any] = dict(entry.policy)
    if entry.layer_budgets is not None:
        shares: LayerBudgets = entry.layer_budgets(**_part(entry.layer_budgets, params))
        extra["layer_budgets"] = shares
    if entry.schedule is not None:
        extra["schedule"] = entry.schedule
    if entry.kind == "propagation":  # caches hold all that goes on
        propagation: Propagation = entry.piece(**_part(entry.piece, params))
        return Policy(name, Full(), Everything(), propagation=propagation, **extra)
    scorer: Scorer = entry.piece(**_part(entry.piece, params))
    return Policy(name, scorer, **extra)


def _shared(entry: Entry, params: Mapping[str, Any]) -> dict[str, Any]:
    """What the scorer that belongs to a propagation takes over from it."""
    defaults = {f.name: f.default for f in fields(entry.piece)}
    return {key: {**defaults, **entry.params, **params}[key] for key in entry.shares}


def _part(piece: type[Any], params: Mapping[str, Any]) -> dict[str, Any]:
    has = {f.name for f in fields(piece)}
    return {key: value for key, value in params.items() if key in has}


def _check(name: str, entry: Entry, params: Mapping[str, Any]) -> None:
    for key, value in params.items():
        if not _fits(value, entry.known[key]):
            raise PolicyError(f"{name}: {key} is {value!r}; expected {entry.known[key]}")


def _fits(value: object, annotation: object) -> bool:
    """Whether a parameter has the type its field names; ranges are the piece's own business."""
    allowed = {p.strip() for p in str(annotation).replace("Literal", "").split("|")}
    if value is None:
        return "None" in allowed
    if isinstance(value, bool):
        return "bool" in allowed
    if isinstance(value, int):
        return bool({"int", "float"} & allowed)
    if isinstance(value, float):
        return "float" in allowed
    return not allowed <= {"int", "float", "bool", "None"}


def _protect(name: str, given: object) -> Protection:
    if given is None or isinstance(given, Protection):
        return given or Protection()
    if isinstance(given, Mapping):
        try:
            return Protection(**given)
        except TypeError:
            pass
    raise PolicyError(
        f"{name}: protect is {given!r}; expected Protection(sink=..., recent=..., prompt=...)"
    )


def _own(name: str, params: Mapping[str, Any]) -> Policy:
    """A policy of the user's own, `package.module:NAME`."""
    module_name, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except ImportError as error:
        raise PolicyError(
            f"cannot import {module_name!r} for policy {name!r}: {error}; "
            "is it installed, or on PYTHONPATH?"
        ) from error
    except AttributeError as error:
        raise PolicyError(f"{module_name!r} has no {attribute!r}; looked for a policy") from error
    try:
        made = found(**params) if callable(found) and not isinstance(found, Policy) else found
    except TypeError as error:
        raise PolicyError(f"{name!r} cannot be made of {params}: {error}") from error
    if isinstance(made, Scorer):
        made = Policy(attribute, made, schedule=Schedule(interval=128))
    if not isinstance(made, Policy):
        raise PolicyError(
            f"{name!r} is a {type(made).__name__}; expected a kvsim.Policy, a Scorer, or what "
            "returns one of them"
        )
    if params and made is found:
        raise PolicyError(f"{name!r} is a ready Policy and takes no parameters")
    return made
