"""A progress bar on standard error, on a terminal only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def progress_bar(unit: str, label: str = "") -> Iterator[Callable[..., None]]:
    """Return a function that shows (done, total, label); silent in a pipe.

    unit: what is counted. label: the first label; a call without one keeps it.
    """
    if not sys.stderr.isatty():
        yield lambda *_: None
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
            progress.update(task, completed=done, total=total, description=label)

        yield show
