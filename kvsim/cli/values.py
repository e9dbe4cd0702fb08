"""What the user typed, as values; each error says what was got and what was expected."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvsim.errors import KvsimError, PolicyError, suggest
from kvsim.schema import is_url
from kvsim.tiny.sample import sample_trace

if TYPE_CHECKING:
    from kvsim.core.policy import Policy, Protection

#: A parameter of a policy as `--set` gives it.
Value = int | float | bool | str | None

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
PolicyNames = Annotated[
    list[str],
    typer.Option(
        "--policy",
        metavar="NAME[,NAME...]",
        help="Policies, as `kvsim policies` lists them, or module:NAME for one of your own.",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A parameter, for each policy that has it."),
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")
]
TracePaths = Annotated[
    list[str],
    typer.Argument(
        metavar="TRACE",
        help="Recorded traces: folders, packed files, URLs of folders, or 'sample', which ships.",
    ),
]


class Stop(Exception):  # noqa: N818  how a command ends, not an error of the program
    """Ends a command with a line on standard error and a status other than 0."""

    def __init__(self, line: str, status: int) -> None:
        super().__init__(line)
        self.status = status


class OptionError(KvsimError, ValueError):
    """An option that does not say what it should."""


def locate(trace: str) -> Path | str:
    """The path of a trace, or its URL; `sample` is the one that comes with kvsim."""
    if is_url(trace):
        return trace
    path = Path(trace)
    return sample_trace() if trace == "sample" and not path.exists() else path


def local_path(text: str) -> Path:
    """A path of this machine; as a path a URL would name some folder called ``http:``."""
    if is_url(text):
        raise typer.BadParameter(f"{text} is a URL; expected a path on this machine")
    return Path(text)


def split(values: Iterable[str], option: str) -> list[str]:
    """Values of an option that may be repeated and hold commas; each once, in order."""
    parts = [part.strip() for value in values for part in value.split(",")]
    if not parts or not all(parts):
        given = ",".join(values)
        raise OptionError(f"{option} is {given!r}; expected names or numbers between commas")
    return list(dict.fromkeys(parts))


_CONSTANTS: dict[str, Value] = {"true": True, "false": False, "none": None}


def parse_set(text: str) -> tuple[str, Value]:
    """`key=value`; the value is a number, true, false, none, or else text."""
    key, equals, value = (part.strip() for part in text.partition("="))
    key = key.replace("scorer.", "scorer__")  # of the scorer inside; as Python has to spell it
    if not equals or not key or not value:
        raise OptionError(f"--set is {text!r}; expected KEY=VALUE, such as window=64")
    if value.lower() in _CONSTANTS:
        return key, _CONSTANTS[value.lower()]
    for kind in (int, float):
        try:
            return key, kind(value)
        except ValueError:
            continue
    return key, value


_UNITS = {"": 1, **{f"{p}B": 1000**n for n, p in enumerate(("", "K", "M", "G", "T"))}}
_UNITS |= {f"{p}IB": 1024**n for n, p in enumerate(("K", "M", "G", "T"), start=1)}


def parse_memory(text: str) -> int:
    """Bytes: 500MB, 2GB, 1GiB, or a number of bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    unit = None if found is None else _UNITS.get(found[2].upper())
    if found is None or unit is None or not float(found[1]):
        raise OptionError(f"--memory is {text!r}; expected a size such as 500MB, 2GB or 1GiB")
    return int(float(found[1]) * unit)


def quiet_transformers() -> None:
    """Let transformers say errors alone: its remarks would stand among our own lines."""
    logging.getLogger("transformers").setLevel(logging.ERROR)


def parse_device(name: str) -> str:
    """A device of this machine."""
    import torch

    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise OptionError(f"--device is {name!r}; expected cpu or cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise OptionError(
            f"--device is {name!r}, but PyTorch {torch.__version__} finds "
            f"{torch.cuda.device_count()} CUDA devices here; use --device cpu"
        )
    return name


def parse_layers(text: str) -> list[int]:
    """Numbers of layers: 0,4-7,-1, where negative ones count from the end."""
    found: list[int] = []
    for part in text.split(","):
        one = re.fullmatch(r"(-\d{1,4})|(\d{1,4})(?:-(\d{1,4}))?", part.strip())
        numbers = [] if one is None else [int(number) for number in one.groups() if number]
        span = range(numbers[0], numbers[-1] + 1) if numbers else range(0)
        if not span:
            raise OptionError(
                f"--layers is {text!r}; expected numbers and ranges between commas, such as "
                "0,4-7,-1"
            )
        found += span
    return found


def build_policies(
    names: Sequence[str], settings: Sequence[str], protect: Protection | None = None
) -> list[Policy]:
    """The policies by name; each setting goes to every one that has its key.

    protect: what each of them is to keep beside what it keeps by itself. Raises PolicyError where
    no policy has the key of a setting.
    """
    from kvsim.policies import has_parameter, parameters, policy

    own = [name for name in names if ":" in name]
    if own:
        sys.path.append(str(Path.cwd()))  # where a file of the user's own is looked for last
    wanted = dict(parse_set(text) for text in settings)

    def takes(name: str, key: str) -> bool:
        return key in known[name] or (name not in own and has_parameter(name, key))

    known = {name: policy(name).params if name in own else parameters(name) for name in names}
    for key in wanted:
        if not any(takes(name, key) for name in known):
            typed = key.replace("scorer__", "scorer.")
            listed = dict.fromkeys(
                key.replace("scorer__", "scorer.") for keys in known.values() for key in keys
            )
            raise PolicyError(
                f"--set {typed}: none of {', '.join(names)} has this parameter"
                f"{suggest(typed, listed)}; parameters: {', '.join(listed) or 'none'}"
            )
    built = (
        policy(name, **{key: value for key, value in wanted.items() if takes(name, key)})
        for name in known
    )
    return [
        one if protect is None else replace(one, protect=one.protect | protect) for one in built
    ]
