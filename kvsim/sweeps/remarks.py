"""Remarks on what a budget does not compare, by the policies and schedules of cells."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvsim.sweeps.cells import Cell
from kvsim.sweeps.terms import INTERVAL

#: Rows that see this many times the budget on a paper's schedule are remarked on.
_FAR = 1.5


def cell_remarks(cells: Sequence[Cell]) -> tuple[str, ...]:
    """Return what readers of results of these cells should know about all of them."""
    return tuple(filter(None, (paper_remark(cells), access_remark(cells))))


def access_remark(cells: Sequence[Cell]) -> str:
    """Return which policies a budget of entries does not compare with the others."""
    policies = {cell.policy.name: cell.policy for cell in cells}
    other = [name for name, policy in policies.items() if policy.reader or policy.rounds]
    if not other or len(policies) < 2:
        return ""
    names = f"{', '.join(other)} read{'s' * (len(other) == 1)} or store{'s' * (len(other) == 1)}"
    part = " (`seen` counts what is held, not what is read)"
    part *= any(policies[name].reader for name in other)
    return (
        f"{names} entries in another way, so budgets of entries do not compare them{part}; "
        "bytes do: replay with --out RUN --metric output_error,bytes_held,bytes_read, "
        "then `kvsim plot pareto RUN`"
    )


def paper_remark(cells: Sequence[Cell]) -> str:
    """Return which policies let rows see far more than the budget on the schedule of their paper.

    Between events a cache grows: after a prompt-only schedule, by every row of the response.
    """
    times: dict[str, float] = {}
    for cell in cells:
        policy, trace = cell.policy, cell.trace
        dropping = policy.propagation is not None and policy.propagation.alone
        if (
            policy.so_far is not None
            or cell.schedule != policy.schedule
            or not policy.bounded
            or dropping
        ):
            continue
        rows = np.arange(trace.prompt_len, trace.n_pos)
        events = np.array([-1, *cell.schedule.rows(*trace.extent)])
        last = events[np.searchsorted(events, rows) - 1]
        seen = np.minimum(cell.budget, last + 1) + rows - last
        if rows.size:
            times[policy.name] = max(times.get(policy.name, 0), seen.mean() / cell.budget)
    far = [f"{name} (up to {x:.1f} times)" for name, x in times.items() if x > _FAR]
    if not far:
        return ""
    return (
        f"rows see far more than the budget on the schedule of the paper: {', '.join(far)}; "
        f"--interval {INTERVAL} holds the budget"
    )
