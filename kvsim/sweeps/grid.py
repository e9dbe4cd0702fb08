"""The grid of a sweep: traces, policies with their parameters, budgets, schedules and layers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_type_hints

import yaml

from kvsim.analysis.folder import ONE_SCHEDULE
from kvsim.analysis.measuring import available, check_arrays, choose
from kvsim.analysis.overview import SUMMARY
from kvsim.analysis.results import check_distinct
from kvsim.core.arguments import listed, share_of, value_of
from kvsim.core.budgets import EXPECTED, budgeted
from kvsim.core.checks import resolve_device
from kvsim.core.options import given_options
from kvsim.core.parameters import integer
from kvsim.core.policy import Policy, Protection, Scorer
from kvsim.core.trace import Trace
from kvsim.engine.layers import layers_to_replay
from kvsim.errors import ConfigError, OutputError, PolicyError, local_path, suggest
from kvsim.experiment import SweepOptions, numbers_in
from kvsim.files import read_input
from kvsim.policies import as_policy, variants
from kvsim.policies.fit import fitted
from kvsim.samples import SAMPLES
from kvsim.schema import PREFILL, Compress, is_url, schedule, size_in_bytes
from kvsim.store.opening import paths_of
from kvsim.store.reader import open_trace
from kvsim.sweeps.folder import check_output
from kvsim.sweeps.tasks import Cell

#: Most bytes of a configuration, and cells of a sweep.
_DOCUMENT = 4 << 20
_CELLS = 1_000_000
#: Rows between events when policies are compared, unless an interval is given.
INTERVAL = 32
#: The interval that stands for each policy's own schedule.
PAPER = "paper"

#: Replacement of policies' schedules: interval, prefill, compress and prefill_chunk, each None to
#: keep the policy's own.
Terms = tuple[int | None, bool | None, Compress | None, int | None]
#: Options that select all metrics whose arrays the traces have.
EVERYTHING = ("all",)


@dataclass(frozen=True)
class Grid:
    """Every policy at every budget and interval over every trace.

    traces: paths, URLs, and objects. policies: one for each combination of settings, each once.
    budgets: entries, or shares (`25%`). options: all others, checked.
    """

    traces: tuple[str | Trace, ...]
    policies: tuple[Policy, ...]
    budgets: tuple[str, ...]
    options: Mapping[str, Any]

    def opened(self) -> list[Trace]:
        """The traces, with only their metadata read."""
        traces = [each if isinstance(each, Trace) else open_trace(each) for each in self.traces]
        check_distinct(traces)
        return traces

    def chosen(self, traces: Sequence[Trace]) -> list[str]:
        """The metrics by name, checked against the arrays of the traces."""
        names, judged = self.options["metrics"], self.options["judge"] is not False
        if names == EVERYTHING:
            return [*choose(None, judged=judged)]
        names = available(SUMMARY, traces) if names is None else names
        chosen = choose(names, optima=True, judged=judged)
        for trace in traces:
            check_arrays(trace, chosen)
        return [*chosen]

    def schedules(self) -> list[tuple[Terms, str]]:
        """The schedules of the compared policies, and a remark on each."""
        return [
            shared_terms(self.policies, interval, self.options)
            for interval in self.options["interval"] or (None,)
        ]

    def cells(self, traces: Sequence[Trace], schedules: Sequence[Terms]) -> list[Cell]:
        """Every cell, numbered: trace by trace, policy by policy, budget by budget."""
        count = len(traces) * len(self.policies) * len(self.budgets) * len(schedules)
        if count > _CELLS:
            raise ConfigError(f"the grid has {count} cells, expected at most {_CELLS}; split it")
        layers = {trace.name: layers_to_replay(trace, self.options["layers"]) for trace in traces}
        growing: dict[tuple[int, float], Policy] = {}  # one object for the cells of all traces
        # a repeated budget, or an interval equal to a policy's own, is the same cell
        cells: dict[tuple[object, ...], Cell] = {}
        for trace, given, budget, terms in product(traces, self.policies, self.budgets, schedules):
            policy, entries = budgeted(given, trace, budget)
            if policy.so_far is not None:
                policy = growing.setdefault((id(given), policy.so_far), policy)
            where = entries, share_of(budget), policy.schedule.override(*terms)
            cell = Cell(len(cells), trace, policy, *where, layers[trace.name])
            cells.setdefault((trace.name, id(policy), *where), cell)
        return [*cells.values()]


def grid_of(
    config: str | Path | Mapping[str, Any] | None = None,
    *,
    of: type = SweepOptions,
    where: str = "the grid",
    defaults: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> Grid:
    """Return the grid of a YAML file (docs/sweeps.md) or a mapping, and of keywords.

    config: paths are relative to the folder of the file, and those of traces may have wildcards;
    values are as in `--set`. options: replace those of config; None stands for a default. of:
    declares the keys. defaults: replace the declared ones. Raises ConfigError, which begins with
    the path or `where`, for an unknown key or another kind of value.
    """
    document, folder = config or {}, Path()
    if isinstance(config, str | Path):
        where = str(config)
        document = _document(config)
        folder = Path(config).parent
    if not isinstance(document, Mapping):
        kind = type(document).__name__
        raise ConfigError(f"{where}: it holds a {kind}; expected keys such as traces and policies")
    names, read = [*get_type_hints(of)], dict[str, Any]()
    given = {x: y for each in (document, options) for x, y in each.items() if y is not None}
    for key in (key for key in given if key not in names):
        close = suggest(str(key), names)
        raise ConfigError(f"{where}: unknown key {key!r}{close}; known: {', '.join(names)}")
    for key, value in {**defaults, **given}.items():
        reader, expected = _READERS.get(key, (lambda given: given, ""))
        read[key] = taken = reader(value)
        empty = taken == () and key != "metrics"  # figures of kept sets need no values
        if (expected and taken is None) or empty or (isinstance(taken, tuple) and None in taken):
            raise ConfigError(f"{where}: {key} is {value!r}; expected {expected}")
    for key, flag in (("traces", ""), ("policies", " (--policy)"), ("budgets", " (--budget)")):
        if key not in read:
            raise ConfigError(f"{where}: {key}{flag} is missing; expected one or several")
    checked = given_options(of, read, where)
    if checked["out"] is not None:
        out = local_path(checked["out"], OutputError)
        checked["out"] = out if "out" in options else folder / out
        check_output(checked["out"], overwrite=checked["overwrite"])
    policies = adapted(checked.pop("policies"), fit=checked["fit"], protect=checked["protect"])
    return Grid(
        traces=tuple(_paths(checked.pop("traces"), Path() if "traces" in options else folder)),
        policies=tuple(policies),
        budgets=checked.pop("budgets"),
        options=checked,
    )


def adapted(given: Iterable[Policy], *, fit: bool = False, protect: object = None) -> list[Policy]:
    """Return policies, each once, with lengths that fit the budget and common protected entries."""
    common = protection_of(protect or {})
    fitting = (fitted(each) if fit else each for each in given)
    policies = [replace(each, protect=each.protect | common) for each in fitting]
    check_names(policies)
    return [each for place, each in enumerate(policies) if each not in policies[:place]]


def described(terms: Terms) -> dict[str, Any]:
    """Settings that replace the schedules of policies, ready for JSON."""
    return dict(zip(("interval", "prefill", *PREFILL), terms, strict=True))


def shared_terms(
    policies: Sequence[Policy], interval: int | str | None, options: Mapping[str, Any]
) -> tuple[Terms, str]:
    """One schedule for compared policies, and a remark if none was given.

    Without an interval, two or more policies act after the prompt and every `INTERVAL` rows,
    whichever they are, so that the numbers of one do not depend on the others. A single policy has
    the schedule of its paper, and all do with the interval `paper`. A given interval adds the
    prefill event for all policies, unless `prefill` decides.
    """
    prefill, compress, chunk = (options[name] for name in ("prefill", *PREFILL))
    if interval == PAPER or (interval is None and all(x == policies[0] for x in policies)):
        return (None, prefill, compress, chunk), ""
    rows = INTERVAL if interval is None else int(interval)
    prefill = True if prefill is None else prefill
    ends = compress or "prompt"
    after = schedule(rows, prefill=prefill, compress=ends, prefill_chunk=chunk)
    remark = (
        f"{ONE_SCHEDULE} ({after}); --interval N changes it, --interval paper "
        "lets each policy follow its paper"
    )
    return (rows, prefill, compress, chunk), remark * (interval is None)


def check_names(policies: Sequence[Policy]) -> None:
    """Raise PolicyError for two different policies with equal names and parameters."""
    by_name: dict[str, Policy] = {}
    for policy in policies:
        label = f"{policy.name} {json.dumps(policy.params, sort_keys=True)}"
        if by_name.setdefault(label, policy) != policy:
            raise PolicyError(
                f"two different policies are called {policy.name!r} and have the same parameters, "
                "so that results could not be told apart; replay them one by one or name them "
                "differently"
            )


def params_of(policies: Sequence[Policy]) -> dict[str, Any]:
    """Parameters of policies by name, in a list where several have one name."""
    by_name: dict[str, list[Any]] = {}
    for policy in policies:
        by_name.setdefault(policy.name, []).append(policy.params)
    return {name: each[0] if len(each) == 1 else each for name, each in by_name.items()}


class _Loader(yaml.BaseLoader):  # type: ignore[misc]  # PyYAML has no types
    """YAML loader of texts, within the memory and time that the file's size allows."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Return the next node; aliases are refused."""
        if self.check_event(yaml.AliasEvent):
            raise yaml.MarkedYAMLError(
                "it has an alias, expected the value itself", self.peek_event().start_mark
            )
        return super().compose_node(parent, index)


