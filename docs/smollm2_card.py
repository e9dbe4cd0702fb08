# ruff: noqa: INP001 - a script, not a module
"""Which tasks on real text does SmolLM2 solve with the full cache? The tables of its card.

    python docs/smollm2_card.py measure [--n 30] [--length 512 1024] [--device cuda]
    python docs/smollm2_card.py write

The first form appends a line of JSON for each prompt that the results lack: it may be stopped and
run again, and a later run with more lengths or prompts adds to them. The second writes the tables
of docs/smollm2.md, and measures nothing.

Responses are greedy and end with their first line. The formulations of the tasks were chosen on
prompts of other seeds.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from scipy.stats import binomtest
from study import append, filled, read, run_command

from apps.tiny.card import table as markdown
from kvsim.recorder.models import load_model
from kvsim.recorder.prompts import token_count
from kvsim.text.answers import is_right
from kvsim.text.tasks import DEPTHLESS, TASKS, sample

RESULTS = Path(__file__).with_name("smollm2-results.jsonl")
PAGE = Path(__file__).with_name("smollm2.md")
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
SEED = 1
NEW_TOKENS = 24
#: Share of right answers from which on a task counts as a test of policies.
SOLVED = 0.8


def cells(lengths: list[int], tasks: list[str], n: int) -> Iterator[tuple[int, str, float | None]]:
    """Yield (length, task, depth) with `n` prompts of each task and length in all, in turns."""
    for length in lengths:
        for _ in range(n // len(DEPTHS)):
            for depth in DEPTHS:
                for task in tasks:
                    yield length, task, None if task in DEPTHLESS else depth


def measure(args: argparse.Namespace) -> None:
    """Append a line for each prompt that the results lack."""
    model, tokenizer = load_model(args.model, device=args.device)

    def ends_line(ids: torch.Tensor, _scores: object) -> torch.Tensor:
        return torch.tensor(["\n" in tokenizer.decode(ids[0, -1:])], device=ids.device)

    names = ("length", "task", "depth", "index")
    done = {tuple(row[name] for name in names) for row in read(args.out)}
    seen: dict[Any, int] = {}
    for cell in cells(args.length, args.task, args.n):
        length, task, depth = cell
        index = seen[cell] = seen.get(cell, -1) + 1
        if (*cell[:2], depth, index) in done:
            continue
        drawn = sample(
            SEED,
            index,
            lambda prompt: token_count(prompt, tokenizer),
            task=task,
            length=length,
            depth=depth,
        )
        began = time.perf_counter()
        chat = isinstance(drawn.prompt, list)
        text = drawn.prompt
        if chat:
            text = tokenizer.apply_chat_template(text, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=not chat, return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            out = model.generate(
                ids.to(model.device),
                attention_mask=torch.ones_like(ids, device=model.device),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                stopping_criteria=[ends_line],
                pad_token_id=0,
            )
        response = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        response = response.partition("\n")[0]
        row = {"length": length, "task": task, "depth": depth, "index": index}
        row |= {"seed": SEED, "tokens": drawn.tokens, "answer": drawn.answer}
        row |= {"response": response, "right": is_right(response, drawn.answer or "")}
        row["seconds"] = round(time.perf_counter() - began, 2)
        append(args.out, [row])


def table(rows: Sequence[dict[str, Any]], column: str, tasks: Sequence[str]) -> str:
    """Return a table of right answers: a row per task, a column per value."""
    values = sorted({row[column] for row in rows if row[column] is not None})
    counts: dict[Any, list[bool]] = defaultdict(list)
    for row in rows:
        counts[row["task"], row[column]].append(row["right"])
    lines = {task: [cell(counts[task, value]) for value in values] for task in tasks}
    shown = [[f"`{task}`", *cells] for task, cells in lines.items() if any(cells)]
    return markdown(["task", *map(str, values)], shown)


def cell(right: Sequence[bool]) -> str:
    """Return a share with its Wilson interval and its number of prompts."""
    if not right:
        return ""
    ends = binomtest(sum(right), len(right)).proportion_ci(0.95, method="wilson")
    share = sum(right) / len(right)
    text = f"{share:.0%} ({ends.low:.0%} to {ends.high:.0%}; {len(right)})"
    return f"**{text}**" if share >= SOLVED else text


def page(text: str, rows: Sequence[dict[str, Any]]) -> str:
    """Return the page with its generated parts."""
    depths = table(rows, "depth", [task for task in TASKS if task not in DEPTHLESS])
    return filled(text, {"lengths": table(rows, "length", TASKS), "depths": depths})


def write(_: argparse.Namespace) -> None:
    """Write the generated parts of the page."""
    PAGE.write_text(page(PAGE.read_text(), read(RESULTS)))


MEASURE = {
    "--out": {"type": Path, "default": RESULTS},
    "--model": {"default": "smollm2"},
    "--device": {"default": "cpu"},
    "--n": {"type": int, "default": 30},
    "--length": {"type": int, "nargs": "+", "default": [512, 1024, 2048]},
    "--task": {"nargs": "+", "default": [task for task in TASKS if task != "text"]},
}

if __name__ == "__main__":
    run_command(__doc__, {"measure": measure, "write": write}, {"measure": MEASURE})
