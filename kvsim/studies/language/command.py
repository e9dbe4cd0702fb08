"""`kvsim prompts`: prompts with answers, in the shipped models' language or on real text."""

from __future__ import annotations

import json
import math
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsim.cli.groups import grouped
from kvsim.cli.shared import OptionError, Overwrite, path_option, several
from kvsim.errors import suggest
from kvsim.files import check_output, write_file
from kvsim.schema import plural
from kvsim.studies.language.tasks import TASKS, TOKENS
from kvsim.text.ruler import RULER
from kvsim.text.tasks import DEPTHLESS
from kvsim.text.tasks import TASKS as TEXT_TASKS
from kvsim.tiny import MODELS
from kvsim.tiny.vocabulary import DOMAINS

#: RULER's tasks.
_RULER = tuple(f"ruler:{task}" for task in RULER)

if TYPE_CHECKING:
    from kvsim.studies.language.tasks import Sample
    from kvsim.text.ruler import RulerSample
    from kvsim.text.tasks import Sample as TextSample


@dataclass(frozen=True)
class Sizes:
    """Sizes of a page and its response, where they are not those of a level."""

    facts: Annotated[int | None, typer.Option(help="Facts on the page.")] = None
    lines: Annotated[
        int | None, typer.Option(help="Lines of the response; get and join: at most one per fact.")
    ] = None


@grouped
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
            f"text: {', '.join(TEXT_TASKS)}; RULER's: {', '.join(_RULER)}.",
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
            "shorter; of RULER's tasks, those of prompt and response. [default: 512]",
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
    *,
    page: Sizes,
    out: Annotated[Path | None, path_option("FILE.jsonl", "Write to a file instead.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Write prompts with their right answers.

    Prints a JSON object per line, in the format of `kvsim capture --prompts`. Several tasks,
    levels, domains, lengths or depths alternate in all combinations. For the shipped models a level
    sets all sizes; without a level, sizes have defaults of about 500 tokens. For other models the
    text is Python's documentation; docs/smollm2.md says which tasks SmolLM2 solves.
    """
    if out is not None:
        check_output(out, overwrite=overwrite)
    elif overwrite:
        raise OptionError("--overwrite is about the file of --out; give --out FILE.jsonl too")
    sizes = dict(vars(page))
    shipped = model in MODELS
    of_text = {"length": length, "depth": depth, "context": context or None}
    of_pages = {"domain": domain, **sizes}
    unread = of_text if shipped else {"level": level, **of_pages}
    given = [name for name, value in unread.items() if value is not None]
    if given:
        kind = (
            "tiny and tiny-deep" if given[0] not in of_text else "models for real text, as smollm2"
        )
        raise OptionError(
            f"--{given[0]} is an option of {kind}, but --model is {model}; leave it out"
        )
    rows, lengths = [], []
    if shipped:
        expected = f"numbers from 1 to {len(TOKENS)}"
        levels = None if level is None else _numbers("level", level, int, expected)
        for i, sample in enumerate(_samples(n, seed, task, levels, domain, sizes)):
            parts = (sample.task, sample.level, sample.domain)
            rows.append(sample.row(_name(parts, seed, i)))
            lengths.append(sample.tokens)
    else:
        for i, text in enumerate(_on_text(model, n, seed, task, length, depth)):
            if context and not text.question:
                raise OptionError(f"--context: {text.task} has no question; leave --context out")
            share = None if text.depth is None else f"d{text.depth:g}"
            name = _name((text.task, text.length, share), seed, i)
            rows.append(text.row(name, split=context))
            lengths.append(text.tokens)
    written = "\n".join(map(json.dumps, rows))
    if out is None:
        typer.echo(written)
        return
    write_file(out, written + "\n", overwrite=overwrite)
    what = "with their responses " if shipped else ""
    low, high = min(lengths), max(lengths)
    tokens = plural(high, "token") if low == high else f"{low} to {high} tokens"
    typer.echo(f"{out}: {plural(n, 'prompt')}, {what}{tokens}")


def _on_text(
    model: str,
    n: int,
    seed: int,
    tasks: Sequence[str] | None,
    lengths: Sequence[str] | None,
    depths: Sequence[str] | None,
) -> list[TextSample | RulerSample]:
    from kvsim.text.ruler import ruler_sample
    from kvsim.text.tasks import sample

    sizes = _numbers("length", lengths or ["512"], int, "whole numbers of tokens")
    places = _numbers("depth", depths or ["0.5"], float, "numbers from 0 to 1")
    chosen = tasks or TEXT_TASKS
    for task in chosen:
        if task not in (*TEXT_TASKS, *_RULER):
            near = suggest(task, (*TEXT_TASKS, *_RULER))
            raise OptionError(
                f"--task is {task!r}{near}; expected {', '.join((*TEXT_TASKS, *_RULER))}"
            )
    if depths and all(task in (*DEPTHLESS, *_RULER) for task in chosen):
        raise OptionError(f"--depth: {chosen[0]} has no needle; leave --depth out")

    from kvsim.cli.show import echo_error
    from kvsim.recorder.models import load_tokenizer
    from kvsim.recorder.prompts import token_count

    tokenizer = load_tokenizer(model, note=echo_error)
    count = partial(token_count, tokenizer=tokenizer)
    turns = _turns(chosen, sizes, places)
    drawn: Counter[tuple[Any, ...]] = Counter()
    samples: list[TextSample | RulerSample] = []
    for i in range(n):
        task, length, depth = turns[i % len(turns)]
        at = None if task in (*DEPTHLESS, *_RULER) else depth
        index = drawn[task, length, at]
        drawn[task, length, at] += 1
        if task in _RULER:
            name = task.removeprefix("ruler:")
            samples.append(ruler_sample(seed, index, count, task=name, length=length))
        else:
            samples.append(sample(seed, index, count, task=task, length=length, depth=at))
    return samples


def _numbers(
    option: str, texts: Sequence[str], kind: type[int | float], expected: str
) -> list[Any]:
    out = []
    for text in texts:
        try:
            out.append(kind(text))
        except ValueError:
            raise OptionError(f"--{option} is {text!r}; expected {expected}") from None
    return list(dict.fromkeys(out))


def _samples(
    n: int,
    seed: int,
    tasks: Sequence[str] | None,
    levels: Sequence[int] | None,
    domains: Sequence[str] | None,
    sizes: Mapping[str, Any],
) -> list[Sample]:
    """Draw prompts of all combinations in turn, each from its own seed; None means all."""
    from kvsim.studies.language.tasks import prompts as draw

    choices = {"task": tasks, "level": levels, "domain": domains}
    if all(values is None or len(values) == 1 for values in choices.values()):
        fixed: dict[str, Any] = {name: values[0] for name, values in choices.items() if values}
        return draw(n, seed, **fixed, **sizes)
    turns = _turns(tasks or TASKS, levels or [None], domains or list(DOMAINS))
    shares = Counter(turns[i % len(turns)] for i in range(n))
    drawn = {}
    for turn in turns:
        task, level, domain = turn
        turn_seed = zlib.crc32(f"{seed} {task} {level} {domain}".encode())
        # at least one, so that a bad value is an error even if its turn does not come
        count = max(1, shares[turn])
        drawn[turn] = iter(draw(count, turn_seed, task=task, level=level, domain=domain, **sizes))
    return [next(drawn[turns[i % len(turns)]]) for i in range(n)]


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
