"""Options of a command, generated from a dataclass that declares them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

import typer

from kvsim.cli.values import parse_layers
from kvsim.recorder.options import Declared, declared


class _Form(NamedTuple):
    """How the command line takes values of a type: as what, and how they are converted."""

    kind: Any
    convert: Callable[[Any], Any]


#: Types that the command line takes in another form.
_FORMS: dict[Any, _Form] = {
    str | Sequence[str]: _Form(list[str] | None, lambda texts: texts or ()),
    Sequence[int] | None: _Form(
        str | None, lambda text: None if text is None else parse_layers(text)
    ),
    bool | str: _Form(str | None, lambda text: text or False),
    Literal["float16"] | None: _Form(str | None, lambda text: text),
}


def with_options(
    options: type, **fixed: object
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace the parameter `options` of a command by one option for each field of a dataclass.

    options: the dataclass, whose fields `kvsim.recorder.options.declared` describes.
    fixed: values of fields that the command line does not offer.
    """
    offered = [option for option in declared(options) if option.name not in fixed]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(command, include_extras=True)

        def parameters() -> Iterator[inspect.Parameter]:
            for name, parameter in inspect.signature(command).parameters.items():
                if name == "options":
                    yield from map(_parameter, offered)
                else:
                    yield parameter.replace(annotation=hints[name])

        @functools.wraps(command)
        def run(**values: Any) -> None:
            given = {option.name: _convert(option, values.pop(option.name)) for option in offered}
            command(**values, options=options(**given, **fixed))

        signature = inspect.Signature(list(parameters()))
        run.__signature__ = signature  # type: ignore[attr-defined]  # typer reads it
        return run

    return decorate


def _parameter(option: Declared) -> inspect.Parameter:
    """Return the parameter of a command that typer makes an option of."""
    form = _FORMS.get(option.kind)
    name = f"--{option.name.replace('_', '-')}"
    kind = option.kind if form is None else form.kind
    info = typer.Option(name, help=option.help.text, metavar=option.help.metavar, min=option.least)
    return inspect.Parameter(
        option.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=option.default if form is None else None,
        annotation=Annotated[kind, info],
    )


def _convert(option: Declared, value: Any) -> Any:
    form = _FORMS.get(option.kind)
    return value if form is None else form.convert(value)
