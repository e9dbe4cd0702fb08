"""From a name to a Policy: `outer[@preset][+inner[@preset]]...[+reader][+codec]` or `[+merger]`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from kvsim.core.arguments import listed
from kvsim.core.parameters import Length, Parameter, parameters
from kvsim.core.policy import Even, Everything, Policy, PolicyLike, Protection, Uniform
from kvsim.core.reading import Reader
from kvsim.core.storing import Codec, Spec
from kvsim.errors import PolicyError, suggest
from kvsim.policies import foreign
from kvsim.policies.access import ACCESS
from kvsim.policies.catalogue import CATALOGUE
from kvsim.policies.entry import Entry
from kvsim.policies.full import Full

#: Kinds of parts that stand behind an eviction.
BEHIND = ("reader", "codec", "merger")


def as_policy(given: PolicyLike) -> Policy:
    """Return a policy, built if it is given by name; raises as `policy` and `Policy.of`."""
    return policy(given) if isinstance(given, str) else Policy.of(given)


def as_policies(given: PolicyLike | Iterable[PolicyLike]) -> list[Policy]:
    """Return one policy or several as `Policy` objects (`as_policy`)."""
    several: list[PolicyLike] = listed(given)
    return [as_policy(each) for each in several]


def variants(name: str, settings: Mapping[str, Iterable[Any]]) -> list[Policy]:
    """Return a policy for each combination of values of its settings."""
    combinations = itertools.product(*settings.values())
    return [policy(name, **dict(zip(settings, each, strict=True))) for each in combinations]


def policy(name: str, **params: Any) -> Policy:
    """Return the policy called `name`, with parameters replaced by `params`.

    A name is a scorer, `NAME[@PRESET]`, with wrappers and at most one allocator in front:
    `ams+expected_attention`, `adakv@kvpress+snapkv`, `ams+global+knorm`. Bare `ams` is `ams+tova`.
    A reader and a codec stand behind it, `snapkv+quest+kivi`, or alone where nothing is evicted; or
    a merger, `snapkv+lookm`, alone behind `h2o`.
    Next to an eviction a reader reads a quarter of the budget by default (`share`). `rocketkv`
    alone is `snapkv+rocketkv`, as in the paper.
    A parameter goes to the outermost part that has it; `scorer__NAME` looks one part further in,
    and from the eviction to the reader and the codec: `tova+quest` takes `heads` for `tova`, and
    `scorer__heads` for `quest`.
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
    protect = _protect(name, params.pop("protect", None))
    chain, behind = _parse(name)
    part, innermost = chain[-1]
    outer = [entry for _, entry in chain[:-1] if entry is not None]
    own = len(outer) if innermost is None else None
    routed = _route(name, _levels(chain, behind), params, own)
    of_innermost = routed[len(outer)]
    if innermost is None:
        built = foreign.build(part, of_innermost)
    else:
        around = (*outer, *behind)
        inside = {key: value for entry in around for key, value in entry.inner.items()}
        inner = inside.get(part.partition("@")[0], {})
        inner = {key: inner[key] for key in inner.keys() & innermost.parameters.keys()}
        shared = _shared(outer[0], routed[0]) if outer and part == outer[0].default else {}
        given = {**innermost.params, **inner, **shared, **of_innermost}
        built = _explained(name, params, lambda: _base(name, innermost, given))
    rearranged = any(entry.kind != "propagation" for entry in outer)
    if rearranged and built.allocator.yields:
        built = replace(built, allocator=Uniform())
    if rearranged and not isinstance(built.allocator, Uniform):
        raise PolicyError(
            f"{name}: {part} decides itself how many entries each head keeps, so nothing can be "
            f"put around it; expected a scorer after {chain[-2][0]!r}, such as tova"
        )
    for entry, level in reversed(list(zip(outer, routed, strict=False))):
        arguments = {**entry.params, **level}
        if entry.kind == "propagation":
            built = replace(built, propagation=entry.piece(**arguments))
        elif entry.kind == "wrapper":
            built = replace(built, scorer=entry.piece(scorer=built.scorer, **arguments))
        else:
            built = replace(built, allocator=entry.piece(**arguments))
            if built.allocator.ordinal and "log" not in of_innermost:
                built = replace(built, scorer=built.scorer.logarithm())
        if entry.schedule is not None:
            built = replace(built, schedule=entry.schedule)
    for entry, level in zip(behind, routed[len(chain) :], strict=True):
        quarter = {"share": 0.25} if built.bounded and "share" in entry.parameters else {}
        piece = entry.piece(**{**entry.params, **quarter, **level})
        field = "reader" if entry.kind == "reader" else "codec"  # in which a merger is, too
        built = replace(built, **{field: piece})
    title = built.name if innermost is None and not outer and not behind else name
    built = replace(built, name=title, protect=built.protect | protect)
    lengths, scaled = _lengths(built, chain, routed)
    return replace(built, lengths=lengths, scaled=scaled)


