"""Policies whose size is not a budget: the parameter at which they hold as much as others do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, get_args, get_origin

import numpy as np

from kvsim.analysis.kept.retention import entries_seen
from kvsim.core.parameters import Between
from kvsim.core.record import Record
from kvsim.core.trace import Trace
from kvsim.engine.replay import replay
from kvsim.errors import PolicyError
from kvsim.policies.naming import declared, policy

#: The largest float32: what every threshold is below.
_MOST = float(np.finfo(np.float32).max)

#: The share by which the size may miss the wanted one.
_NEAR = 0.002


def seen(record: Record) -> float:
    """Entries of a head that rows after the prompt see, mean over rows, heads and layers."""
    return float(np.mean([entries_seen(of, record.prompt_len) for of in record.evicted_at]))


def fitted(
    name: str,
    traces: Sequence[Trace],
    wanted: float,
    *,
    budget: int,
    interval: int,
    by: str = "threshold",
    params: Mapping[str, Any] | None = None,
    size: Callable[[Record], float] = seen,
) -> float:
    """Return the value of a parameter at which a policy is as large as wanted on these traces.

    Halves the range of the parameter, counted in float32 numbers, so that any scale will do, until
    the size is within 0.2 % of what is wanted or no number is between.

    Args:
        name: of the policy.
        traces: its size is the mean over them.
        wanted: size.
        budget: to which other lengths of the policy are scaled.
        interval: rows between events, one of them after the prompt.
        by: the parameter, a number that makes the policy larger or smaller throughout.
        params: other parameters.
        size: of a record; by default the mean entries that a row sees.

    Raises:
        PolicyError: no such parameter, or no value with such a size.
    """

    def size_at(code: int) -> float:
        built = policy(name, **{**(params or {}), by: _number(code)}).fitted()
        records = (
            replay(trace, built, budget, interval=interval, prefill=True) for trace in traces
        )
        return float(np.mean([size(record) for record in records]))

    low, high = (_code(end) for end in _range(name, by))
    ends = size_at(low), size_at(high)
    if not min(ends) <= wanted <= max(ends):
        raise PolicyError(
            f"{name}: {by} from {_number(low):g} to {_number(high):g} has sizes from "
            f"{min(ends):.1f} to {max(ends):.1f}; expected {wanted:.1f} between them"
        )
    grows = ends[1] > ends[0]
    near, best = min(zip((abs(end - wanted) for end in ends), (low, high), strict=True))
    while high - low > 1 and near > _NEAR * wanted:
        middle = (low + high) // 2
        here = size_at(middle)
        near, best = min((near, best), (abs(here - wanted), middle))
        low, high = (middle, high) if (here < wanted) == grows else (low, middle)
    return _number(best)


def _range(name: str, by: str) -> tuple[float, float]:
    """Both ends of what a parameter may be."""
    parameter = declared(name).get(by)
    if parameter is None:
        raise PolicyError(
            f"{name} has no parameter {by}; expected one of {', '.join(declared(name))}"
        )
    hint = parameter.hint
    kind, *bounds = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    if kind is not float:
        raise PolicyError(f"{name}: {by} is {parameter.expected}; expected a parameter of numbers")
    between = next((bound for bound in bounds if isinstance(bound, Between)), None)
    return (-_MOST, _MOST) if between is None else (between.least, between.most)


def _code(number: float) -> int:
    """The place of a number among all float32 numbers, 0 at 0."""
    bits = int(np.float32(abs(number)).view(np.int32))
    return bits if number >= 0 else -bits


def _number(code: int) -> float:
    return float(np.int32(abs(code)).view(np.float32)) * (1 if code >= 0 else -1)
