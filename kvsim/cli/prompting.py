"""`kvsim prompts`: prompts of the shipped model's language, each with its only right response."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvsim.cli.values import OptionError
from kvsim.errors import OutputError
from kvsim.tiny.tasks import TASKS, TOKENS
from kvsim.tiny.vocabulary import DOMAINS

if TYPE_CHECKING:
    from kvsim.tiny.tasks import Sample


def prompts(
    task: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(TASKS), help="What is asked for; without it, all tasks in turn."
        ),
    ] = None,
    level: Annotated[
        int | None,
        typer.Option(
            metavar=f"1..{len(TOKENS)}",
            help="How long page and response are and how far back facts are looked up, from about "
            f"{TOKENS[0][0]} to {TOKENS[-1][1]} tokens; without it, sizes as below.",
        ),
    ] = None,
    domain: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(DOMAINS),
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
        Path | None, typer.Option(metavar="FILE.jsonl", help="Write to a file instead.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a file that is there already.")
    ] = False,
) -> None:
    """Write prompts for the shipped model, whose right answers are known.

    Prints a JSON object per line: a file of them is what `kvsim capture --prompts` takes. A level
    sets all sizes; without one they can be given, or have defaults that make about 500 tokens.
    """
    from kvsim.tiny.tasks import prompts as draw

    _check_output(out, overwrite=overwrite)
    samples = draw(
        n,
        seed,
        task=task,
        level=level,
        domain=domain,
        facts=facts,
        lines=lines,
        filler=filler,
        kinds=kinds,
        report=report,
        cycle=cycle,
    )
    rows = [json.dumps(one.row(_name(one, seed, i))) for i, one in enumerate(samples)]
    if out is None:
        typer.echo("\n".join(rows))
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("\n".join(rows) + "\n", "utf-8")
    lengths = sorted(one.tokens for one in samples)
    typer.echo(f"{out}: {n} prompts, with their responses {lengths[0]} to {lengths[-1]} tokens")


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