def _lengths(
    built: Policy, chain: Sequence[tuple[str, Entry | None]], routed: Sequence[Mapping[str, Any]]
) -> tuple[tuple[Length, ...], tuple[Length, ...]]:
    """The lengths of a policy that are not given, and those that its name wants scaled."""
    every: list[Length] = []
    scaled: list[Length] = []
    outer, alike = chain[0][1], isinstance(built.layer_budgets, Even)
    for depth, (part, entry) in enumerate(chain):
        if entry is None:
            continue
        meant_for, given, scales = dict(entry.meant_for), set(routed[depth]), entry.scaled
        if depth and outer is not None and part == outer.default:  # it takes values over
            meant_for |= {x: y for x, y in outer.meant_for.items() if x in outer.shares}
            given |= set(routed[0]) & set(outer.shares)
            scales |= outer.scaled
        for name in meant_for.keys() - given:
            values = [getattr(x, name) for x in built.levels[depth] if hasattr(x, name)]
            if values and type(values[0]) is int:
                every.append(Length(depth, name, values[0], meant_for[name], alike))
                scaled += every[-1:] * scales
    return tuple(sorted(every)), tuple(sorted(scaled))


def canonical(name: str) -> str:
    """Return a name as the catalogue has it, so that `TOVA` is `tova`; a user's own as it is."""
    if not isinstance(name, str):
        raise PolicyError(
            f"the name of the policy is {name!r}; expected text such as 'ams+tova', "
            "`kvsim policies` lists them"
        )
    parts = map(str.strip, name.split("+"))
    return "+".join(part if ":" in part else part.lower() for part in parts)


def names() -> list[str]:
    """Every eviction of the catalogue, presets included, as `policy` takes it."""
    return _names(CATALOGUE)


def access_names() -> list[str]:
    """Every reader, codec and merger, presets included, as `policy` takes it alone or behind."""
    return _names(ACCESS)


def _names(entries: Mapping[str, Entry]) -> list[str]:
    return [
        full
        for name, entry in entries.items()
        for full in (name, *(f"{name}@{preset}" for preset in entry.presets))
    ]


def entry_of(name: str) -> Entry:
    """The entry or preset `name` by itself. Raises PolicyError for an unknown one."""
    ((_, entry),) = _entries(name)
    if entry is None:
        raise PolicyError(f"{name} is a policy of your own; expected a name of kvsim's")
    return entry


def parameter_names(name: str) -> tuple[str, ...]:
    """Names of the parameters that `policy` takes for `name`; none for a user's own."""
    return tuple(declared(name))


def _levels(
    chain: Sequence[tuple[str, Entry | None]], behind: Sequence[Entry]
) -> list[Mapping[str, Any]]:
    """The parameters of each part from the outside in, then reader and codec, as `scorer__` counts.

    Of a policy of the user's own, those that its class or function names.
    """
    inside = [entry.parameters if entry else foreign.named(part) for part, entry in chain]
    return [*inside, *(entry.parameters for entry in behind)]


