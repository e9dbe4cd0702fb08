"""What a run folder may be written over, and what is in it."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from kvsim.analysis.folder import CONFIG, RUN, is_run
from kvsim.errors import OutputError
from kvsim.files import check_writable, hidden, lock

PARTS = "parts"


def check_output(path: Path, *, resume: bool = False) -> None:
    """Raise OutputError unless a run can be written to `path`, or one that is there continued."""
    begun = (path / CONFIG).is_file()
    if not (resume and begun) and not is_free(path):
        raise taken(str(path), begun=begun)
    check_writable(path.parent)


def is_free(path: Path) -> bool:
    """Whether nothing is at a path but perhaps an empty folder."""
    if path.is_symlink() or not path.is_dir():
        return not (path.exists() or path.is_symlink())
    return not any(path.iterdir())


def taken(where: str, *, begun: bool) -> OutputError:
    """Return the error of a folder in which something is; begun: a run of kvsim."""
    what = "; give another --out or move it away"
    if begun:
        what = " and holds a run; continue it with the same command and --resume, or give another "
        what += "--out"
    return OutputError(f"{where} exists{what}, nothing was changed")


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
    if any(map(locked, (path / PARTS).glob("*.claim"))):
        raise OutputError(f"{path} is being written by another process; wait for it")
    old = hidden(path, "old")
    path.rename(old)
    try:
        yield
    finally:
        if path.exists():
            shutil.rmtree(old)
        else:
            old.rename(path)


def locked(claim: Path) -> bool:
    """Whether a process holds a claim."""
    try:
        with claim.open("rb") as file:
            return not lock(file, wait=False)
    except FileNotFoundError:
        return False


def is_complete(folder: Path) -> bool:
    """Whether a folder holds a run of which nothing is left to do."""
    try:
        document = json.loads((folder / RUN).read_bytes())
        return not any(document.get(name, 0) for name in ("missing", "missing_traces"))
    except (OSError, ValueError, AttributeError):
        return False
