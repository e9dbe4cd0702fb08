# ruff: noqa: INP001, T201 - a script, not a module, and it says what it did
"""Replay every policy on traces of the shipped model, and test what the papers claim: results.md.

    python docs/results.py              24 prompts, four budgets: six minutes on two cores
    python docs/results.py --smallest   2 short prompts, two budgets: a minute; what a test runs
    python docs/results.py --out FILE --traces DIR --jobs N

Traces are kept in `--traces` and used again. Every number of the page comes from `measure_trace`,
every verdict from `Claim.verdict`: nothing in the page is typed in.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray

import kvsim
from kvsim import Policy, Record, Trace, open_trace, policy
from kvsim.composition import Protection
from kvsim.diagnostics import ranking
from kvsim.metrics import retained_iou, window_overlap, wipeout
from kvsim.metrics.catalogue import mean_known
from kvsim.policies import names, parameters
from kvsim.policies.asl import ASL
from kvsim.recorder import Prompt, capture_many, load_model
from kvsim.sweeps import sweep
from kvsim.tiny import PATH, tasks
from kvsim.tiny.vocabulary import DOMAINS

ROOT = Path(__file__).resolve().parent.parent

Floats = NDArray[np.float64]
#: Of one trace: (policy, budget, quantity) -> value; budget 0 for what belongs to the trace.
Numbers = dict[tuple[str, int, str], float]


@dataclass(frozen=True)
class Plan:
    """What is recorded and replayed."""

    prompts: int = 24
    seed: int = 1
    level: int | None = 2  #: of difficulty; without one the sizes below
    facts: int = 12
    lines: int = 12
    budgets: tuple[int, ...] = (32, 48, 64, 96)
    cost: tuple[int, ...] = (1024, 2048, 4096, 8192)


FULL = Plan()
SMALLEST = Plan(prompts=2, level=None, budgets=(32, 64), cost=(128, 256))

#: Tasks of the prompts, in turn: those whose response is long enough for events.
VERBS = tuple(task for task in tasks.TASKS if task != "needle")

#: Rows between events, the same for every policy; no event follows the prompt.
INTERVAL = 16
#: One event alone, after the prompt: no trace is so long that another one fires.
PROMPT_ALONE = 1 << 20

# ---------------------------------------------------------------------------------- the policies

#: Parameters made for thousands of tokens, and the most that they are here.
LARGEST = {"window": 8, "lag": 8, "chunk": 8}
#: AMS likewise. Its window and recent entries are not those of the scorer inside.
AMS = {"min_segment": 4, "max_segment": 32, "window": 16, "recent": 8, "min_quota": 1}
#: What AMS protects at these sizes.
KEEP = Protection(sink=4, recent=AMS["recent"])
#: Fixed segments, the paper's 128 in the ratio of its window.
SEGMENT = 16

CROSSES = (
    *(f"ams+{x}" for x in ("expected_attention", "keydiff", "rkv@ams", "triattention")),
    "ams+snapkv@gkv",
    *(f"adakv+{x}" for x in ("expected_attention", "snapkv")),
    "chunkkv+expected_attention",
    *(f"global+{x}" for x in ("snapkv@gkv", "tova", "expected_attention", "knorm")),
    "criticalkv+expected_attention",
)

#: The two settings of AMS that the papers give, beside the one made for these traces.
PAPER, RELEASE = "ams, the paper's sizes", "ams@release, the release's sizes"


def scaled(name: str, calibration: str | None = None, **params: Any) -> Policy:
    """The policy with the parameters that are larger than these traces bear made smaller."""
    known = parameters(name)
    if "protect_prompt" in known:  # the prompt is longer than any of the budgets
        params.setdefault("protect_prompt", False)
    if "calibration" in known:
        params["calibration"] = calibration
    for key, value in policy(name, **params).params.items():
        own = name.startswith("ams") and "__" not in key
        most = (AMS if own and key in AMS else LARGEST).get(key.rpartition("__")[2])
        if most is not None and value > most and key not in params:
            params[key] = most
    return policy(name, **params)


def table_policies(calibration: str) -> dict[str, Policy]:
    """The rows of the tables, by label: every name of the catalogue, and crosses."""
    out = {}
    for name in names():
        kind = kvsim.policies.describe(name).kind
        if kind == "propagation":  # part of the prefill: see across_policies
            continue
        if kind == "scorer" or name.startswith("ams"):
            out[name] = scaled(name, calibration)
        elif "@" in name:  # a preset of what needs a scorer
            out[f"{name}+expected_attention"] = scaled(f"{name}+expected_attention", calibration)
    out["oracle, by output"] = policy("oracle", by="output")
    out |= {name: scaled(name, calibration) for name in CROSSES}
    out[PAPER], out[RELEASE] = policy("ams"), policy("ams@release")
    return out


def variants() -> dict[str, Policy]:
    """What claims need beside the rows of the tables, at the same events."""
    one = partial(scaled, "ams")
    whole = partial(scaled, "global_max")
    return {
        "tova, per head": policy("tova", heads="group"),
        "tova, must-keep": policy("tova", protect=KEEP),
        "keydiff, must-keep": policy("keydiff", protect=KEEP),
        "ams, no credit": one(credit=False),
        "ams, observed": one(suffix_fill="observed"),
        "ams, weights by length": one(weights="length"),
        "ams, equal weights": one(weights="equal"),
        "ams, fixed segments": one(segmentation="fixed", segment_length=SEGMENT),
        **{f"ams, window {w}": one(window=w) for w in (4, 8, 32)},
        **{f"global_max, decay {d}": whole(decay=d) for d in (0.0, 0.5, 0.9)},
        "global_max, pooled": whole(pool="max"),
        **{f"gkv, mix_lambda {m}": scaled("gkv", mix_lambda=m) for m in (0.5, 0.9)},
    }


def prompt_policies() -> dict[str, Policy]:
    """What is compared at the one event after the prompt, where Expected Attention is at home."""
    inside = [scaled(x) for x in ("snapkv", "tova", "streaming_llm", "keydiff", "knorm")]
    crossed = [scaled(f"adakv+{x}") for x in ("expected_attention", "snapkv")]
    made = partial(policy, "expected_attention")
    return {
        **{one.name: one for one in (made(), *inside, *crossed)},
        "no covariance": made(covariance=False),
        "no value norm": made(value_norm="none"),
        "epsilon 0": made(epsilon=0.0),
        **{f"n_future {n}": made(n_future=n) for n in (128, 256, 1024)},
    }


def across_policies() -> dict[str, Policy]:
    """What drops rows of the prompt on the way down, beside SnapKV with the same window.

    ASL is forced to select at the only layer at which it can in a model of three.
    """
    window = {"window": LARGEST["window"]}
    forced = {"tau": 1.01, **window}
    return {
        "snapkv": policy("snapkv", pool="avg", **window),
        "asl": policy("asl", **forced),
        "asl, full before": policy("asl", kv_before="full", **forced),
        "asl_2pass": policy("asl_2pass", **forced),
        "fastkv": policy("fastkv", rows=None, **window),
        "gemfilter": policy("gemfilter"),
        "pyramidinfer": policy("pyramidinfer", least=16),
    }


# ------------------------------------------------------------------------------------- the traces


@cache
def weights() -> str:
    """SHA-256 of the weights of `tiny`."""
    return hashlib.sha256((PATH / "model.safetensors").read_bytes()).hexdigest()


def samples(plan: Plan) -> list[Prompt]:
    """The prompts, and before them the one for calibration alone."""
    label = f"{weights()[:8]}-{plan.level or plan.facts}-{plan.seed}"
    domains = list(DOMAINS)
    size: dict[str, Any] = {"level": plan.level}
    if plan.level is None:
        size = {"facts": plan.facts, "lines": plan.lines}
    found: list[Prompt] = []
    for i in range(plan.prompts + 1):
        (one,) = tasks.prompts(
            1,
            1000 * plan.seed + i,
            task=VERBS[i % len(VERBS)],
            domain=domains[i % len(domains)],
            **size,
        )
        found.append(Prompt(f"{label}-{i:02}", one.prompt, one.answer))
    return found


def record(plan: Plan, folder: Path) -> list[Path]:
    """The traces of the prompts; those that an earlier run left in the folder are used again."""
    wanted = {folder / f"{prompt.id}.zarr": prompt for prompt in samples(plan)}
    missing = [prompt for path, prompt in wanted.items() if not path.exists()]
    if missing:
        model, tokenizer = load_model("tiny")
        capture_many(model, tokenizer, missing, folder, o_proj=True)
    for path, prompt in wanted.items():
        if open_trace(path).meta["text"]["prompt"] != prompt.content:
            raise SystemExit(f"{path} is a trace of another prompt; remove it and run again")
    return list(wanted)


def in_memory(path: Path) -> Trace:
    """A stored trace with its arrays in memory, for it is read some hundred times."""
    trace = open_trace(path)
    more = ("attn_out", "lse", "o_proj", "tokens")
    given: dict[str, Any] = {name: trace.read(name) for name in more}
    return Trace.from_arrays(
        trace.q,
        trace.k,
        trace.v,
        **given,
        prompt_len=trace.prompt_len,
        rope=trace.rope,
        scale=trace.scale,
        token_text=trace.token_text,
        name=trace.name,
        layer_ids=trace.layer_ids,
    )


# ------------------------------------------------------------------------- what a trace is asked

LENGTHS, THRESHOLDS = (8, 16, 32, 64), (0.0, 0.1)
_METRICS = ("output_error", "retained_mass", "entries_seen", "retained_iou")
_SHORT = {"output_error": "error", "retained_mass": "mass", "entries_seen": "entries"}


def measure_trace(path: Path, calibration: Path, budgets: Sequence[int]) -> Numbers:
    """Everything that the page says of one trace."""
    torch.set_num_threads(1)
    trace = in_memory(path)
    decode = {**table_policies(str(calibration)), **variants()}
    out = {("trace", 0, key): value for key, value in of_trace(trace).items()}
    out |= replayed(trace, decode, budgets, "", interval=INTERVAL, prefill=False)
    alone = prompt_policies()
    out |= replayed(trace, alone, budgets, "prompt: ", interval=PROMPT_ALONE, prefill=True)
    out |= across_layers(trace, budgets)
    for label in ("ams", "ams, no credit", "ams@release"):
        for budget in budgets:
            found = of_segments(trace, decode[label], budget)
            out |= {(label, budget, key): value for key, value in found.items()}
    return out


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
    means = run.table.group_by(keys).agg(pl.col("value").mean(), pl.col("chance").mean())
    out: Numbers = {}
    for label, budget, metric, value, chance in means.iter_rows():
        out[label, budget, _SHORT.get(metric, metric)] = _number(value)
        if metric == "retained_iou":
            out[label, budget, "chance"] = _number(chance)
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
    out: Numbers = {}
    found = ranking(trace, ASL(window=LARGEST["window"]))
    for layer, nats in enumerate(found.entropy()):
        out["trace", 0, f"entropy {layer}"] = float(nats)
    for budget in budgets:
        curve = found.curve(budget)
        for layer in range(curve.first_layer, trace.n_layers):
            out["layers", budget, f"variance {layer}"] = float(curve.variance[layer])
            out["layers", budget, f"relative {layer}"] = float(curve.relative[layer])
            out["layers", budget, f"union {layer}"] = float(curve.union[layer] / curve.k)
    named = [replace(one, name=f"across: {label}") for label, one in across_policies().items()]
    run = sweep([trace], named, budgets, metrics=["output_error", "retained_mass", "entries_seen"])
    if run.failures:
        raise SystemExit(f"a replay failed: {run.failures[0]}")
    means = run.table.group_by("policy", "budget", "metric").agg(pl.col("value").mean())
    for label, budget, metric, value in means.iter_rows():
        out[label, budget, _SHORT[metric]] = _number(value)
    return out


def _number(value: float | None) -> float:
    return np.nan if value is None else value


def of_record(trace: Trace, one: Record) -> Iterator[tuple[str, float]]:
    """What a kept set says, after the last event that evicted."""
    layers = list(one.gone_after)
    for length in LENGTHS:
        for threshold in THRESHOLDS:
            rates = [wipeout(x, length, threshold).cumulative[:, -1:] for x in layers]
            mean = float(mean_known(np.concatenate([rate.ravel() for rate in rates])))
            yield f"wipeout {length} {threshold:g}", mean if one.events else 0.0
    for layer, evicted_at in enumerate(layers):
        iou = retained_iou(evicted_at).iou
        yield f"retained_iou {layer}", float(iou.mean()) if iou.size else np.nan
    last = one.events[-1] if one.events else one.n_pos - 1
    held = one.retained(last)[..., : last + 1]  # [L, H, N]
    n = last + 1
    pos = np.arange(n)
    middle = (pos + 0.5 >= n / 3) & (pos + 0.5 < 2 * n / 3)
    yield "middle coverage", float(held[..., middle].mean())
    before = np.maximum.accumulate(np.where(held, pos, -1), axis=-1)
    yield "longest run", float((pos - before).max(-1).mean())
    x = np.sort(np.nonzero(held)[2] / (n - 1))
    yield "mean place", float(x.mean())
    rank = np.arange(len(x) + 1) / len(x)
    yield "distance from uniform", float(np.maximum(rank[1:] - x, x - rank[:-1]).max())
    old = n - one.budget // 2  # what is not among H2O's recent entries
    heavy = np.nonzero(held[..., :old])[2]
    yield "mean place of older", float(heavy.mean() / (old - 1)) if len(heavy) else np.nan
    yield "similarity", _similarity(trace, held)
    yield "punctuation", _punctuation(trace, held)
    yield "norm overlap", _norm_overlap(trace, held, one.budget)


def _similarity(trace: Trace, held: NDArray[np.bool_]) -> float:
    """Mean cosine between two kept keys of a head."""
    if held.shape[1] != trace.n_heads:
        return np.nan
    keys = torch.nn.functional.normalize(trace.k[:, :, : held.shape[-1]], dim=-1).double().numpy()
    total = (held[..., None, :] @ keys)[..., 0, :]
    count = held.sum(-1)
    return float((((total**2).sum(-1) - count) / (count * (count - 1)).clip(1)).mean())


def _punctuation(trace: Trace, held: NDArray[np.bool_]) -> float:
    """Share of punctuation kept in the last layer over the share of everything, less 1."""
    old = held.shape[-1] - LARGEST["window"]  # windows are kept whatever is in them
    mark = np.isin(np.array((trace.token_text or [])[:old]), [".", ",", ";", ":"])
    last = held[-1, :, :old]
    known = mark.any() and last.any()
    return float(last[:, mark].mean() / last.mean() - 1) if known else np.nan


def _norm_overlap(trace: Trace, held: NDArray[np.bool_], budget: int) -> float:
    """Share of the kept entries behind the sinks that the norm of the value alone would keep."""
    n, sink, count = held.shape[-1], 4, budget - 4
    if held.shape[1] != trace.n_heads or n - sink <= count:
        return np.nan
    size = trace.v[:, :, sink:n].norm(dim=-1).numpy()
    best = np.argsort(-size, axis=-1, kind="stable")[..., :count]
    return float(np.take_along_axis(held[..., sink:], best, -1).mean())


#: Rows of a window of the trace's own attention, and the share of keys that are its top.
WINDOW, TOP = 16, 0.1
SHARES = (0.05, 0.1, 0.25, 0.5, 0.55)


def of_trace(trace: Trace) -> dict[str, float]:
    """What full attention says: overlap of windows, sparsity, gaps, size of scores, expectation."""
    out = {"tokens": float(trace.n_pos), "prompt": float(trace.prompt_len)}
    for layer in range(trace.n_layers):
        found = window_overlap(trace, layer, shares=SHARES)
        for i, share in enumerate(SHARES):
            name = f"{layer} {share:g}"
            out[f"overlap {name}"] = float(found.before[:, i].mean())
            out[f"oldest {name}"], out[f"newest {name}"] = found.before[[0, 2], i]
            out[f"chance {name}"] = float(found.chance[i])
            out[f"union {name}"] = float(found.union[i])
            out[f"union chance {name}"] = float(found.chance_union[i])
            out[f"merged {name}"] = float(found.equal_budget[i])
        scores = _window_scores(trace, layer)  # [window, head, key]
        last = _local(trace, layer, trace.n_pos - WINDOW, trace.n_pos - WINDOW)
        for sinks in (0, 4):
            peak = last[:, sinks:].max(-1, keepdims=True)
            out[f"sparsity {layer} {sinks}"] = float((last[:, sinks:] < 0.01 * peak).mean())
        out[f"back {layer}"], out[f"back shuffled {layer}"] = _come_back(scores)
        out[f"size {layer}"] = float(
            np.mean([_spearman(np.arange(len(scores)), x) for x in scores.max(-1).T])
        )
        out[f"expectation {layer}"] = _expectation(trace, layer)
    return out


def _window_scores(trace: Trace, layer: int) -> Floats:
    """Local scores of the prompt's keys in every whole window after it; [window, head, key]."""
    starts = range(trace.prompt_len, trace.n_pos - WINDOW + 1, WINDOW)
    return np.stack([_local(trace, layer, start, trace.prompt_len) for start in starts])


