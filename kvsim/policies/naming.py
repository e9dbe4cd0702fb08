"""Names of policies: `outer[@preset][+inner[@preset]]...[+sparse][+quantizer]` or `[+merger]`."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple, cast

from kvsim.core.parameters import Length
from kvsim.core.parameters import parameters as fields_of
from kvsim.core.policy import (
    Even,
    Everything,
    Policy,
    Protection,
    Schedule,
    Scorer,
    Uniform,
    chain_of,
    keyed,
)
from kvsim.core.storing import Spec
from kvsim.errors import PolicyError, suggest
from kvsim.policies import foreign
from kvsim.policies.catalogue import ACCESS, CATALOGUE
from kvsim.policies.entry import Entry, load
from kvsim.policies.full import Full

#: Kinds of parts that follow an eviction in a name.
BEHIND = ("sparse attention", "quantizer", "merger")
# The order of the kinds in a name; whole: of a propagation that leaves caches whole.
_ORDER = re.compile(
    r"(whole,|(propagation,)?(allocator,)?(wrapper,)*scorer,)"
    r"((sparse attention,)?(quantizer,)?|merger,)"
)
_ORDER_IN_WORDS = (
    "at most one of each, in this order: propagation, allocator, wrappers, scorer, sparse "
    "attention, quantizer, as in fastkv+ams+global+tova+quest+kivi; or a merger after the scorer"
)
# The field of a policy that a part around or after the innermost one replaces.
_FIELDS = {
    **{kind: kind for kind in ("propagation", "allocator")},
    **dict(zip(BEHIND, ("sparse", "storage", "storage"), strict=True)),
    "wrapper": "scorer",
}


class Part(NamedTuple):
    """A part of a name, and its parameters.

    own: built by user code. written: named explicitly, not implied. policy: the policy of a
    described part, around TOVA if it needs a scorer.
    """

    name: str
    entry: Entry
    accepts: Mapping[str, Any]
    own: bool = False
    written: bool = True
    policy: Any = None

    @property
    def params(self) -> dict[str, Any]:
        """Values of the parameters of a described part."""
        return {key: x for key, x in self.policy.params.items() if key in self.accepts}

    @property
    def place(self) -> str:
        """Its kind in the order of a name."""
        kind = self.entry.kind
        return "whole" if kind == "propagation" and self.entry.innermost else kind


def variants(name: str, settings: Mapping[str, Iterable[Any]]) -> list[Policy]:
    """Return a policy for each combination of values of its settings."""
    combinations = itertools.product(*settings.values())
    return [policy(name, **dict(zip(settings, each, strict=True))) for each in combinations]


def policy(name: str, **params: Any) -> Policy:
    """Return the policy called `name`, with parameters replaced by `params`.

    A name is a scorer, `NAME[@PRESET]`, with wrappers and at most one allocator in front:
    `ams+expected_attention`, `adakv@kvpress+snapkv`, `ams+global+knorm`. Bare `ams` is `ams+tova`.
    Sparse attention and a quantizer follow it, `snapkv+quest+kivi`, or stand by themselves without
    eviction. So does a merger, `snapkv+lookm`; by itself it merges into `h2o`. With an eviction,
    rows read a quarter of the budget by default (`share`). Bare `rocketkv` is `snapkv+rocketkv`, as
    in the paper. A parameter goes to the outermost part that has it. `scorer__NAME` goes one part
    further in, or from the eviction to the part after it: `tova+quest` takes `heads` for `tova`,
    and `scorer__heads` for `quest`. `protect=Protection(sink, recent, prompt)` protects these
    entries, too.

    `package.module:NAME` is a user-defined policy: a Policy, a Scorer, or a callable that returns
    one for `params`; it may also follow a `+`. `duo:FILE`, `headkv:FILE` and `lukv:FILE` follow a
    plan of `kvsim heads`.

    Raises PolicyError for an unknown name, preset or parameter, a parameter out of range, and
    incompatible parts.

    Example:
        >>> kvsim.policy("adakv+snapkv", window=16).params["window"]
        16
    """
    name = canonical(name)
    return replace(_built(name, params), default=_default(name))


@cache
def _default(name: str) -> Policy | None:
    """The policy with default parameters; None if user-defined, or if one has no default."""
    with suppress(PolicyError):
        return None if ":" in name else _built(name, {})
    return None


def _built(name: str, params: dict[str, Any]) -> Policy:
    protect = params.pop("protect", Protection())
    with suppress(TypeError):  # reported below, with all other errors
        protect = Protection(**protect) if isinstance(protect, Mapping) else protect
    chain, behind = _parse(name)
    routed = _route(name, chain + behind, params)
    outer, inner = [*zip(chain[:-1], routed, strict=False)], chain[-1]
    built = _innermost(name, chain, behind, routed)
    if any(part.entry.kind != "propagation" for part, _ in outer):
        if built.allocator.label == built.scorer.label:
            built = replace(built, allocator=Uniform())
        if not isinstance(built.allocator, Uniform):
            raise PolicyError(
                f"{name}: {inner.name} decides itself how many entries each head keeps; expected "
                f"a scorer after {chain[-2].name!r}, such as tova"
            )
    further = zip(behind, routed[len(chain) :], strict=True)
    for part, given in (*reversed(outer), *further):
        entry, values, scorer = part.entry, dict(part.entry.params), cast("Any", built.scorer)
        if entry.kind == "wrapper":
            values["scorer"] = scorer
        elif entry.kind in BEHIND and built.bounded and "share" in part.accepts:
            values["share"] = 0.25
        changes = {_FIELDS[entry.kind]: entry.piece(**{**values, **given})}
        if entry.ordinal and _underflows(inner.entry, scorer, routed[len(outer)]):
            changes["scorer"] = replace(scorer, log=True)
        built = replace(built, schedule=entry.schedule or built.schedule, **changes)
    title = built.name if inner.own and not outer and not behind else name
    named = replace(built, name=title, protect=protect)  # the name reports a wrong protection
    built = replace(named, protect=built.protect | protect)
    return replace(built, lengths=_lengths(built, chain, routed))


def _underflows(entry: Entry, scorer: Scorer, given: Mapping[str, Any]) -> bool:
    """Whether scores can underflow to 0, and the parameters request neither them nor logarithms."""
    values = entry.underflows
    if values is None or "log" in given or not isinstance(scorer, entry.piece):
        return False
    return all(getattr(scorer, name) == value for name, value in values.items())


def _innermost(
    name: str, chain: Sequence[Part], behind: Sequence[Part], routed: Sequence[Mapping[str, Any]]
) -> Policy:
    """The innermost policy: a scorer with its schedule and defaults for its place in the name."""
    *outer, part = chain
    entry, values = part.entry, dict(part.entry.params)
    if part.own:
        return foreign.build(part.name, routed[len(outer)])
    for around in (*outer, *behind):
        inner = around.entry.inner.get(part.name.partition("@")[0], {})
        values |= {key: inner[key] for key in inner.keys() & part.accepts.keys()}
    if outer and part.name == (first := outer[0].entry).default:
        # a propagation passes values of its parameters to its scorer
        defaults = {key: each.default for key, each in first.parameters.items()}
        values |= {key: {**defaults, **first.params, **routed[0]}[key] for key in first.shares}
    values |= routed[len(outer)]

    def piece(kind: type[Any]) -> Any:
        return kind(**{key: values[key] for key in values.keys() & fields_of(kind).keys()})

    own, schedule = piece(entry.piece), entry.schedule or Schedule()
    if entry.kind == "propagation":  # caches hold all propagated rows
        return Policy(name, Full(), Everything(), schedule, propagation=own)
    return Policy(
        name,
        own,
        piece(load(entry.allocator)),
        schedule,
        layer_budgets=piece(entry.layer_budgets),
        positions=entry.positions,
        per_query_head=entry.per_query_head,
    )


def _lengths(
    built: Policy, chain: Sequence[Part], routed: Sequence[Mapping[str, Any]]
) -> tuple[Length, ...]:
    found: list[Length] = []
    outer, alike = chain[0].entry, isinstance(built.layer_budgets, Even)
    for depth, part in enumerate(chain):
        scales, given = part.entry.scaled, {*routed[depth]}
        meant_for = dict(part.entry.meant_for) if part.written or not depth else {}
        if depth and part.name == outer.default:  # it receives these values
            meant_for |= {x: y for x, y in outer.meant_for.items() if x in outer.shares}
            given |= set(routed[0]) & set(outer.shares)
            scales |= outer.scaled
        for name in meant_for.keys() - given:
            values = [getattr(x, name) for x in built.levels[depth] if hasattr(x, name)]
            if values and type(values[0]) is int:
                found.append(Length(depth, name, values[0], meant_for[name], alike, scales))
    return tuple(sorted(found))


def canonical(name: str) -> str:
    """Return a name as in the catalogue: `TOVA` is `tova`; a user-defined one is unchanged."""
    parts = map(str.strip, str(name).split("+"))
    return "+".join(part if ":" in part else part.lower() for part in parts)


def names(entries: Mapping[str, Entry] = CATALOGUE) -> list[str]:
    """Names of all evictions, presets included; of ACCESS, of the parts that follow one."""
    presets = ((name, preset) for name, x in entries.items() for preset in ("", *x.presets))
    return [f"{name}@{preset}" if preset else name for name, preset in presets]


def parameters(name: str) -> tuple[str, ...]:
    """Names of the parameters that `policy` takes for `name`; empty for a user-defined one."""
    return tuple(key for part, keys in _keys(name) if not part.own for key in keys.values())


def parts_of(name: str) -> list[tuple[str, dict[str, str]]]:
    """The written parts of a name, each with the parameters that `policy` takes."""
    return [(part.name, keys) for part, keys in _keys(name) if part.written]


def _keys(name: str) -> list[tuple[Part, dict[str, str]]]:
    chain, behind = _parse(name)
    keys = [*keyed(part.accepts for part in chain + behind)]
    return [
        (part, {name: key for of, name, key in keys if of == depth})
        for depth, part in enumerate(chain + behind)
    ]


def has_parameter(name: str, key: str) -> bool:
    """Whether `policy` takes the parameter `key` for `name`, in any accepted spelling."""
    chain, behind = _parse(name)
    further_in = (chain + behind)[key.count("scorer__") :]
    return any(key.replace("scorer__", "") in part.accepts for part in further_in)


def _parse(name: str) -> tuple[list[Part], list[Part]]:
    """The parts of a name from the outside in, then the parts after the eviction.

    Without an eviction, the default of the sparse attention, or `full`.
    """
    parts = written_parts(name)
    at = next((at for at, part in enumerate(parts) if part.entry.kind in BEHIND), len(parts))
    chain, behind = parts[:at], parts[at:]
    defaults = (part.entry.default for part in behind)
    chain = chain or [_implied(next(filter(None, defaults), "full"))]
    innermost = chain[-1].entry
    if not innermost.innermost and innermost.default:
        chain.append(_implied(innermost.default))
    if not _ORDER.fullmatch("".join(f"{part.place}," for part in chain + behind)):
        found = " + ".join(f"{part.name} ({part.entry.kind})" for part in parts)
        *_, last = chain
        cure = f"a scorer inside {last.name}, such as {last.name}+tova"
        expected = _ORDER_IN_WORDS if last.entry.innermost else cure
        raise PolicyError(f"{found}; expected {expected}")
    return chain, behind


def _implied(name: str) -> Part:
    return Part(name, CATALOGUE[name], CATALOGUE[name].parameters, written=False)


def written_parts(name: str) -> list[Part]:
    """Return the written parts of a name."""
    parts = []
    for part in canonical(name).split("+"):
        if ":" in part:
            parts.append(Part(part, *foreign.described(part)))
            continue
        base, at, preset = part.partition("@")
        if base not in CATALOGUE and base not in ACCESS:
            module, _, last = base.rpartition(".")
            own = f"{module}:{'NAME' if last == 'py' else last}"
            hint = f"; a policy of your own is {own}" if module else ""
            shown = f"{base!r}{suggest(base, [*CATALOGUE, *ACCESS])}" if base else f"'' in {name!r}"
            raise PolicyError(f"unknown policy {shown}{hint}; `kvsim policies` lists all")
        entry = CATALOGUE[base] if base in CATALOGUE else ACCESS[base]
        try:
            entry = entry.preset(preset or at)
        except KeyError as error:
            presets = ", ".join(f"{base}@{p}" for p in entry.variants) or "none"
            raise PolicyError(
                f"{base} has no preset {preset!r}{suggest(preset, entry.variants)}; "
                f"presets of {base}: {presets}"
            ) from error
        parts.append(Part(part, entry, entry.parameters))
    return parts


def stored_piece(given: Any) -> Any:
    """Build the sparse attention, quantizer or merger that a record names; a piece as it is.

    Raises PolicyError for a name outside the catalogue.
    """
    if not isinstance(given, Spec):
        return given
    entry = ACCESS.get(given.name) or CATALOGUE.get(given.name)
    if entry is None or not given.params.keys() <= entry.parameters.keys():
        raise PolicyError(
            f"the record names {given.name!r} with {dict(given.params)}, which kvsim does not "
            "have; measure it where it was replayed, before it is stored"
        )
    return entry.piece(**given.params)


def _route(name: str, parts: Sequence[Part], params: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Assign each value to the outermost part with its name; `scorer__` means one part in.

    A user-defined policy also gets unknown names, because a function may take `**kwargs`.
    """
    rest = next((at for at, part in enumerate(parts) if part.own), None)
    out: list[dict[str, Any]] = [{} for _ in parts]
    for given, value in params.items():
        depth, key = given.count("scorer__"), given.replace("scorer__", "")
        found = (at for at in range(depth, len(parts)) if key in parts[at].accepts)
        level = next(found, rest)
        if level is None or level < depth:
            available = dict.fromkeys(k for each in parts[depth:] for k in each.accepts)
            raise PolicyError(
                f"{name} has no parameter {given!r}{suggest(key, available)}; "
                f"parameters: {', '.join(available) or 'none'}"
            )
        out[level][key] = value
    return out


