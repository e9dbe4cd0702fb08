"""Terms on which policies are compared: one schedule, distinct names, metrics of all traces."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvsim.core.policy import Policy
from kvsim.errors import PolicyError
from kvsim.schema import PREFILL, Compress, schedule

#: Rows between events of policies that are compared, unless an interval is given.
INTERVAL = 32
#: The interval that stands for each policy's own schedule.
PAPER = "paper"

#: What replaces the schedules of policies: interval, prefill, compress and prefill_chunk, each None
#: where a policy's own stays.
Terms = tuple[int | None, bool | None, Compress | None, int | None]


def described(terms: Terms) -> dict[str, Any]:
    """What replaces the schedules of policies, ready for JSON."""
    return dict(zip(("interval", "prefill", *PREFILL), terms, strict=True))


def shared_terms(
    policies: Sequence[Policy], interval: int | str | None, options: Mapping[str, Any]
) -> tuple[Terms, str]:
    """One schedule for policies that are compared, and a remark if none was given.

    Without an interval, two or more policies act after the prompt and every `INTERVAL` rows,
    whichever they are, so that the numbers of one do not depend on the others; one policy keeps
    that of its paper, and all do with the interval `paper`. An interval stands for one schedule, so
    it brings the prefill event along for all policies, unless `prefill` decides.
    """
    prefill, compress, chunk = (options[name] for name in ("prefill", *PREFILL))
    if interval == PAPER or (interval is None and all(x == policies[0] for x in policies)):
        return (None, prefill, compress, chunk), ""
    rows = INTERVAL if interval is None else int(interval)
    prefill = True if prefill is None else prefill
    ends = compress or "prompt"
    after = schedule(rows, prefill=prefill, compress=ends, prefill_chunk=chunk)
    remark = (
        f"all policies act on one schedule ({after}): --interval N gives another, --interval "
        "paper each that of its paper"
    )
    return (rows, prefill, compress, chunk), remark * (interval is None)


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
