"""The grid of a sweep: traces, policies with their parameters, budgets, schedules and layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from kvsim.analysis.overview import SUMMARY
from kvsim.analysis.results import check_distinct
from kvsim.analysis.table import available
from kvsim.core.arguments import value_of
from kvsim.core.budgets import EXPECTED
from kvsim.core.checks import resolve_device
from kvsim.core.options import given_options
from kvsim.core.parameters import integer
from kvsim.core.policy import Policy, Protection, Scorer
from kvsim.core.trace import Trace
from kvsim.engine.layers import replayed
from kvsim.errors import ConfigError, KvsimError, TraceNotFoundError, local_path, suggest
from kvsim.experiment import Keys, Options
from kvsim.files import read_input
from kvsim.policies import policy as build
from kvsim.policies import variants
from kvsim.samples import SAMPLES
from kvsim.schema import PREFILL, is_url, size_in_bytes
from kvsim.store import open_trace
from kvsim.store.opening import paths_of
from kvsim.sweeps.cells import Cell, cells_of
from kvsim.sweeps.terms import Terms, check_names, measurable, shared_terms

#: Most bytes of a configuration, and cells of a sweep.
_DOCUMENT = 4 << 20
_CELLS = 1_000_000


@dataclass(frozen=True)
class Grid:
    """Every policy at every budget and interval over every trace.

    traces: paths, URLs, and objects. policies: names or objects, each with settings, of which a
    list of values stands for as many policies. budgets: entries, or shares (`25%`). intervals: rows
    between events, None for each policy's own schedule; by default one schedule for all
    (`kvsim.sweeps.terms.shared_terms`). records: keep them too. options: all of
    `kvsim.experiment.Options`, checked.
    """

    traces: tuple[str | Trace, ...]
    policies: tuple[tuple[str | Policy, Mapping[str, Any]], ...]
    budgets: tuple[str, ...]
    intervals: tuple[int | None, ...]
    records: bool
    options: Mapping[str, Any]

    @staticmethod
    def of(given: Mapping[str, Any], folder: Path = Path()) -> Grid:
        """Build a grid from values by the keys `kvsim.experiment.Keys`; None stands for a default.

        folder: from which relative paths of traces are seen. Raises ConfigError for a value of
        another kind.
        """
        for key in ("traces", "policies", "budgets"):
            if not given.get(key):
                raise ConfigError(f"{key} is missing; expected one or a list")
        read = {
            key: _READERS[key](value) if key in _READERS else value
            for key, value in given.items()
            if value is not None and key != "traces"
        }
        checked = given_options(Keys, read, "grid")
        checked["protect"] = _protection(checked["protect"])
        return Grid(
            traces=tuple(_traces(_listed(given["traces"]), folder)),
            policies=checked["policies"],
            budgets=checked["budgets"],
            intervals=checked["intervals"] or (),
            records=checked["records"],
            options={name: checked[name] for name in get_type_hints(Options)},
        )

    def built(self) -> list[Policy]:
        """The policies, one for each combination of settings."""
        policies: list[Policy] = []
        for name, settings in self.policies:
            if isinstance(name, Policy):
                policies.append(name)
            else:
                policies += variants(name, {key: _listed(x) for key, x in settings.items()})
        policies = [each.fitted() for each in policies] if self.options["fit"] else policies
        check_names(policies)
        protect = self.options["protect"]
        return [replace(each, protect=each.protect | protect) for each in policies]

    def opened(self) -> list[Trace]:
        """The traces, of which nothing but their metadata is read."""
        traces = [each if isinstance(each, Trace) else open_trace(each) for each in self.traces]
        check_distinct(traces)
        return traces

    def chosen(self, traces: Sequence[Trace]) -> list[str]:
        """The metrics by name, checked against the arrays of the traces."""
        options = self.options
        names = available(SUMMARY, traces) if options["metrics"] is None else options["metrics"]
        judged = bool(options["judge"])
        return list(measurable(names, traces, regret=options["regret"], judged=judged))

    def schedules(self, policies: Sequence[Policy]) -> list[tuple[Terms, str]]:
        """The schedules of policies that are compared, and a remark on each."""
        return [
            shared_terms(
                policies,
                (interval, *(self.options[name] for name in ("prefill", *PREFILL))),
                own_schedule=bool(self.intervals) and interval is None,
            )
            for interval in self.intervals or (None,)
        ]

    def cells(self, traces: Sequence[Trace]) -> list[Cell]:
        """Every cell, numbered: trace by trace, policy by policy, budget by budget."""
        policies: list[Policy] = []
        for each in self.built():
            policies += [each] * (each not in policies)
        schedules = [terms for terms, _ in self.schedules(policies)]
        count = len(traces) * len(policies) * len(self.budgets) * len(schedules)
        if count > _CELLS:
            raise ConfigError(f"the grid has {count} cells, expected at most {_CELLS}; split it")
        cells = cells_of(traces, policies, self.budgets, schedules)
        # a budget given twice, or an interval that is a policy's own, is the same cell again
        different = {
            (cell.trace.name, id(cell.policy), cell.budget, cell.share, cell.schedule): cell
            for cell in cells
        }
        layers = {trace.name: replayed(trace, self.options["layers"]) for trace in traces}
        return [
            cell._replace(number=number, layers=layers[cell.trace.name])
            for number, cell in enumerate(different.values())
        ]

    def document(self) -> dict[str, Any]:
        """The grid as a configuration, ready for YAML.

        Traces in memory, and policies that no name and parameters make, stand there as texts, with
        `objects: true`: a file cannot hold them, and nothing reads the grid again.
        """
        traces = [x if isinstance(x, str) else str(x.path or x.name) for x in self.traces]
        policies = [_spelled(name, given) for name, given in self.policies]
        objects = any(isinstance(x, Trace) and x.path is None for x in self.traces)
        objects = objects or not all(policies)
        return {
            "traces": traces,
            "policies": [
                spelled or str(getattr(name, "name", name))
                for spelled, (name, _) in zip(policies, self.policies, strict=True)
            ],
            **({"objects": True} if objects else {}),
            "budgets": list(self.budgets),
            "intervals": list(self.intervals),
            "records": self.records,
            **{x: list(y) if isinstance(y, tuple) else y for x, y in self.options.items()},
            "protect": dict(vars(self.options["protect"])),
        }


def _spelled(policy: str | Policy, given: Mapping[str, Any]) -> str | dict[str, Any] | None:
    """A policy as a configuration has it; None for one that no name and parameters make."""
    if isinstance(policy, str):
        return {policy: dict(given)} if given else policy
    params = {name: x for name, x in policy.params.items() if name != "protect"}
    if not all(isinstance(x, int | float | bool | str | None) for x in params.values()):
        return None  # a list would stand for several policies
    try:
        made = build(policy.name, **params)
    except (KvsimError, TypeError):
        return None
    return {policy.name: params} if replace(made, protect=policy.protect) == policy else None


_TAGS = {int: "int", float: "float", bool: "bool", type(None): "null", str: "str"}


class _Values:
    """Values without quotes as `--set` takes them; YAML 1.1 has 1e-2 for text."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        """Return the tag of a node."""
        if kind is yaml.ScalarNode and implicit[0]:
            return f"tag:yaml.org,2002:{_TAGS[type(value_of(value))]}"
        return super().resolve(kind, value, implicit)  # type: ignore[misc]  # of PyYAML


class Loader(_Values, yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
    """Reads configurations; their values take no more memory or time than their text."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Return the next node, which no alias may stand for."""
        if self.check_event(yaml.AliasEvent):
            raise yaml.MarkedYAMLError(
                "it has an alias, expected the value itself", self.peek_event().start_mark
            )
        return super().compose_node(parent, index)