def describe(name: str) -> Part:
    """Return one entry or preset of the catalogue, or one user-defined policy, without a +.

    Raises PolicyError for a name with a +, and what `policy` raises.
    """
    name = canonical(name)
    if "+" in name:
        raise PolicyError(
            f"{name} has several parts; expected one of them, as `kvsim policies` lists them"
        )
    if ":" not in name:
        (part,) = written_parts(name)
        entry = part.entry
        inside = "" if entry.innermost or entry.default or entry.kind in BEHIND else "+tova"
        return part._replace(policy=policy(name + inside, **entry.required))
    built = policy(name)
    behind = built.sparse or built.storage  # its main piece, else its scorer
    piece = behind if behind and isinstance(built.scorer, Full) else chain_of(built.scorer)[-1]
    text = documentation(type(piece)).partition("\n")[0] or "a policy of your own"
    declared = [fields_of(type(x)) for level in reversed(built.levels) for x in level]
    accepts = {key: each for of_piece in declared for key, each in of_piece.items()}
    return Part(name, Entry(text, type(piece), built.schedule), accepts, policy=built)


def documentation(kind: type) -> str:
    """The docstring of a class; empty without one, or if the dataclass generated it."""
    text = inspect.getdoc(kind) or ""
    return "" if text.startswith(f"{kind.__name__}(") else text
