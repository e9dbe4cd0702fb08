"""Parsing of user arguments: values as text, lists, and budgets as shares."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from typing import Any, TypeVar, cast

from kvsim.core.parameters import integer
from kvsim.errors import BudgetError
from kvsim.schema import NEVER

T = TypeVar("T")

#: A parameter of a policy as `--set` and configurations give it.
Value = int | float | bool | str | None

_CONSTANTS: dict[str, Value] = {
    **dict.fromkeys(("true", "yes", "on"), True),
    **dict.fromkeys(("false", "no", "off"), False),
    **dict.fromkeys(("none", "null", "~", ""), None),
}


def value_of(text: str) -> Value:
    """Parse a text as a number, True, False or None; return any other text unchanged.

    A number has at most 64 characters.
    """
    plain = text.strip().lower()
    if plain in _CONSTANTS:
        return _CONSTANTS[plain]
    for kind in (int, float) if len(plain) <= 64 else ():
        with contextlib.suppress(ValueError):
            return kind(re.sub(r"^([-+]?)\.(?=inf|nan)", r"\1", plain))  # as YAML spells them
    return text


def setting(key: str, value: Any) -> str:
    """Parse a parameter of `--set`."""
    text = str(value).lower() if value is None or isinstance(value, bool) else str(value)
    return f"{key.replace('scorer__', 'scorer.')}={text}"


def listed(given: T | Iterable[T]) -> list[T]:
    """Return the given values as a list; text, or anything not iterable, is one value."""
    single = isinstance(given, str) or not isinstance(given, Iterable)
    return [cast("T", given)] if single else list(cast("Iterable[T]", given))


def share_of(budget: int | str) -> str | None:
    """Return a budget such as `25%` or `64MiB` without spaces; None for a number of entries."""
    text = "".join(str(budget).split())
    return None if re.fullmatch(r"[+-]?[\d_]+", text) else text


def in_entries(budget: int) -> int:
    """Return the budget as an int; BudgetError for anything else, such as a share or a bool."""
    entries = integer(budget)
    if entries is not None and entries <= NEVER:
        return entries
    raise BudgetError(
        f"budget is {budget!r}; expected a whole number of entries per KV head, at most {NEVER}"
    )


def resolve_budget(
    budget: int | str, n_pos: int, expected: str = "entries (128) or a share (25%)"
) -> int:
    """Return entries: an integer, or `25%` of the final length, rounded down, at least 1.

    expected: the expectation in errors.
    """
    if not isinstance(budget, str):
        return in_entries(budget)
    text = budget.strip()
    try:
        if not text.endswith("%"):
            return int(text)
        share = float(text[:-1])
    except ValueError:
        more = ""
        if re.search(r"so-far|[bB](@\w+)?$", text) and "so-far" not in expected:
            more = ", as only budgets of replays and live runs grow or are bytes"
        raise BudgetError(f"budget is {text!r}; expected {expected}{more}") from None
    if not 0 < share <= 100:
        raise BudgetError(f"budget is {text}; expected a share above 0% and up to 100%")
    return max(1, int(n_pos * share / 100 + 1e-9))
