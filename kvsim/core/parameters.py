"""Parameters of a piece: typed and bounded fields of a frozen dataclass, checked when it is built.

    @dataclass(frozen=True)
    class SnapKV(Scorer):
        window: Annotated[int, AtLeast(1)] = 32
        pool: Literal["max", "avg"] | None = "max"

An annotation has the type of a value (an int passes for a float, a bool for neither, a list for
a tuple), its bounds and its choices. Errors, `kvsim policies` and the documentation read them from
there. A field whose annotation says nothing that can be checked takes any value.
"""

from __future__ import annotations

import math
import numbers
import operator
import reprlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, cached_property, partial
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from kvsim.errors import KvsimError, PolicyError


@dataclass(frozen=True)
class Bound:
    """A condition on a number, never met by NaN; as text, its words in "an integer ..."."""

    limit: float = 0
    most: float = math.inf

    words: ClassVar[str]
    #: whether the words stand before the noun ("odd") or behind it ("of at least 1")
    before: ClassVar[bool] = False
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
    """Any real number that a double can hold, neither infinite nor NaN."""

    words, before, allows = "finite", True, lambda _, value: abs(value) <= sys.float_info.max


class Odd(Bound):
    """1, 3, 5, ..., negative ones included: the width of a pooling centred on an entry."""

    words, before, allows = "odd", True, lambda _, value: value % 2 == 1


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

    @cached_property
    def fit(self) -> Conversion:
        """The check of a value."""
        return _fit_of(self.hint)

    def value(self, given: object, label: str, error: type[KvsimError] = PolicyError) -> Any:
        """The value as a plain number; raises `error`, beginning with `label`, for a bad one."""
        fitted = self.fit(given)
        if fitted is _UNFIT:
            shown = repr(given) if isinstance(given, str) else reprlib.repr(given)
            shown = shown.replace("\n", " ")
            raise error(f"{label}: {self.name} is {shown}; expected {self.expected}")
        return fitted


def parameters(kind: type) -> dict[str, Parameter]:
    """The parameters of a dataclass by name, in order; any other class has none."""
    return _parameters(kind)


@cache
def _parameters(kind: type) -> dict[str, Parameter]:
    if not is_dataclass(kind):
        return {}
    try:
        hints = get_type_hints(kind, include_extras=True)
    except NameError:  # a name that only a type checker sees, in a piece of a user's own
        hints = {}
    return {f.name: Parameter(f.name, hints.get(f.name, Any), f.default) for f in fields(kind)}


def check_fields(piece: object, label: str, error: type[KvsimError] = PolicyError) -> None:
    """Raise `error` where a field of a dataclass holds what its annotation rules out."""
    for name, parameter in parameters(type(piece)).items():
        given = getattr(piece, name)
        if (fitted := parameter.value(given, label, error)) is not given:
            object.__setattr__(piece, name, fitted)


def integer(value: Any) -> int | None:
    """An integer as an int, numpy's included; None for anything else, True and False included."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def is_finite(value: object) -> bool:
    """Whether a value is a real number, neither NaN nor infinite; False for True and False."""
    try:
        real = not isinstance(value, bool) and isinstance(value, numbers.Real)
        return real and math.isfinite(value)  # type: ignore[arg-type]
    except OverflowError:  # an integer beyond any float
        return False


_UNFIT = object()
#: Returns a value that fits an annotation, as a plain number where it is a number; else _UNFIT.
Conversion = Callable[[Any], Any]


def _fit_of(hint: Any) -> Conversion:
    """The check of an annotation, resolved once for a class, as pieces are built at every event."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        allows: list[Conversion] = [
            bound.allows for bound in arguments[1:] if isinstance(bound, Bound)
        ]
        return partial(_bounded, _fit_of(arguments[0]), allows)
    if origin in (Union, UnionType):
        return partial(_any_of, [*map(_fit_of, arguments)])
    if origin is Literal:
        return partial(_among, arguments)
    if origin is tuple:
        fits = [_fit_of(x) for x in arguments if x is not ...]
        return partial(_each, fits, arguments[-1] is ...)
    if hint in (int, float):
        return partial(_number, hint)
    try:
        isinstance(None, hint)
    except TypeError:  # Any, a protocol, ...: no class of which to be an instance
        hint = object
    return lambda value: value if isinstance(value, hint) else _UNFIT


