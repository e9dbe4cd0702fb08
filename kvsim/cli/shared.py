"""Options and arguments that several commands share, and their values."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsim.core.arguments import Value, value_of
from kvsim.core.options import declared
from kvsim.errors import KvsimError, PolicyError, suggest
from kvsim.experiment import Experiment, numbers_in
from kvsim.schema import is_url

if TYPE_CHECKING:
    from kvsim.core.policy import Policy
    from kvsim.core.trace import Trace


def local_path(text: str) -> Path:
    """Return a path on this machine; a URL would become a folder named ``http:``."""
    if is_url(text):
        raise typer.BadParameter(f"{text} is a URL; expected a path on this machine")
    return Path(text)


def path_option(metavar: str, text: str) -> Any:
    """Return an option, of which `text` is the help, whose value is a path on this machine."""
    return typer.Option(parser=local_path, metavar=metavar, help=text)


def path_argument(metavar: str, text: str) -> Any:
    """Return an argument, of which `text` is the help, whose value is a path on this machine."""
    return typer.Argument(parser=local_path, metavar=metavar, help=text)


def split(param: typer.CallbackParam, values: list[str] | None) -> list[str] | None:
    """Return the values of an option that may repeat and have commas; each once, in order.

    Commas in parentheses belong to a label, such as `tova (after: the prompt, every 8 rows)`.
    """
    if not values:
        return None
    parts = [part.strip() for value in values for part in re.split(r",(?![^()]*\))", value)]
    if not all(parts):
        raise OptionError(
            f"{param.opts[0]} is {','.join(values)!r}; expected names or numbers between commas, "
            "without spaces or a comma at the end"
        )
    return list(dict.fromkeys(parts))


def several(metavar: str, text: str) -> Any:
    """Return an option, of which `text` is the help, that takes several values between commas."""
    return typer.Option(callback=split, metavar=metavar, help=text)


def parse_device(context: typer.Context, name: str | None) -> str | None:
    """Return the name of a device of this machine, or of any for a plan; else OptionError."""
    if name in (None, "cpu"):  # without torch, which takes a second to import
        return name
    from kvsim.core.checks import resolve_device

    try:
        return resolve_device(name, here=not context.params.get("plan"))
    except PolicyError as error:
        raise OptionError(f"--{error}") from error


class Stop(Exception):  # noqa: N818  the end of a command, not an error of the program
    """Ends a command with a line on standard error and a nonzero status."""

    def __init__(self, line: str, status: int) -> None:
        super().__init__(line)
        self.status = status


class OptionError(KvsimError, ValueError):
    """An option with a bad value."""


def refuse(conflicts: Mapping[str, object]) -> None:
    """Raise OptionError with the first of these sentences whose value is true."""
    for sentence in (sentence for sentence, holds in conflicts.items() if holds):
        raise OptionError(sentence)


def parse_ranges(text: str, option: str, expected: str) -> list[int]:
    """Parse numbers and ranges: 0,4-7,-1, where negative numbers count from the end."""
    numbers = numbers_in(text)
    if numbers is None:
        raise OptionError(f"{option} is {text!r}; expected {expected}")
    return numbers


def parse_layers(text: str | None) -> list[int] | None:
    """Parse numbers of layers, if any are given."""
    expected = "numbers and ranges between commas, such as 0,4-7,-1"
    return None if text is None else parse_ranges(text, "--layers", expected)


def parse_judge(text: str | None) -> bool | str | None:
    """Parse the model of --judge; `true` selects the model of the traces."""
    return True if text == "true" else text


def parse_template(text: str | None) -> dict[str, Any] | None:
    """Parse the JSON object of --chat-template-kwargs, if one is given."""
    try:
        return None if text is None else {**json.loads(text)}
    except (TypeError, ValueError, RecursionError):
        text = f"--chat-template-kwargs is {text!r:.80}; expected a JSON object"
        raise OptionError(text) from None


def numbers(param: typer.CallbackParam, values: list[str] | None) -> list[Value] | None:
    """Return values as `split`, numbers as such."""
    texts = split(param, values)
    return None if texts is None else [value_of(text) for text in texts]


_OPTIONS = {each.name: each for each in declared(Experiment)}
DEVICES = _OPTIONS["device"].help.text


TracePaths = Annotated[
    list[str],
    typer.Argument(metavar="TRACE", help=_OPTIONS["traces"].help.text),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Plan = Annotated[
    bool,
    typer.Option(
        "--plan",
        is_eager=True,  # the device of a plan may be another machine's
        help="Print cells, disk and memory, and do nothing.",
    ),
]
PolicyNames = Annotated[list[str], several("NAME[,...]", _OPTIONS["policies"].help.text)]
Device = Annotated[str, typer.Option(callback=parse_device, help=DEVICES)]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE[,...]",
        help="A parameter of each policy that has it, or POLICY.KEY of one, and each of several "
        "values; or a key of a grid file, as prefill=false, layers=0,4-7, protect.sink=4.",
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing output.")]
Runs = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN",
        help="Folders that `kvsim replay` or `live` wrote to --out, or Tables in .parquet files.",
    ),
]
PoliciesOfRuns = Annotated[
    list[str] | None,
    several("NAME[,NAME...]", "Policies; for runs, all by default."),
]
BudgetsOfRuns = Annotated[
    list[str] | None,
    several("N|P%[,...]", "Budgets; for runs, all by default."),
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")
]


def paths_of(traces: Iterable[str]) -> list[Path | str]:
    """Return the paths and URLs of traces; those of `SAMPLES` ship, a folder may hold several."""
    from kvsim.store import opening

    return [path for trace in traces for path in opening.paths_of(trace)]


def open_traces(paths: Iterable[str]) -> list[Trace]:
    """Open traces; raise TraceError unless their names are distinct."""
    from kvsim.analysis.results import check_distinct
    from kvsim.store.opening import as_traces

    traces = as_traces(paths)
    check_distinct(traces)
    return traces


def parse_set(text: str) -> tuple[str, Value]:
    """Parse `key=value`, where the value is as `value_of` reads it."""
    key, equals, value = (part.strip() for part in text.partition("="))
    key = key.replace("scorer.", "scorer__")  # a parameter of the inner scorer, as in Python
    if not equals or not key or not value:
        raise OptionError(f"--set is {text!r}; expected KEY=VALUE, such as window=64")
    return key, value_of(value)


def quiet_transformers() -> None:
    """Silence transformers except errors: its remarks would mix with our output."""
    logging.getLogger("transformers").setLevel(logging.ERROR)


#: Keys of a grid file that `--set` takes, because they have no options.
KEYS = ("prefill", "prefill_chunk", "fit", "layers", "memory", "events", "records", "protect")


def keys_of(
    settings: Iterable[str] | None, keys: Collection[str] = KEYS
) -> tuple[dict[str, Any], list[str]]:
    """Return the keys of an experiment that `--set` gives, and the settings of policies."""
    given, others = dict[str, Any](), list[str]()
    for text in settings or ():
        left, equals, right = text.partition("=")
        key, _, part = left.strip().partition(".")
        if key not in keys or not equals:
            others.append(text)
        elif key == "protect":
            given[key] = given.get(key, {}) | {part: parse_set(f"x={right}")[1]}
        else:
            values = [value_of(each) for each in right.split(",")]
            given[key] = values if len(values) > 1 else values[0]
    return given, others


def build_policies(names: Sequence[str], settings: Iterable[str] | None) -> list[Policy]:
    """Build the policies by name, one for each combination of settings (`policies_of`)."""
    from kvsim.sweeps.grid import adapted

    given, others = keys_of(settings, ("fit", "protect"))
    return adapted(policies_of(names, others), **given)


def experiment(
    options: Mapping[str, Any], settings: Iterable[str] | None, keys: Collection[str] = KEYS
) -> dict[str, Any]:
    """Return the keys of an experiment from the options of a command, with those of `--set`."""
    given, others = keys_of(settings, keys)
    names = options.get("policies", ())
    if others and not names:
        raise OptionError(f"--set {others[0]} is of policies; give --policy")
    return {**options, **given} | ({"policies": policies_of(names, others)} if names else {})


def policies_of(names: Sequence[str], settings: Iterable[str]) -> list[Policy]:
    """Return the policies by name, one for each combination of values of their settings.

    `snapkv.window=8,16` is of every policy with a part of this name, `adakv+snapkv.window=8` of
    this one, `window=8` of each that has the key; the narrower one wins. Raises PolicyError if no
    policy has the key.
    """
    from kvsim.policies import parameters, policy, variants
    from kvsim.policies.naming import canonical, parts_of

    names = [canonical(name) for name in names]
    keys_of = {name: policy(name).params if ":" in name else parameters(name) for name in names}
    titles = {title.lower() for name in names for title, _ in parts_of(name)}
    taken: dict[str, list[tuple[int, str, list[Value]]]] = {name: [] for name in names}
    for text in settings:
        left, equals, right = text.partition("=")
        pairs = [parse_set(f"{left}{equals}{value}") for value in right.split(",")]
        key, values = pairs[0][0], [value for _, value in pairs]
        places = {name: _place(name, key, keys_of[name], titles) for name in names}
        if not any(places.values()):
            keys = dict.fromkeys((key, *chain(*keys_of.values())))
            typed, *listed = (each.replace("scorer__", "scorer.") for each in keys)
            raise PolicyError(
                f"--set {typed}: none of {', '.join(names)} has this parameter"
                f"{suggest(typed, listed)}; parameters: {', '.join(listed) or 'none'}"
            )
        for name, place in places.items():
            taken[name] += [(*place, values)] if place else []
    return [
        each
        for name, of_name in taken.items()
        for each in variants(name, {key: x for _, key, x in sorted(of_name, key=itemgetter(0))})
    ]


def _place(
    name: str, key: str, keys: Collection[str], titles: Collection[str]
) -> tuple[int, str] | None:
    """Return how specific a key of `--set` is for a policy, and its parameter."""
    from kvsim.policies import has_parameter
    from kvsim.policies.naming import parts_of

    for rank, lead in ((0, ""), (2, f"{name}.")):
        bare = key[len(lead) :]
        if key.lower().startswith(lead.lower()) and (
            bare in keys or (":" not in name and has_parameter(name, bare))
        ):
            return rank, bare
    for title, of_part in parts_of(name):
        base = title.partition("@")[0]
        for each in {title} if base.lower() in titles else {title, base}:
            bare = key[len(each) + 1 :]
            if key.lower().startswith(f"{each.lower()}.") and bare in of_part:
                return 1, of_part[bare]
    return None