def _local(trace: Trace, layer: int, start: int, keys: int) -> Floats:
    """G-KV's local score of the first keys in the window from row `start`; [head, key]."""
    attention = trace.attention(layer, slice(start, start + WINDOW), slice(0, keys))
    by_group = attention.unflatten(0, (trace.n_heads, -1)).amax(1)
    found: Floats = by_group.mean(1).double().numpy()
    return found


def _come_back(scores: Floats) -> tuple[float, float]:
    """Share of the top keys of a window, seen in a top before, that the last window did without.

    The second number is the same with the windows in random orders.
    """
    count = max(1, round(TOP * scores.shape[-1]))
    best = np.argsort(-scores, axis=-1, kind="stable")[..., :count]
    top = np.zeros(scores.shape, bool)
    np.put_along_axis(top, best, values=True, axis=-1)

    def share(order: NDArray[np.int64]) -> float:
        seen = top[order]
        before = np.cumsum(seen, 0)[:-1] > 0
        again = seen[1:] & before
        return float((again & ~seen[:-1]).sum() / max(1, again.sum()))

    rng = np.random.default_rng(0)
    shuffled = [share(rng.permutation(len(top))) for _ in range(20)]
    return share(np.arange(len(top))), float(np.mean(shuffled))


def _expectation(trace: Trace, layer: int) -> float:
    """Rank correlation over the prompt's keys of expected with observed attention, by query head.

    Expected: the score without value and epsilon, for as many positions as the response has.
    """
    rest = trace.n_pos - trace.prompt_len
    made = policy("expected_attention", n_future=rest, value_norm="none")
    one = replace(made, per_query_head=True)
    found = kvsim.replay(trace, one, 8, layers=[layer], internals=True).internals[0]
    rows, keys = slice(trace.prompt_len, None), slice(4, trace.prompt_len)
    observed = trace.attention(layer, rows, keys).mean(1).numpy()
    return float(
        np.mean([_spearman(a, b) for a, b in zip(found.scores[0, :, 4:], observed, strict=True)])
    )


