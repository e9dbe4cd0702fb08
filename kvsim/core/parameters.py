"""Parameters of a piece: typed and bounded fields of a frozen dataclass, checked when it is built.

    class SnapKV(Scorer):
        window: Annotated[int, AtLeast(1)] = 32
        pool: Literal["max", "avg"] | None = "max"

An annotation has the type of a value (an int passes for a float, a bool for neither, a list for a
tuple), its bounds and its choices; errors, `kvsim policies` and the documentation read them. A
field with another annotation takes any value.
"""

from __future__ import annotations

import math
import numbers
import operator
import reprlib
import sys
from abc import ABC
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Self,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from kvsim.errors import KvsimError, PolicyError


@dataclass(frozen=True)
class Bound:
    """A condition on a number, false for NaN; its text completes "an integer ..."."""

    limit: float = 0
    most: float = math.inf

    words: ClassVar[str]
    #: whether a number is within the bound
    allows: ClassVar[Callable[[Any, float], bool]]

    def __str__(self) -> str:
        return self.words.format(self)


class AtLeast(Bound):
    """value >= limit, infinity included."""

    words, allows = "of at least {0.limit:.10g}", lambda self, value: value >= self.limit


class AtMost(Bound):
    """value <= limit."""

    words, allows = "at most {0.limit:.10g}", lambda self, value: value <= self.limit


class Above(Bound):
    """value > limit, infinity included."""

    words, allows = "above {0.limit:.10g}", lambda self, value: value > self.limit


class Below(Bound):
    """value < limit."""

    words, allows = "below {0.limit:.10g}", lambda self, value: value < self.limit


class Between(Bound):
    """limit <= value <= most."""

    words, allows = "from {0.limit:g} to {0.most:g}", lambda self, x: self.limit <= x <= self.most


class Finite(Bound):
    """Any finite real number that a double can hold."""

    words, allows = "finite", lambda _, value: abs(value) <= sys.float_info.max


class Odd(Bound):
    """1, 3, 5, ..., negative ones included: the width of a pooling centred on an entry."""

    words, allows = "odd", lambda _, value: value % 2 == 1


@dataclass(frozen=True)
class Parameter:
    """A field of a piece: its resolved annotation, and its default (MISSING for none)."""

    name: str
    hint: Any
    default: Any

    @property
    def expected(self) -> str:
        """Expected values in words: `an integer of at least 1`, `'max', 'avg' or None`."""
        *most, last = _phrases(self.hint)
        comma = "," if any(" " in phrase for phrase in most) else ""
        return f"{', '.join(most)}{comma} or {last}" if most else last

    def value(self, given: object, label: str, error: type[KvsimError] = PolicyError) -> Any:
        """Return the value as a plain number; raise `error`, led by `label`, for a bad one."""
        fitted = _fitted(self.hint, given)
        if fitted is _UNFIT:
            shown = repr(given) if isinstance(given, str) else reprlib.repr(given)
            shown = shown.replace("\n", " ")
            raise error(f"{label}: {self.name} is {shown}; expected {self.expected}")
        return fitted


def parameters(kind: type) -> dict[str, Parameter]:
    """The parameters of a dataclass by name, in order; empty for any other class."""
    return _parameters(kind)


@cache
def _parameters(kind: type) -> dict[str, Parameter]:
    _as_dataclass(kind)
    if not is_dataclass(kind):
        return {}
    try:
        hints = get_type_hints(kind, include_extras=True)
    except NameError:  # a name only for type checkers, in a user-defined piece
        hints = {}
    return {f.name: Parameter(f.name, hints.get(f.name, Any), f.default) for f in fields(kind)}


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Parametrised:
    """Base of implicit frozen dataclasses, whose annotated fields are parameters.

    A class becomes one when it is first built, read or inherited; a decorator may do it before.
    Classes with ABC among their bases, or an `__init__`, declare no parameters.
    """

    #: name in errors
    label: ClassVar[str] = ""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for base in cls.__bases__:
            _as_dataclass(base)

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Make the class a dataclass before its first object."""
        _as_dataclass(cls)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check_fields(self, self.label)


def _as_dataclass(kind: type) -> None:
    done = vars(kind).keys() & {"__init__", "__dataclass_fields__"} or ABC in kind.__bases__
    if issubclass(kind, Parametrised) and kind is not Parametrised and not done:
        dataclass(frozen=True)(kind)


def of_a_user(kind: type) -> bool:
    """Whether a class is user code."""
    return not kind.__module__.startswith("kvsim.")


def check_fields(piece: object, label: str, error: type[KvsimError] = PolicyError) -> None:
    """Raise `error` for a field of a dataclass with a value that its annotation excludes."""
    for name, parameter in parameters(type(piece)).items():
        given = getattr(piece, name)
        if (fitted := parameter.value(given, label, error)) is not given:
            object.__setattr__(piece, name, fitted)


def integer(value: Any) -> int | None:
    """Return an integer, also numpy's, as an int; None for anything else and for bools."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def is_finite(value: object) -> bool:
    """Whether a value is a finite real number; False for bools."""
    try:
        real = not isinstance(value, bool) and isinstance(value, numbers.Real)
        return real and math.isfinite(value)  # type: ignore[arg-type]
    except OverflowError:  # an integer beyond any float
        return False


