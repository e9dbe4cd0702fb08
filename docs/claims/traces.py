"""The traces: prompts of a model, recorded, and read into memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from claims.plan import Plan
from kvsim import Trace, open_trace
from kvsim.recorder import Prompt, capture_many, load_model
from kvsim.recorder.encoding import token_count
from kvsim.recorder.loading import load_tokenizer
from kvsim.recorder.provenance import describe_model
from kvsim.runner.judging import Judge
from kvsim.runner.model import RunningModel
from kvsim.studies.language import tasks
from kvsim.text.tasks import DEPTHLESS, sample
from kvsim.tiny import PATH
from kvsim.tiny.vocabulary import DOMAINS

#: Tasks of the prompts for tiny, in turn: those whose response is long enough for events.
VERBS = tuple(task for task in tasks.TASKS if task != "needle")
#: Depths of the needles, in turn.
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
#: Answers of larger models.
ANSWERS = Path(__file__).parent.parent / "qwen-results.jsonl"
#: The task of prompts with three questions.
SHEET = "sheet"
#: Tokens that the model writes at most, where the response is not given.
ANSWER = 32

_tokenizer = cache(load_tokenizer)


@cache
def _model(plan: Plan) -> tuple[Any, Any]:
    model, tokenizer = load_model(plan.file or plan.model)
    return model.to(plan.device), tokenizer


@cache
def weights(plan: Plan) -> str:
    """SHA-256 of the weights of the model."""
    if plan.lengths or plan.solved:
        return str(describe_model(_model(plan)[0])["source"]["sha256"])
    return hashlib.sha256((PATH / "model.safetensors").read_bytes()).hexdigest()


def labels(plan: Plan, number: int) -> dict[str, Any]:
    """Labels of a prompt, the groups of a table; number 0 is the prompt for calibration."""
    if plan.solved:
        return {"task": _solved(plan, number).labels["task"]}
    if plan.lengths:
        if not number:
            return {"length": plan.calibration or plan.lengths[0], "task": "text"}
        at = number - 1
        return {
            "length": plan.lengths[at % len(plan.lengths)],
            "task": plan.tasks[at % len(plan.tasks)],
        }
    domains = list(DOMAINS)
    return {"domain": domains[number % len(domains)], "task": VERBS[number % len(VERBS)]}


@cache
def samples(plan: Plan) -> list[Prompt]:
    """The prompts, and before them the one for calibration alone."""
    make = _solved if plan.solved else _real if plan.lengths else _ledger
    return [make(plan, number) for number in range(plan.prompts + 1)]


def _ledger(plan: Plan, number: int) -> Prompt:
    """A prompt in the language of tiny."""
    label = f"{weights(plan)[:8]}-{plan.level or plan.facts}-{plan.seed}"
    size: dict[str, Any] = {"level": plan.level}
    if plan.level is None:
        size = {"facts": plan.facts, "lines": plan.lines}
    of = labels(plan, number)
    (one,) = tasks.prompts(1, 1000 * plan.seed + number, **of, **size)
    return Prompt(f"{label}-{number:02}", one.prompt, one.answer, labels=of)


def _solved(plan: Plan, number: int) -> Prompt:
    """A question and its right answer, as a model wrote it with the full cache, and its end."""
    rows = map(json.loads, ANSWERS.read_text("utf-8").splitlines())
    right = [
        row
        for row in rows
        if row["model"] == plan.solved
        and {"right", "ended", "prompt"} <= {name for name, value in row.items() if value}
        and row["response_tokens"] >= plan.least
        and (row["task"] == SHEET) == plan.sheets
    ]
    if number > len(right):
        raise SystemExit(f"{ANSWERS} has {len(right)} answers, expected {plan.prompts}")
    row = right[number - 1]
    return Prompt(
        f"{plan.called}-{row['task']}-{row['index']:02}",
        [{"role": "user", "content": row["prompt"]}],
        row["answer"],
        labels={"task": row["task"]},
        response=row["response"],
    )


def _real(plan: Plan, number: int) -> Prompt:
    """A prompt on real text. Of a text a quarter of the tokens or so is the response."""
    tokenizer = _model(plan)[1] if plan.file else _tokenizer(plan.model)
    task, length = (labels(plan, number)[name] for name in ("task", "length"))
    at = None if task in DEPTHLESS else DEPTHS[number % len(DEPTHS)]
    prompt_length = length * 3 // 4 if task == "text" else length
    if plan.response is not None:
        prompt_length = length - plan.response
    count = partial(token_count, tokenizer=tokenizer)
    one = sample(plan.seed, number, count, task=task, length=prompt_length, depth=at)
    response = None
    if task == "text":
        response = tokenizer(one.response, add_special_tokens=False)["input_ids"]
        response = response[: length - one.tokens]
    shown = {"task": task, "length": length} | ({} if at is None else {"depth": at})
    return Prompt(
        f"{plan.model}-{task}-{length}-{plan.seed}-{number:03}",
        one.prompt,
        one.answer,
        labels=shown,
        needle=one.needles,
        response=response,
    )


def record(plan: Plan, folder: Path, numbers: Sequence[int]) -> list[Path]:
    """The traces of some prompts; those that an earlier run left in the folder are used again."""
    wanted = [samples(plan)[number] for number in numbers]
    paths = [folder / f"{prompt.id}.zarr" for prompt in wanted]
    missing = [prompt for prompt, path in zip(wanted, paths, strict=True) if not path.exists()]
    if missing:
        model, tokenizer = _model(plan)
        most = {"max_new_tokens": ANSWER} if plan.lengths and not missing[0].response else {}
        most |= {"sensitivity": False} if plan.only else {"probe": "repeat"}
        capture_many(model, tokenizer, missing, folder, o_proj=True, **most)
    for prompt, path in zip(wanted, paths, strict=True):
        recorded = open_trace(path).meta["text"]
        if prompt.content not in (recorded["prompt"], recorded["messages"]):
            raise SystemExit(f"{path} is a trace of another prompt; remove it and run again")
    return paths


def in_memory(path: Path) -> Trace:
    """A stored trace with its arrays in memory, for it is read some hundred times."""
    trace = open_trace(path)
    more = ("attn_out", "lse", "o_proj", "tokens", "probe_q", "probe_k")
    given: dict[str, Any] = {name: trace.read(name) for name in more if trace.has(name)}
    return Trace.from_arrays(
        *map(trace.read, "qkv"),
        **given,
        prompt_len=trace.prompt_len,
        rope=trace.ropes[0],
        scale=trace.formulas[0].scale,
        token_text=trace.token_text,
        name=trace.name,
        layer_ids=trace.layer_ids,
        meta=trace.meta,
    )


def judge_of(plan: Plan, trace: Trace) -> Judge:
    """The judge of replays of a trace."""
    return Judge(RunningModel(_model(plan)[0]), trace)