def _spearman(a: NDArray[Any], b: NDArray[Any]) -> float:
    first, second = (np.argsort(np.argsort(x, kind="stable")) for x in (a, b))
    return float(np.corrcoef(first, second)[0, 1])


def of_segments(trace: Trace, one: Policy, budget: int) -> dict[str, float]:
    """What AMS decided, mean over events and heads."""
    plans = kvsim.replay(
        trace, one, budget, interval=INTERVAL, prefill=False, internals=True
    ).internals
    out: dict[str, float] = {}
    for name in ("suffix_mass", "quota_minimum", "quota_by_mass", "infeasible"):
        out[name] = float(np.mean([plan.notes[name] for plan in plans]))
    number = np.mean([(plan.notes["segment_length"] > 0).sum(-1).mean(-1) for plan in plans], 0)
    out |= {f"segments {layer}": float(x) for layer, x in enumerate(number)}
    out["segments"] = float(number.mean())
    cuts = [_boundaries(plan) for plan in plans]
    moved = []
    for old, new, plan in zip(cuts, cuts[1:], plans, strict=False):
        for head, at in new.items():
            known = at[at <= plan.row]
            if len(known) and len(old[head]):
                moved.append(np.abs(known[:, None] - old[head]).min(-1).mean())
    out["boundary shift"] = float(np.mean(moved)) if moved else np.nan
    return out


def _boundaries(plan: Any) -> dict[tuple[int, int], NDArray[np.int64]]:
    """Positions at which a segment starts, the first segment left out, by layer and head."""
    group = plan.notes["segment"] if plan.groups is None else plan.groups
    starts = (np.diff(group, axis=-1) > 0) & (plan.pos[..., :-1] >= 0)
    return {at: plan.pos[at][1:][starts[at]] for at in np.ndindex(*starts.shape[:2])}


