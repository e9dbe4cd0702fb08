"""`kvsim prompts`: prompts with answers, in the shipped models' language or on real text."""

from __future__ import annotations

import json
import math
import zlib
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsim.cli.shared import OptionError, Overwrite, path_option, several
from kvsim.files import check_output, write_file
from kvsim.schema import plural
from kvsim.studies.language.tasks import TASKS, TOKENS
from kvsim.text.tasks import DEPTHLESS
from kvsim.text.tasks import TASKS as TEXT_TASKS
from kvsim.tiny import MODELS
from kvsim.tiny.vocabulary import DOMAINS

if TYPE_CHECKING:
    from kvsim.studies.language.tasks import Sample
    from kvsim.text.tasks import Sample as TextSample


def prompts(
    model: Annotated[
        str,
        typer.Option(
            help="'tiny' or 'tiny-deep', whose language the prompts are in; or 'smollm2', a local "
            "folder, a GGUF file or a hub id of a model for real text, of which only the "
            "tokenizer is loaded."
        ),
    ] = "tiny",
    task: Annotated[
        list[str] | None,
        several(
            "NAME[,...]",
            f"The question; without it, all tasks in turn. tiny: {', '.join(TASKS)}. Real "
            f"text: {', '.join(TEXT_TASKS)}.",
        ),
    ] = None,
    level: Annotated[
        list[str] | None,
        several(
            f"1..{len(TOKENS)}[,...]",
            "The length of page and response, and the distance of lookups, from about "
            f"{TOKENS[0][0]} to {TOKENS[-1][1]} tokens; without it, the sizes below.",
        ),
    ] = None,
    domain: Annotated[
        list[str] | None,
        several(
            f"{'|'.join(DOMAINS)}[,...]",
            "The subject of the words; without it, all domains in turn.",
        ),
    ] = None,
    length: Annotated[
        list[str] | None,
        several(
            "N[,...]",
            "Real text: tokens of the encoded prompt, at most; a prompt is a few tokens "
            "shorter. [default: 512]",
        ),
    ] = None,
    depth: Annotated[
        list[str] | None,
        several("0..1[,...]", "Real text: the share of the text before the needle. [default: 0.5]"),
    ] = None,
    context: Annotated[
        bool,
        typer.Option(
            "--context",
            help="Real text: say where the context ends and the question begins, for "
            "`kvsim replay --compress context`.",
        ),
    ] = False,
    n: Annotated[int, typer.Option(min=1, help="The number of prompts.")] = 10,
    seed: Annotated[int, typer.Option(help="The same seed gives the same prompts.")] = 0,
    facts: Annotated[int | None, typer.Option(help="Facts on the page.")] = None,
    lines: Annotated[
        int | None, typer.Option(help="Lines of the response; get and join: at most one per fact.")
    ] = None,
    out: Annotated[Path | None, path_option("FILE.jsonl", "Write to a file instead.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Write prompts with their right answers.

    Prints a JSON object per line, in the format of `kvsim capture --prompts`. Several tasks,
    levels, domains, lengths or depths alternate in all combinations. For the shipped models a level
    sets all sizes; without a level, sizes have defaults of about 500 tokens. For other models the
    text is Python's documentation; docs/models.md says which tasks SmolLM2 solves.
    """
    if out is not None:
        check_output(out, overwrite=overwrite)
    shipped = model in MODELS
    of_text = {"length": length, "depth": depth, "context": context or None}
    of_pages = {"level": level, "domain": domain, "facts": facts, "lines": lines}
    unread = of_text if shipped else of_pages
    if given := [name for name, value in unread.items() if value is not None]:
        kind = "models for real text, as smollm2" if shipped else "tiny and tiny-deep"
        raise OptionError(
            f"--{given[0]} is an option of {kind}, but --model is {model}; leave it out"
        )
    rows = list[dict[str, Any]]()
    if shipped:
        for sample in _on_pages(n, seed, task, level, domain, facts=facts, lines=lines):
            parts: tuple[object, ...] = (sample.task, sample.level, sample.domain)
            rows.append(sample.row(_name(parts, seed, len(rows))))
    else:
        for text in _on_text(model, n, seed, task, length or ["512"], depth):
            parts = (text.task, text.length, None if text.depth is None else f"d{text.depth:g}")
            rows.append(text.row(_name(parts, seed, len(rows)), split=context))
    written = "\n".join(map(json.dumps, rows))
    if out is None:
        typer.echo(written)
        return
    write_file(out, written + "\n", overwrite=overwrite)
    what = "with responses " if shipped else ""
    low, *_, high = sorted(2 * [row["tokens"] for row in rows])
    tokens = plural(high, "token") if low == high else f"{low} to {high} tokens"
    typer.echo(f"{out}: {plural(n, 'prompt')}, {what}{tokens}")


def _on_text(
    model: str,
    n: int,
    seed: int,
    tasks: Sequence[str] | None,
    lengths: Sequence[str],
    depths: Sequence[str] | None,
) -> list[TextSample]:
    from kvsim.recorder.encoding import token_count
    from kvsim.recorder.loading import load_tokenizer
    from kvsim.text.tasks import sample

    sizes, places = _numbers("length", lengths, int), _numbers("depth", depths or ["0.5"], float)
    chosen = tasks or TEXT_TASKS
    if depths and {*DEPTHLESS}.issuperset(chosen):
        raise OptionError(f"--depth: {chosen[0]} has no needle; leave --depth out")
    count = partial(token_count, tokenizer=load_tokenizer(model))
    turns = _turns(chosen, sizes, places)
    drawn: Counter[tuple[Any, ...]] = Counter()
    samples = []
    for i in range(n):
        task, length, depth = turns[i % len(turns)]
        at = None if task in DEPTHLESS else depth
        index = drawn[task, length, at]
        drawn[task, length, at] += 1
        samples.append(sample(seed, index, count, task=task, length=length, depth=at))
    return samples


def _numbers(option: str, texts: Sequence[str], kind: type[int | float]) -> list[Any]:
    try:
        return list(dict.fromkeys(map(kind, texts)))
    except ValueError:
        raise OptionError(f"--{option} is {','.join(texts)!r}; expected numbers") from None


def _on_pages(
    n: int,
    seed: int,
    tasks: Sequence[str] | None,
    levels: Sequence[str] | None,
    domains: Sequence[str] | None,
    **sizes: Any,
) -> list[Sample]:
    """Draw prompts of all combinations in turn, each from its own seed; None means all."""
    from kvsim.studies.language.tasks import prompts as draw

    numbers = None if levels is None else _numbers("level", levels, int)
    choices = {"task": tasks, "level": numbers, "domain": domains}
    if all(values is None or len(values) == 1 for values in choices.values()):
        fixed: dict[str, Any] = {name: values[0] for name, values in choices.items() if values}
        return draw(n, seed, **fixed, **sizes)
    turns = _turns(tasks or TASKS, numbers or [None], domains or list(DOMAINS))
    drawn = {}
    for task, level, domain in turns:
        own = zlib.crc32(f"{seed} {task} {level} {domain}".encode())
        given = {"task": task, "level": level, "domain": domain}
        drawn[task, level, domain] = draw(1 + n // len(turns), own, **given, **sizes)
    return [drawn[turns[i % len(turns)]][i // len(turns)] for i in range(n)]


def _turns(*choices: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return every combination of the choices once, in an order that alternates all values."""
    turns: list[tuple[Any, ...]] = [()]
    for choice in choices:
        cycle = math.lcm(len(turns), len(choice))  # after it the pairs would repeat: shift by one
        turns = [
            (*turns[i % len(turns)], choice[(i + i // cycle) % len(choice)])
            for i in range(len(turns) * len(choice))
        ]
    return turns


def _name(parts: Sequence[object], seed: int, index: int) -> str:
    """Return a name such as `walk-2-paint-s0-003`, unique within a file; without parts of None."""
    given = [str(part) for part in parts if part is not None]
    return "-".join([*given, f"s{seed}", f"{index:03d}"])
