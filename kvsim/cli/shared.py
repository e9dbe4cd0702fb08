"""Options and arguments that several commands share, and their values."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsim.core.arguments import Value, value_of
from kvsim.core.options import Declared, declared
from kvsim.errors import KvsimError, PolicyError, suggest
from kvsim.experiment import Experiment
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
    """Return the name of a device of this machine, or of any for a plan; OptionError for others."""
    if name in (None, "cpu"):  # without torch, which takes a second to import
        return name
    from kvsim.core.checks import resolve_device

    try:
        return resolve_device(name, here=not context.params.get("plan"))
    except PolicyError as error:
        raise OptionError(f"--{error}") from error


class Stop(Exception):  # noqa: N818  the end of a command, not an error of the program
    """Ends a command with a line on standard error and a status other than 0."""

    def __init__(self, line: str, status: int) -> None:
        super().__init__(line)
        self.status = status


class OptionError(KvsimError, ValueError):
    """An option with a bad value."""


def parse_ranges(text: str, option: str, expected: str) -> list[int]:
    """Parse numbers and ranges: 0,4-7,-1, where negative numbers count from the end."""
    numbers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(-\d{1,7})|(\d{1,7})(?:-(\d{1,7}))?", part.strip())
        ends = [] if match is None else [int(number) for number in match.groups() if number]
        if not ends or ends[-1] < ends[0]:
            raise OptionError(f"{option} is {text!r}; expected {expected}")
        numbers += range(ends[0], ends[-1] + 1)
    return numbers


def parse_layers(text: str | None) -> list[int] | None:
    """Parse numbers of layers, if any are given."""
    expected = "numbers and ranges between commas, such as 0,4-7,-1"
    return None if text is None else parse_ranges(text, "--layers", expected)


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


#: What reads options of types that the command line takes as text.
_READERS: dict[Any, Callable[..., Any] | None] = {
    str | Sequence[str]: None,
    bool | str: None,
    Sequence[int] | None: parse_layers,
    int | Sequence[int] | None: parse_layers,
    int | str | None: None,
    Mapping[str, Any] | None: parse_template,
}


def kind_of(option: Declared) -> Any:
    """Return the type by which typer takes an option; text is None where it is not given."""
    if "[," in (option.help.metavar or "") or option.kind == str | Sequence[str]:
        return list[str] | None
    return str | None if option.kind in _READERS else option.kind


def option_of(option: Declared, unset: str = "", **changes: Any) -> Any:
    """Return what typer reads of an option; unset: what the command does without it, in words."""
    flag = option.help.flag or f"--{option.name.replace('_', '-')}"
    if option.kind == bool | None or option.default is True:
        flag += f"/--no-{flag[2:]}"
    given: dict[str, Any] = {
        "help": option.help.text + f"  [default: {unset}]" * bool(unset),
        "metavar": option.help.metavar,
        "min": option.least,
        "callback": _callback(option),
    }
    return typer.Option(flag, **given | changes)


def _callback(option: Declared) -> Callable[..., Any] | None:
    if "[," in (option.help.metavar or ""):
        return numbers if option.name == "interval" else split
    return parse_device if option.name == "device" else _READERS.get(option.kind)


_OPTIONS = {each.name: each for each in declared(Experiment)}
DEVICES = _OPTIONS["device"].help.text


def option(name: str, **changes: Any) -> Any:
    """Return what typer reads of an option of `Experiment`; changes: keywords of `typer.Option`."""
    return option_of(_OPTIONS[name], _OPTIONS[name].help.unset, **changes)


PolicyNames = Annotated[list[str], option("policies")]
Budgets = Annotated[list[str], option("budgets")]
Memory = Annotated[str | None, option("memory")]
Device = Annotated[str, option("device")]
ModelDevice = Annotated[str, option("device", help=f"Where the model runs: {DEVICES}")]
TracePaths = Annotated[
    list[str],
    typer.Argument(metavar="TRACE", help=_OPTIONS["traces"].help.text),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
Plan = Annotated[
    bool,
    typer.Option(
        "--plan",
        is_eager=True,  # the device of a plan may be another machine's
        help="Say what it takes (cells, disk, memory), and do nothing else; needs no weights.",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="[POLICY.]KEY=VALUE[,...]",
        help="A parameter of one policy, of a part such as snapkv wherever it stands, or of each "
        "that has it; of several values each is tried. protect.sink, protect.recent and "
        "protect.prompt: what every policy protects.",
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is there already.")]
RecordedModel = Annotated[
    str,
    typer.Option(
        help="The model that was recorded: 'tiny', 'tiny-deep', 'smollm2', a local folder, a "
        "GGUF file, or a hub id."
    ),
]
JudgingModel = Annotated[
    str | None,
    typer.Option("--model", metavar="MODEL", help="Judge by this model, as `kvsim live` takes it."),
]
ShowText = Annotated[
    bool,
    typer.Option(
        "--show-text",
        help="Print all of what the model wrote in a live run; by default parts of a few texts.",
    ),
]
Runs = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN",
        help="Folders that `kvsim replay` or `live` wrote to --out, or Tables in .parquet files.",
    ),
]
PoliciesOfRuns = Annotated[
    list[str] | None,
    several("NAME[,NAME...]", "Policies; of runs all by default."),
]
BudgetsOfRuns = Annotated[
    list[str] | None,
    several("N|P%[,...]", "Budgets; of runs all by default."),
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
    """Silence transformers but for errors: its remarks would mix with our output."""
    logging.getLogger("transformers").setLevel(logging.ERROR)


def build_policies(
    names: Sequence[str], settings: Iterable[str] | None, *, fit: bool = False
) -> list[Policy]:
    """Build the policies by name, one for each combination of settings (`settings_of`).

    `protect.sink=4` and its like are of every policy. fit: scale lengths that no setting gives to
    the budget (`Policy.fitted`).
    """
    from kvsim.policies import variants
    from kvsim.sweeps.grid import protection_of

    of_all = [text for text in settings or () if text.startswith("protect.")]
    protect = protection_of(dict(parse_set(text.partition(".")[2]) for text in of_all))
    given = settings_of(names, [text for text in settings or () if text not in of_all]).items()
    built = [each for name, lists in given for each in variants(name, lists)]
    fitted = (each.fitted() if fit else each for each in built)
    return [replace(each, protect=each.protect | protect) for each in fitted]


def settings_of(names: Sequence[str], settings: Iterable[str]) -> dict[str, dict[str, list[Value]]]:
    """Return for each policy its settings, a list of values for each key.

    `snapkv.window=8,16` is of every policy with a part of this name, `adakv+snapkv.window=8` of
    this one, `window=8` of each that has the key; the narrower one wins. Raises PolicyError if no
    policy has the key.
    """
    from kvsim.policies import parameters, policy
    from kvsim.policies.naming import canonical, parts_of

    names = [canonical(name) for name in names]
    keys_of = {name: policy(name).params if ":" in name else parameters(name) for name in names}
    titles = {title.lower() for name in names for title, _ in parts_of(name)}
    ranked = []
    for text in settings:
        left, equals, right = text.partition("=")
        pairs = [parse_set(f"{left}{equals}{value}") for value in right.split(",")]
        key, values = pairs[0][0], [value for _, value in pairs]
        found = [(*taken, name) for name in names for taken in _taken(name, key, keys_of, titles)]
        if not found:
            keys = dict.fromkeys(key for of_policy in keys_of.values() for key in of_policy)
            typed, *listed = (each.replace("scorer__", "scorer.") for each in (key, *keys))
            raise PolicyError(
                f"--set {typed}: none of {', '.join(names)} has this parameter"
                f"{suggest(typed, listed)}; parameters: {', '.join(listed) or 'none'}"
            )
        ranked += [(rank, name, taken, values) for rank, taken, name in found]
    out: dict[str, dict[str, list[Value]]] = {name: {} for name in names}
    for _, name, taken, values in sorted(ranked, key=lambda each: each[0]):
        out[name][taken] = values
    return out


def _taken(
    name: str, key: str, keys_of: Mapping[str, Collection[str]], titles: Collection[str]
) -> Iterator[tuple[int, str]]:
    """Yield how narrow a key of `--set` is for a policy, and the parameter that it takes for it."""
    from kvsim.policies import has_parameter
    from kvsim.policies.naming import parts_of

    def has(bare: str) -> bool:
        return bare in keys_of[name] or (":" not in name and has_parameter(name, bare))

    if has(key):
        yield 0, key
    elif key.lower().startswith(f"{name.lower()}.") and has(bare := key[len(name) + 1 :]):
        yield 2, bare
    else:
        for title, of_part in parts_of(name):
            base = title.partition("@")[0]
            for each in {title} if base.lower() in titles else {title, base}:
                bare = key[len(each) + 1 :]
                if key.lower().startswith(f"{each.lower()}.") and bare in of_part:
                    yield 1, of_part[bare]