def cost(lengths: Sequence[int], repeats: int = 5) -> dict[str, Floats]:
    """Seconds of one event of four policies over random caches; [repeat, length]."""
    one = {"random": policy("random"), "tova": policy("tova", heads="group")}
    one |= {"expected_attention": policy("expected_attention"), "ams": policy("ams")}
    one |= {"gkv": policy("gkv"), "global_max": policy("global_max")}
    out = {label: np.zeros((repeats, len(lengths))) for label in one}
    for i, length in enumerate(lengths):
        made = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(1, heads, length, 64, generator=made) for heads in (16, 4, 4))
        rope = kvsim.Rope.default(64)
        trace = Trace.from_arrays(q, k, v, prompt_len=length, rope=rope)
        for repeat in range(-1, repeats):
            for label, tried in one.items():
                start = time.perf_counter()
                kvsim.replay(trace, tried, length // 2, interval=PROMPT_ALONE, prefill=True)
                if repeat >= 0:  # the first one warms up
                    out[label][repeat, i] = time.perf_counter() - start
    return out


# --------------------------------------------------------------------------------- the statistics


RESAMPLES = 4000


@dataclass(frozen=True)
class Interval:
    """A mean over prompts and its 95 % bootstrap interval."""

    mean: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, values: Floats) -> Interval:
        """Percentiles of the means of resamples; prompts without a value are left out."""
        known = values[~np.isnan(values)]
        if not len(known):
            return cls(np.nan, np.nan, np.nan, 0)
        low, high = np.percentile(known[_resamples(len(known))].mean(1), [2.5, 97.5])
        return cls(float(known.mean()), float(low), float(high), len(known))

    def text(self, form: str) -> str:
        """The mean, and the interval in brackets; empty without a value."""
        if not self.n:
            return ""
        mean, low, high = (format(x, form) for x in (self.mean, self.low, self.high))
        return f"{mean} [{low}, {high}]"


@cache
def _resamples(n: int) -> NDArray[np.int64]:
    return np.random.default_rng(0).integers(n, size=(RESAMPLES, n))


@dataclass(frozen=True)
class Results:
    """The numbers of every trace, and the seconds of `cost`."""

    plan: Plan
    traces: Sequence[Numbers]
    seconds: Mapping[str, Floats]
    digests: Sequence[str] = ()

    def of(self, label: str, budget: int, quantity: str) -> Floats:
        """A value for each prompt, NaN where there is none."""
        at = label, budget, quantity
        if not any(at in one for one in self.traces):
            raise KeyError(at)
        return np.array([one.get(at, np.nan) for one in self.traces])

    def trace(self, quantity: str) -> Floats:
        """A property of each trace."""
        return self.of("trace", 0, quantity)

    def has(self, label: str, budget: int, quantity: str) -> bool:
        """Whether any trace has a value."""
        return any((label, budget, quantity) in one for one in self.traces)

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return sum(quantity.startswith("expectation ") for *_, quantity in self.traces[0])

    def above(self, more: str, less: str, quantity: str) -> dict[str, Floats]:
        """The difference on each prompt, at each budget."""
        return {
            str(n): self.of(more, n, quantity) - self.of(less, n, quantity)
            for n in self.plan.budgets
        }

    def change(self, label: str, base: str) -> dict[str, Floats]:
        """The difference of the output error, relative to the mean error of the base."""
        means = {str(n): np.nanmean(self.of(base, n, "error")) for n in self.plan.budgets}
        return {n: x / means[n] for n, x in self.above(label, base, "error").items()}

    def claim(self, number: str, says: str, more: str, less: str, quantity: str = "error") -> Claim:
        """A claim that one policy has more of something than another, at every budget."""
        pair = (label.removeprefix("prompt: ") for label in (more, less))
        test = f"{TITLES[quantity]}: " + " minus ".join(f"`{label}`" for label in pair)
        return Claim(number, says, test, self.above(more, less, quantity))


# ------------------------------------------------------------------------------------- the claims

HOLDS, NOT, OPEN = "holds", "does not hold", "not decidable here"


@dataclass(frozen=True)
class Claim:
    """What a paper says, and how it does here.

    cases: for each case a number per prompt that is above 0 where the claim is right; with a
    margin, one that is nearer to 0 than the margin. why: why there is no number here.
    """

    number: str
    says: str
    test: str = ""
    cases: Mapping[str, Floats] = field(default_factory=dict)
    margin: float | None = None
    why: str = ""

    def vote(self, found: Interval) -> str:
        """`for`, `against` or `open`, for one case."""
        least = 0.0 if self.margin is None else -self.margin
        most = np.inf if self.margin is None else self.margin
        if self.margin is None and found.low == 0:
            return "open"
        if least <= found.low and found.high <= most:
            return "for"
        return "against" if found.high < least or found.low > most else "open"

    @property
    def votes(self) -> dict[str, tuple[Interval, str]]:
        """Interval and vote of each case."""
        found = {case: Interval.of(values) for case, values in self.cases.items()}
        return {case: (one, self.vote(one)) for case, one in found.items()}

    @property
    def verdict(self) -> str:
        """Holds in every case; does not hold in at least one; or neither."""
        votes = {vote for _, vote in self.votes.values()}
        if "against" in votes:
            return NOT
        return HOLDS if votes == {"for"} else OPEN

    def result(self, prompts: int) -> str:
        """The cases, or where there are many how many of each kind and the outermost."""
        if self.why:
            return self.why
        said = {case: _case(case, *found, prompts) for case, found in self.votes.items()}
        if len(said) <= 4:
            return "<br>".join(said.values())
        votes = [vote for _, vote in self.votes.values()]
        count = ", ".join(f"{votes.count(kind)} {kind}" for kind in dict.fromkeys(votes))
        order = sorted(said, key=lambda case: self.votes[case][0].mean)
        return f"{len(said)} cases: {count}<br>least, {said[order[0]]}<br>most, {said[order[-1]]}"


def _case(case: str, found: Interval, vote: str, prompts: int) -> str:
    number = "" if found.n == prompts else f", n = {found.n}"
    mark = "" if vote == "for" else f" ({vote})"
    return f"{case}: {found.text('+.1f' if abs(found.mean) >= 10 else '+.3f')}{number}{mark}"


#: What the quantities of a record are called in tests.
TITLES = {
    "error": "output error",
    "mass": "retained mass",
    "retained_iou": "IoU of consecutive kept sets",
    "middle coverage": "share kept of the middle third",
    "longest run": "longest run of dropped tokens",
    "boundary shift": "tokens from a boundary to the nearest one of the event before",
    "wipeout 8 0": "wipe-out of regions of 8",
    "mean place": "mean place of what is kept, 0 to 1",
    "mean place of older": "mean place of what is kept behind the recent half, 0 to 1",
    "distance from uniform": "largest distance of the places kept from even ones",
    "similarity": "mean cosine of two kept keys",
}