def _document(path: str | Path) -> Any:
    """Return the content of a YAML file; ConfigError for invalid YAML."""
    try:
        return _values(
            _Loader(read_input(local_path(path, ConfigError), _DOCUMENT)).get_single_data()
        )
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror or error})") from error
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"{path} is no YAML: {reason}") from error


def _values(given: Any) -> Any:
    """Parse the texts of a document as values."""
    if isinstance(given, dict):
        return {key: _values(value) for key, value in given.items()}
    if isinstance(given, list):
        return [_values(value) for value in given]
    return value_of(given) if isinstance(given, str) else given


def _listed(value: Any) -> list[Any]:
    return [value] if isinstance(value, Mapping) else listed(value)


def _paths(given: Iterable[Any], folder: Path) -> Iterator[str | Trace]:
    """Yield the paths of traces; those of folders and wildcards in alphabetical order."""
    for source in given:
        if isinstance(source, Trace) or is_url(source):
            yield source
            continue
        path = folder / source
        name = source if str(source) in SAMPLES and not path.exists() else path
        yield from (str(Path(path).absolute()) for path in paths_of(name))


def _policies(given: object) -> Iterator[Policy | None]:
    """Yield policies of names, `NAME: {parameter: values}`, objects or lists; None is no policy."""
    plain = (int, float, bool, str, type(None))
    for each in _listed(given):
        if isinstance(each, Policy | Scorer):
            yield as_policy(each)
            continue
        pairs = each.items() if isinstance(each, Mapping) else [(each, None)]
        for name, settings in pairs:
            lists = {}
            if isinstance(settings, Mapping):  # `scorer.window` as Python spells it
                lists = {
                    str(key).replace("scorer.", "scorer__"): _listed(value)
                    for key, value in settings.items()
                }
            fits = all(x and all(isinstance(y, plain) for y in x) for x in lists.values())
            if isinstance(name, str) and isinstance(settings or {}, Mapping) and fits:
                yield from variants(name, lists)
            else:
                yield None


