"""`kvsim prompts`: prompts in the language of the shipped models, with their responses."""

from __future__ import annotations

import json
import math
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsim.cli.values import OptionError, Overwrite, path_option, split
from kvsim.files import check_output, write_file
from kvsim.tiny.tasks import TASKS, TOKENS
from kvsim.tiny.vocabulary import DOMAINS

if TYPE_CHECKING:
    from kvsim.tiny.tasks import Sample


def prompts(
    task: Annotated[
        list[str] | None,
        typer.Option(
            callback=split,
            metavar=f"{'|'.join(TASKS)}[,...]",
            help="The question; without it, all tasks in turn.",
        ),
    ] = None,
    level: Annotated[
        list[str] | None,
        typer.Option(
            callback=split,
            metavar=f"1..{len(TOKENS)}[,...]",
            help="The length of page and response, and the distance of lookups, from about "
            f"{TOKENS[0][0]} to {TOKENS[-1][1]} tokens; without it, the sizes below.",
        ),
    ] = None,
    domain: Annotated[
        list[str] | None,
        typer.Option(
            callback=split,
            metavar=f"{'|'.join(DOMAINS)}[,...]",
            help="The subject of the words; without it, all domains in turn.",
        ),
    ] = None,
    n: Annotated[int, typer.Option(min=1, help="The number of prompts.")] = 10,
    seed: Annotated[int, typer.Option(help="The same seed gives the same prompts.")] = 0,
    facts: Annotated[int | None, typer.Option(help="Facts on the page.")] = None,
    lines: Annotated[
        int | None, typer.Option(help="Lines of the response; get and join: at most one per fact.")
    ] = None,
    filler: Annotated[
        float | None, typer.Option(help="Sentences of filler before a fact, on average.")
    ] = None,
    kinds: Annotated[int | None, typer.Option(help="Kinds in the key.")] = None,
    report: Annotated[int | None, typer.Option(help="Sums that the report repeats.")] = None,
    cycle: Annotated[
        int | None, typer.Option(help="Lines after which a walk returns to a fact.")
    ] = None,
    out: Annotated[Path | None, path_option("FILE.jsonl", "Write to a file instead.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Write prompts for the shipped models, with the right answers.

    Prints a JSON object per line, in the format of `kvsim capture --prompts`. Several tasks, levels
    or domains alternate in all combinations. A level sets all sizes; without a level, sizes have
    defaults of about 500 tokens.
    """
    if out is not None:
        check_output(out, overwrite=overwrite)
    elif overwrite:
        raise OptionError("--overwrite is about the file of --out; give --out FILE.jsonl too")
    levels = None if level is None else _numbers(level)
    sizes: dict[str, Any] = {"facts": facts, "lines": lines, "filler": filler}
    sizes |= {"kinds": kinds, "report": report, "cycle": cycle}
    samples = _samples(n, seed, task, levels, domain, sizes)
    rows = [json.dumps(sample.row(_name(sample, seed, i))) for i, sample in enumerate(samples)]
    if out is None:
        typer.echo("\n".join(rows))
        return
    write_file(out, "\n".join(rows) + "\n", overwrite=overwrite)
    lengths = sorted(sample.tokens for sample in samples)
    typer.echo(f"{out}: {n} prompts, with their responses {lengths[0]} to {lengths[-1]} tokens")


def _numbers(texts: Sequence[str]) -> list[int]:
    wrong = [text for text in texts if not text.isdecimal()]
    if wrong:
        raise OptionError(f"--level is {wrong[0]!r}; expected numbers from 1 to {len(TOKENS)}")
    return list(dict.fromkeys(map(int, texts)))


def _samples(
    n: int,
    seed: int,
    tasks: Sequence[str] | None,
    levels: Sequence[int] | None,
    domains: Sequence[str] | None,
    sizes: Mapping[str, Any],
) -> list[Sample]:
    """Draw prompts of all combinations in turn; None means all tasks, all domains, no level.

    Each of several combinations has its own seed, so that no two share a page.
    """
    from kvsim.tiny.tasks import prompts as draw

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


def _name(sample: Sample, seed: int, index: int) -> str:
    """Return a name such as `walk-2-paint-s0-003`, unique within a file."""
    level = [] if sample.level is None else [str(sample.level)]
    return "-".join([sample.task, *level, sample.domain, f"s{seed}", f"{index:03d}"])