def ams_claims(r: Results) -> Iterator[Claim]:
    """AMS, Q1 to Q13."""
    layers, budgets = range(r.layers), r.plan.budgets
    bases = (("tova", "ams"), ("expected_attention", "ams+expected_attention"))
    for base, made in bases:
        grid = {
            f"length {length}, threshold {least:g}, budget {n}": [
                r.of(label, n, f"wipeout {length} {least:g}") for label in (base, made)
            ]
            for length in LENGTHS
            for least in THRESHOLDS
            for n in budgets
        }
        yield Claim(
            "Q1",
            f"AMS around {base} wipes out fewer regions, whatever their length and the threshold",
            f"wipe-out: `{base}` minus `{made}`, regions of 8 to 64, of which nothing or a tenth "
            "may be left; cases in which neither wipes out anything are left out",
            {case: plain - ours for case, (plain, ours) in grid.items() if np.nansum(plain + ours)},
        )
    for base, made in bases:
        yield Claim(
            "Q2",
            f"AMS raises the IoU of consecutive kept sets over {base}, at every depth",
            f"{TITLES['retained_iou']}: `{made}` minus `{base}`, each layer and budget",
            {
                f"layer {layer}, budget {n}": values
                for layer in layers
                for n, values in r.above(made, base, f"retained_iou {layer}").items()
            },
        )
    for base, made in bases:
        says = f"AMS keeps more of the middle of the text than {base}"
        yield r.claim("Q3", says, made, base, "middle coverage")
    for base, made in bases:
        says = f"The longest run of tokens that AMS drops is shorter than that of {base}"
        yield r.claim("Q4", says, base, made, "longest run")
    without = "ams, no credit"
    says = "Credit makes segments move less from event to event"
    yield r.claim("Q5", says, without, "ams", "boundary shift")
    says = "Credit raises the IoU of consecutive kept sets"
    yield r.claim("Q5", says, "ams", without, "retained_iou")
    yield Claim(
        "Q5",
        "Credit changes nothing at the first event",
        "number of entries that only one of `ams` and `ams, no credit` keeps there; has to be 0",
        {str(n): r.of("ams", n, "changed by credit") for n in budgets},
        margin=0.0,
    )
    for says, worse in (
        ("Quotas by mass are better than by length", "ams, weights by length"),
        ("Quotas by mass are better than equal ones", "ams, equal weights"),
    ):
        yield r.claim("Q6", says, worse, "ams")
    says = f"Segments by mass are better than fixed ones, here of {SEGMENT} entries"
    yield r.claim("Q7", says, "ams, fixed segments", "ams")
    for base, made in (("tova", "ams"), ("keydiff", "ams+keydiff")):
        kept = f"{base}, must-keep"
        for says, worse, better in (
            (f"AMS is better than {base}", base, made),
            (f"Keeping sinks and recent entries alone makes {base} better", base, kept),
            (f"AMS is better than {base} with sinks and recent entries kept", kept, made),
        ):
            yield r.claim("Q8", says, worse, better)
    says = "Sets per head alone, which AMS brings too, make tova better"
    yield r.claim("Q8", says, "tova", "tova, per head")
    for label, mode in (("ams", "strict"), ("ams@release", "release")):
        yield Claim(
            "Q9",
            f"The mass decides about most of the budget ({mode})",
            f"share of the budget that `{label}` deals by mass, minus 1/2",
            {str(n): r.of(label, n, "quota_by_mass") - 0.5 for n in budgets},
        )
        yield Claim(
            "Q9",
            f"Most of that mass is measured, and not filled in for the window's entries ({mode})",
            f"1/2 minus the share of the mass on the window's own entries, `{label}`",
            {str(n): 0.5 - r.of(label, n, "suffix_mass") for n in budgets},
        )
    says = "Filling in the largest usage for the window's entries is better than what was observed"
    yield r.claim("Q9", says, "ams, observed", "ams")
    yield r.claim("Q9", "... and wipes out less", "ams, observed", "ams", "wipeout 8 0")
    for quantity in ("error", "wipeout 8 0"):
        lead = r.above("tova", "ams", quantity)
        small, large = str(budgets[0]), str(budgets[-1])
        yield Claim(
            "Q10",
            f"The lead of AMS over tova grows as the budget falls ({TITLES[quantity]})",
            "`tova` minus `ams` at the smaller budget, minus the same at the larger",
            {f"{small} against {large}": lead[small] - lead[large]},
        )
    yield Claim(
        "Q11",
        "Earlier layers have more segments",
        "segments of a layer minus those of the next, `ams`",
        {
            f"layers {layer} and {layer + 1}, budget {n}": r.of("ams", n, f"segments {layer}")
            - r.of("ams", n, f"segments {layer + 1}")
            for layer in layers[:-1]
            for n in budgets
        },
    )
    yield Claim(
        "Q12",
        "The length of the window hardly matters",
        "relative change of the output error of `ams` with a window of 4, 8 or 32 instead of 16 "
        "rows; within 5 %",
        {
            f"window {w}, budget {n}": values
            for w in (4, 8, 32)
            for n, values in r.change(f"ams, window {w}", "ams").items()
        },
        margin=0.05,
    )
    yield from _cost_claims(r)


def _cost_claims(r: Results) -> Iterator[Claim]:
    """Q13, by seconds of this machine over random caches of many lengths."""
    low, high = r.plan.cost[0], r.plan.cost[-1]
    added = (r.seconds["ams"] - r.seconds["tova"]).clip(1e-6)
    slopes = np.polyfit(np.log(r.plan.cost), np.log(added).T, 1)[0]
    scoring = (r.seconds["expected_attention"] - r.seconds["random"]).clip(1e-6)
    yield Claim(
        "Q13",
        "What AMS adds to an event grows in proportion to the length of the cache",
        f"1.2 minus the exponent with which its seconds grow from {low} to {high} entries; n "
        "repetitions on a random cache, no prompts",
        {"seconds": 1.2 - slopes},
    )
    yield Claim(
        "Q13",
        "What AMS adds is negligible beside the scoring",
        f"1/10 minus its seconds over those of the scores of Expected Attention, at {high} "
        "entries; as before",
        {"seconds": 0.1 - added[:, -1] / scoring[:, -1]},
    )


