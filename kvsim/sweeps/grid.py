"""The grid of a sweep: traces, policies with their parameters, budgets, schedules and layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from kvsim.analysis.measuring import BESIDE, available, check_arrays, choose
from kvsim.analysis.overview import SUMMARY
from kvsim.analysis.results import check_distinct
from kvsim.core.arguments import value_of
from kvsim.core.budgets import EXPECTED
from kvsim.core.checks import resolve_device
from kvsim.core.options import given_options
from kvsim.core.parameters import integer
from kvsim.core.policy import Policy, Protection, Scorer
from kvsim.core.trace import Trace
from kvsim.engine.layers import replayed
from kvsim.errors import ConfigError, local_path, suggest
from kvsim.experiment import Keys, Options
from kvsim.files import read_input
from kvsim.policies import variants
from kvsim.samples import SAMPLES
from kvsim.schema import is_url, size_in_bytes
from kvsim.store import open_trace
from kvsim.store.opening import paths_of
from kvsim.sweeps.cells import Cell, cells_of
from kvsim.sweeps.terms import Terms, check_names, shared_terms

#: Most bytes of a configuration, and cells of a sweep.
_DOCUMENT = 4 << 20
_CELLS = 1_000_000


@dataclass(frozen=True)
class Grid:
    """Every policy at every budget and interval over every trace.

    traces: paths, URLs, and objects. policies: one for each combination of settings, each once.
    budgets: entries, or shares (`25%`). records: keep them too. options: all of
    `kvsim.experiment.Options`, checked.
    """

    traces: tuple[str | Trace, ...]
    policies: tuple[Policy, ...]
    budgets: tuple[str, ...]
    records: bool
    options: Mapping[str, Any]

    def opened(self) -> list[Trace]:
        """The traces, of which nothing but their metadata is read."""
        traces = [each if isinstance(each, Trace) else open_trace(each) for each in self.traces]
        check_distinct(traces)
        return traces

    def chosen(self, traces: Sequence[Trace]) -> list[str]:
        """The metrics by name, checked against the arrays of the traces."""
        names = self.options["metrics"]
        names = available(SUMMARY, traces) if names is None else names
        chosen = choose(names, beside=BESIDE, judged=bool(self.options["judge"]))
        for trace in traces:
            check_arrays(trace, chosen)
        return [*chosen]

    def schedules(self) -> list[tuple[Terms, str]]:
        """The schedules of policies that are compared, and a remark on each."""
        return [
            shared_terms(self.policies, interval, self.options)
            for interval in self.options["interval"] or (None,)
        ]

    def cells(self, traces: Sequence[Trace], schedules: Sequence[Terms]) -> list[Cell]:
        """Every cell, numbered: trace by trace, policy by policy, budget by budget."""
        count = len(traces) * len(self.policies) * len(self.budgets) * len(schedules)
        if count > _CELLS:
            raise ConfigError(f"the grid has {count} cells, expected at most {_CELLS}; split it")
        # a budget given twice, or an interval that is a policy's own, is the same cell again
        different = {
            (cell.trace.name, id(cell.policy), cell.budget, cell.share, cell.schedule): cell
            for cell in cells_of(traces, self.policies, self.budgets, schedules)
        }
        layers = {trace.name: replayed(trace, self.options["layers"]) for trace in traces}
        return [
            cell._replace(number=number, layers=layers[cell.trace.name])
            for number, cell in enumerate(different.values())
        ]


def grid_of(document: object, folder: Path = Path(), *, where: str = "the grid") -> Grid:
    """Return the grid of values by the keys `kvsim.experiment.Keys`; None stands for a default.

    folder: from which relative paths of traces are seen. Raises ConfigError, which begins with
    `where`, for an unknown key or another kind of value.
    """
    if not isinstance(document, Mapping):
        kind = type(document).__name__
        raise ConfigError(f"{where}: it holds a {kind}; expected keys such as traces and policies")
    names, read = [*get_type_hints(Keys)], dict[str, Any]()
    for key, value in document.items():
        if key not in names:
            close = suggest(str(key), names)
            raise ConfigError(f"{where}: unknown key {key!r}{close}; known: {', '.join(names)}")
        if value is None:
            continue
        reader, expected = _READERS.get(key, (lambda given: given, ""))
        read[key] = taken = reader(value)
        empty = taken == () and key != "metrics"  # figures of kept sets need no values
        if taken is None or empty or (isinstance(taken, tuple) and None in taken):
            raise ConfigError(f"{where}: {key} is {value!r}; expected {expected}")
    if missing := [key for key in ("traces", "policies", "budgets") if key not in read]:
        raise ConfigError(f"{where}: {missing[0]} is missing; expected one or a list")
    checked = given_options(Keys, read, where)
    protect = protection_of(checked["protect"])
    built = [each.fitted() if checked["fit"] else each for each in checked["policies"]]
    check_names(built)
    policies: list[Policy] = []
    for each in built:
        policies += [each] * (each not in policies)
    return Grid(
        traces=tuple(_paths(checked["traces"], folder)),
        policies=tuple(replace(each, protect=each.protect | protect) for each in policies),
        budgets=checked["budgets"],
        records=checked["records"],
        options={name: checked[name] for name in get_type_hints(Options)} | {"protect": protect},
    )


class _Loader(yaml.BaseLoader):  # type: ignore[misc]  # PyYAML has no types
    """Reads configurations: texts, which take no more memory or time than the file."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Return the next node, which no alias may stand for."""
        if self.check_event(yaml.AliasEvent):
            raise yaml.MarkedYAMLError(
                "it has an alias, expected the value itself", self.peek_event().start_mark
            )
        return super().compose_node(parent, index)


