"""One prompt: replayed, and run on its model, under every policy at every budget."""

from __future__ import annotations

import hashlib
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import polars as pl
import torch

import kvsim
from fidelity_page.plan import Study
from kvsim.analysis.registry import METRICS
from kvsim.recorder import capture_many, load_model
from kvsim.sweeps.run import replay_all
from results_page.traces import samples

_model = cache(load_model)

#: What a replay says of a policy, all of which may predict what the model does.
OFFLINE = (
    *("layer_error", "layer_error_relative", "output_error", "concat_error"),
    *("concat_error_absolute", "retained_mass", "topk_recall", "wipeout", "retained_iou"),
    *("needle_recall", "needle_wipeout", "global_eviction", "oracle_regret"),
)


def measure_prompt(number: int, study: Study, folder: Path) -> pl.DataFrame:
    """A row for each policy, budget, metric and loop: `value`, over layers and heads.

    What was measured before is read from `folder/measured`.
    """
    torch.set_num_threads(1)
    stored = stored_prompt(number, study, folder)
    if not stored.exists():
        stored.parent.mkdir(parents=True, exist_ok=True)
        table = _measure(number, study, folder)
        part = stored.with_suffix(".part")
        table.write_parquet(part)
        part.rename(stored)
    return pl.read_parquet(stored)


def stored_prompt(number: int, study: Study, folder: Path) -> Path:
    """Where the measurements of a prompt are, or will be."""
    return folder / "measured" / f"{_key(number, study)}.parquet"


def _key(number: int, study: Study) -> str:
    policies = [(each.name, each.params) for each in study.policies]
    prompt = samples(study.prompts)[number]
    decides = [study.prompts, prompt, study.budgets, study.new_tokens, OFFLINE, policies]
    decides.append("KL after the first token")  # older measurements count it
    digest = hashlib.sha256(repr(decides).encode()).hexdigest()[:12]
    return f"{study.prompts.model}-{number:03}-{digest}"


def _measure(number: int, study: Study, folder: Path) -> pl.DataFrame:
    plan = study.prompts
    model, tokenizer = _model(plan.model)
    prompt = samples(plan)[number]
    given = prompt.response is not None
    writes: dict[str, Any] = {} if given else {"max_new_tokens": study.new_tokens}
    at = folder / "traces" / f"{plan.model}-{number:03}"
    shutil.rmtree(at, ignore_errors=True)  # of a run that was killed
    (trace,) = capture_many(model, tokenizer, [prompt], at, residual=True, o_proj=True, **writes)
    terms: dict[str, Any] = {"interval": plan.interval, "prefill": plan.prefill}
    policies = study.policies
    opened = replay_all([trace], policies, study.budgets, metrics=OFFLINE, regret=True, **terms)
    closed = kvsim.live(
        model,
        [trace],
        policies,
        study.budgets,
        tokenizer=tokenizer,
        max_new_tokens=0 if given else study.new_tokens,
        **terms,
    )
    for run in (opened, closed):
        if run.failures:
            raise SystemExit(f"prompt {number}: {run.failures[0]}")
    agreement = [
        {
            "policy": replayed.policy,
            "budget": replayed.budget,
            "layer": layer,
            "metric": "kept_agreement",
            "value": _agreement(replayed, lived, layer),
            "loop": "closed",
        }
        for replayed, lived in zip(opened.records, closed.records, strict=True)
        for layer in range(len(replayed.layers))
    ]
    tables = [
        _by_layer(opened.table).with_columns(loop=pl.lit("open")),
        _by_layer(closed.table).with_columns(loop=pl.lit("closed")),
        pl.DataFrame(agreement),
    ]
    shutil.rmtree(at)
    right = (trace.meta.get("answer_check") or {}).get("right")
    return pl.concat(tables, how="diagonal_relaxed").with_columns(
        prompt=pl.lit(number),
        task=pl.lit(prompt.labels.get("task")),
        tokens=pl.lit(trace.n_pos),
        prompt_tokens=pl.lit(trace.prompt_len),
        full_right=pl.lit(right, pl.Boolean),
    )


def _by_layer(table: pl.DataFrame) -> pl.DataFrame:
    """Means over heads and events of the main variant of each metric."""
    main = pl.col("metric").replace_strict({name: one.main for name, one in METRICS.items()})
    return (
        table.filter(pl.col("policy").is_not_null(), pl.col("variant") == main)
        .group_by("policy", "budget", "layer", "metric", maintain_order=True)
        .agg(pl.col("value").mean())
    )


def _agreement(replayed: kvsim.Record, lived: kvsim.Record, layer: int) -> float | None:
    """Share of retained entries that both loops retain, mean over events; None without events."""
    shares = []
    for row in replayed.events:
        a, b = (record.retained(row)[layer] for record in (replayed, lived))
        shares.append(float((a & b).sum() / max(1, (a | b).sum())))
    return sum(shares) / len(shares) if shares else None
