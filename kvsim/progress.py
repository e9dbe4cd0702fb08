"""Progress: a bar on a terminal, elsewhere a line every so often."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvsim.schema import visible

F = TypeVar("F", bound=Callable[..., Any])

#: Seconds between lines of progress in a pipe or a file; work that is done before prints none.
EVERY = 30.0


def progress_lines(unit: str, label: str = "") -> Callable[..., None]:
    """Return a function that prints (done, total, label) every `EVERY` seconds."""
    began = last = time.monotonic()
    now = label

    def show(done: int, total: int, label: str | None = None) -> None:
        nonlocal last, now
        now = now if label is None else visible(label)
        if time.monotonic() - last < EVERY:
            return
        last = time.monotonic()
        what = f": {now}" if now else ""
        line = f"{done} of {total} {unit} after {last - began:.0f} s{what}"
        print(line, file=sys.stderr, flush=True)  # noqa: T201

    return show


@contextmanager
def progress_bar(unit: str, label: str = "") -> Iterator[Callable[..., None]]:
    """Return a function that shows (done, total, label).

    unit: of the count. label: the first label; a call without one keeps it.
    """
    if not sys.stderr.isatty():
        yield progress_lines(unit, label)
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=None)

        def show(done: int, total: int, label: str | None = None) -> None:
            text = None if label is None else visible(label)
            progress.update(task, completed=done, total=total, description=text)

        yield show


def with_bar(unit: str) -> Callable[[F], F]:
    """Return a decorator: with `progress=True` a function shows a bar of `unit`."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def run(*args: Any, progress: Any = None, **options: Any) -> Any:
            if progress is not True:
                return function(*args, progress=progress, **options)
            with progress_bar(unit) as show:
                return function(*args, progress=show, **options)

        return cast("F", run)

    return decorate
