# ruff: noqa: INP001 - a module of docs/leaderboard.py, and it says what was measured
"""Frozen prompts by name, and the values of policies on them, a prompt at a time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import polars as pl
import torch
from scoring_plan import TURN_TOKENS
from scoring_plan import Workload as Prompts
from scoring_prompts import prompt_of

import kvsim
from claims.kept_answers import ANSWER, answered
from claims.plan import LONG, Sizes
from claims.policies import scaled
from claims.traces import in_memory, samples
from kvsim import Policy
from kvsim.analysis.live.table import measure_live
from kvsim.analysis.summaries import over_layers
from kvsim.analysis.table import COLUMNS
from kvsim.core.policy import Schedule
from kvsim.policies import parameters
from kvsim.policies.fit import fitted
from kvsim.recorder import Prompt, capture_many, load_model
from kvsim.recorder.provenance import describe_model
from kvsim.runner.judging import Judge, unjudged
from kvsim.runner.model import RunningModel
from kvsim.sweeps import replay_all

#: Budgets, as shares of prompt and response.
SHARES = ("25%", "50%")
KL, SEEN, BYTES = "response_kl", "entries_seen", ("bytes_held", "bytes_read")
#: Names of the models that need no file, as `--model` calls them.
TINY, SMOLLM2 = "tiny", "smollm2"


@dataclass(frozen=True)
class Workload:
    """Prompts of a kind; any model can have them.

    kind: of scoring_prompts, or of the long documents. response: its most tokens. once: the only
    event follows the prompt, as the schedules of papers on long prompts say. about: a sentence.
    """

    name: str
    kind: str
    response: int
    about: str
    once: bool = False


WORKLOADS = {
    each.name: each
    for each in (
        Workload(
            "answers", "answers", 160,
            "Questions that need reasoning, and the first 160 tokens of what the 1.5B wrote.",
        ),
        Workload("sheets", "sheets", 320, "Three such questions in one prompt, and 320 tokens."),
        Workload(
            "needles", "needles", 16,
            "A fact or a quotation in 512 tokens of text, asked for at the end.",
        ),
        Workload("turns", "turns", TURN_TOKENS, "Three questions on one document of 900 tokens."),
        Workload(
            "long documents", "", 64, "8,192 tokens of text, half of the prompts with a needle.",
            once=True,
        ),
    )
}  # fmt: skip


def prompt(workload: Workload, model: str, number: int, tokenizer: Any) -> Prompt:
    """Return prompt `number` of a workload, from 0, as a tokenizer cuts it."""
    if not workload.kind:
        plan = replace(LONG, model=model, prompts=number + 1)
        return samples(plan)[number + 1]
    of = Prompts(workload.kind, TINY if model == TINY else SMOLLM2, response=workload.response)
    return prompt_of(of, number, tokenizer)


def digest(one: Prompt, weights: str) -> str:
    """Return a digest of the text, questions and response of a prompt, and of the weights."""
    turns = [(each.question, each.answer) for each in one.turns]
    said = one.content, one.context, one.answer, one.response, turns, weights
    return hashlib.sha256(json.dumps(said, ensure_ascii=False).encode()).hexdigest()[:12]


# ---------------------------------------------------------------------------------------- policies

#: Lengths of policies made for thousands of tokens, at most; a preset keeps its own.
_SIZES = Sizes(largest={"window": 16, "lag": 16}, ams={"window": 128})
#: Layers in which sparse attention reads everything: none, for prompts and models are small.
_ALL = {"dense_layers": 0}
_KIVI, _QUEST = {"window": 32, "bits_per_number": 4}, {**_ALL, "page": 4}
#: Policies with other parameters than their defaults, by label.
VARIANTS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "kivi, 4 bits": ("kivi", _KIVI),
    "kivi, 2 bits": ("kivi", {"window": 32}),
    "kvquant, 4 bits": ("kvquant", {"bits_per_number": 4, "group": 64}),
    "quest, pages of 4": ("quest", _QUEST),
    "pqcache": ("pqcache", _ALL),
    "skip_softmax, 0.01": ("skip_softmax", {**_ALL, "threshold": 0.01}),
    "quest, pages of 4 + int8": ("quest+int8", _QUEST),
    "h2o + kivi, 4 bits": ("h2o+kivi", _KIVI),
    "dropkv + kivi, 4 bits": ("dropkv+kivi", {"scorer__window": 32, "bits_per_number": 4}),
    "openvino, blocks of 8": ("openvino", {"page": 8, "sink": 8, "recent": 16}),
    "openvino@sum, blocks of 8": ("openvino@sum", {"page": 8, "sink": 8, "recent": 16}),
    "openvino@kvcrush, blocks of 8": ("openvino@kvcrush", {"page": 8, "sink": 8, "recent": 16}),
    "dropkv + quest, pages of 4": ("dropkv+quest", {**_QUEST, "share": 0.5}),
}
#: What a new board has, in the order in which it is measured.
POLICIES = (
    *("full", "random", "streaming_llm", "snapkv", "h2o", "tova", "expected_attention", "keydiff"),
    *("kivi, 4 bits", "int8", "int4", "fp8", "turboquant@vllm", "pqcache", "quest, pages of 4"),
    *("dropkv", "rkv", "gkv", "cake", "adakv+snapkv", "pyramidkv", "ams", "oracle", "kvzip"),
    *("h2o+int8", "h2o + kivi, 4 bits", "h2o+turboquant@vllm", "dropkv + kivi, 4 bits"),
    *("dropkv+turboquant@vllm", "dropkv + quest, pages of 4", "quest, pages of 4 + int8", "topk"),
    *("kivi, 2 bits", "kvquant, 4 bits", "skip_softmax, 0.01", "nvfp4"),
    *("knorm", "lagkv", "compactor", "capkv", "morphkv", "raas", "finch", "triattention"),
    *("adakv+expected_attention", "ams+expected_attention"),
)


def build(label: str, model: str, folder: Path) -> Policy:
    """Return the policy of a label, its lengths scaled to the budget."""
    if label in VARIANTS:
        name, params = VARIANTS[label]
        return replace(kvsim.policy(name, **params), name=label)
    sizes = Sizes() if "@" in label else _SIZES
    text = str(calibration(model, folder)) if "calibration" in parameters(label) else None
    return replace(fitted(scaled(sizes, label, text)), name=label)


def budgets(policy: Policy) -> Sequence[str]:
    """Return the budgets of a policy: one, where it has no effect."""
    return SHARES if policy.bounded else SHARES[:1]


# ------------------------------------------------------------------------------------- measurement


def called(model: str) -> str:
    """Return the name of a model by name or file, as boards have it."""
    return Path(model).name.removesuffix(".gguf")


@cache
def loaded(model: str) -> tuple[Any, Any, str]:
    """Return a model by name or file, its tokenizer, and the digest of its weights."""
    lm, tokenizer = load_model(Path(model) if Path(model).exists() else model)
    facts = describe_model(lm)
    return lm, tokenizer, str(facts["source"]["sha256"] if "source" in facts else facts["weights"])


def prompt_digest(workload: Workload, model: str, number: int) -> str:
    """Return the digest of a prompt."""
    _, tokenizer, weights = loaded(model)
    return digest(prompt(workload, model, number, tokenizer), weights)


def recorded(workload: Workload, model: str, number: int, folder: Path) -> tuple[Path, str]:
    """Record a prompt, unless the folder has its trace; return its path and the prompt's digest."""
    lm, tokenizer, weights = loaded(model)
    one = prompt(workload, model, number, tokenizer)
    of = digest(one, weights)
    path = folder / f"{called(model)}-{workload.name.replace(' ', '-')}-{number:02}-{of}.zarr"
    if not path.exists():
        options: dict[str, Any] = {"o_proj": True, "sensitivity": False}
        options |= {} if workload.once else {"probe": "repeat"}
        if one.response is None:
            options["max_new_tokens"] = workload.response
        if workload.kind == "turns":
            options["chat"] = True
        capture_many(lm, tokenizer, [replace(one, id=path.stem)], folder, **options)
    return path, of


