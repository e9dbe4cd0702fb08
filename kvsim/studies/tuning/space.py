"""The range of a parameter that is searched, from the bounds that it declares."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from kvsim.core.parameters import Above, AtLeast, AtMost, Below, Between, Bound, Odd, Parameter

if TYPE_CHECKING:
    import optuna

#: From this ratio of its ends on, a range is searched on a logarithmic scale.
_WIDE = 32


@dataclass(frozen=True)
class Dimension:
    """A parameter that is searched: its choices, or a range with both ends.

    default: its value without a search. choices: empty for a range, otherwise all of them. whole:
    integers alone, of this step. optional: None is a choice beside the range. assumed: where an end
    of the range comes from that the parameter does not declare.
    """

    name: str
    default: Any
    choices: tuple[Any, ...] = ()
    low: float = 0
    high: float = 0
    whole: bool = False
    step: int = 1
    optional: bool = False
    assumed: str = ""

    @property
    def log(self) -> bool:
        """Whether small values differ more than large ones."""
        return self.low > 0 and self.step == 1 and self.high / self.low >= _WIDE

    def suggest(self, trial: optuna.Trial) -> Any:
        """A value for a trial; numbers have four digits, so that they can be typed again."""
        if self.choices:
            return self.choices[trial.suggest_categorical(self.name, range(len(self.choices)))]
        if self.optional and trial.suggest_categorical(f"{self.name} is None", (False, True)):
            return None
        if self.whole:
            low, high = int(self.low), int(self.high)
            return trial.suggest_int(self.name, low, high, step=self.step, log=self.log)
        value = trial.suggest_float(self.name, self.low, self.high, log=self.log)
        return min(max(float(f"{value:.4g}"), self.low), self.high)

    @property
    def initial(self) -> dict[str, Any]:
        """The default as `suggest` names it."""
        if self.choices:
            return {self.name: self.choices.index(self.default)}
        absent = {f"{self.name} is None": self.default is None} if self.optional else {}
        return absent if self.default is None else {**absent, self.name: self.default}


def dimension(name: str, parameter: Parameter, value: Any, entries: int) -> Dimension | None:
    """The dimension of a parameter; None for text, paths and the like, which have no range.

    value: without a search, None where it is not known. entries: of the budget, the largest value
    of an integer that declares none.
    """
    if value is None and parameter.default is not MISSING:
        value = parameter.default
    parts = list(_alternatives(parameter.hint))
    choices = [x for kind, _ in parts for x in _choices(kind)]
    ranges = [(kind, bounds) for kind, bounds in parts if kind in (int, float)]
    if len(choices) + len(ranges) != sum(len(_choices(kind)) or 1 for kind, _ in parts):
        return None  # an alternative without a range
    if not ranges:
        return Dimension(name, value, tuple(choices)) if value in choices else None
    if any(choice is not None for choice in choices):
        return None
    kind, bounds = ranges[0]
    low, high, assumed = _ends(bounds, value, entries, whole=kind is int)
    step = 2 if any(isinstance(bound, Odd) for bound in bounds) else 1
    if kind is int:
        high = low + (high - low) // step * step
    return Dimension(
        *(name, value, (), low, high, kind is int, step, bool(choices)), assumed=assumed
    )


def _alternatives(hint: Any, bounds: tuple[Bound, ...] = ()) -> Iterator[tuple[Any, Any]]:
    """Types of a union with the bounds of each."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        more = tuple(bound for bound in arguments[1:] if isinstance(bound, Bound))
        yield from _alternatives(arguments[0], (*bounds, *more))
    elif origin in (Union, UnionType):
        for part in arguments:
            yield from _alternatives(part, bounds)
    else:
        yield hint, bounds


def _choices(kind: Any) -> tuple[Any, ...]:
    if get_origin(kind) is Literal:
        return get_args(kind)
    return (False, True) if kind is bool else (None,) if kind is NoneType else ()


def _ends(
    bounds: tuple[Bound, ...], default: Any, entries: int, *, whole: bool
) -> tuple[float, float, str]:
    """Both ends of a range, and where one comes from that no bound declares."""
    low = high = None
    for bound in bounds:
        match bound:
            case AtLeast(limit) | Above(limit):
                low = limit
            case AtMost(limit) | Below(limit):
                high = limit
            case Between(least, most):
                low, high = least, most
            case _:
                pass
    value = default if isinstance(default, int | float) else 0
    assumed = []
    if high is None:
        high = max(entries, value) if whole else max(10 * value, 10 * (low or 0)) or 1
        size = "the budget" if high == entries else "its default"
        assumed.append(f"up to {size if whole else 'ten times its default'}")
    if low is None:
        low = min(0, 10 * value)
        assumed.append("from 0" if not low else "from ten times its default")
    for bound in bounds:  # ends that are themselves excluded
        if isinstance(bound, Above):
            low = low + 1 if whole else low + (high - low) / 1000
        elif isinstance(bound, Below):
            high = high - 1 if whole else high - (high - low) / 1000
    return low, max(high, low), ", ".join(assumed)
