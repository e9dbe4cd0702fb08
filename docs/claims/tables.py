"""Everything that the page says of one trace: every policy replayed over it, as a Table."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import polars as pl
import torch

import kvsim
from claims.kept_answers import ANSWER, answered
from claims.plan import Plan
from claims.policies import (
    across_policies,
    expectations,
    prompt_policies,
    table_policies,
    variants,
)
from claims.statistics import STORED, stored_rows
from claims.traces import in_memory, judge_of, record, samples, weights
from kvsim import Policy, Trace, open_trace
from kvsim.analysis.live.metrics import JUDGED
from kvsim.analysis.live.table import measure_live
from kvsim.analysis.output.metrics import REGRET
from kvsim.analysis.subject import Analysis
from kvsim.analysis.table import COLUMNS
from kvsim.core.policy import Schedule
from kvsim.policies.asl import ASL
from kvsim.runner.judging import Judge, unjudged
from kvsim.studies.layers.ranking import curves
from kvsim.sweeps import replay_all

#: What is measured of every result.
_METRICS = (
    *("layer_error", "output_error", "retained_mass", "entries_seen", "wipeout", "retained_iou"),
    *("middle_coverage", "burst_length", "retained_position", "key_similarity"),
    *("punctuation_lift", "segment_count", "boundary_shift", "quota_share", "suffix_mass"),
    *("needle_recall", "needle_wipeout"),
)
#: What is measured of the traces, and asked for where policies drop rows on the way down.
_OF_TRACES = ("window_overlap", "sparsity", "attention_return")
_ACROSS = ("output_error", "retained_mass", "entries_seen")
#: Metrics of a page on long prompts, and where its only event is.
_LONG = (
    *("layer_error", "output_error", "retained_mass", "entries_seen", "wipeout"),
    *("needle_recall", "needle_wipeout"),
)
_AFTER_PROMPT = Schedule(None, prefill=True)
#: Policies with one budget for all layers, which are in memory at once.
_JOINT, _JOINT_MEMORY = ("cake",), {"memory": 3 << 30}
_OF_PROMPTS = (
    *("expectation", "projection_gap", "score_decline", "layer_entropy"),
    *("rank_variance", "rank_relative", "rank_union", "selection_layer"),
)


@dataclass(frozen=True)
class Replays:
    """Policies to replay over a prompt, and what to measure of them.

    budgets: of the plan. options: of `replay_all`. more: further metrics of a policy. judged:
    whether the model judges them. answers: whether what it answers then is measured too. regret:
    whether to measure it, of policies that a budget binds. device: what computes.
    """

    policies: Sequence[Policy]
    budgets: Sequence[int]
    metrics: Sequence[str]
    options: Mapping[str, Any]
    more: Mapping[str, Sequence[str]] = field(default_factory=dict)
    judged: bool = True
    answers: bool = False
    regret: bool = False
    device: str = "cpu"

    def fitting(self, tokens: int) -> list[int]:
        """The budgets for a trace of so many tokens: at most half of them."""
        return [budget for budget in self.budgets if 2 * budget <= tokens]

    def pieces(self, policy: Policy) -> dict[str, tuple[str, ...]]:
        """The metrics of a policy in pieces, by a name for all that decides about a piece."""
        pieces = [(*self.metrics, *self.more.get(policy.name, ()))]
        of_model = (*JUDGED, *[ANSWER] * self.answers)
        pieces += [of_model] * (self.judged and policy.positions == "absolute")
        pieces += [REGRET] * (self.regret and policy.bounded)
        schedule = _stated(policy.schedule)
        decides = policy.name, _params(policy), schedule, self.budgets, self.options
        return {_hash(*decides, metrics): metrics for metrics in pieces}

    def measure(
        self, trace: Trace, judge: Judge, missing: Collection[str]
    ) -> Iterator[tuple[str, pl.DataFrame]]:
        """Replay the policies of missing pieces; name and Table of each piece."""
        budgets = self.fitting(trace.n_pos)
        together: dict[tuple[tuple[str, ...], int], list[Policy]] = {}
        turns: Counter[str] = Counter()  # a sweep has one policy of a name
        for policy in self.policies:
            pieces = [names for piece, names in self.pieces(policy).items() if piece in missing]
            if pieces:
                together.setdefault((sum(pieces, ()), turns[policy.name]), []).append(policy)
                turns[policy.name] += 1
        for (metrics, _), policies in together.items():
            judged = (*JUDGED, ANSWER)
            replayed = [name for name in metrics if name not in judged] or ["entries_seen"]
            options = {**self.options, "device": self.device}
            run = replay_all([trace], policies, budgets, metrics=replayed, **options)
            if run.failures:
                raise SystemExit(f"a replay failed: {run.failures[0]}")
            records = [one for one in run.records if not unjudged(one)]
            of_model = []
            if not set(JUDGED).isdisjoint(metrics):
                outcomes = [answered(trace, each) for each in judge.outcomes(records)]
                of_model = [measure_live(trace, records, outcomes, judged)]
            values = pl.concat([run.table, *of_model])
            for policy in policies:
                table = values.filter(policy=policy.name)
                for piece, names in self.pieces(policy).items():
                    if piece in missing:
                        yield piece, table.filter(pl.col("metric").is_in(names))


def measure_prompt(
    number: int, plan: Plan, folder: Path, calibration: Path, values: Path
) -> pl.DataFrame:
    """Everything that the page says of one prompt, as stored rows.

    What was measured before is read from `folder/measured` and from `values`, the file of a page;
    traces of large models are removed as soon as they are measured. A change of the code is not
    noticed: remove both.
    """
    torch.set_num_threads(1)
    name = key(plan, number)
    stored = folder / "measured" / f"{name}.parquet"
    rows = {}
    for file in (values, stored):
        if file.exists():
            of_prompt = stored_rows(file).filter(prompt=name)
            rows |= {str(each["piece"][0]): each for each in of_prompt.partition_by("piece")}
    if rows:
        tokens = next(iter(rows.values()))["tokens"][0]
    else:
        (path,) = record(plan, folder, [number])
        tokens = open_trace(path).n_pos
    replays = _replays(plan, calibration, regret=number <= (plan.regret or number))
    replays = [each for each in replays if each.fitting(tokens)]
    of_trace = _of_trace(plan)
    pieces = (piece for each in replays for one in each.policies for piece in each.pieces(one))
    wanted = [*dict.fromkeys(pieces), *of_trace]
    missing = set(wanted).difference(rows)
    if missing:
        (path,) = record(plan, folder, [number])
        trace, digest = in_memory(path), open_trace(path).digest
        judge = judge_of(plan, trace)
        new = dict(pair for each in replays for pair in each.measure(trace, judge, missing))
        new |= {piece: make(trace) for piece, make in of_trace.items() if piece in missing}
        for piece, table in new.items():
            of_piece = (name, piece, digest, trace.n_pos, trace.prompt_len)
            columns = (pl.lit(x).alias(column) for column, x in zip(STORED, of_piece, strict=True))
            rows[piece] = _means(table).select(*columns, pl.all())
        stored.parent.mkdir(exist_ok=True)
        unfinished = stored.with_suffix(".part")
        pl.concat(rows.values()).write_parquet(unfinished)
        unfinished.rename(stored)
        if plan.lengths or plan.solved:
            # a run that ends meanwhile leaves no half of a trace under its name
            shutil.rmtree(path.rename(path.with_suffix(f".{os.getpid()}")))
    return pl.concat(rows[piece] for piece in wanted)


def key(plan: Plan, number: int) -> str:
    """Return the name of a prompt, with a digest of its text, its response and the weights."""
    calibration, prompt = (
        ("" if plan.only else f"{samples(plan)[0].id}.zarr"),
        samples(plan)[number],
    )
    said = prompt.content, prompt.response
    return f"{prompt.id}-{_hash(said, weights(plan), calibration)}"


def _hash(*decides: Any) -> str:
    """A name for what decides about something."""
    return hashlib.sha256(repr(decides).encode()).hexdigest()[:12]


def _params(policy: Policy) -> dict[str, Any]:
    """Parameters of a policy, without the folder of its calibration, and without what is off.

    What was measured before a policy had a parameter stays measured where that is off.
    """
    return {
        name: Path(str(x)).name if name.endswith("calibration") else x
        for name, x in policy.params.items()
        if x is not None and x is not False
    }


def _stated(schedule: Schedule) -> dict[str, Any]:
    """What a schedule has that is not the default, so that it may have more one day."""
    usual = vars(Schedule())
    return {name: x for name, x in vars(schedule).items() if x != usual[name]}


def _replays(plan: Plan, calibration: Path, *, regret: bool) -> list[Replays]:
    """Return the replays of a prompt."""
    rows = [*table_policies(plan, str(calibration)).values()]
    terms = {"interval": plan.interval, "prefill": plan.prefill}
    tried, each_own = plan.tried or plan.budgets, {"interval": "paper"}
    overlap = {"expected_attention": ("value_norm_overlap",)}
    if plan.only:
        more = overlap if plan.claimed and plan.once else {}
        if plan.once:
            rows, terms = [replace(one, schedule=_AFTER_PROMPT) for one in rows], each_own
        joint = [one for one in rows if one.name in _JOINT]
        rows = [one for one in rows if one not in joint]
        metrics = _METRICS if plan.claimed and not plan.once else _LONG
        replays = [
            Replays(of, plan.budgets, metrics, options, more, answers=plan.once, device=plan.device)
            for of, options in ((rows, terms), (joint, {**terms, **_JOINT_MEMORY}))
        ]
        if more:
            rows = [replace(one, schedule=_AFTER_PROMPT) for one in expectations()]
            replays.append(Replays(rows, tried, (), terms, more, device=plan.device))
        return replays
    expected = prompt_policies(plan.sizes)
    at_the_prompt = [replace(one, schedule=_AFTER_PROMPT) for one in expected]
    sparsity = {"gkv": ("sparsity_compressed",)}
    return [
        Replays(rows, plan.budgets, _METRICS, terms, sparsity, regret=regret),
        Replays(variants(plan.sizes), tried, _METRICS, terms, sparsity),
        Replays(at_the_prompt, tried, _METRICS, each_own, overlap),
        Replays(across_policies(plan.sizes), plan.budgets, _ACROSS, each_own, judged=False),
    ]


def _of_trace(plan: Plan) -> dict[str, Callable[[Trace], pl.DataFrame]]:
    """Return the metrics of a trace alone, by the names of the pieces."""
    if not plan.claimed:
        return {}
    rule = ASL() if plan.sizes.across is None else ASL(window=plan.sizes.across)

    def of_prompt(trace: Trace) -> pl.DataFrame:
        ks = [budget - rule.window for budget in plan.budgets if 2 * budget <= trace.n_pos]
        given = {curves: curves(Analysis(trace), ks, rule)}
        analysis = Analysis(trace, given=given)
        return kvsim.measure(analysis, metrics=_OF_PROMPTS)

    return {
        _hash(_OF_TRACES): lambda trace: kvsim.measure(trace, metrics=_OF_TRACES),
        _hash(_OF_PROMPTS, plan.budgets, rule): of_prompt,
    }


def _means(table: pl.DataFrame) -> pl.DataFrame:
    """One row for the heads of a layer: all of the traces together would not fit in memory.

    Of regret one row for all layers, whose fidelity is that of the last.
    """
    over = ["layer"] * table["metric"].is_in(REGRET).all() + ["head", "qhead"]
    values = ("value", "chance", "fidelity")
    return (
        table.group_by([x for x in COLUMNS if x not in (*over, *values)], maintain_order=True)
        .agg(pl.col("value", "chance").mean(), pl.col("fidelity").last())
        .with_columns(pl.lit(None, pl.Int64).alias(name) for name in over)
        .select(list(COLUMNS))
    )