def read_grid(path: str | Path) -> Grid:
    """Return the grid of a YAML file (docs/sweeps.md), whose values are as `--set` takes them.

    Paths of traces are those seen from the folder of the file, and may have wildcards.

    Raises ConfigError for what is no configuration.
    """
    file = local_path(path, ConfigError)
    try:
        document = _values(_Loader(read_input(file, _DOCUMENT)).get_single_data())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror or error})") from error
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"{path} is no YAML: {reason}") from error
    return grid_of(document, file.parent, where=str(path))


def _values(given: Any) -> Any:
    """Return the values that the texts of a document mean."""
    if isinstance(given, dict):
        return {key: _values(value) for key, value in given.items()}
    if isinstance(given, list):
        return [_values(value) for value in given]
    return value_of(given) if isinstance(given, str) else given


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


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
    """Yield the policies of names, of `NAME: {parameter: value}`, of objects, or of a list.

    A list of values stands for as many policies. None is no policy.
    """
    plain = (int, float, bool, str, type(None))
    for each in _listed(given):
        if isinstance(each, Policy | Scorer):
            yield Policy.of(each)
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
    """Return what every policy protects too, by the fields of `Protection`; or ConfigError."""
    if isinstance(given, Protection):
        return given
    names = [f.name for f in fields(Protection)]
    if not isinstance(given, dict) or not set(given) <= set(names):
        raise ConfigError(f"protect is {given!r}; expected {', '.join(names)}")
    return Protection(**given)


def _fitting(fits: Callable[[Any], bool]) -> Callable[[Any], tuple[Any, ...]]:
    """Return what reads one value or several, None in place of those that do not fit."""
    return lambda given: tuple(each if fits(each) else None for each in _listed(given))


def _budgets(given: object) -> tuple[str | None, ...]:
    numbers = _fitting(lambda each: integer(each) is not None or isinstance(each, str | float))
    return tuple(None if each is None else str(each) for each in numbers(given))


def _layers(given: object) -> tuple[int | None, ...]:
    numbers = _fitting(lambda each: integer(each) is not None)(given)
    return numbers if None in numbers else tuple(sorted(numbers))


#: What reads the value of a key, with None for what does not fit, and what it expects.
_READERS: Mapping[str, tuple[Callable[[Any], Any], str]] = {
    "traces": (_fitting(lambda each: isinstance(each, Trace | str | Path)), "paths or URLs"),
    "policies": (lambda given: tuple(_policies(given)), "names, or NAME: {parameter: value}"),
    "budgets": (_budgets, EXPECTED),
    "interval": (
        _fitting(lambda each: each == "own" or (integer(each) or 0) >= 1),
        "rows, at least 1, or own",
    ),
    "layers": (_layers, "whole numbers"),
    "metrics": (lambda given: tuple(map(str, _listed(given))), "names"),
    "memory": (lambda given: size_in_bytes(str(given)), "a size such as 500MB, 2GB or 1GiB"),
    "device": (lambda given: resolve_device(given, here=False), ""),  # until it runs
}
