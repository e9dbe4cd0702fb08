"""Terms on which policies are compared: one schedule, distinct names, metrics of all traces."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from kvsim.analysis.definition import Metric
from kvsim.analysis.table import BESIDE, REGRET, check_arrays, choose, names_of
from kvsim.core.policy import Policy
from kvsim.core.trace import Trace
from kvsim.errors import ConfigError, PolicyError
from kvsim.schema import PREFILL, Compress, schedule

#: Rows between events of policies that are compared, unless an interval is given.
INTERVAL = 32

#: What replaces the schedules of policies: interval, prefill, compress and prefill_chunk, each None
#: where a policy's own stays.
Terms = tuple[int | None, bool | None, Compress | None, int | None]


def described(terms: Terms) -> dict[str, Any]:
    """What replaces the schedules of policies, ready for JSON."""
    return dict(zip(("interval", "prefill", *PREFILL), terms, strict=True))


def shared_prefill(interval: int | None, prefill: bool | None) -> bool | None:
    """Whether the prefill event fires where policies are compared; None is each policy's own.

    An interval stands for one schedule, so it brings the prefill event along for all policies,
    also for those whose own schedule leaves it out, unless `prefill` decides.
    """
    return True if interval is not None and prefill is None else prefill


def shared_terms(
    policies: Sequence[Policy], terms: Terms, *, own_schedule: bool = False
) -> tuple[Terms, str]:
    """One schedule for policies that are compared, and a remark if none was given.

    Without an interval, two or more policies act after the prompt and every `INTERVAL` rows,
    whichever they are, so that the numbers of one do not depend on the others; one policy keeps
    that of its paper. own_schedule: each keeps its own. Raises ConfigError for an interval beside
    that.
    """
    interval, prefill, compress, chunk = terms
    if own_schedule and interval is not None:
        raise ConfigError(
            f"an interval of {interval} and own schedules exclude each other; give one of them"
        )
    alone = all(policy == policies[0] for policy in policies)
    if interval is not None or own_schedule or alone:
        return (interval, shared_prefill(interval, prefill), compress, chunk), ""
    shared = shared_prefill(INTERVAL, prefill)
    ends = compress or "prompt"
    after = schedule(INTERVAL, prefill=bool(shared), compress=ends, prefill_chunk=chunk)
    remark = (
        f"all policies act on one schedule ({after}): --interval N gives another, --own-schedule "
        "each that of its paper"
    )
    return (INTERVAL, shared, compress, chunk), remark


def measurable(
    metrics: str | Sequence[str],
    traces: Sequence[Trace],
    *,
    regret: bool = False,
    judged: bool = False,
) -> dict[str, Metric]:
    """Return metrics by name, with those of the regret and of the judge if they are measured.

    Raises PolicyError for an unknown one, NeedsError where a trace has not what one reads.
    """
    names = list(dict.fromkeys([*names_of(metrics), *(REGRET if regret else ())]))
    chosen = choose(names, beside=BESIDE if regret else (), judged=judged)
    for trace in traces:
        check_arrays(trace, chosen)
    return chosen


def check_names(policies: Sequence[Policy]) -> None:
    """Raise PolicyError where two policies differ in neither name nor parameters, and yet do."""
    by_name: dict[str, Policy] = {}
    for policy in policies:
        label = f"{policy.name} {json.dumps(policy.params, sort_keys=True)}"
        if by_name.setdefault(label, policy) != policy:
            raise PolicyError(
                f"two different policies are called {policy.name!r} and have the same parameters, "
                "so that results could not be told apart; replay them one by one or name them "
                "differently"
            )


def params_of(policies: Sequence[Policy]) -> dict[str, Any]:
    """The parameters of policies by name, in a list where several have one."""
    by_name: dict[str, list[Any]] = {}
    for policy in policies:
        by_name.setdefault(policy.name, []).append(policy.params)
    return {name: each[0] if len(each) == 1 else each for name, each in by_name.items()}