def gkv_claims(r: Results) -> Iterator[Claim]:
    """G-KV, the 14 that need no generation."""

    def each(make: Callable[[int], Floats]) -> dict[str, Floats]:
        return {f"layer {layer}": make(layer) for layer in range(r.layers)}

    def lift(layer: int, share: float) -> Floats:
        chance = r.trace(f"chance {layer} {share:g}")
        return (r.trace(f"overlap {layer} {share:g}") - chance) / (1 - chance)

    yield Claim(
        "G1",
        "What the last window attends to is less like an older window than like a newer one",
        "overlap of its top 10 % with that of the window before it, minus with the oldest of three",
        each(lambda i: r.trace(f"newest {i} 0.1") - r.trace(f"oldest {i} 0.1")),
    )
    yield Claim(
        "G1",
        "Windows attend to different keys, the more so the fewer of the top are taken",
        "overlap of the top 50 % minus that of the top 5 %",
        each(lambda i: r.trace(f"overlap {i} 0.5") - r.trace(f"overlap {i} 0.05")),
    )
    yield Claim(
        "G1",
        "The same beyond what chance gives to larger sets",
        "the same of (overlap - chance) / (1 - chance)",
        each(lambda i: lift(i, 0.5) - lift(i, 0.05)),
    )
    yield Claim(
        "G2",
        "The union of three earlier top 55 % holds 95 % of the last one",
        "overlap with the union, minus 0.95",
        each(lambda i: r.trace(f"union {i} 0.55") - 0.95),
    )
    yield Claim(
        "G2",
        "That is more than chance gives to such a union",
        "overlap with the union, minus its chance (0.91)",
        each(lambda i: r.trace(f"union {i} 0.55") - r.trace(f"union chance {i} 0.55")),
    )
    yield Claim(
        "G2",
        "Earlier scores merged into one top 55 % say more than chance about the last one",
        "overlap with a set of the same size, minus its chance (0.55)",
        each(lambda i: r.trace(f"merged {i} 0.55") - r.trace(f"chance {i} 0.55")),
    )
    yield Claim(
        "G3",
        "Attention is intermittent: what one window does without is wanted again later",
        f"share of a window's top {TOP:.0%} that was top before, but not in the window just "
        "before; minus half of that share with the windows in random order",
        each(lambda i: r.trace(f"back {i}") - r.trace(f"back shuffled {i}") / 2),
    )
    for sinks, said in ((0, "all keys"), (4, "without the first 4")):
        small = {f"layer {i}": r.trace(f"sparsity {i} {sinks}") - 0.9 for i in range(r.layers)}
        yield Claim(
            "G4",
            f"More than 90 % of the keys get less than 1 % of the largest score ({said})",
            f"that share in the last {WINDOW} rows, minus 0.9",
            small,
        )
    yield Claim(
        "G5",
        "Attention over what was kept is as sparse",
        why="kvsim has no metric yet of attention over a kept set alone",
    )
    local, whole = "morphkv@gkv", "global_max"
    says = "The local score keeps later positions than the global one"
    yield r.claim("G6", says, local, whole, "mean place")
    says = "What the global score keeps is spread more evenly"
    yield r.claim("G6", says, local, whole, "distance from uniform")
    yield Claim(
        "G7",
        "It is the rotary embedding that draws the local score to late positions",
        why="needs a local score before the rotary embedding, which kvsim does not have yet",
    )
    for other in (local, "random", "streaming_llm"):
        says = f"The global score keeps more of what is attended to later than {other}"
        yield r.claim("G8", says, whole, other, "mass")
        yield r.claim("G8", f"... with a lower output error than {other}", other, whole)
    yield Claim(
        "G9",
        "Fusion by maximum and by sum are alike",
        "relative change of the output error from `global_max` to `global_sum`; within 5 %",
        r.change("global_sum", whole),
        margin=0.05,
    )
    yield r.claim("G9", "Fusion by maximum is better than by mean", "global_mean", whole)
    for decay in (0.0, 0.5):
        says = f"A decay of 0.8 is better than one of {decay:g}"
        yield r.claim("G9", says, f"global_max, decay {decay}", whole)
    yield Claim(
        "G9",
        "Decays of 0.8 and 0.9 are alike",
        "relative change of the output error of `global_max` from 0.8 to 0.9; within 5 %",
        r.change("global_max, decay 0.9", whole),
        margin=0.05,
    )
    says = "Pooling hurts in decoding"
    yield r.claim("G10", f"{says}: the global score", "global_max, pooled", whole)
    yield r.claim("G10", f"{says}: the local score", "snapkv@gkv", local)
    says = "Redundancy makes the kept keys less alike"
    yield r.claim("G11", says, whole, "gkv", "similarity")
    for label, value in (("gkv, mix_lambda 0.5", 0.5), ("gkv", 0.7), ("gkv, mix_lambda 0.9", 0.9)):
        yield r.claim("G11", f"... and the output better (mix_lambda {value})", whole, label)
    yield Claim(
        "G12",
        "Attention thins out as the text grows, so that scores have to be normalised",
        "rank correlation of the number of a window with its largest score of a prompt's key, "
        "times -1",
        each(lambda i: -r.trace(f"size {i}")),
    )
    yield Claim(
        "G13",
        "H2O neglects the end of a long text",
        f"1/2 minus the {TITLES['mean place of older']}, `h2o`",
        {str(n): 0.5 - r.of("h2o", n, "mean place of older") for n in r.plan.budgets},
    )
    says = "... more than chance does, for what is old has survived more events"
    yield r.claim("G13", says, "random", "h2o", "mean place of older")
    yield Claim(
        "G14",
        'Deep layers keep punctuation and words such as "wait" out of proportion',
        "share kept of the punctuation in the last layer over that of all tokens, minus 1, `gkv`; "
        'the language has no "wait"',
        {str(n): r.of("gkv", n, "punctuation") for n in r.plan.budgets},
    )


def expected_claims(r: Results) -> Iterator[Claim]:
    """Expected Attention, at the one event after the prompt."""
    made, budgets = "prompt: expected_attention", r.plan.budgets
    yield Claim(
        "E1",
        "Expected attention goes with observed attention",
        "rank correlation over the prompt's keys with what the response attends to, mean over "
        "query heads",
        {f"layer {i}": r.trace(f"expectation {i}") for i in range(r.layers)},
    )
    yield Claim(
        "E2",
        "The number of positions looked ahead hardly matters",
        "relative change of the output error with 128, 256 or 1024 instead of 512; within 5 %",
        {
            f"{ahead} positions, budget {n}": values
            for ahead in (128, 256, 1024)
            for n, values in r.change(f"prompt: n_future {ahead}", made).items()
        },
        margin=0.05,
    )
    yield r.claim("E3", "The covariance makes it better", "prompt: no covariance", made)
    yield Claim(
        "E3",
        "The covariance matters less where queries and keys are normalised",
        why="`tiny` has no such norm",
    )
    yield Claim(
        "E4",
        "With epsilon 0.01 the norm of the value decides more than the expected attention",
        "share of the kept entries that the norm alone would keep, minus the share that the "
        "expected attention alone would keep",
        {
            str(n): r.of(made, n, "norm overlap") - r.of(made, n, "attention overlap")
            for n in budgets
        },
    )
    says = "The norm of the value makes it better"
    yield r.claim("E4", says, "prompt: no value norm", "prompt: epsilon 0")
    yield r.claim("E4", "Epsilon 0.01 makes it better", "prompt: epsilon 0", made)
    for name in ("expected_attention", "snapkv"):
        says = f"Budgets by head (AdaKV) make {name} better"
        yield r.claim("E5", says, f"prompt: {name}", f"prompt: adakv+{name}")
    for name in ("knorm", "keydiff", "snapkv", "tova", "streaming_llm"):
        yield r.claim("E6", f"Expected Attention is better than {name}", f"prompt: {name}", made)
    yield Claim(
        "E7",
        "Projections of queries are nearly normal, but for the sinks",
        why="kvsim has no diagnostic yet of how queries are distributed",
    )


