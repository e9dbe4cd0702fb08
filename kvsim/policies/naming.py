"""From a name and parameters to a Policy: `outer[@preset][+inner[@preset]]...`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvsim.core.parameters import Parameter, parameters
from kvsim.core.policy import (
    Allocator,
    Everything,
    Policy,
    Protection,
    Schedule,
    Scorer,
    Uniform,
    Wrapper,
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
    piece: type[Any]
    schedule: Schedule | None
    paper: str = ""
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
        return "wrapper" if issubclass(self.piece, Wrapper) else "scorer"

    @property
    def innermost(self) -> bool:
        """Whether nothing stands inside: a scorer, or a propagation that leaves caches whole."""
        return self.kind == "scorer" or (self.kind == "propagation" and self.piece.alone)

    def preset(self, name: str) -> Entry:
        """The entry as the preset has it."""
        if not name:
            return self
        preset = self.presets[name]
        policy = {**self.policy, **preset.policy}
        return replace(
            self,
            summary=preset.summary,
            piece=preset.piece or self.piece,
            layer_budgets=preset.layer_budgets or self.layer_budgets,
            schedule=policy.pop("schedule", self.schedule),
            params={**self.params, **preset.params},
            policy=policy,
            inner=self.inner if preset.inner is None else preset.inner,
        )

    @property
    def parameters(self) -> dict[str, Parameter]:
        """Its parameters by name; one that pieces share is that of the first of them."""
        first = parameters(self.piece)
        then = {} if self.layer_budgets is None else parameters(self.layer_budgets)
        return {key: each for key, each in {**first, **then, **first}.items() if key != "scorer"}


@dataclass(frozen=True)
class Description:
    """What `kvsim policies` shows of a name.

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
    keeps: str
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