def protection_of(given: object) -> Protection:
    """Return common protected entries, by the fields of `Protection`; or ConfigError."""
    if isinstance(given, Protection):
        return given
    names = [f.name for f in fields(Protection)]
    if not isinstance(given, dict) or not set(given) <= set(names):
        raise ConfigError(f"protect is {given!r}; expected {', '.join(names)}")
    return Protection(**given)


def _fitting(fits: Callable[[Any], bool]) -> Callable[[Any], tuple[Any, ...]]:
    """Return a reader of one value or several, with None in place of invalid ones."""
    return lambda given: tuple(each if fits(each) else None for each in _listed(given))


def _budgets(given: object) -> tuple[str | None, ...]:
    numbers = _fitting(lambda each: integer(each) is not None or isinstance(each, str | float))
    return tuple(None if each is None else str(each) for each in numbers(given))


def _layers(given: object) -> tuple[int, ...] | None:
    fits = (isinstance(each, str) or integer(each) is not None for each in _listed(given))
    numbers = numbers_in(",".join(map(str, _listed(given)))) if all(fits) else None
    return None if numbers is None else tuple(sorted(numbers))


#: The reader of the value of a key, with None for an invalid one, and the expected type.
_READERS: Mapping[str, tuple[Callable[[Any], Any], str]] = {
    "traces": (_fitting(lambda each: isinstance(each, Trace | str | Path)), "paths or URLs"),
    "policies": (lambda given: tuple(_policies(given)), "names, or NAME: {parameter: value}"),
    "budgets": (_budgets, EXPECTED),
    "interval": (
        _fitting(lambda each: each == PAPER or (integer(each) or 0) >= 1),
        "rows, at least 1, or paper (called own before)",
    ),
    "layers": (_layers, "whole numbers, or ranges such as 4-7"),
    "metrics": (lambda given: tuple(map(str, _listed(given))), "names"),
    "memory": (lambda given: size_in_bytes(str(given)), "a size such as 500MB, 2GB or 1GiB"),
    "device": (lambda given: resolve_device(given, here=False), ""),  # until it runs
}
