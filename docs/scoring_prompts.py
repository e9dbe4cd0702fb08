# ruff: noqa: INP001 - beside the script that it belongs to
"""The prompts of scoring.py, by kind of workload."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from scoring_plan import Workload

from claims.plan import FULL
from claims.traces import ANSWERS, DEPTHS, SHEET, samples
from kvsim.recorder import Prompt, Turn
from kvsim.recorder.encoding import token_count
from kvsim.studies.language.tasks import make
from kvsim.text.haystack import draw
from kvsim.text.tasks import sample


def prompt_of(workload: Workload, number: int, tokenizer: Any) -> Prompt:
    """Prompt `number` of a workload, from 0."""
    name = f"{workload.name}-{number:02}"
    if workload.model == "tiny":
        if workload.kind == "needles":
            return _ledger(40 + number, name)
        plan = replace(FULL, seed=65, prompts=workload.prompts)
        return replace(samples(plan)[number + 1], id=name)
    return PROMPTS[workload.kind](workload, number, name, tokenizer)


#: Lengths of needles of tiny, and how far one may be from its depth, and a prompt from its length.
_LENGTHS, _AWAY, _OFF = (300, 450, 650, 900), 0.12, 0.06
#: Facts on a page of tiny, two of which are asked for.
_PAGE = 12


def _ledger(number: int, name: str) -> Prompt:
    """A needle in the language of tiny: both facts that are asked for stand near the depth."""
    at, depth_at = divmod(number, len(DEPTHS))
    turn, length_at = divmod(at, len(_LENGTHS))
    length, depth = _LENGTHS[length_at], DEPTHS[depth_at]
    rng = random.Random(f"needle 9 {length} {depth} {turn}")
    filler = (length - 88) / (6.5 * _PAGE)  # sentences before each fact
    while True:
        drawn = make(rng, task="needle", facts=_PAGE, lines=2, kinds=6, filler=filler)
        words = drawn.prompt.split()
        starts = [read.path[0] - 1 for read in drawn.retrievals if read.purpose == "successor"]
        near = all(abs(start / words.index("key") - depth) <= _AWAY for start in starts)
        if near and abs(drawn.prompt_words / length - 1) <= _OFF:
            break
    needles = tuple(" ".join(words[start : start + 3]) for start in starts)
    labels = {"task": "needle", "length": length, "depth": depth}
    return Prompt(name, drawn.prompt, drawn.answer, labels=labels, needle=needles)


def _cut(workload: Workload, name: str, row: dict[str, Any], tokenizer: Any) -> Prompt:
    """A question, and the beginning of what the 1.5B wrote with the full cache."""
    ids = tokenizer(row["response"], add_special_tokens=False)["input_ids"]
    question = [{"role": "user", "content": row["prompt"]}]
    return Prompt(name, question, response=ids[: workload.response])


def _written(sheet: bool) -> list[dict[str, Any]]:
    rows = map(json.loads, ANSWERS.read_text("utf-8").splitlines())
    return [
        row
        for row in rows
        if row["model"] == "1.5B" and row.get("ended") and row.get("prompt")
        if (row["task"] == SHEET) == sheet and (sheet or row["right"])
        if row["response_tokens"] >= 200
    ]


def _answer(workload: Workload, number: int, name: str, tokenizer: Any) -> Prompt:
    """A right answer of at least 200 tokens; the first was used to measure seconds."""
    return _cut(workload, name, _written(sheet=False)[number + 1], tokenizer)


def _sheet(workload: Workload, number: int, name: str, tokenizer: Any) -> Prompt:
    """Answers to three questions, right or not."""
    return _cut(workload, name, _written(sheet=True)[number], tokenizer)


def _needle(_: Workload, number: int, name: str, tokenizer: Any) -> Prompt:
    """Needles and quotes in 512 tokens, in turn."""
    count = partial(token_count, tokenizer=tokenizer)
    task, depth = ("needle", "quote")[number % 2], DEPTHS[number % len(DEPTHS)]
    one = sample(65, number, count, task=task, length=512, depth=depth)
    return Prompt(name, one.prompt, one.answer, needle=one.needles)


def _document(workload: Workload, number: int, name: str, tokenizer: Any) -> Prompt:
    """Text of 1,024 tokens, and the text that continues it."""
    count = partial(token_count, tokenizer=tokenizer)
    one = sample(65, number, count, task="text", length=1024)
    ids = tokenizer(one.response, add_special_tokens=False)["input_ids"]
    return Prompt(name, one.prompt, response=ids[: workload.response])


#: Tokens of a document with three codes, their depths, and what they may be of.
_LENGTH, _PLACES = 900, (0.2, 0.5, 0.8)
_THINGS = ("red door", "blue gate", "green box", "white tower", "black vault", "silver drawer")


def _turns(_: Workload, number: int, name: str, tokenizer: Any) -> Prompt:
    """Three questions in any order on one document, others than those of turns.md."""
    rng = random.Random(f"turns {100 + number}")
    codes = {thing: str(rng.randrange(10_000, 100_000)) for thing in rng.sample(_THINGS, 3)}
    needles = [
        (depth, f"The secret code of the {thing} is {code}.")
        for depth, (thing, code) in zip(_PLACES, codes.items(), strict=True)
    ]
    filler = draw(rng, _LENGTH)
    words = next(
        n
        for n in range(_LENGTH, 0, -10)
        if token_count(filler.last_words(n).text(needles), tokenizer) <= _LENGTH
    )
    turns = [
        Turn(
            f"What is the secret code of the {thing}?",
            answer=code,
            answer_prefix=f"The secret code of the {thing} is",
            labels={"depth": depth},
        )
        for depth, (thing, code) in zip(_PLACES, codes.items(), strict=True)
    ]
    rng.shuffle(turns)
    first, *later = turns
    return Prompt(
        name,
        str(first.question),
        answer=first.answer,
        context=f"{filler.last_words(words).text(needles)}\n\n",
        answer_prefix=first.answer_prefix,
        turns=later,
    )


PROMPTS: dict[str, Callable[..., Prompt]] = {
    "answers": _answer,
    "sheets": _sheet,
    "needles": _needle,
    "documents": _document,
    "turns": _turns,
}