class Dumper(_Values, yaml.SafeDumper):  # type: ignore[misc]  # as above
    """Writes configurations so that `Loader` reads the same."""

    def ignore_aliases(self, data: object) -> bool:
        """Return True: an object that is there twice is written twice."""
        return True


for _tag in ("int", "float", "bool", "null"):
    Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", lambda _, node: value_of(node.value))


def read_grid(path: str | Path) -> Grid:
    """Return the grid of a YAML file (docs/sweeps.md).

    Paths of traces are those seen from the folder of the file, and may have wildcards.

    Raises ConfigError for what is no configuration.
    """
    file = local_path(path, ConfigError)
    return grid_of(read_yaml(file), file.parent, where=str(path))


def read_yaml(path: Path) -> object:
    """Return the document of a YAML file; ConfigError for another file, and for aliases in it."""
    try:
        return Loader(read_input(path, _DOCUMENT)).get_single_data()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror or error})") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"{path} is no YAML: {reason}") from error


def grid_of(document: object, folder: Path, *, where: str) -> Grid:
    """Return the grid of a configuration; relative paths of traces are seen from `folder`.

    Raises ConfigError, which begins with `where`, for an unknown key or another kind of value.
    """
    try:
        return _grid(document, folder)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


#: Keys of a configuration that kvsim writes for its users and does not read.
_NOTES = ("resolved", "objects", "command")


