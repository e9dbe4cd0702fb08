"""Options of commands from their declarations, in `kvsim.experiment` or a dataclass.

    @takes("policies", "budgets", device="where it was recorded")
    def cost(trace: shared.TracePath, options: dict[str, Any], as_json: shared.Json) -> None: ...

`options` has the options that are given, by the names of their declarations.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kvsim.cli.shared import (
    local_path,
    numbers,
    parse_device,
    parse_judge,
    parse_layers,
    parse_template,
    split,
)
from kvsim.core.options import Declared, declared
from kvsim.experiment import Experiment

#: Parsers of options whose types the command line takes as text.
_READERS: dict[Any, Callable[..., Any] | None] = {
    str | Sequence[str]: None,
    bool | str: parse_judge,
    Sequence[int] | None: parse_layers,
    Mapping[str, Any] | None: parse_template,
}


def takes(*names: str, of: type = Experiment, **unset: str) -> Callable[..., Callable[..., None]]:
    """Return a decorator: a command takes options of a declaration, as its parameter `options`.

    unset: the behaviour without an option of this name, in words.
    """
    every = {each.name: each for each in declared(of)}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        shown = []
        for name, parameter in signature.parameters.items():
            options = [every[each] for each in names] if name == "options" else []
            shown += [] if options else [parameter.replace(kind=parameter.KEYWORD_ONLY)]
            for each in options:
                kind = _kind_of(each), option_of(each, unset.get(each.name, ""))
                option = parameter.replace(name=each.name, kind=parameter.KEYWORD_ONLY)
                shown.append(option.replace(default=None, annotation=Annotated[kind]))

        @functools.wraps(command)
        def run(**given: Any) -> None:
            options = {name: given.pop(name) for name in names}
            command(**given, options={name: x for name, x in options.items() if x is not None})

        run.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in shown}
        return run

    return decorate


def _kind_of(option: Declared) -> Any:
    """Return typer's type of an option, None if the option is omitted."""
    if "[," in (option.help.metavar or "") or option.kind == str | Sequence[str]:
        return list[str] | None
    if option.name == "out":
        return Path | None
    return str | None if option.kind in _READERS else option.kind | None


def option_of(option: Declared, unset: str = "") -> Any:
    """Return typer's parameter of an option; unset: the behaviour without it, in words."""
    flag = option.help.flag or f"--{option.name.replace('_', '-')}"
    if option.kind == bool | None or option.default is True:
        flag += f"/--no-{flag[2:]}"
    plain = isinstance(option.default, str | int | float) and not isinstance(option.default, bool)
    unset = unset or option.help.unset or (str(option.default) if plain else "")
    return typer.Option(
        flag,
        help=option.help.text + f"  [default: {unset}]" * bool(unset),
        metavar=option.help.metavar,
        min=option.least,
        parser=local_path if option.name == "out" else None,
        callback=_callback(option),
    )


def _callback(option: Declared) -> Callable[..., Any] | None:
    if "[," in (option.help.metavar or ""):
        return numbers if option.name == "interval" else split
    return parse_device if option.name == "device" else _READERS.get(option.kind)