# Loops, because generators take several times as long for so few values.


def _bounded(fit: Conversion, allows: list[Conversion], value: Any) -> Any:
    fitted = fit(value)
    if fitted is not _UNFIT and fitted is not None:
        for allowed in allows:
            if not allowed(fitted):
                return _UNFIT
    return fitted


def _any_of(fits: list[Conversion], value: Any) -> Any:
    for fit in fits:
        fitted = fit(value)
        if fitted is not _UNFIT:
            return fitted
    return _UNFIT


def _each(fits: list[Conversion], several: bool, value: Any) -> Any:
    if isinstance(value, str | bytes | Mapping):
        return _UNFIT
    try:
        values = tuple(value)
    except TypeError:
        return _UNFIT
    fits = fits * len(values) if several else fits
    fitted = tuple(fit(each) for fit, each in zip(fits, values, strict=False))
    if len(values) != len(fits) or any(x is _UNFIT for x in fitted):
        return _UNFIT
    return values if all(map(operator.is_, fitted, values)) else fitted


def _among(choices: tuple[Any, ...], value: Any) -> Any:
    for choice in choices:
        if type(value) is type(choice) and value == choice:
            return value
    return _UNFIT


def _number(kind: type, value: Any) -> Any:
    if type(value) is kind:
        return value
    plain = integer(value)
    if plain is not None:
        return plain
    real = kind is float and not isinstance(value, bool) and isinstance(value, numbers.Real)
    return float(value) if real else _UNFIT


_NOUNS = {int: "integer", float: "number"}
_ALTERNATIVES: dict[Any, list[str]] = {
    NoneType: ["None"],
    bool: ["True", "False"],
    str: ["text"],
    Any: ["any value"],
}


def _phrases(hint: Any, bounds: tuple[Bound, ...] = ()) -> list[str]:
    """Allowed values, one phrase for each alternative."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        inner = tuple(bound for bound in arguments[1:] if isinstance(bound, Bound))
        return _phrases(arguments[0], (*bounds, *inner))
    if origin in (Union, UnionType):
        return [phrase for part in arguments for phrase in _phrases(part, bounds)]
    if origin is Literal:
        return [repr(choice) for choice in arguments]
    if origin is tuple:
        count = "" if arguments[-1] is ... else f" of {len(arguments)}"
        return [f"a list{count}, each {' or '.join(_phrases(arguments[0]))}"]
    if hint in _ALTERNATIVES:
        return _ALTERNATIVES[hint]
    noun = _NOUNS.get(hint) or str(getattr(hint, "__name__", hint))
    words = [*(str(bound) for bound in bounds if bound.before), noun]
    article = "an" if words[0][0] in "aeiouAEIOU" else "a"
    behind = " and ".join(str(bound) for bound in bounds if not bound.before)
    return [" ".join([article, *words, *([behind] if behind else [])])]


#: Rows of the smallest window of any paper in the catalogue.
_WINDOW = 8


class Length(NamedTuple):
    """A parameter that is a number of entries or rows: its value, and the budget it is meant for.

    depth: of its piece among `Policy.levels`. alike: layers have equal budgets, so that a length
    which fits the budget fits every layer's. scaled: it shrinks where it does not fit.
    """

    depth: int
    name: str
    value: int
    entries: int
    alike: bool = True
    scaled: bool = False

    def at(self, budget: int) -> int:
        """The value where half of the budget holds it, else the same share of a smaller budget.

        At least 1, and of a window 8 rows as far as half of the budget holds them: the smallest
        that a paper uses (R-KV, PyramidKV, FastKV, DropKV); fewer rows say little.
        """
        if self.alike and 2 * self.value <= budget:
            return self.value
        least = max(1, min(_WINDOW, budget // 2)) if self.name == "window" else 1
        return min(self.value, max(least, round(self.value * budget / self.entries)))

    @property
    def share(self) -> str:
        """The value at any smaller budget, in words."""
        where = f" if {self.value} > budget / 2" if self.alike else ""
        return f"{self.value} * budget / {self.entries}{where}"
