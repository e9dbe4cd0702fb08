"""Names of policies: `outer[@preset][+inner[@preset]]...[+sparse][+quantizer]` or `[+merger]`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

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
)
from kvsim.core.storing import Spec
from kvsim.errors import PolicyError, suggest
from kvsim.policies import foreign
from kvsim.policies.catalogue import ACCESS, CATALOGUE
from kvsim.policies.entry import Entry, load
from kvsim.policies.full import Full

#: Kinds of parts that stand behind an eviction.
BEHIND = ("sparse attention", "quantizer", "merger")
_ALLOWED = ((), BEHIND[:1], BEHIND[:2], BEHIND[1:2], BEHIND[2:])


class Part(NamedTuple):
    """A part of a name, and its parameters; own: a policy of the user's own, or of a plan."""

    name: str
    entry: Entry
    accepts: Mapping[str, Any]
    own: bool = False
    written: bool = True


def variants(name: str, settings: Mapping[str, Iterable[Any]]) -> list[Policy]:
    """Return a policy for each combination of values of its settings."""
    combinations = itertools.product(*settings.values())
    return [policy(name, **dict(zip(settings, each, strict=True))) for each in combinations]


def policy(name: str, **params: Any) -> Policy:
    """Return the policy called `name`, with parameters replaced by `params`.

    A name is a scorer, `NAME[@PRESET]`, with wrappers and at most one allocator in front:
    `ams+expected_attention`, `adakv@kvpress+snapkv`, `ams+global+knorm`. Bare `ams` is `ams+tova`.
    Sparse attention and a quantizer stand behind it, `snapkv+quest+kivi`, or alone where nothing is
    evicted; or a merger, `snapkv+lookm`, alone behind `h2o`.
    Next to an eviction rows read a quarter of the budget by default (`share`). `rocketkv`
    alone is `snapkv+rocketkv`, as in the paper.
    A parameter goes to the outermost part that has it; `scorer__NAME` looks one part further in,
    and from the eviction to what stands behind it: `tova+quest` takes `heads` for `tova`,
    and `scorer__heads` for `quest`.
    `protect=Protection(sink, recent, prompt)` protects these entries, too.

    `package.module:NAME` is a policy of the user's own: a Policy, a Scorer, or something that
    returns one when called with `params`; it may stand behind a `+` too. `duo:FILE`,
    `headkv:FILE` and `lukv:FILE` keep what a plan of `kvsim heads` says.

    Raises PolicyError for an unknown name, preset or parameter, a parameter out of its range, and
    parts that do not go together.
    """
    name = canonical(name)
    return replace(_built(name, params), default=_default(name))


@cache
def _default(name: str) -> Policy | None:
    """The policy with its default parameters; None for the user's own, and where one has none."""
    try:
        return None if ":" in name else _built(name, {})
    except PolicyError:
        return None


def _built(name: str, params: dict[str, Any]) -> Policy:
    protect = params.pop("protect", Protection())
    with suppress(TypeError):  # said below, as of anything else
        protect = Protection(**protect) if isinstance(protect, Mapping) else protect
    chain, behind = _parse(name)
    *outer, innermost = chain
    routed = _route(name, chain + behind, params)
    built = _innermost(name, chain, behind, routed)
    if any(part.entry.kind != "propagation" for part in outer):
        if built.allocator.label == built.scorer.label:
            built = replace(built, allocator=Uniform())
        if not isinstance(built.allocator, Uniform):
            raise PolicyError(
                f"{name}: {innermost.name} decides itself how many entries each head keeps, so "
                f"nothing can be put around it; expected a scorer after {outer[-1].name!r}, such "
                "as tova"
            )
    for (_, entry, *_), level in reversed([*zip(outer, routed, strict=False)]):
        arguments = {**entry.params, **level}
        if entry.kind == "propagation":
            built = replace(built, propagation=entry.piece(**arguments))
        elif entry.kind == "wrapper":
            built = replace(built, scorer=entry.piece(scorer=built.scorer, **arguments))
        else:
            built = replace(built, allocator=entry.piece(**arguments))
            if entry.ordinal and "log" not in routed[len(outer)]:
                built = replace(built, scorer=_logarithm(innermost.entry, built.scorer))
        built = replace(built, schedule=entry.schedule or built.schedule)
    for (_, entry, accepts, *_), level in zip(behind, routed[len(chain) :], strict=True):
        quarter = {"share": 0.25} if built.bounded and "share" in accepts else {}
        piece = entry.piece(**{**entry.params, **quarter, **level})
        built = replace(
            built, **{"sparse" if entry.kind == "sparse attention" else "storage": piece}
        )
    title = built.name if innermost.own and not outer and not behind else name
    named = replace(built, name=title, protect=protect)
    built = replace(named, protect=built.protect | protect)
    return replace(built, lengths=_lengths(built, chain, routed))


