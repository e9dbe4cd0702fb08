"""The error of a layer's attention output by the share of the cache that is evicted.

After Devoto, Jeblick and Jegou, arXiv 2510.00636, Fig. 6. The sequence is cut: at the cut a policy
evicts once, a share of the entries so far (`ratio`), and rows from the cut on see what is left and
everything newer. Whatever the trace's prompt is, rows before the cut are the prompt here.

The paper's error is that of the residual stream, which a recorded run does not tell (the metric
`layer_error` is what one layer adds to it). Here it is that of the attention's output before the
projection, of all heads as one vector: `relative_head_error` is the metric `concat_error`, over the
rows from the cut on.

Open loop, but for the first layer; as the error where that layer alone evicts, exact in all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import polars as pl

from kvsim.analysis.measuring import measure
from kvsim.analysis.results import task_of
from kvsim.analysis.table import columns_of
from kvsim.core.policy import Policy, Schedule
from kvsim.core.trace import Trace
from kvsim.engine.checks import Setup
from kvsim.engine.replay import replay
from kvsim.engine.source import check_unwindowed, ended
from kvsim.errors import PolicyError
from kvsim.schema import FIDELITY

#: Shares of the entries that are evicted.
RATIOS = tuple(i / 10 for i in range(1, 10))

#: Columns of `reconstruction_table`.
RECONSTRUCTION_COLUMNS: dict[str, Any] = {
    **dict.fromkeys(("trace", "task", "policy", "params", "changed"), pl.String),
    **dict.fromkeys(("cut", "rows"), pl.Int64),
    "ratio": pl.Float64,
    **dict.fromkeys(("budget", "layer"), pl.Int64),
    "relative_head_error": pl.Float64,
    "fidelity": pl.Enum(FIDELITY),
}

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
    """Return the error of every policy at every ratio, per layer; `RECONSTRUCTION_COLUMNS`.

    cut: rows before the eviction, four fifths of the trace by default. ratios: at least 0 and below
    1; the budget is what they leave of `cut` entries per head, rounded down, at least 1. A policy's
    own schedule does not count. progress: called with (cells done, cells, what is being done).

    Raises PolicyError for a cut or a ratio that cannot be, and before any work BudgetError and
    others where a policy has no rule for a budget (`kvsim.replay`).
    """
    cut = int(trace.n_pos * _BEFORE) if cut is None else cut
    if not (0 < cut < trace.n_pos and all(0 <= ratio < 1 for ratio in ratios)):
        raise PolicyError(
            f"{trace.name}: cut is {cut}, expected 1 to {trace.n_pos - 1}, so that rows come "
            f"after; ratios are {[*ratios]}, expected shares of at least 0, below 1"
        )
    for layer in range(trace.n_layers):
        check_unwindowed(trace, layer)
    budgets = {ratio: max(1, int(cut * (1 - ratio) + 1e-9)) for ratio in ratios}
    before = ended(trace, cut)
    once = [replace(policy, schedule=Schedule(interval=None)) for policy in policies]
    for policy, budget in product(once, budgets.values()):
        Setup(before, policy, budget).checked()

    of_trace = {"trace": trace.name, "task": task_of(trace), "cut": cut, "rows": trace.n_pos - cut}
    of_trace["layer"] = np.arange(trace.n_layers)
    frames = [pl.DataFrame(schema=RECONSTRUCTION_COLUMNS)]
    for place, policy in enumerate(once):
        records = []
        for done, (ratio, budget) in enumerate(budgets.items(), place * len(budgets)):
            if progress is not None:
                what = f"{trace.name}: {policy.name}, ratio {ratio:g}"
                progress(done, len(once) * len(budgets), what)
            records.append(replay(before, policy, budget, device=device))
        table = measure(before, records, ["concat_error"], device=device)
        # rows of a record follow each other
        for number, (ratio, record) in enumerate(zip(budgets, records, strict=True)):
            rows, columns = table[number * trace.n_layers :][: trace.n_layers], columns_of(record)
            cells = of_trace | {"ratio": ratio, "relative_head_error": rows["value"]}
            cells |= {name: columns[name] for name in ("policy", "params", "changed", "budget")}
            cells["fidelity"] = rows["fidelity"]
            typed = (pl.col(name).cast(kind) for name, kind in RECONSTRUCTION_COLUMNS.items())
            frames.append(pl.DataFrame(cells).select(typed))
    return pl.concat(frames)