def describe(catalogue: Mapping[str, Entry], name: str) -> Description:
    """The entry or preset `name` of the catalogue, with its own parameters and their defaults."""
    base, _, preset = name.partition("@")
    entry = catalogue[base].preset(preset)
    plain = "" if entry.innermost or entry.default else "+tova"
    policy = build(catalogue, name + plain, entry.required)
    params = {key: value for key, value in policy.params.items() if key in entry.parameters}
    return Description(
        name=name,
        kind=entry.kind,
        innermost=entry.innermost,
        default=entry.default,
        keeps=entry.summary,
        params=params,
        accepts={key: entry.parameters[key].expected for key in params},
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


def parameter_names(catalogue: Mapping[str, Entry], name: str) -> tuple[str, ...]:
    """Names of parameters that `build` takes for `name`, `scorer__` names included."""
    levels = [entry.parameters for _, entry in _parse(catalogue, name) if entry is not None]
    outermost = {key: at for at, names in reversed(list(enumerate(levels))) for key in names}
    out = list(outermost)
    for at, names in enumerate(levels):
        for key in names:
            if outermost[key] != at:
                before = max(i for i, outer in enumerate(levels[:at]) if key in outer)
                out.append("scorer__" * (before + 1) + key)
    return tuple(out)


def has_parameter(catalogue: Mapping[str, Entry], name: str, key: str) -> bool:
    """Whether `build` takes `key` for `name`."""
    entries = [entry for _, entry in _parse(catalogue, name) if entry is not None]
    try:
        _route(name, entries, {key: 0}, foreign=False)
    except PolicyError:
        return False
    return True


def build(catalogue: Mapping[str, Entry], name: str, params: Mapping[str, Any]) -> Policy:
    """The policy called `name` with parameters replaced by `params` (see `kvsim.policy`)."""
    given = dict(params)
    protect = _protect(name, given.pop("protect", None))
    chain = _parse(catalogue, name)
    part, innermost = chain[-1]
    foreign = innermost is None
    entries = [entry for _, entry in chain if entry is not None]
    routed = _route(name, entries, given, foreign=foreign)
    outer = entries if foreign else entries[:-1]
    if innermost is None:
        policy = _foreign(part, routed[-1])
    else:
        inside = {key: value for entry in outer for key, value in entry.inner.items()}
        inner = inside.get(part.partition("@")[0], {})
        inner = {k: v for k, v in inner.items() if k in innermost.parameters}
        shared = _shared(outer[0], routed[0]) if outer and part == outer[0].default else {}
        policy = _base(name, innermost, {**innermost.params, **inner, **shared, **routed[-1]})
    rearranged = [entry for entry in outer if entry.kind != "propagation"]
    if rearranged and not isinstance(policy.allocator, Uniform):
        raise PolicyError(
            f"{name}: {part} decides itself how many entries each head keeps, so nothing can be "
            f"put around it; expected a scorer after {chain[-2][0]!r}, such as tova"
        )
    for entry, level in reversed(list(zip(outer, routed, strict=False))):
        arguments = {**entry.params, **level}
        if entry.kind == "propagation":
            policy = replace(policy, propagation=entry.piece(**arguments))
        elif entry.kind == "wrapper":
            policy = replace(policy, scorer=entry.piece(scorer=policy.scorer, **arguments))
        else:
            policy = replace(policy, allocator=entry.piece(**arguments))
            if policy.allocator.ordinal and "log" not in routed[-1]:
                policy = replace(policy, scorer=policy.scorer.logarithm())
        if entry.schedule is not None:
            policy = replace(policy, schedule=entry.schedule)
    title = policy.name if foreign and not outer else name
    return replace(policy, name=title, protect=policy.protect | protect)


def _parse(catalogue: Mapping[str, Entry], name: str) -> list[tuple[str, Entry | None]]:
    """The parts of a name from the outside in; None for a policy of the user's own."""
    chain: list[tuple[str, Entry | None]] = []
    for part in map(str.strip, name.split("+")):
        if ":" in part:
            chain.append((part, None))
            continue
        base, at, preset = part.partition("@")
        if base not in catalogue:
            names = ", ".join(catalogue)
            raise PolicyError(f"unknown policy {base!r}{suggest(base, catalogue)}; known: {names}")
        entry = catalogue[base]
        if at and preset not in entry.presets:
            presets = ", ".join(f"{base}@{p}" for p in entry.presets) or "none"
            raise PolicyError(
                f"{base} has no preset {preset!r}{suggest(preset, entry.presets)}; "
                f"presets of {base}: {presets}"
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
    _check_order(catalogue, name, chain)
    return chain


def _check_order(
    catalogue: Mapping[str, Entry], name: str, chain: Sequence[tuple[str, Entry | None]]
) -> None:
    """Raise PolicyError where a part of a name stands where it cannot."""
    for place, (part, outer) in enumerate(chain[:-1]):
        if outer is None or outer.innermost:
            does = "scores" if outer is None or outer.kind == "scorer" else "fills its caches"
            wraps = ", ".join(key for key, entry in catalogue.items() if not entry.innermost)
            raise PolicyError(
                f"{name}: {part} {does} by itself and takes no scorer inside; "
                f"expected one of these before the +: {wraps}"
            )
        before, around = chain[place - 1] if place else ("", None)
        if outer.kind == "propagation" and before:
            raise PolicyError(
                f"{name}: {part} says which rows reach deeper layers and stands in front of "
                f"everything; expected {part}+{before}, with the scorer last"
            )
        if outer.kind == "allocator" and around is not None and around.kind != "propagation":
            raise PolicyError(
                f"{name}: {part} is an allocator and {before} around it needs a scorer; "
                f"expected at most one allocator, in front, such as {part}+tova"
            )
    part, last = chain[-1]
    if len(chain) > 1 and last is not None and last.kind == "propagation":
        raise PolicyError(
            f"{name}: {part} fills its caches by itself, so nothing stands around it; "
            f"expected {part} alone"
        )


def _route(
    name: str, entries: Sequence[Entry], params: Mapping[str, Any], *, foreign: bool
) -> list[dict[str, Any]]:
    """The parameters of each level: the outermost that has the name, `scorer__` one level in.

    foreign: a policy of the user's own is innermost; it gets the parameters that no other has, and
    its own function says which it takes.
    """
    levels: list[Mapping[str, Parameter] | None] = [entry.parameters for entry in entries]
    levels += [None] * foreign
    out: list[dict[str, Any]] = [{} for _ in levels]
    for given, value in params.items():
        depth, key = 0, given
        while key.startswith("scorer__"):
            depth, key = depth + 1, key.removeprefix("scorer__")
        for at in range(depth, len(levels)):
            names = levels[at]
            if names is None or key in names:
                out[at][key] = value
                break
        else:
            available = {k: None for level in levels[depth:] if level for k in level}
            raise PolicyError(
                f"{name} has no parameter {given!r}{suggest(key, available)}; "
                f"parameters: {', '.join(available) or 'none'}"
            )
    return out


def _base(name: str, entry: Entry, params: Mapping[str, Any]) -> Policy:
    """The innermost policy: a scorer and what belongs to it."""
    extra: dict[str, Any] = dict(entry.policy)
    if entry.layer_budgets is not None:
        extra["layer_budgets"] = entry.layer_budgets(**_part(entry.layer_budgets, params))
    if entry.schedule is not None:
        extra["schedule"] = entry.schedule
    piece = entry.piece(**_part(entry.piece, params))
    if entry.kind == "propagation":  # caches hold all that propagates
        return Policy(name, Full(), Everything(), propagation=piece, **extra)
    return Policy(name, piece, **extra)


def _shared(entry: Entry, params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a propagation that the scorer which belongs to it takes over."""
    defaults = {key: each.default for key, each in entry.parameters.items()}
    return {key: {**defaults, **entry.params, **params}[key] for key in entry.shares}


def _part(piece: type[Any], params: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in params.items() if key in parameters(piece)}


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


def _foreign(name: str, params: Mapping[str, Any]) -> Policy:
    """A policy of the user's own, `package.module:NAME`."""
    module_name, _, attribute = name.partition(":")
    try:
        target = getattr(importlib.import_module(module_name), attribute)
    except ImportError as error:
        raise PolicyError(
            f"cannot import {module_name!r} for policy {name!r}: {error}; "
            "is it installed, or on PYTHONPATH?"
        ) from error
    except AttributeError as error:
        raise PolicyError(f"{module_name!r} has no {attribute!r}; looked for a policy") from error
    built = target
    if callable(target):
        try:
            built = target(**params)
        except TypeError as error:
            raise PolicyError(f"{name!r} cannot be built from {params}: {error}") from error
    elif params:
        raise PolicyError(f"{name!r} is no function or class and takes no parameters")
    if isinstance(built, Scorer):
        built = Policy(attribute, built, schedule=Schedule(interval=128))
    if not isinstance(built, Policy):
        raise PolicyError(
            f"{name!r} is a {type(built).__name__}; expected a kvsim.Policy, a Scorer, or what "
            "returns one of them"
        )
    return built
