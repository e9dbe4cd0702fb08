"""`kvsim prompts`: prompts of the shipped model's language, each with its only right response."""

from __future__ import annotations

import json
import math
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsim.cli.values import OptionError, local_path, split
from kvsim.errors import OutputError
from kvsim.tiny.tasks import TASKS, TOKENS
from kvsim.tiny.vocabulary import DOMAINS

if TYPE_CHECKING:
    from kvsim.tiny.tasks import Sample


def prompts(
    task: Annotated[
        list[str] | None,
        typer.Option(
            metavar=f"{'|'.join(TASKS)}[,...]",
            help="What is asked for; without it, all tasks in turn.",
        ),
    ] = None,
    level: Annotated[
        list[str] | None,
        typer.Option(
            metavar=f"1..{len(TOKENS)}[,...]",
            help="How long page and response are and how far back facts are looked up, from about "
            f"{TOKENS[0][0]} to {TOKENS[-1][1]} tokens; without it, sizes as below.",
        ),
    ] = None,
    domain: Annotated[
        list[str] | None,
        typer.Option(
            metavar=f"{'|'.join(DOMAINS)}[,...]",
            help="What the words are about; without it, all domains in turn.",
        ),
    ] = None,
    n: Annotated[int, typer.Option(min=1, help="How many prompts.")] = 10,
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
        int | None, typer.Option(help="Lines after which a walk comes back to a fact.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(parser=local_path, metavar="FILE.jsonl", help="Write to a file instead."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a file that is there already.")
    ] = False,
) -> None:
    """Write prompts for the shipped model, whose right answers are known.

    Prints a JSON object per line: a file of them is what `kvsim capture --prompts` takes. Of
    several tasks, levels or domains all combinations take turns. A level sets all sizes; without
    one they can be given, or have defaults that make about 500 tokens.
    """
    _check_output(out, overwrite=overwrite)
    tasks = None if task is None else split(task, "--task")
    levels = None if level is None else _numbers(level)
    domains = None if domain is None else split(domain, "--domain")
    sizes = {
        "facts": facts,
        "lines": lines,
        "filler": filler,
        "kinds": kinds,
        "report": report,
        "cycle": cycle,
    }
    samples = _samples(n, seed, tasks, levels, domains, sizes)
    rows = [json.dumps(one.row(_name(one, seed, i))) for i, one in enumerate(samples)]
    if out is None:
        typer.echo("\n".join(rows))
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("\n".join(rows) + "\n", "utf-8")
    lengths = sorted(one.tokens for one in samples)
    typer.echo(f"{out}: {n} prompts, with their responses {lengths[0]} to {lengths[-1]} tokens")


def _numbers(given: Sequence[str]) -> list[int]:
    texts = split(given, "--level")
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
    """Prompts of all combinations in turn; None for all tasks, all domains and no level.

    Each of several combinations has random numbers of its own, so that no two share a page.
    """
    from kvsim.tiny.tasks import prompts as draw

    if all(given is None or len(given) == 1 for given in (tasks, levels, domains)):
        one = {"task": tasks, "level": levels, "domain": domains}
        known: dict[str, Any] = {name: given[0] for name, given in one.items() if given}
        return draw(n, seed, **known, **sizes)
    turns = _turns(tasks or TASKS, levels or [None], domains or list(DOMAINS))
    shares = Counter(turns[i % len(turns)] for i in range(n))
    drawn = {}
    for turn in turns:
        task, level, domain = turn
        own = zlib.crc32(f"{seed} {task} {level} {domain}".encode())
        # one at least, so that a wrong value is an error also where its turn does not come
        count = max(1, shares[turn])
        drawn[turn] = iter(draw(count, own, task=task, level=level, domain=domain, **sizes))
    return [next(drawn[turns[i % len(turns)]]) for i in range(n)]


def _turns(*choices: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Every combination of the choices once, in an order in which all values take turns."""
    found: list[tuple[Any, ...]] = [()]
    for choice in choices:
        cycle = math.lcm(len(found), len(choice))  # then the pairs would come again: one further
        found = [
            (*found[i % len(found)], choice[(i + i // cycle) % len(choice)])
            for i in range(len(found) * len(choice))
        ]
    return found


def _name(sample: Sample, seed: int, index: int) -> str:
    """Such as `walk-2-paint-s0-003`, unique within a file."""
    level = [] if sample.level is None else [str(sample.level)]
    return "-".join([sample.task, *level, sample.domain, f"s{seed}", f"{index:03d}"])


def _check_output(out: Path | None, *, overwrite: bool) -> None:
    if out is None:
        if overwrite:
            raise OptionError("--overwrite is about the file of --out; give --out FILE.jsonl too")
        return
    if out.exists() and not out.is_file():
        raise OutputError(f"{out} exists and is no file; give another --out, nothing was changed")
    if out.exists() and not overwrite:
        raise OutputError(
            f"{out} exists; give another --out, or --overwrite to replace it, nothing was changed"
        )
    if out.parent.exists() and not out.parent.is_dir():
        raise OptionError(f"{out.parent} is a file; expected a folder, give another --out")