def selection_claims(r: Results) -> Iterator[Claim]:
    """ASL, S1 to S6, as far as three layers go."""
    budgets, last = r.plan.budgets, r.layers - 1
    few = "in a model of three layers ASL can select behind one layer alone"

    def of(n: int, quantity: str) -> Floats:
        return r.of("layers", n, quantity)

    yield Claim(
        "S1",
        "The variance of ranks falls with depth",
        f"rank variance of two layers, at layer 1 minus at layer {last}",
        {str(n): of(n, "variance 1") - of(n, f"variance {last}") for n in budgets},
    )
    yield Claim(
        "S2",
        "Early layers attend flatly, deep layers to few tokens",
        "entropy of a layer's pooled scores in nats, minus that of the next layer",
        {
            f"layer {at}": r.trace(f"entropy {at}") - r.trace(f"entropy {at + 1}")
            for at in range(last)
        },
    )
    yield Claim(
        "S3",
        "More tokens select a later layer (a smaller threshold does by definition)",
        f"relative variance at layer {last} at a budget, minus that at the smallest budget: above "
        "0 a threshold is passed later",
        {
            str(n): of(n, f"relative {last}") - of(budgets[0], f"relative {last}")
            for n in budgets[1:]
        },
    )
    yield Claim("S4", "A short look-back reacts faster, a late first layer is noisier", why=few)
    yield Claim(
        "S5",
        "Tokens that rank high in one of the layers compared are more than go on, at early layers",
        "tokens compared over tokens that go on, minus 1, at layer 1",
        {str(n): of(n, "union 1") - 1 for n in budgets},
    )
    yield Claim("S6", "Harder tasks select later", why=few)


CLAIMS: Mapping[str, Callable[[Results], Iterable[Claim]]] = {
    "AMS, arXiv 2605.23200": ams_claims,
    "G-KV, arXiv 2512.00504": gkv_claims,
    "Expected Attention, arXiv 2510.00636": expected_claims,
    "ASL, arXiv 2601.07667": selection_claims,
}


# --------------------------------------------------------------------------------------- the page

#: Columns of the tables: heading, quantity, format.
COLUMNS = (
    ("output error", "error", ".3f"),
    ("retained mass", "mass", ".3f"),
    ("regret", "regret", ".3f"),
    ("wipe-out 8", "wipeout 8 0", ".2f"),
    ("wipe-out 32", "wipeout 32 0", ".2f"),
    ("IoU", "retained_iou", ".2f"),
    ("IoU by chance", "chance", ".2f"),
    ("entries", "entries", ".1f"),
)

#: Of the budgets in the figure, from the smallest on.
COLORS = ("#c8102e", "#e08a1e", "#7a9cc6", "#1f4e79")


def page(r: Results, policies: Mapping[str, Policy], figure: str) -> str:
    """The whole page; `figure` is its path as the page links to it."""
    claims = {paper: list(make(r)) for paper, make in CLAIMS.items()}
    parts = [
        _introduction(r),
        "## What policies keep and lose",
        _reading(r),
        f"![Output error of every policy at every budget]({figure})",
        *(_table(r, policies, n) for n in r.plan.budgets),
        "### Parameters made smaller",
        _changed(policies),
        "## Across layers",
        _across(r),
        "## Which of the papers' claims hold here",
        _rules(r),
        _count(claims),
        *(f"### {paper}\n\n" + _claims(found, r.plan.prompts) for paper, found in claims.items()),
        "## Names",
        f"The catalogue when this page was made: {listing()}.",
    ]
    return "\n\n".join(parts) + "\n"


def listing() -> str:
    """Every name of the catalogue, as the page lists it."""
    return ", ".join(f"`{name}`" for name in names())


def _introduction(r: Results) -> str:
    plan = r.plan
    command = "python docs/results.py" + ("" if plan == FULL else " --smallest")
    traces = hashlib.sha256("".join(r.digests).encode()).hexdigest()
    tools = ", ".join(f"{name} {version(name)}" for name in ("kvsim", "torch", "transformers"))
    tokens, prompt = r.trace("tokens"), r.trace("prompt")
    size = f"level {plan.level}" if plan.level else f"{plan.facts} facts, up to {plan.lines} lines"
    return f"""# Results on the shipped model

`tiny` has three layers and about a million parameters, and was built for an artificial task with \
its retrieving heads partly put there, so these numbers show what policies do to such attention \
and not what they do to a large model. A claim that holds here has passed one small test; one \
that does not may hold all the same where texts are ten times as long and heads less sharp.

<!-- not run: takes minutes, and this page is what it writes -->
```bash
{command}
```

* {plan.prompts} prompts in the language of `tiny` ({", ".join(VERBS)} in turn, domains in turn, \
{size}, seed {plan.seed}), answered greedily: {tokens.min():.0f} to \
{tokens.max():.0f} tokens, of which {prompt.min():.0f} to {prompt.max():.0f} are prompt. One more \
prompt serves to calibrate `qfilter` and `triattention`.
* Weights of `tiny`: sha256 `{weights()}`. Digests of the traces together: sha256 `{traces}`.
* {tools}, Python {platform.python_version()}, CPU.
* One schedule for every policy, whatever its own is: an event after each {INTERVAL} rows of the \
response, and none after the prompt (`--interval {INTERVAL} --no-prefill`). This compares what \
policies keep, and not when they act.
* A value is the mean over layers and heads (and over the rows of the response, where rows count) \
of a prompt, then over prompts. In brackets: its 95 % bootstrap interval over prompts \
({RESAMPLES} resamples, seed 0).
* Numbers of layer 0 are exact, those of layers 1 and 2 open loop: errors do not add up over \
layers ([fidelity](concepts.md#fidelity))."""


def _reading(r: Results) -> str:
    small, large = (AMS["window"] / (n + INTERVAL) for n in (r.plan.budgets[0], r.plan.budgets[-1]))
    return (
        "Rows are sorted by output error. *Regret* is the mass that an oracle retains on the same "
        "terms, minus retained mass; without a bound on the size there is none. *Wipe-out 8* and "
        "*32* are the shares of regions of so many tokens of which nothing is left after the last "
        "event. Beside the *IoU* of consecutive kept sets stands what random sets of the same "
        "sizes have. *Entries* is what a row sees, on average over rows, so it lies above the "
        "budget. [Definitions](metrics.md).\n\n"
        "AMS, G-KV and others are made for caches of hundreds or thousands of entries, so their "
        "windows and segments are made smaller here ([how](#parameters-made-smaller)). "
        f"{_name(PAPER)} and {_name(RELEASE)}, are AMS with the numbers of the paper and of the "
        "released code, which at these budgets leave little or nothing to choose: the most recent "
        f"entries alone take 32. The window of `ams` is {small:.0%} of the cache before an event "
        f"at the smallest budget and {large:.0%} at the largest; with 512 entries, an event every "
        f"512 rows and the window of the paper it is {128 / (512 + 512):.1%}."
    )


