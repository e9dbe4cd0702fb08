"""The error of a layer's attention output by the share of the cache that is evicted.

After Devoto, Jeblick and Jegou, arXiv 2510.00636, Fig. 6. At a cut of the sequence a policy evicts
once, a share of the entries so far (`ratio`), and rows from the cut on see the remaining entries
and all newer ones. Rows before the cut are the prompt here, whatever the trace's prompt is.

The paper's error is that of the residual stream, which a recorded run does not have (the metric
`layer_error` is the part that one layer adds). Here it is the error of the attention's output
before the projection, of all heads as one vector: `relative_head_error` is the metric
`concat_error`, over the rows from the cut on.

Open loop except for the first layer. As the error with eviction in a single layer, exact in all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import polars as pl

from kvsim.analysis.measuring import measure
from kvsim.analysis.results import task_of
from kvsim.core.policy import Policy, Schedule
from kvsim.core.trace import Trace
from kvsim.engine.checks import Setup
from kvsim.engine.replay import replay
from kvsim.engine.source import check_unwindowed, ended
from kvsim.errors import PolicyError

#: Shares of the entries that are evicted.
RATIOS = tuple(i / 10 for i in range(1, 10))

# 4,096 of 5,120 tokens by default: the paper's sequences have about 5,000.
_BEFORE = 4 / 5


def reconstruction_table(
    trace: Trace,
    policies: Sequence[Policy],
    ratios: Sequence[float] = RATIOS,
    *,
    cut: int | None = None,
    device: str = "cpu",
    progress: Callable[[int, int, str], None] | None = None,
) -> pl.DataFrame:
    """Return the error of every policy at every ratio, per layer, as `relative_head_error`.

    Columns: those of a Table, the cut and the rows after it, the ratio, and as task that of
    `task_of`.

    cut: rows before the eviction, four fifths of the trace by default. ratios: at least 0 and below
    1; the budget is the rest of `cut` entries per head, rounded down, at least 1. A policy's own
    schedule is ignored. progress: called with (cells done, cells, current step).

    Raises PolicyError for a cut or a ratio out of range, and before any work the errors of
    `kvsim.replay` on budgets.
    """
    cut = int(trace.n_pos * _BEFORE) if cut is None else cut
    if not (0 < cut < trace.n_pos and all(0 <= ratio < 1 for ratio in ratios)):
        raise PolicyError(
            f"{trace.name}: cut is {cut}, expected 1 to {trace.n_pos - 1}, so that rows come "
            f"after; ratios are {[*ratios]}, expected shares of at least 0, below 1"
        )
    for layer in range(trace.n_layers):
        check_unwindowed(trace, layer)
    before, once = ended(trace, cut), Schedule(interval=None)
    budgets = [max(1, int(cut * (1 - ratio) + 1e-9)) for ratio in ratios]
    setups = [
        Setup(before, replace(policy, schedule=once), budget).checked()
        for policy, budget in product(policies, budgets)
    ]
    tables = []
    for place, policy in enumerate(policies):
        records = []
        for done, ratio in enumerate(ratios, place * len(ratios)):
            if progress is not None:
                progress(done, len(setups), f"{trace.name}: {policy.name}, ratio {ratio:g}")
            setup = setups[done]
            records.append(replay(before, setup.policy, setup.budget, device=device))
        errors = measure(before, records, ["concat_error"], device=device)
        # rows of a record follow each other
        of_row = pl.Series(np.repeat(np.asarray(ratios, np.float64), trace.n_layers))
        tables.append(errors.with_columns(ratio=of_row).rename({"value": "relative_head_error"}))
    rows = pl.lit(trace.n_pos - cut)
    return pl.concat(tables).with_columns(task=pl.lit(task_of(trace)), cut=pl.lit(cut), rows=rows)