def declared(name: str) -> dict[str, Parameter]:
    """The parameters that `policy` takes for `name`, as their pieces declare them."""
    chain, behind = _parse(name)
    ours = [*(entry is not None for _, entry in chain), *(True for _ in behind)]
    out: dict[str, Parameter] = {}
    last: dict[str, int] = {}
    for depth, level in enumerate(_levels(chain, behind)):
        for key, parameter in level.items():
            if ours[depth]:
                out["scorer__" * (last.get(key, -1) + 1) + key] = parameter
            last[key] = depth
    return out


def parts_of(name: str) -> list[tuple[str, dict[str, str]]]:
    """The parts of a name as written, each with its parameters: the keys that `policy` takes."""
    chain, behind = _parse(name)
    levels, written = _levels(chain, behind), canonical(name).split("+")
    depths = [*range(len(written) - len(behind)), *range(len(chain), len(levels))]
    out = []
    for part, depth in zip(written, depths, strict=True):
        before = {key: at for at, level in enumerate(levels[:depth]) for key in level}
        keys = {key: "scorer__" * (before.get(key, -1) + 1) + key for key in levels[depth]}
        out.append((part, keys))
    return out


def hidden_key(name: str, key: str) -> tuple[str, str] | None:
    """The part of `name` whose parameter `key` one before it has too; its key in `--set`.

    None where `key` alone reaches it, or is taken over from the one before.
    """
    outer = _entries(name)[0][1]
    for part, keys in parts_of(name):
        shared = outer is not None and part == outer.default and key in outer.shares
        if keys.get(key, key) != key and not shared:
            return part, keys[key].replace("scorer__", "scorer.")
    return None


def has_parameter(name: str, key: str) -> bool:
    """Whether `policy` takes the parameter `key` for `name`, spelt in any way that it takes."""
    try:
        _route(name, _levels(*_parse(name)), {key: 0}, rest=None)
    except PolicyError:
        return False
    return True


def _parse(name: str) -> tuple[list[tuple[str, Entry | None]], list[Entry]]:
    """The parts of a name from the outside in, and the reader and the codec behind them.

    None for a policy of the user's own; without an eviction the reader's own, or `full`.
    """
    parts = _entries(name)
    at = next((at for at, (_, x) in enumerate(parts) if x and x.kind in BEHIND), len(parts))
    chain, behind = parts[:at], parts[at:]
    kinds = [entry.kind if entry else "" for _, entry in behind]
    if kinds not in ([], ["reader"], ["codec"], ["reader", "codec"], ["merger"]):
        written = ["EVICTION"] * at + [x.upper() if x in BEHIND else "EVICTION" for x in kinds]
        raise PolicyError(
            f"{name} is {'+'.join(written)}; expected EVICTION+READER+CODEC, such as "
            "snapkv+quest+kivi, each at most once, or EVICTION+MERGER, such as snapkv+lookm"
        )
    front = next((entry.default for _, entry in behind if entry and entry.default), "full")
    chain = chain or [(front, CATALOGUE[front])]
    innermost = chain[-1][1]
    if innermost is not None and not innermost.innermost:
        if not innermost.default:
            _check_order(name, chain)
            raise PolicyError(
                f"{name!r} says how entries are chosen but not how they are scored; "
                f"name a scorer too, such as {name}+tova or {name}+expected_attention"
            )
        chain.append((innermost.default, CATALOGUE[innermost.default]))
    _check_order(name, chain)
    return chain, [entry for _, entry in behind if entry is not None]


def _entries(name: str) -> list[tuple[str, Entry | None]]:
    """The parts of a name and their entries; None for a policy of the user's own."""
    chain: list[tuple[str, Entry | None]] = []
    for part in canonical(name).split("+"):
        if ":" in part:
            chain.append((part, foreign.entry_of(part)))
            continue
        base, at, preset = part.partition("@")
        if base not in CATALOGUE and base not in ACCESS:
            module, _, last = base.rpartition(".")
            hint = f"; a policy of your own is {module}:{last}" if module else ""
            shown = f"{base!r}{suggest(base, [*CATALOGUE, *ACCESS])}" if base else f"'' in {name!r}"
            raise PolicyError(f"unknown policy {shown}{hint}; `kvsim policies` lists all")
        entry = _entry(base)
        if at and not entry.has_preset(preset):
            available = [*entry.presets, *["scaled"] * entry.has_preset("scaled")]
            presets = ", ".join(f"{base}@{p}" for p in available) or "none"
            raise PolicyError(
                f"{base} has no preset {preset!r}{suggest(preset, available)}; "
                f"presets of {base}: {presets}"
            )
        chain.append((part, entry.preset(preset)))
    return chain