def calibration(model: str, folder: Path) -> Path:
    """Record the text that calibrates policies: 1,024 tokens, none of a workload."""
    text = Workload("calibration", "documents", 128, "")
    return recorded(text, model, 23 if model == TINY else 90, folder)[0]


def measure(
    workload: Workload, model: str, number: int, labels: Sequence[str], folder: Path
) -> pl.DataFrame:
    """Replay and judge policies on a prompt: rows of a Table, one for each value.

    Values are kept in `folder/values` by policy, and read again. A change of the code is not
    noticed: remove them.
    """
    torch.set_num_threads(1)
    path, of = recorded(workload, model, number, folder)
    done = {x: folder / "values" / path.stem / f"{x.replace('/', '-')}.parquet" for x in labels}
    for label, each in done.items():
        if ":" in label:  # of a file that may have changed
            each.unlink(missing_ok=True)
    missing = {x: build(x, model, folder) for x in labels if not done[x].exists()}
    if missing:
        trace = in_memory(path)
        judge = Judge(RunningModel(loaded(model)[0]), trace)
    for of_budgets in (SHARES, SHARES[:1]):
        some = [x for x in missing.values() if budgets(x) == of_budgets]
        for at in range(0, len(some), 8):
            table = _table(workload, trace, judge, some[at : at + 8], of_budgets)
            for label, rows in table.group_by("policy"):
                target = done[str(label[0])]
                target.parent.mkdir(parents=True, exist_ok=True)
                part = target.with_suffix(".part")
                rows.write_parquet(part)
                part.rename(target)
    facts = {"workload": workload.name, "prompt": of, "number": number}
    parts = [pl.read_parquet(each) for each in done.values() if each.exists()]
    return pl.concat(parts).with_columns(pl.lit(x).alias(key) for key, x in facts.items())


def _table(
    workload: Workload, trace: Any, judge: Judge, some: Sequence[Policy], of: Sequence[str]
) -> pl.DataFrame:
    """Return the values of some policies at some budgets on a trace, means over layers."""
    terms: dict[str, Any] = {"interval": 32, "prefill": True}
    if workload.once:
        some = [replace(one, schedule=Schedule(None, prefill=True)) for one in some]
        terms = {"interval": "paper"}
    run = replay_all([trace], some, of, metrics=[SEEN, *BYTES], **terms)
    if run.failures:
        raise SystemExit(f"a replay failed: {run.failures[0]}")
    records = [one for one in run.records if not unjudged(one)]
    outcomes = [answered(trace, each) for each in judge.outcomes(records)]
    table = pl.concat([run.table, measure_live(trace, records, outcomes, [KL, ANSWER])])
    values = ("value", "chance", "fidelity", "layer", "head", "qhead")
    keys = [x for x in COLUMNS if x not in values]
    table = over_layers(table, keys).group_by(keys, maintain_order=True)
    means = table.agg(pl.col("value").mean(), pl.col("fidelity").last().cast(pl.String))
    sizes = {"tokens": trace.n_pos, "prompt_tokens": trace.prompt_len, "digest": trace.digest}
    return means.drop_nulls("value").with_columns(pl.lit(x).alias(key) for key, x in sizes.items())
