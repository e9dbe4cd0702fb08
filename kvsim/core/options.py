"""Options of functions and commands, each declared once: type, bounds, default and help.

A dataclass or a TypedDict has an annotated field for each option:

    class Writing(TypedDict, total=False):
        temperature: Annotated[float, AtLeast(0), Help("0 takes the likeliest token.", default=0.0)]

`takes_options` shows the fields as keywords of a Python function, `given_options` checks the values
of a call, and `kvsim.cli.options` offers them as options of commands.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass
from typing import Any, NamedTuple, TypeVar, get_args, get_type_hints, is_typeddict

from kvsim.core.parameters import AtLeast, Parameter, parameters
from kvsim.errors import ConfigError, KvsimError, suggest

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Help:
    """Text of an option for docstrings and `--help`.

    Attributes:
        text: its effect, in sentences that begin with a capital letter.
        metavar: placeholder of a value on the command line.
        default: for an option in a TypedDict; a dataclass has it in the field.
        flag: its name on the command line; by default the keyword.
        unset: the effect of leaving the option out, in words; its default is None there.
    """

    text: str
    metavar: str | None = None
    default: Any = None
    flag: str = ""
    unset: str = ""


class Declared(NamedTuple):
    """One option; least: its smallest value, if it has one."""

    name: str
    kind: Any
    default: Any
    help: Help
    least: float | None
    parameter: Parameter


def declared(options: type) -> Iterator[Declared]:
    """Yield the fields of a dataclass or TypedDict of options, with their annotations."""
    of_fields = parameters(options)
    if is_typeddict(options):
        hints = get_type_hints(options, include_extras=True)
        of_fields = {name: Parameter(name, hint, MISSING) for name, hint in hints.items()}
    for name, parameter in of_fields.items():
        kind, *notes = get_args(parameter.hint)
        text = next(note for note in notes if isinstance(note, Help))
        least = next((note.limit for note in notes if isinstance(note, AtLeast)), None)
        default = text.default if parameter.default is MISSING else parameter.default
        yield Declared(name, kind, default, text, least, parameter)


def given_options(
    options: type, given: Mapping[str, Any], label: str, error: type[KvsimError] = ConfigError
) -> dict[str, Any]:
    """Return the options of a call with all defaults, checked.

    Raises:
        TypeError: an unknown keyword.
        KvsimError: a wrong type or a value out of bounds; of the class `error`.
    """
    fields = {option.name: option for option in declared(options)}
    for name in given:
        if name not in fields:
            raise TypeError(
                f"{label} has no option {name!r}{suggest(name, fields)}; options: "
                f"{', '.join(fields)}"
            )
    return {
        name: option.parameter.value(given[name], label, error) if name in given else option.default
        for name, option in fields.items()
    }


def _written(options: type, name: str) -> str:
    found = (getattr(kind, "__annotations__", {}).get(name) for kind in options.__mro__)
    text = next(filter(None, found))
    tree: Any = ast.parse(getattr(text, "__forward_arg__", text), mode="eval")
    return ast.unparse(tree.body.slice.elts[0])


def takes_options(options: type) -> Callable[[Function], Function]:
    """Return a decorator that shows these options for `**options` in signature and docstring."""

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        *parameters, last = signature.parameters.values()
        keyword = last.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        wrapper = textwrap.TextWrapper(
            100, initial_indent=" " * 8, subsequent_indent=" " * 12, break_on_hyphens=False
        )
        lines = []
        for option in declared(options):
            shown = keyword.replace(name=option.name, default=option.default)
            parameters.append(shown.replace(annotation=_written(options, option.name)))
            lines.append(wrapper.fill(f"{option.name}: {option.help.text}"))
        function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        if function.__doc__ is not None:  # python -OO
            text = re.sub(r" +\*\*options: .*", lambda _: "\n".join(lines), function.__doc__)
            function.__doc__ = text
        return function

    return decorate
