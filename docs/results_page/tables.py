"""Everything that the page says of one trace: every policy replayed over it, as a Table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import polars as pl
import torch

import kvsim
from kvsim import Policy, Trace
from kvsim.analysis.subject import Analysis
from kvsim.analysis.table import COLUMNS
from kvsim.core.policy import Schedule
from kvsim.policies.asl import ASL
from kvsim.sweeps.run import Run, sweep
from results_page.plan import INTERVAL
from results_page.policies import (
    LARGEST,
    across_policies,
    prompt_policies,
    table_policies,
    variants,
)
from results_page.traces import in_memory

#: What is measured of every result.
_METRICS = (
    *("output_error", "retained_mass", "entries_seen", "wipeout", "retained_iou"),
    *("middle_coverage", "burst_length", "retained_position", "key_similarity"),
    *("punctuation_lift", "segment_count", "boundary_shift", "quota_share", "suffix_mass"),
)
#: What is measured of the traces, and asked for where policies drop rows on the way down.
_OF_TRACES = ("window_overlap", "sparsity", "attention_return")
_ACROSS = ("output_error", "retained_mass", "entries_seen")
_OF_PROMPTS = (
    *("expectation", "projection_gap", "score_decline", "layer_entropy"),
    *("rank_variance", "rank_relative", "rank_union", "selection_layer"),
)


def measure_trace(path: Path, calibration: Path, budgets: Sequence[int]) -> pl.DataFrame:
    """A Table of one trace, means over heads: every policy, every variant, and the trace itself."""
    torch.set_num_threads(1)
    trace = in_memory(path)
    tables = []
    for policies in _batches([*table_policies(str(calibration)).values(), *variants()]):
        run = sweep(
            [trace],
            policies,
            budgets,
            interval=INTERVAL,
            prefill=False,
            metrics=_METRICS,
            regret=True,
        )
        tables += [_table(run), _more(trace, run, "gkv", "sparsity_compressed")]
    alone = Schedule(None, prefill=True)
    for policies in _batches(replace(one, schedule=alone) for one in prompt_policies()):
        run = sweep([trace], policies, budgets, metrics=_METRICS)
        tables += [_table(run), _more(trace, run, "expected_attention", "value_norm_overlap")]
    tables.append(_table(sweep([trace], across_policies(), budgets, metrics=_ACROSS)))
    tables.append(kvsim.measure(trace, metrics=_OF_TRACES))
    window = LARGEST["window"]
    ks = [budget - window for budget in budgets]
    analysis = Analysis(trace, ks=ks, rule=ASL(window=window))
    tables.append(kvsim.measure(analysis, metrics=_OF_PROMPTS))
    return pl.concat(map(_over_heads, tables))


def _batches(policies: Iterable[Policy]) -> Iterator[list[Policy]]:
    """The policies in lists of which none has two of one name, as a sweep wants them."""
    batches: list[dict[str, Policy]] = []
    for one in policies:
        free = next((batch for batch in batches if one.name not in batch), None)
        if free is None:
            batches.append(free := {})
        free[one.name] = one
    for batch in batches:
        yield list(batch.values())


def _table(run: Run) -> pl.DataFrame:
    if run.failures:
        raise SystemExit(f"a replay failed: {run.failures[0]}")
    return run.table


def _more(trace: Trace, run: Run, policy: str, metric: str) -> pl.DataFrame:
    """One more metric of one policy alone."""
    return kvsim.measure(trace, [one for one in run.records if one.policy == policy], [metric])


def _over_heads(table: pl.DataFrame) -> pl.DataFrame:
    """One row for the heads of a layer: all of the traces together would not fit in memory."""
    heads = ("head", "qhead", "value", "chance")
    keys = [name for name in COLUMNS if name not in heads]
    none = pl.lit(None, pl.Int64)
    return (
        table.group_by(keys, maintain_order=True)
        .agg(pl.col("value").mean(), pl.col("chance").mean())
        .with_columns(head=none, qhead=none)
        .select(list(COLUMNS))
    )
