"""The traces: prompts in the language of the shipped model, recorded, and read into memory."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

from kvsim import Trace, open_trace
from kvsim.recorder import Prompt, capture_many, load_model
from kvsim.tiny import PATH, tasks
from kvsim.tiny.vocabulary import DOMAINS
from results_page.plan import Plan

#: Tasks of the prompts, in turn: those whose response is long enough for events.
VERBS = tuple(task for task in tasks.TASKS if task != "needle")


@cache
def weights() -> str:
    """SHA-256 of the weights of `tiny`."""
    return hashlib.sha256((PATH / "model.safetensors").read_bytes()).hexdigest()


def kind(number: int) -> tuple[str, str]:
    """Task and domain of a prompt; number 0 is the one for calibration."""
    domains = list(DOMAINS)
    return VERBS[number % len(VERBS)], domains[number % len(domains)]


def samples(plan: Plan) -> list[Prompt]:
    """The prompts, and before them the one for calibration alone."""
    label = f"{weights()[:8]}-{plan.level or plan.facts}-{plan.seed}"
    size: dict[str, Any] = {"level": plan.level}
    if plan.level is None:
        size = {"facts": plan.facts, "lines": plan.lines}
    found: list[Prompt] = []
    for i in range(plan.prompts + 1):
        task, domain = kind(i)
        (one,) = tasks.prompts(1, 1000 * plan.seed + i, task=task, domain=domain, **size)
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
