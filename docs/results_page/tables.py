"""Everything that the page says of one trace: every policy replayed over it, as a Table."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import polars as pl
import torch

import kvsim
from kvsim import Policy, Trace, open_trace
from kvsim.analysis.subject import Analysis
from kvsim.analysis.table import COLUMNS
from kvsim.core.policy import Schedule
from kvsim.policies.asl import ASL
from kvsim.sweeps import Run, replay_all
from results_page.plan import Plan
from results_page.policies import (
    across_policies,
    prompt_policies,
    table_policies,
    variants,
)
from results_page.traces import in_memory, record, samples

#: What is measured of every result.
_METRICS = (
    *("output_error", "retained_mass", "entries_seen", "wipeout", "retained_iou"),
    *("middle_coverage", "burst_length", "retained_position", "key_similarity"),
    *("punctuation_lift", "segment_count", "boundary_shift", "quota_share", "suffix_mass"),
    *("needle_recall", "needle_wipeout"),
)
#: What is measured of the traces, and asked for where policies drop rows on the way down.
_OF_TRACES = ("window_overlap", "sparsity", "attention_return")
_ACROSS = ("output_error", "retained_mass", "entries_seen")
_OF_PROMPTS = (
    *("expectation", "projection_gap", "score_decline", "layer_entropy"),
    *("rank_variance", "rank_relative", "rank_union", "selection_layer"),
)


#: What a stored table says of its trace beside the measurements.
_OF_TRACE = ("digest", "tokens", "prompt_tokens")


@dataclass(frozen=True)
class Measured:
    """The Table of one trace, its digest, and how many tokens it has, all and of the prompt."""

    table: pl.DataFrame
    digest: str
    size: tuple[int, int]


def measure_prompt(number: int, plan: Plan, folder: Path, calibration: Path) -> Measured:
    """Everything that the page says of one prompt.

    What was measured before is read from `folder/measured`; traces of a plan with `lengths`, which
    are large, are removed as soon as they are measured.
    """
    torch.set_num_threads(1)
    stored = folder / "measured" / f"{_key(number, plan, calibration)}.parquet"
    if not stored.exists():
        path = record(plan, folder, [number])[0]
        trace = open_trace(path)
        table = measure_trace(path, plan, calibration).with_columns(
            digest=pl.lit(trace.digest), tokens=trace.n_pos, prompt_tokens=trace.prompt_len
        )
        stored.parent.mkdir(exist_ok=True)
        part = stored.with_suffix(".part")
        table.write_parquet(part)
        part.rename(stored)
        if plan.lengths:
            shutil.rmtree(path)
    table = pl.read_parquet(stored)
    digest, tokens, prompt = table.row(0, named=False)[-3:]
    return Measured(table.drop(_OF_TRACE), digest, (tokens, prompt))


def _key(number: int, plan: Plan, calibration: Path) -> str:
    """A name for what decides about the measurements of a prompt."""
    policies = [
        *table_policies(plan, str(calibration)).values(),
        *variants(plan.sizes),
        *prompt_policies(plan.sizes),
        *across_policies(plan.sizes),
    ]
    prompt = samples(plan)[number]
    decides = [
        replace(plan, prompts=0, lengths=()),
        prompt,
        kvsim.__version__,
        _METRICS,
        "oracle_regret",
        *((one.name, one.params) for one in policies),
    ]
    text = repr(decides).replace(str(calibration.parent), "")
    return f"{plan.model}-{number:03}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def measure_trace(path: Path, plan: Plan, calibration: Path) -> pl.DataFrame:
    """A Table of one trace, means over heads: every policy, every variant, and the trace itself."""
    trace = in_memory(path)
    tables = []
    rows = table_policies(plan, str(calibration))
    terms: dict[str, Any] = {"interval": plan.interval, "prefill": plan.prefill}
    alone = Schedule(None, prefill=True)
    own: dict[str, Any] = {"own_schedule": True}
    at_the_prompt = [replace(one, schedule=alone) for one in prompt_policies(plan.sizes)]
    budgets = [budget for budget in plan.budgets if 2 * budget <= trace.n_pos]
    tried = [budget for budget in budgets if budget in (plan.tried or budgets)]
    for policies, at, options, also in (
        (rows.values(), budgets, terms | {"regret": True}, ("gkv", "sparsity_compressed")),
        (variants(plan.sizes), tried, terms, ("gkv", "sparsity_compressed")),
        (at_the_prompt, tried, own, ("expected_attention", "value_norm_overlap")),
    ):
        for batch in _batches(policies):
            names = [*_METRICS, *(("oracle_regret",) if "regret" in options else ())]
            run = replay_all([trace], batch, at, metrics=names, **options)
            tables += [_table(run), _more(trace, run, *also)]
    across = replay_all([trace], across_policies(plan.sizes), budgets, metrics=_ACROSS, **own)
    tables.append(_table(across))
    tables.append(kvsim.measure(trace, metrics=_OF_TRACES))
    rule = ASL() if plan.sizes.across is None else ASL(window=plan.sizes.across)
    ks = [budget - rule.window for budget in budgets]
    analysis = Analysis(trace, ks=ks, rule=rule)
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
