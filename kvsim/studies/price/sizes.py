"""Policies whose size is not a budget: the threshold at which they hold as much as others do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl

from kvsim.analysis.kept.retention import entries_seen
from kvsim.core.record import Record
from kvsim.core.trace import Trace
from kvsim.engine.replay import replay
from kvsim.errors import PolicyError
from kvsim.policies.naming import policy
from kvsim.sweeps.driver import replay_all
from kvsim.sweeps.held_out import split

#: The place of the largest float32 among all, and the share by which a size may miss.
_LAST, _NEAR = 0x7F7FFFFF, 0.002


def at_equal_size(
    traces: Sequence[Trace],
    policies: Mapping[str, Mapping[str, Any]],
    against: Sequence[str],
    budgets: Sequence[int],
    *,
    interval: int = 32,
    test: Sequence[Trace] | None = None,
    judge: bool | str = False,
) -> pl.DataFrame:
    """Compare policies that have a threshold with others where rows see as many entries on average.

    Args:
        traces: of prompts on which thresholds are searched (`threshold_of_size`).
        policies: names of some that have a threshold and no budget, and other parameters of each.
        against: policies with a budget; the first one has the size that is wanted.
        budgets: entries of a head, one point of the curve each.
        interval: rows between events, one of them after the prompt.
        test: what is measured; by default half of the traces, which are then not searched on
            (`split`).
        judge: as `replay_all`.

    Returns a Table (`kvsim.measure`). Raises PolicyError where a policy fails.
    """
    searched, rest = (traces, test) if test else split(traces, 0.5, 0)
    others = [policy(name).fitted() for name in against]
    tables: list[pl.DataFrame] = []
    for budget in budgets:
        terms: dict[str, Any] = {"budget": budget, "interval": interval}
        sizes = [seen(replay(x, others[0], prefill=True, **terms)) for x in searched]
        built = list(others)
        for name, params in policies.items():
            value = threshold_of_size(name, params, searched, float(np.mean(sizes)), **terms)
            built.append(policy(name, threshold=value, **params).fitted())
        run = replay_all(rest or traces, built, budget, interval=interval, judge=judge).whole()
        if run.failures:
            raise PolicyError(f"{run.failures[0].trace}: {run.failures[0].error}")
        tables.append(run.table)
    return pl.concat(tables)


def seen(record: Record) -> float:
    """Entries of a head that rows after the prompt see, mean over rows, heads and layers."""
    return float(np.mean([entries_seen(of, record.prompt_len) for of in record.evicted_at]))


def threshold_of_size(
    name: str,
    params: Mapping[str, Any],
    traces: Sequence[Trace],
    wanted: float,
    *,
    budget: int,
    interval: int,
    size: Callable[[Record], float] = seen,
) -> float:
    """Return the threshold at which a policy is as large as wanted, mean over traces.

    Halves the range of thresholds, counted in float32 numbers so that any scale will do, until the
    size is within 0.2 % of what is wanted or no number is between.

    Args:
        name: of the policy.
        params: its other parameters.
        traces: on which it is replayed.
        wanted: size.
        budget: to which lengths of the policy are scaled.
        interval: rows between events, one of them after the prompt.
        size: of a record; by default the mean entries that a row sees.

    Raises:
        PolicyError: a policy without a threshold, a threshold given, or none with such a size.
    """
    if "threshold" in params:
        raise PolicyError(f"{name}: its threshold is searched; expected other parameters alone")

    def size_at(place: int) -> float:
        built = policy(name, threshold=_number(place), **params).fitted()
        each = (replay(x, built, budget, interval=interval, prefill=True) for x in traces)
        return float(np.mean([size(record) for record in each]))

    low, high = -_LAST, _LAST
    least, most = size_at(high), size_at(low)
    if not least <= wanted <= most:
        raise PolicyError(
            f"{name}: with thresholds its sizes are from {least:.1f} to {most:.1f}; expected "
            f"{wanted:.1f} between them; other parameters, such as a window, may leave more room"
        )
    near, best = min((most - wanted, low), (wanted - least, high))
    while high - low > 1 and near > _NEAR * wanted:
        middle = (low + high) // 2
        here = size_at(middle)
        near, best = min((near, best), (abs(here - wanted), middle))
        low, high = (low, middle) if here < wanted else (middle, high)
    return float(f"{_number(best):.6g}")


def _number(place: int) -> float:
    """The float32 number at a place among all of them, 0 at 0."""
    return float(np.int32(abs(place)).view(np.float32)) * (1 if place >= 0 else -1)
