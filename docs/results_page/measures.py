"""Everything that the page says of one trace: every policy replayed over it, and measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import torch

from kvsim import Policy, Trace
from kvsim.diagnostics import findings
from kvsim.policies.asl import ASL
from kvsim.sweeps import sweep
from results_page.attention import of_trace
from results_page.kept import of_record
from results_page.plan import INTERVAL, PROMPT_ALONE
from results_page.policies import (
    LARGEST,
    across_policies,
    prompt_policies,
    table_policies,
    variants,
)
from results_page.quantities import Numbers
from results_page.traces import in_memory

_SHORT = {"output_error": "error", "retained_mass": "mass", "entries_seen": "entries"}
_OF_SEGMENTS = {
    ("segment_count", "ams"): "segments",
    ("boundary_shift", "ams"): "boundary shift",
    ("quota_share", "mass"): "quota_by_mass",
    ("quota_share", "minimum"): "quota_minimum",
    ("quota_share", "infeasible"): "infeasible",
    ("suffix_mass", ""): "suffix_mass",
}
_METRICS = (*_SHORT, "retained_iou", *dict.fromkeys(metric for metric, _ in _OF_SEGMENTS))


def measure_trace(path: Path, calibration: Path, budgets: Sequence[int]) -> Numbers:
    """Everything that the page says of one trace."""
    torch.set_num_threads(1)
    trace = in_memory(path)
    decode = {**table_policies(str(calibration)), **variants()}
    out = {("trace", 0, key): value for key, value in of_trace(trace).items()}
    out |= replayed(trace, decode, budgets, "", interval=INTERVAL, prefill=False)
    alone = prompt_policies()
    out |= replayed(trace, alone, budgets, "prompt: ", interval=PROMPT_ALONE, prefill=True)
    return out | across_layers(trace, budgets)


def replayed(
    trace: Trace,
    policies: Mapping[str, Policy],
    budgets: Sequence[int],
    prefix: str,
    *,
    interval: int,
    prefill: bool,
) -> Numbers:
    """The metrics of every policy at every budget, and what else its kept sets say."""
    named = [replace(one, name=prefix + label) for label, one in policies.items()]
    run = sweep(
        [trace],
        named,
        budgets,
        interval=interval,
        prefill=prefill,
        metrics=_METRICS,
        regret=True,
    )
    if run.failures:
        raise SystemExit(f"a replay failed: {run.failures[0]}")
    keys = ["policy", "budget", "metric"]
    main = run.table.filter(pl.col("variant") == "")
    means = main.group_by(keys).agg(pl.col("value").mean(), pl.col("chance").mean())
    out: Numbers = {}
    for label, budget, metric, value, chance in means.iter_rows():
        out[label, budget, _SHORT.get(metric, metric)] = _number(value)
        if metric == "retained_iou":
            out[label, budget, "chance"] = _number(chance)
    by_layer = main.filter(metric="retained_iou").group_by("policy", "budget", "layer")
    for label, budget, layer, iou in by_layer.agg(pl.col("value").mean()).iter_rows():
        out[label, budget, f"retained_iou {layer}"] = _number(iou)
    out |= of_segments(run.table)
    for one in run.records:
        out |= {(one.policy, one.budget, key): value for key, value in of_record(trace, one)}
    if prefill:
        held = {(one.policy, one.budget): one.retained(trace.prompt_len - 1) for one in run.records}
        for budget in budgets:
            made, plain = (
                held[prefix + label, budget][..., 4:]
                for label in ("expected_attention", "no value norm")
            )
            share = (made & plain).sum() / plain.sum()
            out[prefix + "expected_attention", budget, "attention overlap"] = float(share)
        return out
    first = {
        (one.policy, one.budget): one.retained(one.events[0]) for one in run.records if one.events
    }
    for budget in budgets:
        both = first["ams", budget], first["ams, no credit", budget]
        out["ams", budget, "changed by credit"] = float((both[0] != both[1]).sum())
    return out


def across_layers(trace: Trace, budgets: Sequence[int]) -> Numbers:
    """How layers rank the prompt, and what policies lose that drop rows on the way down."""
    out = _ranked(trace, budgets)
    named = [replace(one, name=f"across: {label}") for label, one in across_policies().items()]
    run = sweep([trace], named, budgets, metrics=["output_error", "retained_mass", "entries_seen"])
    if run.failures:
        raise SystemExit(f"a replay failed: {run.failures[0]}")
    means = run.table.group_by("policy", "budget", "metric").agg(pl.col("value").mean())
    for label, budget, metric, value in means.iter_rows():
        out[label, budget, _SHORT[metric]] = _number(value)
    return out


def _ranked(trace: Trace, budgets: Sequence[int]) -> Numbers:
    """How layers rank the prompt, where `LARGEST` is the window and it with k others go on."""
    window = LARGEST["window"]
    at = {f"k={budget - window}": budget for budget in budgets}
    ks = [budget - window for budget in budgets]
    found = findings(trace, list(_RANKED), ks=ks, rule=ASL(window=window))
    out: Numbers = {}
    rows = found.select("metric", "variant", "layer", "value").iter_rows()
    for name, variant, layer, value in rows:
        of, budget = ("layers", at[variant]) if variant else ("trace", 0)
        out[of, budget, f"{_RANKED[name]} {layer}"] = _number(value)
    return out


#: What the page calls these findings.
_RANKED = {
    "layer_entropy": "entropy",
    "rank_variance": "variance",
    "rank_relative": "relative",
    "rank_union": "union",
}


def _number(value: float | None) -> float:
    return np.nan if value is None else value


def of_segments(table: pl.DataFrame) -> Numbers:
    """What policies with segments decided, mean over events and heads; not their proxies."""
    out: Numbers = {}
    for (metric, variant), quantity in _OF_SEGMENTS.items():
        found = table.filter(metric=metric, variant=variant)
        means = found.group_by("policy", "budget").agg(pl.col("value").mean())
        for label, budget, value in means.iter_rows():
            out[label, budget, quantity] = _number(value)
    by_layer = table.filter(metric="segment_count", variant="ams")
    means = by_layer.group_by("policy", "budget", "layer").agg(pl.col("value").mean())
    for label, budget, layer, value in means.iter_rows():
        out[label, budget, f"segments {layer}"] = _number(value)
    return out
