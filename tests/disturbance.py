"""Kill, interrupt or full disk at one of a command's writes, seen by an audit hook beforehand."""

import errno
import os
import shutil
import signal
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_CHANGES = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link"}

_current = None


class Disturbance:
    """What happens at the n-th call that changes files.

    kind: ``kill`` leaves the folder as it is at that moment; the file that was opened last is cut
    to `torn` of what has been written to it. ``interrupt`` is Ctrl-C. ``full`` refuses that file
    and all later ones, as a full disk does.
    """

    def __init__(self, kind: str, at: int, torn: float = 1.0) -> None:
        self.kind, self.at, self.torn = kind, at, torn
        self.happened = False
        self.calls = 0
        self._busy = False
        self._last: Path | None = None

    def __repr__(self) -> str:
        return f"Disturbance({self.kind!r}, {self.at}, {self.torn})"

    @contextmanager
    def during(self, folder: Path):
        """Disturb what changes files of a folder; suppress the interrupt."""
        global _current  # noqa: PLW0603  an audit hook cannot be taken away
        self._folder, self._copy = folder, folder.with_name(folder.name + "-killed")
        _current = self
        try:
            with suppress(KeyboardInterrupt):
                yield
        finally:
            _current = None
        if self._copy.exists():
            shutil.rmtree(folder)
            self._copy.rename(folder)

    def see(self, event: str, arguments: tuple) -> None:
        """One call is about to happen."""
        if self._busy or event not in _CHANGES:
            return
        flags = arguments[2] if event == "open" else 0
        if event == "open" and not (isinstance(arguments[0], str | Path) and flags & _WRITING):
            return
        self._busy = True
        try:
            if self.calls == self.at:
                self._disturb()
            full = self.kind == "full" and self.calls >= self.at
            self._last = Path(arguments[0]) if flags & (os.O_TRUNC | os.O_EXCL) else None
            self.calls += 1
        finally:
            self._busy = False
        if full and event in ("open", "os.mkdir"):
            self.happened = True
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _disturb(self) -> None:
        if self.kind == "interrupt":
            self.happened = True
            signal.raise_signal(signal.SIGINT)
        elif self.kind == "kill":
            self.happened = True
            shutil.copytree(self._folder, self._copy, symlinks=True)
            if self._last is not None and self._folder in self._last.parents:
                torn = self._copy / self._last.relative_to(self._folder)
                if torn.is_file():
                    os.truncate(torn, int(torn.stat().st_size * self.torn))


def _hook(event: str, arguments: tuple) -> None:
    if _current is not None:
        _current.see(event, arguments)


sys.addaudithook(_hook)