_UNFIT = object()


def _fitted(hint: Any, value: Any) -> Any:
    """Return the value if it fits an annotation, numbers as plain ones; else _UNFIT."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        fitted = _fitted(arguments[0], value)
        bounds = () if fitted is None or fitted is _UNFIT else arguments[1:]
        fits = all(x.allows(fitted) for x in bounds if isinstance(x, Bound))
        return fitted if fits else _UNFIT
    if origin is tuple:
        return _each(arguments, value)
    if origin in (Union, UnionType):
        found = [_fitted(part, value) for part in arguments]
    elif origin is Literal:
        found = [x for x in arguments if type(x) is type(value) and x == value]
    elif hint in (int, float):
        plain: Any = integer(value)
        if plain is None and hint is float and not isinstance(value, bool):
            plain = float(value) if isinstance(value, numbers.Real) else None
        found = [plain] if plain is not None else []
    else:
        with suppress(TypeError):  # Any, a protocol, ...: no class of which to be an instance
            return value if isinstance(value, hint) else _UNFIT
        return value
    return next((x for x in found if x is not _UNFIT), _UNFIT)


def _each(arguments: tuple[Any, ...], value: Any) -> Any:
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping):
        return _UNFIT
    values = tuple(value)
    hints = arguments[:1] * len(values) if arguments[-1] is ... else arguments
    fitted = tuple(map(_fitted, hints, values))
    if len(values) != len(hints) or any(x is _UNFIT for x in fitted):
        return _UNFIT
    return values if all(map(operator.is_, fitted, values)) else fitted


_NOUNS: Mapping[Any, str] = {
    int: "an integer",
    float: "a number",
    NoneType: "None",
    str: "text",
    Any: "any value",
}


def _phrases(hint: Any, bounds: tuple[Bound, ...] = ()) -> list[str]:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        inner = tuple(bound for bound in arguments[1:] if isinstance(bound, Bound))
        return _phrases(arguments[0], (*bounds, *inner))
    if origin in (Union, UnionType):
        return [phrase for part in arguments for phrase in _phrases(part, bounds)]
    if origin is Literal or hint is bool:
        return [repr(choice) for choice in arguments or (True, False)]
    if origin is tuple:
        count = "" if arguments[-1] is ... else f" of {len(arguments)}"
        return [f"a list{count}, each {' or '.join(_phrases(arguments[0]))}"]
    noun = _NOUNS.get(hint) or f"a {getattr(hint, '__name__', hint)}"
    return [" ".join([noun, " and ".join(map(str, bounds))]).strip()]


#: The smallest window of any paper in the catalogue.
_WINDOW = 8


class Length(NamedTuple):
    """A parameter in entries or rows: its value, and the budget it is meant for.

    depth: of its piece among `Policy.levels`. alike: whether layers have equal budgets, so that a
    length fits all or none. scaled: whether it shrinks to fit.
    """

    depth: int
    name: str
    value: int
    entries: int
    alike: bool = True
    scaled: bool = False

    def at(self, budget: int) -> int:
        """Return the value if it fits half of the budget, else the same share of a smaller budget.

        At least 1, and at least 8 rows of a window if half of the budget holds them: the smallest
        window of a paper (R-KV, PyramidKV, FastKV, DropKV).
        """
        if self.alike and 2 * self.value <= budget:
            return self.value
        least = max(1, min(_WINDOW, budget // 2)) if self.name == "window" else 1
        return min(self.value, max(least, round(self.value * budget / self.entries)))

    @property
    def share(self) -> str:
        """The scaled value in words."""
        where = f" if {self.value} > budget / 2" if self.alike else ""
        return f"{self.value} * budget / {self.entries}{where}"