def _logarithm(entry: Entry, scorer: Scorer) -> Scorer:
    """The ranking by logarithms if scores of the entry could underflow to 0, else the scorer."""
    if entry.underflows is None or not isinstance(scorer, entry.piece):
        return scorer
    underflows = all(getattr(scorer, name) == value for name, value in entry.underflows.items())
    ranked: Scorer = replace(scorer, log=True) if underflows else scorer
    return ranked


def _innermost(
    name: str, chain: Sequence[Part], behind: Sequence[Part], routed: Sequence[Mapping[str, Any]]
) -> Policy:
    """The innermost policy: a scorer and what belongs to it, with defaults of its place."""
    *outer, part = chain
    entry, values = part.entry, dict(part.entry.params)
    if part.own:
        return foreign.build(part.name, routed[len(outer)])
    for around in (*outer, *behind):
        inner = around.entry.inner.get(part.name.partition("@")[0], {})
        values |= {key: inner[key] for key in inner.keys() & part.accepts.keys()}
    if outer and part.name == (first := outer[0].entry).default:
        # a propagation's own scorer takes values of its parameters over
        defaults = {key: each.default for key, each in first.parameters.items()}
        values |= {key: {**defaults, **first.params, **routed[0]}[key] for key in first.shares}
    values |= routed[len(outer)]

    def piece(kind: type[Any]) -> Any:
        return kind(**{key: values[key] for key in values.keys() & fields_of(kind).keys()})

    own, schedule = piece(entry.piece), entry.schedule or Schedule()
    if entry.kind == "propagation":  # caches hold all that propagates
        return Policy(name, Full(), Everything(), schedule, propagation=own)
    return Policy(
        name,
        own,
        load(entry.allocator)(),
        schedule,
        layer_budgets=piece(entry.layer_budgets),
        positions=entry.positions,
        per_query_head=entry.per_query_head,
    )


def _lengths(
    built: Policy, chain: Sequence[Part], routed: Sequence[Mapping[str, Any]]
) -> tuple[Length, ...]:
    """The lengths of a policy that are not given."""
    found: list[Length] = []
    outer, alike = chain[0].entry, isinstance(built.layer_budgets, Even)
    for depth, (part, entry, *_) in enumerate(chain):
        meant_for, given, scales = dict(entry.meant_for), set(routed[depth]), entry.scaled
        if depth and part == outer.default:  # it takes values over
            meant_for |= {x: y for x, y in outer.meant_for.items() if x in outer.shares}
            given |= set(routed[0]) & set(outer.shares)
            scales |= outer.scaled
        for name in meant_for.keys() - given:
            values = [getattr(x, name) for x in built.levels[depth] if hasattr(x, name)]
            if values and type(values[0]) is int:
                found.append(Length(depth, name, values[0], meant_for[name], alike, scales))
    return tuple(sorted(found))


def canonical(name: str) -> str:
    """Return a name as the catalogue has it, so that `TOVA` is `tova`; a user's own as it is."""
    parts = map(str.strip, str(name).split("+"))
    return "+".join(part if ":" in part else part.lower() for part in parts)


def names() -> list[str]:
    """Every eviction of the catalogue, presets included, as `policy` takes it."""
    return _names(CATALOGUE)


def access_names() -> list[str]:
    """What stands behind an eviction, presets included, as `policy` takes it alone."""
    return _names(ACCESS)


def _names(entries: Mapping[str, Entry]) -> list[str]:
    return [
        full
        for name, entry in entries.items()
        for full in (name, *(f"{name}@{preset}" for preset in entry.presets))
    ]


def entry_of(name: str) -> Entry:
    """The entry or preset `name` by itself. Raises PolicyError for an unknown one."""
    return _parts(name)[0].entry


def parameters(name: str) -> tuple[str, ...]:
    """Names of the parameters that `policy` takes for `name`; none for a user's own."""
    chain, behind = _parse(name)
    return tuple(full for part, _, full in _keys(chain + behind) if not part.own)