def _grid(document: object, folder: Path) -> Grid:
    if not isinstance(document, dict):
        raise ConfigError(f"it holds {_kind(document)}; expected keys such as traces and policies")
    if document.get("objects") or "loop" in document:
        raise ConfigError(
            "it is of a run of the model, or of traces or policies that were given as objects; "
            "expected paths and names; continue with the command or the call that began it"
        )
    names = [*get_type_hints(Keys)]
    for key in document:
        if key not in (*names, *_NOTES):
            close = suggest(str(key), names)
            raise ConfigError(f"unknown key {key!r}{close}; known: {', '.join(names)}")
    return Grid.of({key: x for key, x in document.items() if key not in _NOTES}, folder)


def _kind(value: object) -> str:
    return {dict: "keys", list: "a list", str: "text", type(None): "nothing"}.get(
        type(value), repr(value)[:80]
    )


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _whole(key: str, value: object) -> int:
    number = integer(value)
    if number is None:
        raise ConfigError(f"{key} is {value!r}; expected a whole number")
    return number


def _size(value: object) -> int:
    number = size_in_bytes(str(value))
    if number is None or isinstance(value, bool):
        raise ConfigError(f"memory is {value!r}; expected a size such as 500MB, 2GB or 1GiB")
    return number


def _interval(value: object) -> int | None:
    """Rows between events; `own` or nothing for the policy's own schedule."""
    if value in (None, "own"):
        return None
    number = _whole("intervals", value)
    if number < 1:
        raise ConfigError(f"intervals has {value!r}; expected rows, at least 1, or own")
    return number


def _budget(value: object) -> str:
    if integer(value) is None and not isinstance(value, str | float):
        raise ConfigError(f"budgets has {value!r}; expected {EXPECTED}")
    return str(value)


def _traces(given: Iterable[object], folder: Path) -> Iterator[str | Trace]:
    """Yield the paths of traces; those of folders and wildcards in alphabetical order."""
    for source in given:
        if isinstance(source, Trace):
            yield source
            continue
        if not isinstance(source, str | Path):
            raise ConfigError(f"traces has {source!r}; expected paths or URLs")
        each = str(source)
        if is_url(each):
            yield each
            continue
        path = folder / each
        name = each if each in SAMPLES and not path.exists() else path
        try:
            yield from (str(Path(path).absolute()) for path in paths_of(name))
        except TraceNotFoundError as error:
            raise ConfigError(f"traces has {each!r}: {error}") from error


def _policies(given: object) -> Iterator[tuple[str | Policy, dict[str, Any]]]:
    """Yield names and settings: a name, `NAME: {parameter: value}`, or a list of either."""
    for each in _listed(given):
        if isinstance(each, Policy | Scorer):
            yield Policy.of(each), {}
            continue
        pairs = each.items() if isinstance(each, dict) else [(each, None)]
        for name, settings in pairs:
            if not isinstance(name, str) or not isinstance(settings or {}, dict):
                raise ConfigError(
                    f"policies has {each!r}; expected names, or NAME: {{parameter: value}}"
                )
            yield name, _settings(name, settings or {})


def _settings(name: str, given: Mapping[Any, Any]) -> dict[str, Any]:
    """Settings of a policy, `scorer.window` as Python spells it."""
    out: dict[str, Any] = {}
    for key, value in given.items():
        plain = (int, float, bool, str, type(None))
        values = _listed(value)
        if not isinstance(key, str) or not values or not all(isinstance(x, plain) for x in values):
            raise ConfigError(f"{name} has {key!r}: {value!r}; expected values, or a list of them")
        out[key.replace("scorer.", "scorer__")] = value
    return out


def _protection(given: object) -> Protection:
    if isinstance(given, Protection):
        return given
    names = [f.name for f in fields(Protection)]
    if not isinstance(given, dict) or not set(given) <= set(names):
        raise ConfigError(f"protect is {given!r}; expected {', '.join(names)}")
    try:
        return Protection(**given)
    except KvsimError as error:
        raise ConfigError(str(error)) from error


#: What reads the value of a key.
_READERS: Mapping[str, Callable[[Any], object]] = {
    "policies": lambda given: tuple(_policies(given)),
    "budgets": lambda given: tuple(map(_budget, _listed(given))),
    "intervals": lambda given: tuple(map(_interval, _listed(given))),
    "layers": lambda given: tuple(sorted(_whole("layers", each) for each in _listed(given))),
    "metrics": lambda given: tuple(map(str, _listed(given))),
    "memory": _size,
    "device": lambda given: resolve_device(given, here=False),  # until it runs
}
