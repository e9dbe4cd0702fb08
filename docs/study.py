# ruff: noqa: INP001 - a script, not a module
"""What scripts of studies share: lines of results, parts of pages, pictures, the command line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from apps.tiny.card import fill
from drawing import small
from kvsim.sweeps import Run

ROOT = Path(__file__).resolve().parent.parent

#: Models as tables call them.
NAMED = {"tiny": "`tiny`", "smollm2": "SmolLM2"}

Rows = list[dict[str, Any]]


def read(path: Path) -> Rows:
    """Return the lines of a file of results, none without the file."""
    text = path.read_text("utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


def append(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Add lines to a file of results, once all of them are there."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def finished(run: Run) -> Run:
    """Return a run of which no cell failed."""
    if run.failures:
        raise SystemExit(str(run.failures[0]))
    return run


def traces_in(folder: Path, tail: int) -> list[Path]:
    """Return the traces of a folder by the last characters of their names, which number them."""
    if paths := sorted(folder.glob("*.zarr"), key=lambda path: path.stem[-tail:]):
        return paths
    raise SystemExit(f"{folder} has no traces; the page says how they are recorded")


def put(page: Path, parts: Mapping[str, str]) -> None:
    """Write the parts of a page between their marks, `<!-- begin NAME -->` and `end`."""
    page.write_text(fill(page.read_text("utf-8"), parts), "utf-8")


def filled(text: str, parts: Mapping[str, str]) -> str:
    """Return a page with its parts between their marks, `<!-- measured: NAME -->` and the end."""
    for name, part in parts.items():
        mark, end = f"<!-- measured: {name} -->\n", "<!-- /measured -->"
        before, _, rest = text.partition(mark)
        text = "\n".join([before + mark + part, end + rest.partition(end)[2]])
    return text


def picture(figure: Figure, path: Path, **options: Any) -> None:
    """Save a figure as a picture of pages."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, **options)
    small(path, path)


def of_models(
    doc: str | None,
    traces: str,
    models: Sequence[str],
    measure: Callable[..., None],
    write: Callable[[], None],
    *,
    prompts: bool = False,
    default: Sequence[str] | None = None,
) -> None:
    """Measure what is missing of models, unless `--write-only`, and write the page.

    Args:
        doc: the docstring of the script.
        traces: folder of the traces by default, in `traces/` of the repository.
        models: names that `--models` takes.
        measure: receives a model, the folder, and with ``prompts`` how many of its prompts.
        write: writes the page.
        prompts: whether `--prompts N` chooses the first so many.
        default: models without `--models`; all by default.
    """
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--traces", type=Path, default=ROOT / "traces" / traces)
    parser.add_argument("--models", nargs="*", choices=models, default=[*(default or models)])
    parser.add_argument("--write-only", action="store_true")
    if prompts:
        parser.add_argument("--prompts", type=int, metavar="N", help="the first so many of each")
    args = parser.parse_args()
    if not args.write_only:
        torch.set_num_threads(1)
        for model in args.models:
            measure(model, args.traces, *([args.prompts] if prompts else []))
    write()


def by_prompt(
    measure: Callable[[int], Iterator[Rows]], results: Path, page: Path, new: Callable[[str], str]
) -> None:
    """Write the page with `--page`; with a number, measure prompts until there are so many.

    Args:
        measure: yields the lines of each prompt that has none yet.
        results: the file of these lines.
        page: the page.
        new: receives the text of the page, and returns it with its table.
    """
    if sys.argv[1:] == ["--page"]:
        page.write_text(new(page.read_text("utf-8")), "utf-8")
        return
    for rows in measure(int(sys.argv[1])):
        append(results, rows)


def run_command(
    doc: str | None,
    commands: Mapping[str, Callable[[argparse.Namespace], None]],
    arguments: Mapping[str, Mapping[str, Mapping[str, Any]]],
) -> None:
    """Run the command that the command line names; arguments: of each, with argparse's keywords."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    subparsers = parser.add_subparsers(required=True)
    for name, run in commands.items():
        command = subparsers.add_parser(name)
        command.set_defaults(run=run)
        for flag, keywords in arguments.get(name, {}).items():
            command.add_argument(flag, **keywords)
    args = parser.parse_args()
    args.run(args)
