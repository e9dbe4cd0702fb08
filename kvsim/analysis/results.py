"""Which results a Table holds, and what they are called where one policy has several.

A result is a policy with its parameters and its schedule. Names alone do not tell an ablation from
what it ablates, so a result of the same policy is called by the parameters in which it differs.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from types import MappingProxyType
from typing import Any

import polars as pl

from kvsim.core.trace import Trace
from kvsim.errors import PolicyError, TraceError
from kvsim.policies import policy
from kvsim.schema import schedule

#: The columns that make a result.
COLUMNS = ("policy", "params", "interval", "prefill")

#: From here on an interval asks for the event after the prompt alone: `--interval 1000000`.
BEYOND = 1_000_000

Params = Mapping[str, Any]


def check_distinct(traces: Sequence[Trace]) -> None:
    """Raise TraceError where two traces have one name: a Table could not tell them apart."""
    seen: dict[str, Trace] = {}
    for trace in traces:
        if trace.name in seen:
            raise TraceError(
                f"{_where(seen[trace.name])} and {_where(trace)} are both called {trace.name!r}, "
                "and results are told apart by the names of traces; give them one by one, or "
                "record one again under another id"
            )
        seen[trace.name] = trace


def _where(trace: Trace) -> str:
    """The path of a trace, and the model that it is of where that is known."""
    model = trace.meta.get("model")
    name = model.get("name") if isinstance(model, dict) else None
    where = "a trace in memory" if trace.path is None else str(trace.path)
    return f"{where} (of {name})" if name else where


@dataclass(frozen=True)
class Result:
    """A policy as it was replayed; params: the JSON of its parameters, keys in order."""

    policy: str
    params: str
    interval: int | None
    prefill: bool | None

    @cached_property
    def parameters(self) -> Params:
        """The parameters by name."""
        return MappingProxyType(json.loads(self.params))

    @property
    def schedule(self) -> tuple[int | None, bool | None]:
        """Interval and prefill; an interval that no text reaches is None, as what it amounts to."""
        return None if (self.interval or 0) >= BEYOND else self.interval, self.prefill


def results(table: pl.DataFrame) -> dict[tuple[Any, ...], Result]:
    """The results of a Table, by what stands in `COLUMNS`, in the order of the Table.

    Raises PolicyError where parameters are no JSON object.
    """
    known = table.filter(pl.col("policy").is_not_null()).select(COLUMNS)
    return {
        (name, params, *terms): Result(name, _canonical(name, params), *terms)
        for name, params, *terms in known.unique(maintain_order=True).iter_rows()
    }


def _canonical(name: str, params: str | None) -> str:
    try:
        known = json.loads(params or "")
    except ValueError:
        known = None
    if not isinstance(known, dict):
        raise PolicyError(
            f"the parameters of {name} are {params!r}; expected a JSON object, as kvsim writes it"
        )
    return json.dumps(known, sort_keys=True)


def differing(one: Result, other: Result) -> frozenset[str]:
    """Names of the parameters in which two results differ; one that is missing is None."""
    a, b = one.parameters, other.parameters
    return frozenset(name for name in (*a, *b) if a.get(name) != b.get(name))


def main(results: Sequence[Result]) -> Result:
    """Of results of one policy, the one that the others are variants of.

    The one from which most others differ in a single parameter; of several, that with the fewest
    parameters that are not the policy's defaults; then the first.
    """

    def rank(one: Result) -> tuple[int, int]:
        near = sum(len(differing(one, other)) == 1 for other in results)
        default = _defaults(one.policy)
        changed = sum(default.get(name) != value for name, value in one.parameters.items())
        return -near, changed

    return min(results, key=rank)


@cache
def _defaults(name: str) -> Params:
    """Default parameters by name, none for what is not in the catalogue."""
    if ":" in name:  # a user's own: to ask it would run the code that the name points at
        return {}
    try:
        return MappingProxyType(json.loads(json.dumps(dict(policy(name).params))))
    except PolicyError:
        return {}


def in_words(params: Params) -> str:
    """Parameters as `credit=False, window=8`."""
    return ", ".join(f"{name}={_value(value)}" for name, value in params.items())


def _value(value: object) -> str:
    if isinstance(value, dict):
        known = sorted((name, one) for name, one in value.items() if one)
        return " ".join(f"{name} {_value(one)}" for name, one in known) or "none"
    return str(value)


def labels(results: Sequence[Result]) -> dict[Result, str]:
    """What each result is called: the policy, and where it has several what tells them apart.

    `ams` is the main one and `ams (credit=False)` one that differs from it; where only schedules
    tell results apart, they are named too: `tova (after: every 16 rows)`.

    Raises PolicyError where two results would be called the same.
    """
    by_policy: dict[str, list[Result]] = {}
    for one in results:
        by_policy.setdefault(one.policy, []).append(one)
    schedules = Counter((one.policy, one.params) for one in results)
    taken: dict[str, Result] = {}
    for name, of_policy in by_policy.items():
        base = main(list({one.params: one for one in of_policy}.values()))
        for one in of_policy:
            remarks = [in_words({x: one.parameters.get(x) for x in sorted(differing(one, base))})]
            if schedules[name, one.params] > 1:
                remarks.append(f"after: {schedule(one.interval, prefill=bool(one.prefill))}")
            remark = "; ".join(filter(None, remarks))
            label = f"{name} ({remark})" if remark else name
            if label in taken:
                raise PolicyError(
                    f"two results would be called {label}: policies {taken[label].policy} and "
                    f"{name}; report them one by one"
                )
            taken[label] = one
    return {one: label for label, one in taken.items()}


def labelled(table: pl.DataFrame) -> pl.DataFrame:
    """The Table with labels of results (see `labels`) in the place of the names of policies.

    Raises PolicyError where results cannot be told apart.
    """
    known = results(table)
    called = labels(list(dict.fromkeys(known.values())))
    rows = [(*row, called[one]) for row, one in known.items()]
    schema = {name: table.schema[name] for name in COLUMNS} | {"label": pl.String}
    names = pl.DataFrame(rows, schema=schema, orient="row")
    joined = table.join(names, on=COLUMNS, how="left", nulls_equal=True, maintain_order="left")
    return joined.with_columns(policy="label").drop("label")