def parts_of(name: str) -> list[tuple[str, dict[str, str]]]:
    """The parts of a name as written, each with its parameters: the keys that `policy` takes."""
    chain, behind = _parse(name)
    keys, written = [*_keys(chain + behind)], filter(attrgetter("written"), chain + behind)
    return [(part.name, {key: full for of, key, full in keys if of is part}) for part in written]


def _keys(parts: Sequence[Part]) -> Iterator[tuple[Part, str, str]]:
    """Parts from the outside in, with each parameter's name, and its key in `policy`."""
    further: dict[str, int] = {}
    for depth, part in enumerate(parts):
        for key in part.accepts:
            yield part, key, "scorer__" * further.get(key, 0) + key
        further |= dict.fromkeys(part.accepts, depth + 1)


def has_parameter(name: str, key: str) -> bool:
    """Whether `policy` takes the parameter `key` for `name`, spelt in any way that it takes."""
    chain, behind = _parse(name)
    try:
        _route(name, chain + behind, {key: 0}, declared_alone=True)
    except PolicyError:
        return False
    return True


def _parse(name: str) -> tuple[list[Part], list[Part]]:
    """The parts of a name from the outside in, and what stands behind an eviction.

    Without an eviction that of the sparse attention, or `full`.
    """
    parts = _parts(name)
    at = next((at for at, part in enumerate(parts) if part.entry.kind in BEHIND), len(parts))
    chain, behind = parts[:at], parts[at:]
    kinds = [part.entry.kind for part in parts]
    if tuple(kinds[at:]) not in _ALLOWED:
        written = [kind.upper() if kind in BEHIND else "EVICTION" for kind in kinds]
        raise PolicyError(
            f"{name} is {' + '.join(written)}; expected EVICTION + SPARSE ATTENTION + "
            "QUANTIZER, such as snapkv+quest+kivi, each at most once, or EVICTION + MERGER, such "
            "as snapkv+lookm"
        )
    defaults = (part.entry.default for part in behind)
    chain = chain or [_implied(next(filter(None, defaults), "full"))]
    innermost = chain[-1].entry
    if not innermost.innermost and innermost.default:
        chain.append(_implied(innermost.default))
    _check_order(name, chain)
    return chain, behind


def _implied(name: str) -> Part:
    return Part(name, CATALOGUE[name], CATALOGUE[name].parameters, written=False)


def _parts(name: str) -> list[Part]:
    """The parts of a name as written."""
    parts = []
    for part in canonical(name).split("+"):
        if ":" in part:
            parts.append(Part(part, *foreign.described(part)))
            continue
        base, at, preset = part.partition("@")
        if base not in CATALOGUE and base not in ACCESS:
            module, _, last = base.rpartition(".")
            hint = f"; a policy of your own is {module}:{last}" if module else ""
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
    """The sparse attention, quantizer or merger that a record names; a piece as it is.

    Raises PolicyError for one that is not in the catalogue.
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


def _check_order(name: str, chain: Sequence[Part]) -> None:
    """Raise PolicyError where a part of a name stands where it cannot."""
    for place, part in enumerate(chain):
        reason = ""
        kind = part.entry.kind
        if place < len(chain) - 1 and part.entry.innermost:
            reason = "scores by itself and takes no scorer inside; expected it last (adakv+tova)"
        elif kind == "propagation" and place:
            reason = "says which rows reach deeper layers; expected it in front of all, or alone"
        elif kind == "allocator" and place and chain[place - 1].entry.kind != "propagation":
            reason = (
                f"is an allocator and {chain[place - 1].name} around it needs a scorer; expected "
                f"{part.name} in front, and at most one"
            )
        elif place == len(chain) - 1 and not part.entry.innermost:
            reason = f"does not say how entries are scored; name a scorer, too, such as {name}+tova"
        if reason:
            raise PolicyError(f"{name}: {part.name} {reason}")


def _route(
    name: str, parts: Sequence[Part], params: Mapping[str, Any], *, declared_alone: bool = False
) -> list[dict[str, Any]]:
    """The values for each part: the outermost that has the name, `scorer__` one part in.

    A policy of the user's own also gets what no part has, because a function may take more than its
    signature names, unless `declared_alone`.
    """
    plans = tuple(f"{kind}:" for kind in foreign.PLANNED)
    own = (at for at, x in enumerate(parts) if x.own and not x.name.startswith(plans))
    rest = None if declared_alone else next(own, None)
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
