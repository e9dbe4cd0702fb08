"""Drafts: traces that are being written. Their names, their tokens, and the lock of the writer."""

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

#: The file of a draft's tokens, a JSON object per line, locked by its writer.
TOKENS = "draft.jsonl"

#: ``tmp`` a trace that is being written, ``old`` a trace that is being replaced.
Kind = Literal["tmp", "old"]

_NAME = re.compile(r"\.(?P<name>.+)\.(?P<kind>tmp|old)-\d+-[0-9a-f]{8}")

# Errors of locking on file systems without locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)


def hidden(path: Path, kind: Kind) -> Path:
    """Return a new hidden path next to `path`, for a draft or a replaced trace."""
    return path.parent / f".{path.name}.{kind}-{os.getpid()}-{secrets.token_hex(4)}"


def belongs_to(folder: Path) -> tuple[Path, Kind] | None:
    """Return the path of the trace of a hidden folder, and its kind; None for other names."""
    match = _NAME.fullmatch(folder.name)
    if match is None:
        return None
    return folder.parent / match["name"], "tmp" if match["kind"] == "tmp" else "old"


def recover_command(folder: Path, *options: str) -> str:
    """Return the command that makes a trace of a draft."""
    return " ".join(["kvsim trace recover", shlex.quote(str(folder)), *options])


class TokenFile:
    """The file of a draft's tokens, locked while it is open.

    The system releases the lock when the process ends, however it ends.

    Args:
        folder: the draft.
        wait: wait until the lock is free; otherwise `held` is False if it is not.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, folder: Path, *, wait: bool) -> None:
        self.path = folder / TOKENS
        # unbuffered: lines reach the system as a whole, so a kill cannot lose them
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
        """Close and unlock the file."""
        self._file.close()

    def remove(self) -> None:
        """Close the file and remove it."""
        self.close()
        self.path.unlink(missing_ok=True)


def is_held(folder: Path) -> bool:
    """Whether a process is writing the draft."""
    with contextlib.suppress(OSError), (folder / TOKENS).open("r+b", buffering=0) as file:
        return not _lock(file, wait=False)
    return False


def read_tokens(folder: Path) -> tuple[list[int], list[str] | None]:
    """Return the token ids of a draft and their texts or None, up to a torn line."""
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
    """Lock an open file; False if another process has locked it.

    Windows has no such locks: there abandoned drafts and those being written look the same.
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
