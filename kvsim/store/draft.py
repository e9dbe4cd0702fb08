"""What a trace on its way has beside its arrays: a name, the tokens so far, and who writes it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

if sys.platform != "win32":
    import fcntl

#: A draft's file of tokens, a JSON object per line, which its writer also holds locked.
TOKENS = "draft.jsonl"

#: ``tmp`` a trace on its way, ``old`` a trace that is being replaced by one.
Kind = Literal["tmp", "old"]

_NAME = re.compile(r"\.(?P<name>.+)\.(?P<kind>tmp|old)-\d+-[0-9a-f]{8}")

# What locking fails with where a file system has no locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)


def hidden(path: Path, kind: Kind) -> Path:
    """A new hidden name beside `path`, where what belongs to the trace there is kept meanwhile."""
    return path.parent / f".{path.name}.{kind}-{os.getpid()}-{secrets.token_hex(4)}"


def belongs_to(folder: Path) -> tuple[Path, Kind] | None:
    """The path of the trace that a hidden folder belongs to, and as what; None for other names."""
    found = _NAME.fullmatch(folder.name)
    if found is None:
        return None
    return folder.parent / found["name"], "tmp" if found["kind"] == "tmp" else "old"


def recover_command(folder: Path, *options: str) -> str:
    """The command that makes a trace of a draft."""
    return " ".join(["kvsim trace recover", shlex.quote(str(folder)), *options])


class TokenFile:
    """The file of tokens of a draft, which is locked for as long as it is open.

    The system drops the lock when the process ends, however it ends.

    Args:
        folder: the draft.
        wait: until nobody else holds it; else `held` says whether it was free.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, folder: Path, *, wait: bool) -> None:
        self.path = folder / TOKENS
        # a line goes to the system as a whole, so that a killed process leaves it there
        self._file = self.path.open("ab", buffering=0)
        self.held = _lock(self._file, wait=wait)

    def add(self, ids: Sequence[int], texts: Sequence[str] | None) -> None:
        """Append tokens, with their texts if they have any."""
        rows: list[dict[str, Any]] = [{"token": int(token)} for token in ids]
        for row, text in zip(rows, texts or (), strict=texts is not None):
            row["text"] = text
        data = "".join(json.dumps(row) + "\n" for row in rows).encode("ascii")
        while data:
            data = data[self._file.write(data) :]

    def close(self) -> None:
        """Close and unlock it."""
        self._file.close()

    def remove(self) -> None:
        """Close it, and remove it from the draft."""
        self.close()
        self.path.unlink(missing_ok=True)


def is_held(folder: Path) -> bool:
    """Whether some process is writing the draft."""
    with contextlib.suppress(OSError), (folder / TOKENS).open("r+b", buffering=0) as file:
        return not _lock(file, wait=False)
    return False


def read_tokens(folder: Path) -> tuple[list[int], list[str] | None]:
    """The ids of the tokens of a draft, and their texts or None; up to a line that was torn."""
    ids: list[int] = []
    texts: list[str] = []
    try:
        lines = (folder / TOKENS).read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        lines = []
    for line in lines:
        try:
            row = json.loads(line)
            ids.append(int(row["token"]))
        except (ValueError, TypeError, KeyError):
            break
        if isinstance(row.get("text"), str):
            texts.append(row["text"])
    return ids, texts if len(texts) == len(ids) else None


def _lock(file: Any, *, wait: bool) -> bool:
    """Lock an open file; False if another process holds it.

    Windows has no such locks: there nothing tells a dead draft from one that is being written.
    """
    if sys.platform != "win32":
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            if error.errno not in _NO_LOCKS:
                raise
    return True
