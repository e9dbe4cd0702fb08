"""The values of a metric at each budget, by policy and prompt."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from kvsim.analysis.arrays import Floats, Strings
from kvsim.analysis.significance import weights
from kvsim.analysis.summaries import KEYS, main_variants, per_prompt
from kvsim.analysis.verdict import task_labels
from kvsim.errors import PolicyError
from kvsim.schema import first_of, plural

#: The share of its budget's prompts that a policy may lack; with more it is left out.
_GAPS = 0.2


@dataclass(frozen=True)
class Budget:
    """Values of one budget [result, prompt]: of ranked policies, then of references.

    The prompts are those that every ranked policy has a value for; tasks: of each, if of several.
    """

    requested: str
    results: pl.DataFrame
    ranked: int
    values: Floats
    traces: tuple[str, ...]
    tasks: Strings | None

    @property
    def weights(self) -> Floats:
        """Factors of the prompts such that a mean over prompts is that over tasks."""
        return len(self.traces) * weights(len(self.traces), self.tasks)


def means_of(table: pl.DataFrame, metric: str) -> pl.DataFrame:
    """One row per result and prompt that has a value; NaN is none."""
    means = per_prompt(main_variants(table, [metric]), "task" if "task" in table else ())
    means = means.with_columns(pl.col("value").cast(pl.Float64).fill_nan(None)).drop_nulls("value")
    if means.height:
        return means
    measured = table.drop_nulls(["policy", "value"])["metric"].unique(maintain_order=True)
    raise PolicyError(
        f"the table has no value of {metric} for any policy; it has "
        f"{', '.join(measured) or 'none of any metric'}; finish the run, replay with --metric "
        f"{metric}, or compare by another metric"
    )


def budget_of(means: pl.DataFrame, outside: set[str], remarks: list[str]) -> Budget | None:
    """The values of a budget; None where no prompt has one of every ranked policy."""
    results, traces = means.select(KEYS).unique(maintain_order=True), means["trace"].unique().sort()
    tasks = dict(means.select("trace", "task").iter_rows()) if "task" in means else {}
    cells = results.join(traces.to_frame(), how="cross", maintain_order="left_right").join(
        means, on=[*KEYS, "trace"], how="left", nulls_equal=True, maintain_order="left"
    )
    values = cells["value"].fill_null(np.nan).to_numpy().reshape(results.height, -1)
    size = results["requested"][0]
    candidate = ~results["policy"].is_in(list(outside)).to_numpy()
    known = np.isfinite(values)
    some = known[candidate].any(0) if candidate.any() else known.any(0)
    finite = candidate & ~np.isinf(values).any(1)
    enough = finite & (known[:, some].mean(1) >= 1 - _GAPS)
    ranked = enough if enough.sum() > 1 else finite
    for at in np.flatnonzero(candidate & ~ranked):
        why = "is infinite" if np.isinf(values[at]).any() else "is missing"
        where = first_of(traces.filter(some & ~known[at]).to_list())
        remarks.append(
            f"{results['policy'][int(at)]} is left out at budget {size}: its value {why} on {where}"
        )
    shared = some & known[ranked].all(0) & (ranked.any() | ~candidate.any())
    if not shared.any():
        return None
    if lost := traces.filter(some & ~shared).to_list():
        lacking = results["policy"].filter(ranked & ~known[:, (some & ~shared).argmax()])[0]
        remarks.append(
            f"{plural(len(lost), 'prompt')} left out at budget {size}, because not every policy "
            f"has a value: {first_of(lost)} ({lacking} has none)"
        )
    order = np.concatenate([np.flatnonzero(ranked), np.flatnonzero(~ranked)])
    prompts = tuple(traces.filter(shared))
    return Budget(
        *(size, results[order], int(ranked.sum()), values[order][:, shared], prompts),
        task_labels([tasks.get(trace) for trace in prompts]),
    )