def _entry(name: str) -> Entry:
    return CATALOGUE[name] if name in CATALOGUE else ACCESS[name]


def codec_of(spec: Codec | Spec) -> Codec:
    """The codec that a record names. Raises PolicyError for one that is not in the catalogue."""
    return _stored(spec, "codec", "merger") if isinstance(spec, Spec) else spec


def reader_of(spec: Reader | Spec) -> Reader:
    """The reader that a record names, as `codec_of`."""
    return _stored(spec, "reader") if isinstance(spec, Spec) else spec


def _stored(spec: Spec, *kinds: str) -> Any:
    entry = CATALOGUE.get(spec.name) or ACCESS.get(spec.name)
    known = entry is not None and spec.params.keys() <= entry.parameters.keys()
    if entry is None or not known or entry.kind not in kinds:
        raise PolicyError(
            f"the record names the {kinds[0]} {spec.name!r} with {dict(spec.params)}, which kvsim "
            "does not have; measure it where it was replayed, before it is stored"
        )
    return entry.piece(**spec.params)


def _check_order(name: str, chain: Sequence[tuple[str, Entry | None]]) -> None:
    """Raise PolicyError where a part of a name stands where it cannot."""
    for place, (part, entry) in enumerate(chain):
        kind, inside = (entry.kind, not entry.innermost) if entry else ("policy of your own", False)
        before, around = chain[place - 1] if place else ("", None)
        in_front = around is None or around.kind == "propagation"
        reasons = {
            f"{part} scores by itself and takes no scorer inside; expected it last (adakv+tova)": (
                place < len(chain) - 1 and not inside
            ),
            f"{part} says which rows reach deeper layers; expected it in front of all, or alone": (
                kind == "propagation" and place > 0
            ),
            f"{part} is an allocator and {before} around it needs a scorer; expected {part} in "
            "front, and at most one": kind == "allocator" and place > 0 and not in_front,
        }
        for reason, applies in reasons.items():
            if applies:
                raise PolicyError(f"{name}: {reason}")


def _route(
    name: str, levels: Sequence[Mapping[str, Any]], params: Mapping[str, Any], rest: int | None
) -> list[dict[str, Any]]:
    """The values for each level: the outermost that has the name, `scorer__` one level in.

    rest: the level of a policy of the user's own, which also gets what no level has, because a
    function may take more than its signature names.
    """
    out: list[dict[str, Any]] = [{} for _ in levels]
    for given, value in params.items():
        depth, key = 0, given
        while key.startswith("scorer__"):
            depth, key = depth + 1, key.removeprefix("scorer__")
        level = next((at for at in range(depth, len(levels)) if key in levels[at]), rest)
        if level is None or level < depth:
            available = dict.fromkeys(k for each in levels[depth:] for k in each)
            raise PolicyError(
                f"{name} has no parameter {given!r}{suggest(key, available)}; "
                f"parameters: {', '.join(available) or 'none'}"
            )
        out[level][key] = value
    return out


def _explained(name: str, params: Mapping[str, Any], build: Callable[[], Policy]) -> Policy:
    """Return what `build` does; its error names the key of a reader or codec that it hides."""
    try:
        return build()
    except PolicyError as error:
        for key in (key for key in params if f" {key} is " in str(error)):
            if hidden := hidden_key(name, key):
                raise PolicyError(f"{error}; the {key} of {hidden[0]} is {hidden[1]}") from None
        raise


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