def figure(r: Results, policies: Mapping[str, Policy], path: Path) -> None:
    """Output error of every policy, one dot and its interval for each budget."""
    middle = r.plan.budgets[len(r.plan.budgets) // 2]
    shown = [label for label in policies if label != "full"]
    shown.sort(key=lambda label: -np.nanmean(r.of(label, middle, "error")))
    image = Figure(figsize=(7.5, 0.155 * len(shown) + 1.0), dpi=72)
    axis = image.subplots()
    for at, n in enumerate(r.plan.budgets):
        found = [Interval.of(r.of(label, n, "error")) for label in shown]
        low, mean, high = np.array([(one.low, one.mean, one.high) for one in found]).T
        color = COLORS[at % len(COLORS)]
        axis.hlines(range(len(shown)), low, high, color=color, linewidth=1)
        axis.plot(mean, range(len(shown)), "o", color=color, markersize=3.5, label=f"budget {n}")
    axis.set_xscale("log")
    axis.set_yticks(range(len(shown)), shown, fontsize=6.5)
    axis.set_ylim(-1, len(shown))
    axis.grid(axis="both", color="#e6e6e6", linewidth=0.5)
    axis.set_axisbelow(True)
    axis.set_xlabel("output error, mean and 95 % interval over prompts")
    axis.legend(loc="upper right", fontsize=7)
    image.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    image.savefig(path, metadata={"Software": None}, pil_kwargs={"optimize": True})


def _table(r: Results, policies: Mapping[str, Policy], budget: int) -> str:
    rows = []
    for label, one in policies.items():
        cells = [_cell(r, label, budget, *column[1:]) for column in COLUMNS]
        note = "" if one.bounded else " (no budget binds)"
        row = f"| {_name(label)}{note} | " + " | ".join(cells) + " |"
        rows.append((float(np.nanmean(r.of(label, budget, "error"))), row))
    head = "| policy | " + " | ".join(title for title, *_ in COLUMNS) + " |"
    rule = "| --- |" + " ---: |" * len(COLUMNS)
    return "\n".join([f"### Budget {budget}", "", head, rule, *(row for _, row in sorted(rows))])


def _cell(r: Results, label: str, budget: int, quantity: str, form: str) -> str:
    if not r.has(label, budget, quantity):
        return ""
    found = Interval.of(r.of(label, budget, quantity))
    if quantity == "chance":  # follows from the sizes of sets alone
        return format(found.mean, form) if found.n else ""
    return found.text(form)


def _name(label: str) -> str:
    name, comma, rest = label.partition(",")
    return f"`{name}`{comma}{rest}"


def _across(r: Results) -> str:
    """Policies that drop rows of the prompt, and what they are beside."""
    head = "| policy | " + " | ".join(f"budget {n}" for n in r.plan.budgets) + " | entries |"
    lines = [head, "| --- |" + " ---: |" * (len(r.plan.budgets) + 1)]
    for label in across_policies():
        name = f"across: {label}"
        cells = [_cell(r, name, n, "error", ".3f") for n in r.plan.budgets]
        entries = [r.of(name, n, "entries").mean() for n in r.plan.budgets]
        seen = f"{min(entries):.0f} to {max(entries):.0f}"
        lines.append(f"| {_name(label)} | {' | '.join(cells)} | {seen} |")
    text = (
        "Output error of [policies that drop rows of the prompt on the way down]"
        "(across-layers.md), at the one event after the prompt; SnapKV, which cuts caches alone, "
        "stands first. Windows are 8 rows. In a model of three layers there is one layer behind a "
        "selection, and ASL is forced to select (tau 1.01); the numbers of that layer are open "
        "loop. *Entries* is what a row sees from the smallest budget to the largest, means over "
        "layers: caches grow while the response is written, and those of `pyramidinfer` and of "
        "*full before* are larger to begin with. Dropping rows saves time, which is not in this "
        "table: [costs](cost.md)."
    )
    return "\n".join([text, "", *lines])


def _changed(policies: Mapping[str, Policy]) -> str:
    """Where a row differs from the policy of its name."""
    lines = ["| policy | here, and by default |", "| --- | --- |"]
    for label, one in policies.items():
        if label.partition(",")[2]:
            continue
        default = policy(label, **_required(label)).params
        changed = [
            f"`{key}={value}` ({default[key]})"
            for key, value in one.params.items()
            if default[key] != value and not key.endswith("calibration")
        ]
        if changed:
            lines.append(f"| {_name(label)} | {', '.join(changed)} |")
    return "\n".join(lines)


def _required(name: str) -> dict[str, Any]:
    return {"calibration": "prefix:64"} if "calibration" in parameters(name) else {}


def _rules(r: Results) -> str:
    return (
        "Each claim becomes a number per prompt that is above 0 where the claim is right, most "
        "often the difference between two policies on the same prompt. Where a paper speaks of "
        "accuracy, *better* means a lower output error here, which is not the same. The script "
        f"computes verdicts from the 95 % intervals of the means over the {r.plan.prompts} "
        "prompts (n where it is another number):\n\n"
        f"* **{HOLDS}**: above 0 in every case, or inside the margin where something is to change "
        "little. Cases are budgets, unless they say otherwise.\n"
        f"* **{NOT}**: on the other side in at least one case, which is marked *against*.\n"
        f"* **{OPEN}**: otherwise. Either an interval reaches both sides and is marked *open*, or "
        "there is no number, for the reason given.\n\n"
        "There are so many intervals that some miss by chance. Schedule and parameters are those "
        "of the tables, except for Expected Attention: it is tested at one event, after the "
        "prompt, which is what its paper is about. Claims that are plain arithmetic on printed "
        "numbers, or that need free generation or training, are not listed."
    )


def _count(tested: Mapping[str, Sequence[Claim]]) -> str:
    lines = [f"| paper | tests | {HOLDS} | {NOT} | {OPEN} |", "| --- | ---: | ---: | ---: | ---: |"]
    for paper, found in tested.items():
        verdicts = [claim.verdict for claim in found]
        counts = [verdicts.count(v) for v in (HOLDS, NOT, OPEN)]
        lines.append(f"| {paper} | {len(found)} | " + " | ".join(map(str, counts)) + " |")
    return "\n".join(lines)


def _claims(found: Sequence[Claim], prompts: int) -> str:
    lines = ["|  | claim | test | result | verdict |", "| --- | --- | --- | --- | --- |"]
    for claim in found:
        result = claim.result(prompts)
        cells = (claim.number, claim.says, claim.test, result, f"**{claim.verdict}**")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------ the program


def measure_all(plan: Plan, paths: Sequence[Path], calibration: Path, jobs: int) -> Results:
    """Replay and measure every trace, in processes of their own where there are several."""
    seconds = cost(plan.cost)
    work = partial(measure_trace, calibration=calibration, budgets=plan.budgets)
    if jobs == 1:
        found = [work(path) for path in paths]
    else:
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
            found = list(pool.map(work, paths))
    return Results(plan, found, seconds, [open_trace(path).digest for path in paths])


def main(arguments: Sequence[str] | None = None) -> None:
    """Record, replay, measure, and write the page and its figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--smallest", action="store_true", help="two short prompts, two budgets")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results.md", metavar="FILE")
    parser.add_argument("--traces", type=Path, default=ROOT / "traces" / "results", metavar="DIR")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes; 2 by default")
    given = parser.parse_args(arguments)
    start = time.perf_counter()
    plan = SMALLEST if given.smallest else FULL
    calibration, *paths = record(plan, given.traces)
    results = measure_all(plan, paths, calibration, given.jobs)
    policies = table_policies(str(calibration))
    image = given.out.parent / "figures" / f"{given.out.stem}.png"
    figure(results, policies, image)
    text = page(results, policies, image.relative_to(given.out.parent).as_posix())
    given.out.write_text(text, "utf-8")
    print(f"{given.out} written after {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
