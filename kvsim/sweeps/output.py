"""What a run folder may be written over, and what is in it."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from kvsim.analysis.folder import CONFIG, is_run
from kvsim.errors import OutputError
from kvsim.files import check_writable, hidden, lock

#: The finished tasks of a run, and the file that is locked while it is written.
PARTS, LOCK = "parts", "lock"


def check_output(path: Path, *, resume: bool = False) -> None:
    """Raise OutputError unless a run can be written to `path`, or one that is there continued."""
    begun = (path / CONFIG).is_file()
    if not (resume and begun) and not is_free(path):
        what = "; give another --out or move it away"
        if begun:
            what = " and holds a run; continue it with the same command and --resume, or give "
            what += "another --out"
        raise OutputError(f"{path} exists{what}, nothing was changed")
    check_writable(path.parent)
    if begun:
        _check_unlocked(path)


def is_free(path: Path) -> bool:
    """Whether nothing is at a path but perhaps an empty folder."""
    if path.is_symlink() or not path.is_dir():
        return not (path.exists() or path.is_symlink())
    return not any(path.iterdir())


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[None]:
    """Let a run be written in the place of the one at `path`, which is removed once that is there.

    If nothing is written, the old one stays. Raises OutputError for what is no run folder, and for
    one that another process writes to.
    """
    if is_free(path):
        yield
        return
    if not path.is_dir() or not is_run(path):
        raise OutputError(f"{path} exists and is no run folder; expected one to replace")
    _check_unlocked(path)
    old = hidden(path, "old")
    path.rename(old)
    try:
        yield
    finally:
        if path.exists():
            shutil.rmtree(old)
        else:
            old.rename(path)


def _check_unlocked(folder: Path) -> None:
    """Raise OutputError while another process writes to a run."""
    with contextlib.suppress(FileNotFoundError), (folder / LOCK).open("rb") as file:
        if not lock(file, wait=False):
            raise being_written(folder)


def being_written(folder: Path) -> OutputError:
    """Return the error of a folder in which another process writes a run."""
    return OutputError(f"{folder} is being written by another process; wait for it")
